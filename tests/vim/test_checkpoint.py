"""Files of weights and runs: nothing in them is executed, a crash leaves the old one, every fault has its message."""

import argparse
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import vim
from vim import checkpoint, convert, export
from vim.checkpoint import MissingFile, WeightsError


class Hostile:
    """Creates a file when unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_save_replaces_the_old_file_only_when_done(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    checkpoint.save({"model": {"a": torch.ones(3)}}, path)
    checkpoint.save({"model": {"a": torch.zeros(3)}, "epoch": 2}, path)
    assert checkpoint.read(path)["epoch"] == 2

    def half(obj, file):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save({}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]
    assert checkpoint.read(path)["epoch"] == 2


def test_read_refuses_code_and_names_it(tmp_path):
    torch.save({"model": {"w": torch.ones(1)}, "extra": Hostile(tmp_path / "executed")}, tmp_path / "a.pt")
    with pytest.raises(WeightsError, match=r"a\.pt: holds code \(posix\.mkdir\), which is not run"):
        checkpoint.read(tmp_path / "a.pt")
    assert not (tmp_path / "executed").exists()
    with pytest.raises(WeightsError, match="holds code"):
        vim.load_weights(torch.nn.Linear(1, 1), tmp_path / "a.pt")
    assert not (tmp_path / "executed").exists()


def test_read_takes_a_namespace(tmp_path):
    torch.save(
        {"model": {"w": torch.ones(1)}, "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95))}, tmp_path / "a.pt"
    )
    assert checkpoint.read(tmp_path / "a.pt")["args"].lr == 0.1
    weights, meta = checkpoint.read_weights(tmp_path / "a.pt")
    assert weights.keys() == {"w"} and meta == {}
    assert checkpoint.read_config(tmp_path / "a.pt") == ({}, {})


def test_damaged_and_missing_files(finished, tmp_path):
    whole = (finished / "last.pt").read_bytes()
    for name, content in (("half.pt", whole[: len(whole) // 2]), ("empty.pt", b""), ("text.pt", b"hello")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=rf"{name}: is damaged or no torch file$"):
            checkpoint.read(tmp_path / name)
    (tmp_path / "a.safetensors").write_bytes(b"hello")
    with pytest.raises(WeightsError, match=r"a\.safetensors: is damaged or no safetensors file$"):
        checkpoint.read_weights(tmp_path / "a.safetensors")
    for name in ("no.pt", "no.safetensors"):
        with pytest.raises(MissingFile, match=rf"{name}: no such file"):
            checkpoint.read_weights(tmp_path / name)


def test_files_without_weights(tmp_path):
    for content, message in (
        ([1, 2], "holds a list, not a dictionary of tensors"),
        ({"net": {"w": torch.ones(1)}, "epoch": 3}, "holds no weights; its keys: net, epoch"),
        ({}, "holds no weights; its keys: none"),
        ({1: torch.ones(1)}, "holds no weights; its keys: 1"),
    ):
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(WeightsError, match=message):
            checkpoint.read_weights(tmp_path / "a.pt")


def test_a_run_to_resume_must_be_one(finished, tmp_path):
    assert checkpoint.read_run(finished / "last.pt")["run"]["epoch"] == 1
    for content in ({"model": {}}, [1], checkpoint.read(finished / "best.pt")):
        torch.save(content, tmp_path / "last.pt")
        with pytest.raises(WeightsError, match=r"last\.pt: is no checkpoint to resume from; move it away or choose"):
            checkpoint.read_run(tmp_path / "last.pt")
    (tmp_path / "last.pt").write_bytes(b"half")
    with pytest.raises(
        WeightsError, match=r"last\.pt: is damaged or no torch file; move it away or choose another --out"
    ):
        checkpoint.read_run(tmp_path / "last.pt")


def test_prefixes():
    assert checkpoint.strip_prefixes({"module._orig_mod.module.a.b": 1, "modules.c": 2}) == {"a.b": 1, "modules.c": 2}


def test_what_a_checkpoint_says_of_itself(finished):
    meta, config = checkpoint.read_config(finished / "last.pt")
    assert meta["family"] == "vim" and meta["layout"] == "native" and meta["stride"] == 8 and meta["grid"] == [2, 2]
    assert meta["classes"] == list("abcdefg") and config["model"]["img_size"] == 16
    assert checkpoint.read_config(finished / "best.pt")[0]["metrics"]["epoch"] == 1
    raw, averaged = (checkpoint.read_weights(finished / "last.pt", use_ema=ema)[0] for ema in (False, True))
    held = checkpoint.read(finished / "last.pt")
    assert all(torch.equal(raw[k], held["model"][k]) and torch.equal(averaged[k], held["ema"][k]) for k in raw)
    assert any(not torch.equal(raw[k], averaged[k]) for k in raw)


@pytest.mark.parametrize("name", ["last.pt", "best.pt"])
def test_export_safetensors(name, finished, run_main, tmp_path):
    out = tmp_path / "a.safetensors"
    done = run_main(export.main, "--checkpoint", finished / name, "--out", out)
    assert done.code == 0 and done.out.startswith(f"{out}: ") and done.out.endswith("safetensors\n")
    wanted, _ = checkpoint.read_weights(finished / name)
    found, meta = checkpoint.read_weights(out)
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)
    old, old_config = checkpoint.read_config(finished / name)
    new, new_config = checkpoint.read_config(out)
    assert new_config == old_config and {k: new[k] for k in old} == old
    assert meta["classes"] == list("abcdefg")
    with safe_open(out, "pt") as file:
        assert all(isinstance(v, str) for v in file.metadata().values()) and file.metadata()["format"] == "pt"
    again = tmp_path / "b.safetensors"  # an export may be exported
    assert run_main(export.main, "--checkpoint", out, "--out", again).code == 0
    assert checkpoint.read_config(again) == checkpoint.read_config(out)


def test_export_official_comes_back_bit_identical(finished, run_main, tmp_path):
    out, back = tmp_path / "official.pth", tmp_path / "back.safetensors"
    arguments = ("--checkpoint", finished / "last.pt", "--weights", "raw", "--format", "official", "--out", out)
    assert run_main(export.main, *arguments).code == 0
    weights, _ = checkpoint.read_weights(finished / "last.pt", use_ema=False)
    published = torch.load(out, weights_only=True)["model"]
    assert torch.equal(published["pos_embed"][:, 2], weights["pos_embed"][:, 0])  # class row before patch 2 of 4
    assert run_main(convert.main, out, "--family", "vim", "--out", back).code == 0
    found, _ = checkpoint.read_weights(back)
    assert found.keys() == weights.keys() and all(torch.equal(found[k], weights[k]) for k in weights)


def test_export_refusals(finished, run_main, tmp_path):
    foreign = tmp_path / "foreign.safetensors"
    save_file({"a": torch.ones(1)}, foreign)
    (tmp_path / "foreign.pt").write_bytes(b"hello")
    for argv, message in (
        (["--checkpoint", tmp_path / "no.pt"], "no.pt: no such file"),
        (["--checkpoint", tmp_path / "foreign.pt"], "foreign.pt: is damaged or no torch file"),
        (["--checkpoint", foreign], "is no checkpoint of this package; python -m vim.convert takes published ones"),
        (
            ["--checkpoint", finished / "last.pt", "--out", tmp_path / "no" / "x"],
            f"there is no folder {tmp_path / 'no'}",
        ),
        (["--checkpoint", finished / "last.pt", "--out", tmp_path], f"{tmp_path} is a folder"),
    ):
        done = run_main(export.main, "--out", tmp_path / "x", *argv)
        assert done.code == 2 and message in done.err and done.err.count("\n") == 1, done.err
        assert not (tmp_path / "x").exists()


def test_files_are_as_readable_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        checkpoint.save({"a": torch.ones(1)}, tmp_path / "a.pt")
        checkpoint.save_tensors({"a": torch.ones(1)}, tmp_path / "a.safetensors", {})
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
