import pytest
import torch

import ssm_kernels
from ssm_kernels.testing import LENGTHS, assert_parity, poisoned_empties, textbook_conv

BACKENDS = ssm_kernels.available_backends("causal_conv1d", "cpu")


def conv_inputs(b=2, d=13, length=63, width=4, bias=True):
    g = torch.Generator().manual_seed(1)
    inputs = {
        "x": torch.randn(b, length, d, generator=g).transpose(1, 2),  # channel-last memory, as the mixer has it
        "weight": torch.randn(d, width, generator=g),
        "bias": torch.randn(d, generator=g) if bias else None,
    }
    return inputs, [torch.randn(b, d, length, generator=g)]


def backend_conv(backend):
    return lambda **kw: ssm_kernels.causal_conv1d(**kw, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_parity(backend, length, reverse, activation):
    inputs, grads = conv_inputs(length=length)
    with poisoned_empties():
        assert_parity(backend_conv(backend), textbook_conv, inputs, grads, activation=activation, reverse=reverse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_parity_of_other_widths_without_bias_in_bfloat16(backend, width):
    inputs, grads = conv_inputs(width=width, bias=False)
    assert_parity(backend_conv(backend), textbook_conv, inputs, grads, torch.bfloat16, activation="silu")


def test_wrong_arguments_are_named():
    x, weight = torch.zeros(2, 3, 5), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="activation must be None, 'silu' or 'swish', got 'gelu'"):
        ssm_kernels.causal_conv1d(x, weight, activation="gelu")
    with pytest.raises(ValueError, match=r"weight \(d, w\), got \(2, 3, 5\) and \(4, 4\)"):
        ssm_kernels.causal_conv1d(x, torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"bias must be \(3,\)"):
        ssm_kernels.causal_conv1d(x, weight, torch.zeros(4))
