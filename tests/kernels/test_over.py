"""Convolution and scan whose output takes the input's place: the ordinary values, and nothing else is written."""

import pytest
import torch

import ssm_kernels
from ssm_kernels.testing import LENGTHS, poisoned_empties

BACKENDS = ssm_kernels.available_backends("selective_scan", "cpu")
ROOM = 40  # channels around those that are written


def rows(b, d, length, dtype, layout, seed):
    """(b, d, length), and the tensor whose memory it is a part of."""
    wide = torch.randn(b, length, ROOM, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if layout == "part of wider rows":
        return wide[..., 3 : 3 + d].transpose(1, 2), wide
    x = wide[..., :d].transpose(1, 2)
    x = x.contiguous() if layout == "positions last" else x.transpose(1, 2).contiguous().transpose(1, 2)
    return x, x


def untouched(whole, before, d):
    return whole.shape[-1] != ROOM or all(
        torch.equal(whole[..., part], before[..., part]) for part in (slice(0, 3), slice(3 + d, None))
    )


LAYOUTS = ["channels last", "part of wider rows", "positions last"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("width", "dtype"), [(4, torch.float32), (4, torch.bfloat16), (1, torch.float32), (2, torch.float32)]
)
def test_convolution(backend, layout, reverse, width, dtype):
    d = 21
    weight, bias = torch.randn(d, width), torch.randn(d)
    for length in (*LENGTHS, 16, 17, 33):  # rows are taken by 16
        x, whole = rows(2, d, length, dtype, layout, length)
        before = whole.clone()
        with ssm_kernels.use_backend(backend), poisoned_empties():
            wanted = ssm_kernels.causal_conv1d(x.clone(), weight, bias, "silu", reverse)
            found = ssm_kernels.conv_over(x, weight, bias, "silu", reverse)
        assert found.data_ptr() == x.data_ptr() and torch.equal(x, wanted), length
        assert untouched(whole, before, d)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("states", "dtype"), [(16, torch.float32), (16, torch.bfloat16), (5, torch.float32)])
def test_scan(backend, layout, reverse, states, dtype):
    b, d = 2, 21
    A, D, bias = -torch.rand(d, states) - 0.1, torch.randn(d), torch.randn(d)
    for length in (*LENGTHS, 32, 33):  # positions are taken by 32
        u, whole = rows(b, d, length, dtype, layout, length)
        rest = [rows(b, n, length, dtype, "channels last", i)[0] for i, n in enumerate((d, states, states))]
        before = whole.clone()
        arguments = (rest[0], A, *rest[1:], D)
        with ssm_kernels.use_backend(backend), poisoned_empties():
            wanted = ssm_kernels.selective_scan(u.clone(), *arguments, None, bias, True, reverse)
            found = ssm_kernels.scan_over(u, *arguments, bias, True, reverse)
        assert found.data_ptr() == u.data_ptr() and torch.equal(u, wanted), length
        assert untouched(whole, before, d)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"weight \(d, w\), got \(2, 3, 5\) and \(4, 4\)"):
        ssm_kernels.conv_over(torch.zeros(2, 3, 5), torch.zeros(4, 4))
