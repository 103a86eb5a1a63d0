"""The CUDA convolution of the package causal-conv1d, through its public `causal_conv1d_fn`: any version."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import probe
from . import reference

DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SIZES = range(2, 5)  # window widths, as the kernel says

PACKAGE = probe.Package(
    distribution="causal-conv1d",
    module="causal_conv1d",
    function="causal_conv1d_fn",
    extension="causal_conv1d_cuda",
    keep="",
    force="CAUSAL_CONV1D_FORCE_BUILD=TRUE",
)


def load(device: torch.device) -> Callable:
    def check(causal_conv1d_fn: Callable) -> Callable:
        conv = _adapt(causal_conv1d_fn)
        weights = {"weight": probe.waves(device, 8, 4), "bias": probe.waves(device, 8)}
        rows = probe.waves(device, 2, 8, 16)
        for x in (rows, rows.transpose(1, 2).contiguous().transpose(1, 2)):
            probe.compare(conv, reference.causal_conv1d, {"x": x, **weights}, activation="silu", reverse=True)
        return conv

    with probe.undisturbed(device):
        return PACKAGE.load(check)


def _adapt(causal_conv1d_fn: Callable) -> Callable:
    def conv(x, weight, bias, activation, reverse):
        """One call per group of samples that 32-bit offsets can reach, nearly always one in all."""
        if not x.numel():  # a launch of nothing is an error
            return reference.causal_conv1d(x, weight, bias, activation, reverse)
        step = probe.samples_per_call(x.shape[1] * x.shape[2])
        parts = [
            _conv(causal_conv1d_fn, x[i : i + step], weight, bias, activation, reverse) for i in range(0, len(x), step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return conv


def _conv(causal_conv1d_fn, x, weight, bias, activation, reverse):
    """The kernel wants the bias in the weight's dtype; it knows no direction."""
    dtype = weight.dtype if bias is None else torch.promote_types(weight.dtype, bias.dtype)
    dtype = torch.float32 if dtype == torch.float64 else dtype
    y = causal_conv1d_fn(
        x=_laid_out(x.flip(2) if reverse else x),
        weight=weight.to(dtype),
        bias=None if bias is None else bias.to(dtype),
        activation=activation,
    )
    if y.requires_grad:
        y.register_hook(_laid_out)  # the gradient arrives in whatever layout the next op left it
    return y.flip(2) if reverse else y


def _laid_out(x: Tensor) -> Tensor:
    """x (b, d, l) as rows, or channel-last where the kernel takes that: strides and width in multiples of 8."""
    channel_last = x.stride(1) == 1 and x.stride(2) > 1
    if channel_last and all(n % 8 == 0 for n in (x.shape[1], x.stride(0), x.stride(2), x.storage_offset())):
        return x
    return probe.aligned_rows(x)
