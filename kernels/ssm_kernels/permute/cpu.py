"""Row permutation on the CPU in C++ (permute.cpp): all tensors in one call, as bytes, forward and backward.

Rows that are contiguous are read where they are, whatever the strides between them; other tensors are copied first.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from .. import cpp
from . import reference

DEVICES = ("cpu",)
DTYPES = reference.DTYPES

_lib = torch.library.Library("ssm_kernels", "FRAGMENT")
_lib.define("cpu_permute_rows(Tensor index, Tensor[] tensors, bool inverse) -> Tensor[]")


def load(device: torch.device):
    cpp.library()
    return permute_rows


def permute_rows(index, *tensors):
    return tuple(torch.ops.ssm_kernels.cpu_permute_rows(index, tensors, False))


class _Rows(ctypes.Structure):
    """permute.cpp's Copy."""

    _fields_ = (
        ("source", c_void_p),
        ("target", c_void_p),
        *((name, c_int64) for name in ("batch", "row", "bytes")),
    )


class _Call(ctypes.Structure):
    """permute.cpp's Permute."""

    _fields_ = (
        *((name, c_int64) for name in ("b", "l", "tensors", "threads", "scatter")),
        ("index", c_void_p),
        ("copies", c_void_p),
    )


def _whole_rows(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or x[:1, :1].is_contiguous() else x.contiguous()


def _permute(index, tensors, inverse):
    index, (b, length) = cpp.permutation(index, "permute_rows"), tensors[0].shape[:2]
    tensors = [_whole_rows(x) for x in tensors]
    out = [torch.empty(x.shape, dtype=x.dtype) for x in tensors]
    copies, work = (_Rows * len(out))(), 0
    for copy, x, y in zip(copies, tensors, out, strict=True):
        size = x.element_size()
        copy.source, copy.target = x.data_ptr(), y.data_ptr()
        copy.batch, copy.row, copy.bytes = x.stride(0) * size, x.stride(1) * size, x[:1, :1].numel() * size
        work += b * length * copy.bytes // 4
    call = _Call(b, length, len(out), cpp.threads(work), inverse, index.data_ptr(), ctypes.addressof(copies))
    cpp.library().permute_rows(ctypes.byref(call))
    return out


def _fake(index, tensors, inverse):
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


def _setup_context(ctx, inputs, output):
    index, _, ctx.inverse = inputs
    ctx.save_for_backward(index)
    ctx.set_materialize_grads(False)


def _backward(ctx, grads):
    known = [g for g in grads if g is not None]
    moved = iter(torch.ops.ssm_kernels.cpu_permute_rows(*ctx.saved_tensors, known, not ctx.inverse) if known else ())
    return None, [None if g is None else next(moved) for g in grads], None


_lib.impl("cpu_permute_rows", _permute, "CPU")
torch.library.register_fake("ssm_kernels::cpu_permute_rows", _fake, lib=_lib)
torch.library.register_autograd("ssm_kernels::cpu_permute_rows", _backward, setup_context=_setup_context, lib=_lib)
