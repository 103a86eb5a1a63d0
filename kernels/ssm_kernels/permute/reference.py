"""Row permutation in plain PyTorch: whole rows are copied, forward and backward; no expanded index, no scatter-add."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from . import inverse

DEVICES = ("cpu", "cuda", "mps", "xpu")
DTYPES = tuple(
    getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")
)


def load(device: torch.device):
    return permute_rows


def permute_rows(index, *tensors):
    return _Permute.apply(index, *tensors)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, index, *tensors):
        ctx.save_for_backward(index)
        return tuple(x.index_select(1, index) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        back = inverse(*ctx.saved_tensors)
        return None, *(None if g is None else g.index_select(1, back) for g in grads)
