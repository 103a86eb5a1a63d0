"""Causal convolution in plain PyTorch: a sum of shifted rows, which beats a grouped Conv1d on a CPU.

Forward stores its inputs only; backward recomputes the value before the activation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

DEVICES = ("cpu", "cuda", "mps", "xpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load(device: torch.device):
    return causal_conv1d


def causal_conv1d(x, weight, bias, activation, reverse):
    return _Conv.apply(x, weight, bias, activation is not None, reverse)


def _taps(length: int, width: int, reverse: bool):
    """(tap, output positions, input positions) of each tap that reaches into the sequence."""
    for k in range(width):
        shift = width - 1 - k
        if shift >= length:
            continue
        late, early = slice(shift, length), slice(0, length - shift)
        yield (k, early, late) if reverse else (k, late, early)


def _before_activation(x: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, weight = x.to(dtype), weight.to(dtype)
    y = torch.zeros_like(x) if bias is None else bias.to(dtype)[:, None].expand_as(x).clone()
    for k, to, source in _taps(x.shape[2], weight.shape[1], reverse):
        y[:, :, to].addcmul_(x[:, :, source], weight[:, k, None])
    return y


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, silu, reverse):
        ctx.save_for_backward(x, weight, bias)
        ctx.options = silu, reverse
        y = _before_activation(x, weight, bias, reverse)
        return (F.silu(y, inplace=True) if silu else y).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        silu, reverse = ctx.options
        dtype = torch.promote_types(x.dtype, torch.float32)
        dy = dy.to(dtype)
        if silu:
            y = _before_activation(x, weight, bias, reverse)
            sigmoid = torch.sigmoid(y)
            dy = dy * sigmoid * (1 + y * (1 - sigmoid))
        xf, wf = x.to(dtype), weight.to(dtype)
        dx, dw = torch.zeros_like(xf), torch.zeros_like(wf)
        for k, to, source in _taps(x.shape[2], weight.shape[1], reverse):
            dx[:, :, source].addcmul_(dy[:, :, to], wf[:, k, None])
            dw[:, k] = (dy[:, :, to] * xf[:, :, source]).sum((0, 2))
        dbias = None if bias is None else dy.sum((0, 2)).to(bias.dtype)
        return dx.to(x.dtype), dw.to(weight.dtype), dbias, None, None
