"""Ops inside torch.compile(fullgraph=True): the choice of a backend must not break the graph, warm or cold."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ssm_kernels
from ssm_kernels import OPS
from ssm_kernels import backend as registry
from ssm_kernels.testing import run


def rows(x, residual, weight, index):
    normed, residual = ssm_kernels.add_norm(x, residual, weight, index=index)
    return ssm_kernels.permute_rows(index, normed, residual)


def conv(x, weight):
    return ssm_kernels.causal_conv1d(x, weight, activation="silu", reverse=True)


def scan(u, delta, A, B, C):
    return ssm_kernels.selective_scan(u, delta, A, B, C, delta_softplus=True)


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


CASES = {
    rows: {"x": randn(2, 5, 8), "residual": randn(2, 5, 8), "weight": randn(8), "index": torch.tensor([3, 1, 0, 4, 2])},
    conv: {"x": randn(2, 8, 5), "weight": randn(8, 4)},
    scan: {
        "u": randn(2, 8, 5),
        "delta": randn(2, 8, 5),
        "A": -randn(8, 3).exp(),
        "B": randn(2, 3, 5),
        "C": randn(2, 3, 5),
    },
}


@pytest.fixture
def cold(monkeypatch):
    """No op has been called yet in this process, and none is named by the environment."""
    torch._dynamo.reset()
    monkeypatch.delenv(registry.ENV, raising=False)
    for op in OPS.values():
        monkeypatch.setattr(op, "_chosen", {})
        monkeypatch.setattr(op, "_loaded", {})


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_the_first_call_may_be_a_compiled_one(cold, fn):
    inputs = CASES[fn]
    grads = [torch.ones_like(next(iter(inputs.values())))] * (2 if fn is rows else 1)
    with ssm_kernels.use_backend("reference"):
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        found = run(compiled, inputs, grads)
        again = run(compiled, inputs, grads)
        wanted = run(fn, inputs, grads)
    for name, exact in wanted.items():
        torch.testing.assert_close(found[name], exact, rtol=1e-5, atol=1e-5)
        assert torch.equal(found[name], again[name])


def test_a_compiled_function_follows_use_backend(cold, monkeypatch):
    """The choice is made while tracing, and another choice traces again."""
    x, index = torch.randn(2, 5, 3), torch.tensor([3, 1, 0, 4, 2])
    compiled = torch.compile(lambda x: ssm_kernels.permute_rows(index, x), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), x[:, index])
    real = registry.Op.load

    def load(self, backend, *rest):
        return (lambda index, x: (x + 1,)) if backend == "triton" else real(self, backend, *rest)

    monkeypatch.setattr(registry.Op, "load", load)
    with ssm_kernels.use_backend("triton"):
        assert torch.equal(compiled(x), x + 1)
    assert torch.equal(compiled(x), x[:, index])


def test_use_backend_holds_on_every_thread():
    """A backward that recomputes its forward runs on a thread of autograd's, outside the caller's context."""
    x, index = torch.randn(2, 5, 3), torch.arange(5)
    with ssm_kernels.use_backend("reference"), ThreadPoolExecutor(1) as other:
        chosen = other.submit(OPS["permute_rows"].resolve, x, None).result()
        assert chosen is OPS["permute_rows"].resolve(x, "reference")
        with pytest.raises(ValueError, match="unknown kernel backend"), ssm_kernels.use_backend("fastest"):
            pass
        assert registry._wanted == ["reference"]
    assert registry._wanted == []
    assert torch.equal(ssm_kernels.permute_rows(index, x), x)
