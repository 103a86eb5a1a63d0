"""The `cpu` backend as torch sees it: operators, autograd, torch.compile, and the fall back to the reference."""

import logging

import pytest
import torch
from cpu_cases import CASES, conv_inputs, scan, scan_inputs
from torch.utils._python_dispatch import TorchDispatchMode

import ssm_kernels
from ssm_kernels import backend as registry
from ssm_kernels import cpp
from ssm_kernels.testing import run

if any("cpu" not in ssm_kernels.available_backends(op, "cpu") for op in ("selective_scan", "causal_conv1d")):
    pytest.skip(f"no C++ kernels here: {cpp._library()}", allow_module_level=True)


class Calls(TorchDispatchMode):
    """The operators of this package that run in its block, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ssm_kernels":
            self.seen.append((func.name().removeprefix("ssm_kernels::"), args))
        return func(*args, **kwargs or {})


def test_states_are_kept_for_a_gradient_only():
    inputs, _ = scan_inputs(d=3)
    with Calls() as calls:
        scan(**inputs)
        inputs["A"].requires_grad_()
        scan(**inputs)
        with torch.no_grad():
            scan(**inputs)
    assert [(name, args[-1]) for name, args in calls.seen] == [("cpu_scan_forward", keep) for keep in (0, 1, 0)]


def test_states_are_kept_per_chunk():
    inputs, _ = scan_inputs(b=1, d=16, length=3200)
    args = [inputs[k] for k in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    _, states = torch.ops.ssm_kernels.cpu_scan_forward(*args, True, False, False)
    assert states.numel() == 0
    _, states = torch.ops.ssm_kernels.cpu_scan_forward(*args, True, False, True)
    assert 0 < states.numel() <= inputs["u"].numel()  # all states would be 16 times u


def test_a_second_derivative_is_refused():
    inputs, _ = scan_inputs(b=1, d=3, length=5)
    u = inputs.pop("u").detach().requires_grad_()
    (g,) = torch.autograd.grad(scan(u=u, **inputs).sum(), u, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        g.sum().backward()


def test_operators_are_registered_as_torch_wants():
    inputs, (dy,) = scan_inputs()
    args = [inputs[k] for k in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    check = torch.library.opcheck
    ops = torch.ops.ssm_kernels
    check(ops.cpu_scan_forward.default, (*args, True, False, True))
    _, states = ops.cpu_scan_forward(*args, True, False, True)
    check(ops.cpu_scan_over.default, (*args, True, False))
    check(ops.cpu_scan_backward.default, (dy, states, *args, True, False))
    check(ops.cpu_scan_backward.default, (dy, states, *args[:5], None, None, None, True, False))
    inputs, (dy,) = conv_inputs()
    check(ops.cpu_conv1d_forward.default, (*inputs.values(), True, False))
    check(ops.cpu_conv1d_over.default, (*inputs.values(), True, False))
    check(ops.cpu_conv1d_backward.default, (dy, *inputs.values(), True, False))


@pytest.mark.parametrize("case", CASES)
def test_compiles_without_graph_breaks(case):
    fn, make, options = CASES[case]
    inputs, grads = make()
    wanted = run(fn, inputs, grads, **options)  # also makes the choice of backend, which cannot be traced
    compiled = torch.compile(lambda **kw: fn(**kw, **options), backend="aot_eager", fullgraph=True)
    found = run(compiled, inputs, grads)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_reference_takes_over_with_the_reason_in_the_log(monkeypatch, caplog):
    def unavailable():
        raise registry.Unavailable("no C++ compiler was found")

    monkeypatch.setattr(cpp, "library", unavailable)
    monkeypatch.setattr(registry, "_said", set())
    caplog.set_level(logging.INFO, "ssm_kernels")
    for name, package in (("selective_scan", "ssm_kernels.scan"), ("causal_conv1d", "ssm_kernels.conv1d")):
        found = registry.Op(name, package).resolve(torch.zeros(1), None)
        assert found.__module__ == f"{package}.reference"
    wanted = "{} on cpu: backend reference (cpu: no C++ compiler was found)"
    assert [r.getMessage() for r in caplog.records] == [wanted.format(n) for n in ("selective_scan", "causal_conv1d")]
