import logging

import pytest
import torch

import ssm_kernels
from ssm_kernels import backend as registry


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """An op in a package of its own with a working reference and a `cpu` backend that cannot run."""
    package = tmp_path / "toyop"
    package.mkdir()
    (package / "__init__.py").touch()
    common = "import torch\nDEVICES = ('cpu',)\nDTYPES = (torch.float32,)\n"
    (package / "reference.py").write_text(common + "def load(device):\n    return lambda x: x + 1\n")
    (package / "cpu.py").write_text(
        common + "from ssm_kernels import Unavailable\ndef load(device):\n    raise Unavailable('no compiler')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_said", set())
    return registry.Op("toy", "toyop")


def test_automatic_choice_falls_back_with_one_line(toy, caplog):
    caplog.set_level(logging.INFO, "ssm_kernels")
    x = torch.zeros(2)
    assert torch.equal(toy.resolve(x, None)(x), torch.ones(2))
    toy.resolve(x, None)
    assert [r.getMessage() for r in caplog.records] == ["toy on cpu: backend reference (cpu: no compiler)"]
    assert caplog.records[0].levelno == logging.WARNING


def test_explicit_backend_that_cannot_run_raises(toy, monkeypatch):
    x = torch.zeros(2)
    with pytest.raises(RuntimeError, match="toy: backend 'cpu' was asked for but cannot run: no compiler"):
        toy.resolve(x, "cpu")
    with registry.use_backend("cpu"), pytest.raises(RuntimeError, match="no compiler"):
        toy.resolve(x, None)
    monkeypatch.setenv(registry.ENV, "cpu")
    with pytest.raises(RuntimeError, match="no compiler"):
        toy.resolve(x, None)


def test_use_backend_leaves_ops_without_it_alone(toy):
    x = torch.zeros(2)
    with registry.use_backend("mamba_ssm"):
        assert torch.equal(toy.resolve(x, None)(x), torch.ones(2))
    with pytest.raises(RuntimeError, match="toy has no mamba_ssm backend"):
        toy.resolve(x, "mamba_ssm")


def test_unknown_names_are_refused(toy, monkeypatch):
    with pytest.raises(ValueError, match="unknown kernel backend 'cuda'; choose from mamba_ssm, triton, cpu, ref"):
        registry.use_backend("cuda").__enter__()
    monkeypatch.setenv(registry.ENV, "fastest")
    with pytest.raises(ValueError, match="unknown kernel backend 'fastest'"):
        toy.resolve(torch.zeros(2), None)
    with pytest.raises(ValueError, match="unknown op 'matmul'; choose from"):
        ssm_kernels.available_backends("matmul")


def test_a_dtype_the_backend_lacks_is_a_reason(toy):
    with pytest.raises(RuntimeError, match=r"reference: does not take torch\.float64"):
        toy.resolve(torch.zeros(2, dtype=torch.float64), None)


@pytest.mark.parametrize("op", ["selective_scan", "causal_conv1d", "permute_rows", "add_norm"])
def test_every_op_ends_with_its_reference(op):
    assert ssm_kernels.available_backends(op, "cpu")[-1] == "reference"
