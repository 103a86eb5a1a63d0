"""Add, permute, normalise in plain PyTorch. Backward by hand: it keeps the new residual and one number per row."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from ..permute import inverse

DEVICES = ("cpu", "cuda", "mps", "xpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load(device: torch.device):
    return add_norm


def add_norm(x, residual, weight, bias, eps, norm, index, residual_in_fp32):
    return _AddNorm.apply(x, residual, weight, bias, eps, norm == "layer", index, residual_in_fp32)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, centred, index, residual_in_fp32):
        wide = torch.promote_types(x.dtype, torch.float32)
        if index is not None:
            x = x.index_select(1, index)
            residual = None if residual is None else residual.index_select(1, index)
        total = x.to(wide, copy=True) if residual is None else x.to(wide) + residual
        out = total if residual_in_fp32 else total.to(x.dtype)
        row = out.to(wide)
        mean = row.mean(-1, keepdim=True) if centred else None
        row = row if mean is None else row - mean
        scale = torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
        normed = row * scale * weight.to(wide)
        if bias is not None:
            normed += bias.to(wide)
        ctx.save_for_backward(out, mean, scale, weight, index)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype, None if bias is None else bias.dtype
        return normed.to(x.dtype), out

    @staticmethod
    @once_differentiable
    def backward(ctx, dnormed, dout):
        out, mean, scale, weight, index = ctx.saved_tensors
        x_dtype, residual_dtype, bias_dtype = ctx.dtypes
        wide = scale.dtype
        dnormed = dnormed.to(wide)
        row = out.to(wide)
        normal = (row if mean is None else row - mean) * scale
        dweight = (dnormed * normal).sum((0, 1)).to(weight.dtype)
        dbias = None if bias_dtype is None else dnormed.sum((0, 1)).to(bias_dtype)
        g = dnormed * weight.to(wide)
        drow = g - normal * (g * normal).mean(-1, keepdim=True)
        if mean is not None:
            drow -= g.mean(-1, keepdim=True)
        d = drow.mul_(scale).add_(dout.to(wide))
        if index is not None:
            d = d.index_select(1, inverse(index))
        dresidual = None if residual_dtype is None else d.to(residual_dtype)
        return d.to(x_dtype), dresidual, dweight, dbias, None, None, None, None
