"""What a mixer does between its two projections: convolution, data-dependent projections, scan, gate.

In training this is one autograd function. It keeps its inputs, the sum of the scans and, where the scan's backend
offers them, a few of its states; convolution and projections are computed again in backward. Against keeping every
intermediate tensor that is about a third of the memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssm_kernels import (
    causal_conv1d,
    conv_over,
    inverse,
    permute_rows,
    scan_again,
    scan_keeping,
    scan_over,
    selective_scan,
)

_LARGE = 2**21  # numbers of x from which on inference saves memory
_CHANNELS, _ROWS = 32, 1024  # it takes so many channels for each thread, or positions, at a time


class Direction(NamedTuple):
    """One direction's parameters: conv (d, 1, w), (d,); x_proj (r + 2n, d); dt (d, r), (d,); A_log (d, n); D (d,).

    Directions come in pairs, forward then backward; the second pair scans the transposed order.
    """

    conv_weight: Tensor
    conv_bias: Tensor
    x_proj: Tensor
    dt_weight: Tensor
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor


def mix(
    xz: Tensor, directions: list[Direction], transposed: Tensor | None, scale: float, disposable: bool = False
) -> Tensor:
    """xz (b, l, 2d), the input and the gate -> (b, l, d): the scans' sum times `scale` times silu(gate).

    `transposed` (l,) int64 is the order of the third and fourth direction. A, D and the states stay fp32 (fp64) under
    autocast. Where nothing is differentiated a `disposable` xz, which nobody reads again, may be overwritten.
    """
    parameters = [p for direction in directions for p in direction]
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (xz, *parameters))
    if differentiated and not torch.compiler.is_compiling():  # a compiler decides itself what to compute again
        return _Mix.apply(xz, transposed, scale, *parameters)
    x, z = _halves(xz)
    # A compiler's sizes may be symbols, and a look at one would be a condition on it: so that is asked first.
    frugal = disposable and not (differentiated or torch.compiler.is_compiling())
    if frugal and xz.device.type == "cpu" and x.numel() >= _LARGE:
        return _in_place(x, z, directions, transposed, scale)
    ys = [selective_scan(*i[:6], None, *i[6:]) for i in _scan_inputs(x, directions, transposed, scale)]
    return (_sum(ys, transposed) * F.silu(z)).transpose(1, 2)


def _in_place(x: Tensor, z: Tensor, directions, transposed: Tensor | None, scale: float) -> Tensor:
    """The same where nothing is differentiated, with little memory of its own: outputs take the place of inputs, x's
    too, and only a few channels' delta is there at a time.
    """
    channels, sums = _CHANNELS * torch.get_num_threads(), []
    for number, p in enumerate(directions):
        if number == 2:
            x = permute_rows(transposed, x.transpose(1, 2)).transpose(1, 2)
        convolve = conv_over if number + 1 == len(directions) else causal_conv1d
        y = _convolved(convolve, x, p, number)
        dt, A, B, C, D, bias, *options = _projected(y, p, number, scale)
        for start in range(0, y.shape[1], channels):
            c = slice(start, start + channels)
            delta = F.linear(dt, p.dt_weight[c]).transpose(1, 2)
            scan_over(y[:, c], delta, A[c], B, C, D[c], bias[c], *options)
        sums.append(sums.pop().add_(y) if number % 2 else y)
    if len(sums) == 2:
        sums[0] += permute_rows(inverse(transposed), sums[1].transpose(1, 2)).transpose(1, 2)
    for start in range(0, z.shape[2], _ROWS):
        t = slice(start, start + _ROWS)
        sums[0][..., t] *= F.silu(z[..., t])
    return sums[0].transpose(1, 2)


def _halves(xz: Tensor) -> tuple[Tensor, Tensor]:
    """Input and gate as (b, d, l), channels side by side in memory."""
    return xz.transpose(1, 2).chunk(2, 1)


def _convolved(convolve, x: Tensor, p: Direction, number: int) -> Tensor:
    return convolve(x, p.conv_weight.squeeze(1), p.conv_bias, "silu", number % 2 == 1)


def _projected(u: Tensor, p: Direction, number: int, scale: float):
    """dt (b, l, r) and the scan's arguments after delta; odd numbers in reverse. Scaling C and D scales its output."""
    n = p.A_log.shape[1]
    dt, B, C = F.linear(u.transpose(1, 2), p.x_proj).split([p.dt_weight.shape[1], n, n], -1)
    B, C = (t.transpose(1, 2) for t in (B, C * scale if scale != 1 else C))
    return dt, -torch.exp(_wide(p.A_log)), B, C, _wide(p.D) * scale, _wide(p.dt_bias), True, number % 2 == 1


def _scan_inputs(x: Tensor, directions, transposed: Tensor | None, scale: float):
    """The arguments of each direction's scan, after convolution and projections."""
    for number, p in enumerate(directions):
        if number == 2:
            x = permute_rows(transposed, x.transpose(1, 2)).transpose(1, 2)
        u = _convolved(causal_conv1d, x, p, number)
        dt, *rest = _projected(u, p, number, scale)
        yield u, F.linear(dt, p.dt_weight).transpose(1, 2), *rest


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sum(ys: list[Tensor], transposed: Tensor | None) -> Tensor:
    y = ys[0] if len(ys) == 1 else ys[0] + ys[1]
    if len(ys) == 4:
        y = y + permute_rows(inverse(transposed), (ys[2] + ys[3]).transpose(1, 2)).transpose(1, 2)
    return y


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, xz, transposed, scale, *parameters):
        x, z = _halves(xz)
        ys, kept = [], []
        for inputs in _scan_inputs(x, _directions(parameters), transposed, scale):
            y, states = scan_keeping(*inputs)
            ys.append(y)
            kept.append(states)
        y = _sum(ys, transposed)
        ctx.save_for_backward(xz, transposed, y, *kept, *parameters)
        kind = xz.device.type
        ctx.options = scale, len(kept), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return F.silu(z).mul_(y).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        xz, transposed, y, *rest = ctx.saved_tensors
        scale, count, autocast, dtype = ctx.options
        kept, parameters = rest[:count], [p.detach().requires_grad_() for p in rest[count:]]
        x, z = _halves(xz.detach())
        dout = dout.transpose(1, 2)
        dz = torch.ops.aten.silu_backward(dout * y, z)
        dy = dout * F.silu(z)
        dys = [dy, dy]
        if count == 4:
            dys += [permute_rows(transposed, dy.transpose(1, 2)).transpose(1, 2)] * 2
        x.requires_grad_()
        with torch.enable_grad(), torch.autocast(xz.device.type, dtype, enabled=autocast):
            inputs = _scan_inputs(x, _directions(parameters), transposed, scale)
            ys = [scan_again(states, *i) for states, i in zip(kept, inputs, strict=True)]
        dx, *grads = torch.autograd.grad(ys, [x, *parameters], dys[:count])
        return torch.cat([dx, dz], 1).transpose(1, 2), None, None, *grads


def _directions(parameters) -> list[Direction]:
    width = len(Direction._fields)
    return [Direction(*parameters[i : i + width]) for i in range(0, len(parameters), width)]
