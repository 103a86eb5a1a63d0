"""Add, permute and normalise on the CPU in C++ (norm.cpp): one pass over memory, forward and backward.

The permutation is where a row is read from, and in backward where its gradient is written to: it adds no pass. Forward
keeps the new residual, which it returns anyway, and one or two numbers per row. Results do not depend on the number of
threads. Fast where channels are contiguous; other tensors are copied first.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import cpp
from . import reference

DEVICES = ("cpu",)
DTYPES = cpp.DTYPES

_lib = torch.library.Library("ssm_kernels", "FRAGMENT")
_lib.define(
    "cpu_add_norm_forward(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool centred, "
    "Tensor? index, bool residual_in_fp32) -> (Tensor normed, Tensor residual, Tensor stats)"
)
_lib.define(
    "cpu_add_norm_backward(Tensor? dnormed, Tensor? dout, Tensor out, Tensor stats, Tensor weight, Tensor? index, "
    "ScalarType x_dtype, ScalarType residual_dtype, bool has_bias) -> (Tensor dx, Tensor dresidual, Tensor dparameters)"
)


def load(device: torch.device):
    cpp.library()
    return add_norm


def add_norm(x, residual, weight, bias, eps, norm, index, residual_in_fp32):
    if residual is not None and residual.dtype not in DTYPES:  # fp64: the sum is then fp64 too
        return reference.add_norm(x, residual, weight, bias, eps, norm, index, residual_in_fp32)
    call = torch.ops.ssm_kernels.cpu_add_norm_forward
    return call(x, residual, weight, bias, eps, norm == "layer", index, residual_in_fp32)[:2]


class _Call(ctypes.Structure):
    """norm.cpp's Norm."""

    _fields_ = (
        *((name, c_int64) for name in ("b", "l", "d", "threads", "centred")),
        ("eps", c_double),
        *((name, c_void_p) for name in ("index", "weight", "bias")),
        *((name, cpp.Rows) for name in ("x", "residual", "out", "normed")),
        ("stats", c_void_p),
        ("dout", cpp.Rows),
        *((name, c_void_p) for name in ("dweight", "dbias")),
    )


def _whole_rows(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _rows(x: Tensor | None) -> cpp.Rows:
    return cpp.Rows() if x is None else cpp.Rows(x.data_ptr(), x.stride(0), x.stride(1), cpp.DTYPES.index(x.dtype))


def _checked(index: Tensor | None) -> Tensor | None:
    if index is None:
        return None
    index = cpp.positions(index)
    wrong = cpp.library().permute_wrong(c_void_p(index.data_ptr()), c_int64(len(index)))
    if wrong >= 0:
        raise cpp.wrong_index("add_norm", index, wrong)
    return index


def _call(like, stats, weight, index):
    """The call and what it holds addresses of."""
    weight, index = cpp.table(weight), _checked(index)
    call = _Call(*like.shape, cpp.threads(like.numel()), stats.shape[2] - 1)
    call.index, call.weight, call.stats = cpp.address(index), weight.data_ptr(), stats.data_ptr()
    return call, (weight, index)


def _results(x, centred, residual_in_fp32):
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=torch.float32 if residual_in_fp32 else x.dtype, device=x.device)
    return normed, out, torch.empty(*x.shape[:2], 2 if centred else 1, dtype=torch.float32, device=x.device)


def _forward(x, residual, weight, bias, eps, centred, index, residual_in_fp32):
    x, residual, bias = _whole_rows(x), _whole_rows(residual), cpp.table(bias)
    normed, out, stats = _results(x, centred, residual_in_fp32)
    call, _held = _call(x, stats, weight, index)
    call.eps, call.bias = eps, cpp.address(bias)
    call.x, call.residual, call.out, call.normed = map(_rows, (x, residual, out, normed))
    cpp.library().norm_forward(ctypes.byref(call))
    return normed, out, stats


def _gradients(out, x_dtype, residual_dtype, has_bias):
    dx = torch.empty(out.shape, dtype=x_dtype, device=out.device)
    dresidual = torch.empty(out.shape if residual_dtype != x_dtype else 0, dtype=residual_dtype, device=out.device)
    return dx, dresidual, torch.empty(2 if has_bias else 1, out.shape[2], dtype=torch.float32, device=out.device)


def _backward(dnormed, dout, out, stats, weight, index, x_dtype, residual_dtype, has_bias):
    """(dx, dresidual, fp32 gradients of weight and bias); dresidual is empty where it would equal dx."""
    dnormed, dout, out = map(_whole_rows, (dnormed, dout, out))
    dx, dresidual, dparameters = _gradients(out, x_dtype, residual_dtype, has_bias)
    parts = -(-out.shape[0] * out.shape[1] // cpp.library().norm_part())
    sums = torch.empty(len(dparameters), parts, out.shape[2], dtype=torch.float32)
    call, _held = _call(out, stats, weight, index)
    call.x, call.residual = _rows(dx), _rows(dresidual if residual_dtype != x_dtype else None)
    call.out, call.normed, call.dout = map(_rows, (out, dnormed, dout))
    call.dweight, call.dbias = sums[0].data_ptr(), sums[1].data_ptr() if has_bias else None
    cpp.library().norm_backward(ctypes.byref(call))
    return dx, dresidual, torch.sum(sums, 1, out=dparameters)


def _setup_context(ctx, inputs, output):
    x, residual, weight, bias, *_, index, _fp32 = inputs
    _, out, stats = output
    ctx.save_for_backward(out, stats, weight, index)
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype, None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


@once_differentiable
def _autograd(ctx, dnormed, dout, _dstats):
    x_dtype, residual_dtype, bias_dtype = ctx.dtypes
    saved = ctx.saved_tensors  # read once: an activation checkpoint gives them out only once
    dx, dresidual, dparameters = torch.ops.ssm_kernels.cpu_add_norm_backward(
        dnormed, dout, *saved, x_dtype, residual_dtype or x_dtype, bias_dtype is not None
    )
    if residual_dtype is None:
        dresidual = None
    elif residual_dtype == x_dtype:
        dresidual = dx  # shared, as the backward of torch's own addition does
    dbias = None if bias_dtype is None else dparameters[1].to(bias_dtype)
    return dx, dresidual, dparameters[0].to(saved[2].dtype), dbias, None, None, None, None


def _fake_forward(x, residual, weight, bias, eps, centred, index, residual_in_fp32):
    return _results(x, centred, residual_in_fp32)


def _fake_backward(dnormed, dout, out, stats, weight, index, x_dtype, residual_dtype, has_bias):
    return _gradients(out, x_dtype, residual_dtype, has_bias)


cpp.implement(_lib, "cpu_add_norm_forward", _forward, _fake_forward)
cpp.implement(_lib, "cpu_add_norm_backward", _backward, _fake_backward)
torch.library.register_autograd("ssm_kernels::cpu_add_norm_forward", _autograd, setup_context=_setup_context, lib=_lib)
