"""Row permutation on the CPU in C++ (permute.cpp): all tensors in one call, as bytes, forward and backward.

Rows that are contiguous are read where they are, whatever the strides between them; other tensors are copied first.
"""

from __future__ import annotations

import math
import struct

import torch

from .. import cpp
from . import reference

DEVICES = ("cpu",)
DTYPES = reference.DTYPES

_lib = torch.library.Library("ssm_kernels", "FRAGMENT")
_lib.define("cpu_permute_rows(Tensor index, Tensor[] tensors, bool inverse) -> Tensor[]")
_operator = torch.ops.ssm_kernels.cpu_permute_rows.default


def load(device: torch.device):
    cpp.library()
    return permute_rows


def permute_rows(index, *tensors):
    return _move(index, tensors, False)


def _move(index, tensors, inverse):
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _Permute.apply(index, inverse, *tensors)
    return tuple(_operator(index, tensors, inverse))


class _Permute(torch.autograd.Function):
    """Linear, so its backward is itself the other way round; `once_differentiable` would cost more than small rows."""

    @staticmethod
    def forward(ctx, index, inverse, *tensors):
        ctx.save_for_backward(index)
        ctx.inverse = inverse
        return tuple(_operator(index, tensors, inverse))

    @staticmethod
    def backward(ctx, *grads):
        (index,) = ctx.saved_tensors
        moved = iter(_move(index, [g for g in grads if g is not None], not ctx.inverse))
        return None, None, *(None if g is None else next(moved) for g in grads)


def _permute(index, tensors, inverse):
    index, (b, length) = cpp.positions(index), tensors[0].shape[:2]
    out, rows, bytes_moved = [], [], 0
    tensors = [x if x.is_contiguous() or x[:1, :1].is_contiguous() else x.contiguous() for x in tensors]
    for x in tensors:
        y, size = torch.empty_like(x, memory_format=torch.contiguous_format), x.element_size()
        count = math.prod(x.shape[2:])
        rows += x.data_ptr(), y.data_ptr(), x.stride(0) * size, x.stride(1) * size, count * size
        bytes_moved += y.nbytes
        out.append(y)
    head = (b, length, len(out), cpp.threads(bytes_moved // 4), inverse, index.data_ptr())
    wrong = cpp.library().permute_rows(struct.pack(f"{len(head) + len(rows)}q", *head, *rows))
    if wrong >= 0:
        raise cpp.wrong_index("permute_rows", index, wrong)
    return out


def _fake(index, tensors, inverse):
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


cpp.implement(_lib, "cpu_permute_rows", _permute, _fake)
