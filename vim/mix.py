"""What a mixer does between its two projections: convolution, data-dependent projections, scan, gate.

In training this is one autograd function. It keeps its inputs, the sum of the scans and, where the scan's backend
offers them, a few of its states; convolution and projections are computed again in backward. Against keeping every
intermediate tensor that is about a third of the memory.
"""

from __future__ import annotations

from itertools import starmap
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssm_kernels import causal_conv1d, inverse, permute_rows, scan_again, scan_keeping, selective_scan

_LARGE, _CHANNELS = 2**21, 32  # numbers from which on x goes through in pieces; channels in a piece for each thread


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

    def channels(self, c: slice) -> Direction:
        """The parameters of these of the d channels."""
        per_channel = self._asdict() | {"x_proj": self.x_proj.t()}
        some = Direction(**{name: value[c] for name, value in per_channel.items()})
        return some._replace(x_proj=some.x_proj.t())


def mix(xz: Tensor, directions: list[Direction], transposed: Tensor | None, scale: float) -> Tensor:
    """xz (b, l, 2d), the input and the gate -> (b, l, d): the scans' sum times `scale` times silu(gate).

    `transposed` (l,) int64 is the order of the third and fourth direction. A, D and the states stay fp32 (fp64) under
    autocast.
    """
    parameters = [p for direction in directions for p in direction]
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (xz, *parameters))
    if differentiated and not torch.compiler.is_compiling():  # a compiler decides itself what to compute again
        return _Mix.apply(xz, transposed, scale, *parameters)
    x, z = _halves(xz)
    channels = _CHANNELS * torch.get_num_threads()
    small = xz.device.type != "cpu" or x.numel() < _LARGE or x.shape[1] <= channels
    if small or differentiated or torch.compiler.is_compiling():
        return _gated(x, z, directions, transposed, scale)
    project = lambda p, u: F.linear(u.transpose(1, 2), p.x_proj)  # noqa: E731
    projected = [*starmap(project, _convolved(x, directions, transposed))]  # holds one convolution at a time
    out = torch.empty_like(xz[..., : x.shape[1]])
    for start in range(0, x.shape[1], channels):
        c = slice(start, start + channels)
        some = [p.channels(c) for p in directions]
        out[..., c] = _gated(x[:, c], z[:, c], some, transposed, scale, projected)
    return out


def _gated(x, z, directions, transposed, scale, projected=None) -> Tensor:
    inputs = _scan_inputs(x, directions, transposed, scale, projected)
    ys = [selective_scan(*i[:6], None, *i[6:]) for i in inputs]
    return (_sum(ys, transposed) * F.silu(z)).transpose(1, 2)


def _halves(xz: Tensor) -> tuple[Tensor, Tensor]:
    """Input and gate as (b, d, l), channels side by side in memory."""
    return xz.transpose(1, 2).chunk(2, 1)


def _convolved(x: Tensor, directions, transposed: Tensor | None):
    """(parameters, convolution of x) of each direction."""
    for number, p in enumerate(directions):
        if number == 2:
            x = permute_rows(transposed, x.transpose(1, 2)).transpose(1, 2)
        yield p, causal_conv1d(x, p.conv_weight.squeeze(1), p.conv_bias, "silu", number % 2 == 1)


def _scan_inputs(x: Tensor, directions, transposed: Tensor | None, scale: float, projected=None):
    """The arguments of each direction's scan, after convolution and projections. Scaling C and D scales its output.

    `projected`: each direction's x_proj output, where x and the parameters hold some of the channels only.
    """
    for number, (p, u) in enumerate(_convolved(x, directions, transposed)):
        n = p.A_log.shape[1]
        rows = projected[number] if projected else F.linear(u.transpose(1, 2), p.x_proj)
        dt, B, C = rows.split([p.dt_weight.shape[1], n, n], -1)
        delta = F.linear(dt, p.dt_weight)
        delta, B, C = (t.transpose(1, 2) for t in (delta, B, C * scale if scale != 1 else C))
        A = -torch.exp(_wide(p.A_log))
        yield u, delta, A, B, C, _wide(p.D) * scale, _wide(p.dt_bias), True, number % 2 == 1


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
