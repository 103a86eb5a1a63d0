import json

import pytest
import torch

from ssm_kernels import bench, bench_cases

OPS = ["selective_scan", "causal_conv1d", "permute_rows", "add_norm"]


@pytest.mark.parametrize("op", OPS)
def test_every_backend_is_timed_beside_its_yardsticks(op, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert bench.main([op, "--quick", "--rounds", "2", "--device", "cpu", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["where"]["quick"] and found["where"]["threads"] == torch.get_num_threads()
    records = {r["step"]: r for r in found["records"]}
    wanted = [*bench_cases.available_backends(op, "cpu"), "plain PyTorch", "copy of inputs and output"]
    wanted += ["clone, its backward too"] * (op == "permute_rows")
    assert list(records) == wanted
    for record in records.values():
        assert record["seconds"] > 0 and record["runs"] == 2
        assert record["ratio"] == pytest.approx(record["seconds"] / records["reference"]["seconds"])
    table = capsys.readouterr().out
    assert all(step in table for step in wanted)


def test_a_backend_that_computes_something_else_gets_no_number(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        bench_cases.testing, "textbook_conv", lambda x, weight, bias, activation: x * weight[:, :1] + bias[:, None]
    )
    file = tmp_path / "figures.json"
    assert bench.main(["causal_conv1d", "--quick", "--rounds", "1", "--device", "cpu", "--json", str(file)]) == 1
    records = {r["step"]: r for r in json.loads(file.read_text())["records"]}
    assert "seconds" not in records["reference"] and records["reference"]["wrong"].startswith("output 0: error")
    assert "PARITY FAILED: output 0: error" in capsys.readouterr().out


def test_a_mixer_that_differs_from_the_reference_is_found():
    outputs = iter([torch.ones(3), torch.ones(3) * 1.01])
    assert bench_cases._agrees(lambda: [next(outputs)]) == "tensor 0 is off by 0.0099 from the reference backend"
    assert bench_cases._agrees(lambda: [torch.ones(3)]) is None
    assert "nan" in bench_cases._agrees(lambda: [torch.full((3,), float("nan"))])


def test_what_is_not_installed_is_left_out_by_name(monkeypatch, capsys):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(bench_cases.importlib, "import_module", missing)
    assert bench.main(["mixer", "--quick", "--device", "cpu"]) == 0
    assert "2 mambapy blocks                   left out: No module named 'mambapy.mamba'" in capsys.readouterr().out


def test_a_slow_contender_stops_when_its_time_is_used_up(monkeypatch):
    """By a clock of its own: each slow run takes 0.05 s, each fast one next to nothing."""
    steps = {"slow": lambda: None, "fast": lambda: None}
    monkeypatch.setattr(bench, "_timed", lambda step, device: 0.05 if step is steps["slow"] else 1e-6)
    records = bench.measure(bench_cases.Case("case", steps, "fast"), torch.device("cpu"), seconds=0.12, rounds=8)
    assert [r["runs"] for r in records] == [3, 8]
    assert records[0]["ratio"] > 1 == records[1]["ratio"]


def test_peak_memory_is_that_of_one_run():
    device = torch.device("cpu")
    peak = bench.peak_bytes(lambda: torch.ones(16, 2**20).sum(), device)
    if peak is None:
        pytest.skip("this system does not tell a process its peak memory")
    assert 60 * 2**20 < peak < 90 * 2**20
    assert bench.peak_bytes(lambda: None, device) < 8 * 2**20
