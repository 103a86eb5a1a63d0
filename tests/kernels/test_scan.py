import pytest
import torch

import ssm_kernels
from ssm_kernels.testing import LENGTHS, assert_parity, poisoned_empties, run, textbook_scan


def scan_inputs(b=2, d=13, length=63, n=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    inputs = {
        "u": rand(b, d, length),
        "delta": 0.5 * rand(b, d, length) - 1,
        "A": -torch.exp(0.5 * rand(d, n)),
        "B": rand(b, n, length),
        "C": rand(b, n, length),
        "D": rand(d),
        "z": rand(b, d, length),
        "delta_bias": rand(d) - 1,
    }
    return inputs, [rand(b, d, length)]


def backend_scan(backend):
    return lambda **kw: ssm_kernels.selective_scan(**kw, backend=backend)


BACKENDS = ssm_kernels.available_backends("selective_scan", "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("reverse", [False, True])
def test_parity_at_awkward_lengths(backend, length, reverse):
    inputs, grads = scan_inputs(length=length)
    with poisoned_empties():
        assert_parity(backend_scan(backend), textbook_scan, inputs, grads, delta_softplus=True, reverse=reverse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 5, 16, 24])
@pytest.mark.parametrize("missing", [(), ("D",), ("z",), ("delta_bias",), ("D", "z", "delta_bias")])
@pytest.mark.parametrize("softplus", [False, True])
def test_parity_of_every_option(backend, n, missing, softplus):
    inputs, grads = scan_inputs(d=5, length=9, n=n)
    inputs["delta"] = inputs["delta"].abs() * 0.1  # without softplus the step must be positive
    inputs["delta_bias"] = inputs["delta_bias"].abs() * 0.1
    inputs = {k: None if k in missing else v for k, v in inputs.items()}
    assert_parity(backend_scan(backend), textbook_scan, inputs, grads, delta_softplus=softplus)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parity_in_bfloat16(backend):
    inputs, grads = scan_inputs()
    assert_parity(backend_scan(backend), textbook_scan, inputs, grads, torch.bfloat16, delta_softplus=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides(backend):
    """Channel-last memory, slices of wider tensors and expanded rows give the same numbers as contiguous ones."""
    inputs, grads = scan_inputs()
    wanted = run(backend_scan(backend), inputs, grads, delta_softplus=True)
    strided = dict(inputs)
    for name in ("u", "delta", "B", "C", "z"):
        strided[name] = torch.cat([inputs[name], inputs[name]], 1).transpose(1, 2).contiguous().transpose(1, 2)
        strided[name] = strided[name][:, : inputs[name].shape[1]]
        assert not strided[name].is_contiguous()
    grads = [grads[0].transpose(1, 2).contiguous().transpose(1, 2)]
    leaves = {k: v.detach().requires_grad_() for k, v in strided.items()}
    out = backend_scan(backend)(**leaves, delta_softplus=True)
    out.backward(grads[0])
    torch.testing.assert_close(out, wanted["output 0"])
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, wanted[f"grad {name}"], rtol=1e-5, atol=1e-5)


def test_reference_gradients_against_finite_differences():
    inputs, _ = scan_inputs(b=1, d=2, length=5, n=3)
    leaves = [x.double().requires_grad_() for x in inputs.values()]
    assert torch.autograd.gradcheck(
        lambda *a: ssm_kernels.selective_scan(*a, delta_softplus=True, reverse=True, backend="reference"), leaves
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_stay_fp32_for_half_inputs(backend):
    """A decay of 0.999 over 500 steps: bf16 states would stall, fp32 states reach the sum."""
    ones = torch.ones(1, 1, 500, dtype=torch.bfloat16)
    A = torch.full((1, 1), -1e-3)
    y = ssm_kernels.selective_scan(ones, ones, A, ones, ones, backend=backend)
    exact = textbook_scan(*(x.double() for x in (ones, ones, A, ones, ones)))
    torch.testing.assert_close(y[..., -1].double(), exact[..., -1], rtol=1e-2, atol=0)


def test_wrong_shapes_are_named():
    inputs, _ = scan_inputs()
    inputs["B"] = inputs["B"][:, :-1]
    with pytest.raises(ValueError, match=r"B must be \(2, 16, 63\).*got \(2, 15, 63\)"):
        ssm_kernels.selective_scan(**inputs)
