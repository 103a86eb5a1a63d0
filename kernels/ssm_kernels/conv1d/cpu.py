"""Depthwise causal convolution on the CPU in C++ (conv1d.cpp), with the activation fused.

Fast where x is (b, l, d) in memory, a transposed view or a slice of wider rows; any other layout is copied first. The
output and x's gradient have that layout. Forward keeps its inputs only. For a given number of threads the results are
bitwise reproducible. The two operators can be called without autograd by a function that has its own.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch.autograd.function import once_differentiable

from .. import cpp

DEVICES = ("cpu",)
DTYPES = cpp.DTYPES

_lib = torch.library.Library("ssm_kernels", "FRAGMENT")
_inputs = "Tensor x, Tensor weight, Tensor? bias, bool silu, bool reverse"
_lib.define(f"cpu_conv1d_forward({_inputs}) -> Tensor")
_lib.define(f"cpu_conv1d_over({_inputs.replace('Tensor x', 'Tensor(a!) x')}) -> ()")
_lib.define(f"cpu_conv1d_backward(Tensor dy, {_inputs}) -> Tensor[]")


def load(device: torch.device):
    cpp.library()
    return causal_conv1d


def causal_conv1d(x, weight, bias, activation, reverse):
    return _Conv.apply(x, weight, bias, activation is not None, reverse)


def _over(x, weight, bias, activation, reverse):
    """Into x, without autograd."""
    torch.ops.ssm_kernels.cpu_conv1d_over(x, weight, bias, activation is not None, reverse)


causal_conv1d.over = _over


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, silu, reverse):
        ctx.save_for_backward(x, weight, bias)
        ctx.options = silu, reverse
        return torch.ops.ssm_kernels.cpu_conv1d_forward(x, weight, bias, silu, reverse)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        tensors = ctx.saved_tensors
        grads = iter(torch.ops.ssm_kernels.cpu_conv1d_backward(dy, *tensors, *ctx.options))
        return *(None if x is None else next(grads) for x in tensors), None, None


class _Call(ctypes.Structure):
    """conv1d.cpp's Conv."""

    _fields_ = (
        *((name, c_int64) for name in ("b", "d", "l", "width", "parts", "threads", "silu", "reverse")),
        *((name, cpp.Rows) for name in ("x", "out")),
        *((name, c_void_p) for name in ("weight", "bias")),
        ("dx", cpp.Rows),
        *((name, c_void_p) for name in ("dweight", "dbias")),
    )


class _Arguments:
    """The inputs as the kernels take them, and the call that holds their addresses."""

    def __init__(self, x, weight, bias, silu, reverse):
        self.x, self.weight, self.bias = cpp.channel_last(x), cpp.table(weight.t()), cpp.table(bias)
        (b, d, length), width = x.shape, weight.shape[1]
        parts, threads = cpp.split(b, -(-d // cpp.lanes()), b * d * length * width, torch.get_num_threads())
        self.call = _Call(b, d, length, width, parts, threads, silu, reverse, cpp.rows(self.x))
        self.call.weight, self.call.bias = cpp.address(self.weight), cpp.address(self.bias)


def _forward(x, weight, bias, silu, reverse):
    a = _Arguments(x, weight, bias, silu, reverse)
    y = cpp.new_rows(a.x)
    a.call.out = cpp.rows(y)
    cpp.library().conv_forward(ctypes.byref(a.call))
    return y


def _forward_over(x, weight, bias, silu, reverse):
    a = _Arguments(x, weight, bias, silu, reverse)
    a.call.out = a.call.x
    cpp.library().conv_forward(ctypes.byref(a.call))
    if a.x is not x:
        x.copy_(a.x)


def _backward(dy, x, weight, bias, silu, reverse):
    a = _Arguments(x, weight, bias, silu, reverse)
    dy, dx = cpp.channel_last(dy), cpp.new_rows(a.x)
    (b, d, _), width = x.shape, weight.shape[1]
    dweight = torch.empty(b, width, d, dtype=torch.float32)
    dbias = torch.empty(b, d, dtype=torch.float32)
    a.call.out, a.call.dx = cpp.rows(dy), cpp.rows(dx)
    a.call.dweight, a.call.dbias = dweight.data_ptr(), dbias.data_ptr()
    cpp.library().conv_backward(ctypes.byref(a.call))
    grads = [dx.to(x.dtype), dweight.sum(0).t().contiguous().to(weight.dtype)]
    return grads if bias is None else [*grads, dbias.sum(0).to(bias.dtype)]


def _fake_forward(x, weight, bias, silu, reverse):
    return cpp.new_rows(x)


def _fake_backward(dy, x, weight, bias, silu, reverse):
    grads = [cpp.new_rows(x), torch.empty_like(weight)]
    return grads if bias is None else [*grads, torch.empty_like(bias)]


cpp.implement(_lib, "cpu_conv1d_forward", _forward, _fake_forward)
cpp.implement(_lib, "cpu_conv1d_over", _forward_over)
cpp.implement(_lib, "cpu_conv1d_backward", _backward, _fake_backward)
