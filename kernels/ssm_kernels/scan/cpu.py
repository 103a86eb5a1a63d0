"""Selective scan on the CPU in C++ (scan.cpp): vectors of channels, states in registers, everything fused.

Fast where u, delta and z are (b, l, d) and B and C (b, l, n) in memory, transposed views or slices of wider rows;
any other layout is copied first. Outputs and gradients have that layout. Forward keeps its inputs and, where a
gradient is wanted, one state per chunk of 32 positions. For a given number of threads the results are bitwise
reproducible. The two operators can be called without autograd by a function that has its own.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import cpp

DEVICES = ("cpu",)
DTYPES = cpp.DTYPES

_lib = torch.library.Library("ssm_kernels", "FRAGMENT")
_inputs = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias"
_options = "bool delta_softplus, bool reverse"
_lib.define(f"cpu_scan_forward({_inputs}, {_options}, bool keep_states) -> (Tensor y, Tensor states)")
_lib.define(f"cpu_scan_over({_inputs.replace('Tensor u', 'Tensor(a!) u')}, {_options}) -> ()")
_lib.define(f"cpu_scan_backward(Tensor dy, Tensor states, {_inputs}, {_options}) -> Tensor[]")


def load(device: torch.device):
    cpp.library()
    return selective_scan


def selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse):
    tensors = (u, delta, A, B, C, D, z, delta_bias)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if not keep:
        return torch.ops.ssm_kernels.cpu_scan_forward(*tensors, delta_softplus, reverse, False)[0]
    return _Scan.apply(*tensors, delta_softplus, reverse)


def _keep(*arguments):
    """(y, states) without autograd."""
    return torch.ops.ssm_kernels.cpu_scan_forward(*arguments, True)


def _again(states, *arguments):
    """An output to differentiate, of a scan whose states were kept; its values are undefined."""
    return _Again.apply(states, *arguments)


def _over(*arguments):
    """Into u, without autograd."""
    torch.ops.ssm_kernels.cpu_scan_over(*arguments)


selective_scan.keep, selective_scan.again, selective_scan.over = _keep, _again, _over


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse):
        tensors = (u, delta, A, B, C, D, z, delta_bias)
        y, states = torch.ops.ssm_kernels.cpu_scan_forward(*tensors, delta_softplus, reverse, True)
        ctx.save_for_backward(states, *tensors)
        ctx.options = delta_softplus, reverse
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        states, *tensors = ctx.saved_tensors
        grads = iter(torch.ops.ssm_kernels.cpu_scan_backward(dy, states, *tensors, *ctx.options))
        return *(None if x is None else next(grads) for x in tensors), None, None


class _Again(torch.autograd.Function):
    """The backward of `_Scan` from states that an earlier forward kept."""

    @staticmethod
    def forward(ctx, states, *arguments):
        *tensors, delta_softplus, reverse = arguments
        ctx.save_for_backward(states, *tensors)
        ctx.options = delta_softplus, reverse
        return cpp.new_rows(tensors[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return None, *_Scan.backward(ctx, dy)


class _Call(ctypes.Structure):
    """scan.cpp's Scan."""

    _fields_ = (
        *((name, c_int64) for name in ("b", "d", "l", "n", "parts", "threads", "softplus", "reverse")),
        *((name, cpp.Rows) for name in ("u", "delta", "B", "C", "z", "out")),
        *((name, c_void_p) for name in ("At", "D", "bias", "states")),
        *((name, cpp.Rows) for name in ("du", "ddelta", "dz")),
        *((name, c_void_p) for name in ("dB", "dC", "dA", "dD", "dbias")),
    )


class _Arguments:
    """The inputs as the kernels take them, and the call that holds their addresses."""

    def __init__(self, u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse):
        self.u, self.delta, self.B, self.C, self.z = map(cpp.channel_last, (u, delta, B, C, z))
        self.At, self.D, self.bias = (cpp.table(x) for x in (A.t(), D, delta_bias))
        (self.b, self.d, self.l), self.n = u.shape, A.shape[1]
        blocks = -(-self.d // cpp.lanes())
        self.parts, threads = cpp.split(self.b, blocks, self.b * self.d * self.l * self.n, torch.get_num_threads())
        self.call = _Call(self.b, self.d, self.l, self.n, self.parts, threads, delta_softplus, reverse)
        for name in ("u", "delta", "B", "C", "z"):
            setattr(self.call, name, cpp.rows(getattr(self, name)))
        for name in ("At", "D", "bias"):
            setattr(self.call, name, cpp.address(getattr(self, name)))


def _states_shape(u: Tensor, A: Tensor) -> tuple[int, ...]:
    lanes, chunk, tile = cpp.lanes(), cpp.library().scan_chunk(), cpp.library().scan_tile()
    (b, d, length), n = u.shape, A.shape[1]
    return b, -(-d // lanes), max(0, -(-length // chunk) - 1), -(-n // tile) * tile, lanes


def _forward(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse, keep_states):
    a = _Arguments(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse)
    y = cpp.new_rows(a.u)
    states = u.new_empty(_states_shape(u, A) if keep_states else 0, dtype=torch.float32)
    a.call.out = cpp.rows(y)
    a.call.states = states.data_ptr()
    cpp.library().scan_forward(ctypes.byref(a.call))
    return y, states


def _forward_over(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse):
    a = _Arguments(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse)
    a.call.out = a.call.u  # a chunk is read before it is written
    cpp.library().scan_forward(ctypes.byref(a.call))
    if a.u is not u:
        u.copy_(a.u)


def _backward(dy, states, u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse):
    a = _Arguments(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse)
    dy = cpp.channel_last(dy)
    rows = {"du": cpp.new_rows(a.u), "ddelta": cpp.new_rows(a.delta)}
    if z is not None:
        rows["dz"] = cpp.new_rows(a.z)
    new = lambda *shape: torch.empty(shape, dtype=torch.float32)  # noqa: E731
    sums = {name: new(a.parts, a.b, a.l, a.n) for name in ("dB", "dC")}
    sums["dA"] = new(a.b, a.n, a.d)
    if D is not None:
        sums["dD"] = new(a.b, a.d)
    if delta_bias is not None:
        sums["dbias"] = new(a.b, a.d)
    a.call.out, a.call.states = cpp.rows(dy), states.data_ptr()
    for name, x in rows.items():
        setattr(a.call, name, cpp.rows(x))
    for name, x in sums.items():
        setattr(a.call, name, x.data_ptr())
    cpp.library().scan_backward(ctypes.byref(a.call))

    done = {name: x[0] if len(x) == 1 else x.sum(0) for name, x in sums.items()}
    for name in ("dB", "dC"):
        done[name] = done[name].transpose(1, 2)
    done["dA"] = done["dA"].t().contiguous()
    done |= rows
    order = {"du": u, "ddelta": delta, "dA": A, "dB": B, "dC": C, "dD": D, "dz": z, "dbias": delta_bias}
    return [done[name].to(like.dtype) for name, like in order.items() if like is not None]


def _fake_forward(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse, keep_states):
    return cpp.new_rows(u), u.new_empty(_states_shape(u, A) if keep_states else 0, dtype=torch.float32)


def _fake_backward(dy, states, u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse):
    fakes = (cpp.new_rows(u), cpp.new_rows(delta), torch.empty_like(A), cpp.new_rows(B), cpp.new_rows(C))
    options = (torch.empty_like(D) if D is not None else None, cpp.new_rows(z) if z is not None else None)
    options += (torch.empty_like(delta_bias) if delta_bias is not None else None,)
    return [*fakes, *(x for x in options if x is not None)]


cpp.implement(_lib, "cpu_scan_forward", _forward, _fake_forward)
cpp.implement(_lib, "cpu_scan_over", _forward_over)
cpp.implement(_lib, "cpu_scan_backward", _backward, _fake_backward)
