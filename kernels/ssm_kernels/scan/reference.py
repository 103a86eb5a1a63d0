"""Selective scan in plain PyTorch: one loop over the length with in-place steps, backward by hand.

Time comes first and channels last, so that every step works on contiguous (b, n, d) blocks. Forward keeps its inputs
and one state per chunk of about sqrt(l) steps; backward recomputes the states of one chunk at a time.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

DEVICES = ("cpu", "cuda", "mps", "xpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load(device: torch.device):
    return selective_scan


def selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse):
    return _Scan.apply(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse)


class _Sequences:
    """The inputs of one scan as the loop wants them: (l, b, channels), scan order, fp32 or fp64, delta finished."""

    def __init__(self, u, delta, A, B, C, delta_bias, delta_softplus, reverse):
        self.dtype = torch.promote_types(u.dtype, torch.float32)
        self.reverse = reverse
        self.u, self.raw_delta, self.B, self.C = map(self.time_first, (u, delta, B, C))
        if delta_bias is not None:
            self.raw_delta = self.raw_delta + delta_bias.to(self.dtype)
        self.softplus = delta_softplus
        self.delta = F.softplus(self.raw_delta) if delta_softplus else self.raw_delta
        self.A = A.t().to(self.dtype).contiguous()
        self.du = self.delta * self.u

    def time_first(self, x: Tensor) -> Tensor:
        x = x.permute(2, 0, 1).to(self.dtype)
        return x.flip(0) if self.reverse else x.contiguous()

    def time_last(self, x: Tensor, like: Tensor) -> Tensor:
        return (x.flip(0) if self.reverse else x).permute(1, 2, 0).to(like.dtype)

    def zero_state(self) -> Tensor:
        return self.u.new_zeros(self.u.shape[1], *self.A.shape)

    def gate(self, t: int, out: Tensor) -> Tensor:
        """exp(delta_t A) into `out` (b, n, d)."""
        return torch.mul(self.delta[t].unsqueeze(1), self.A, out=out).exp_()

    def add_input(self, h: Tensor, t: int) -> Tensor:
        return h.addcmul_(self.B[t].unsqueeze(2), self.du[t].unsqueeze(1))

    def read(self, h: Tensor, t: int, out: Tensor) -> None:
        """C_t . h into row t of `out` (l, b, d)."""
        torch.bmm(self.C[t].unsqueeze(1), h, out=out[t].unsqueeze(1))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse):
        s = _Sequences(u, delta, A, B, C, delta_bias, delta_softplus, reverse)
        chunk = max(1, math.isqrt(len(s.u)))
        y, h = torch.empty_like(s.u), s.zero_state()
        gate, starts = torch.empty_like(h), []
        for t in range(len(y)):
            if t % chunk == 0:
                starts.append(h.clone())
            s.add_input(h.mul_(s.gate(t, gate)), t)
            s.read(h, t, y)
        if D is not None:
            y.addcmul_(s.u, D.to(s.dtype))
        if z is not None:
            y.mul_(F.silu(s.time_first(z)))
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, *starts)
        ctx.options = delta_softplus, reverse, chunk
        return s.time_last(y, like=u)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        u, delta, A, B, C, D, z, delta_bias, *starts = ctx.saved_tensors
        delta_softplus, reverse, chunk = ctx.options
        s = _Sequences(u, delta, A, B, C, delta_bias, delta_softplus, reverse)
        dout = s.time_first(dout)
        gated = None if z is None else s.time_first(z)
        dy = dout if z is None else dout * F.silu(gated)
        y = None if z is None else torch.empty_like(s.u)
        g = _Gradients(s)
        for number in reversed(range(len(starts))):
            g.chunk(starts[number], range(number * chunk, min((number + 1) * chunk, len(s.u))), dy, y)

        dz = None
        if z is not None:
            if D is not None:
                y.addcmul_(s.u, D.to(s.dtype))
            sigmoid = torch.sigmoid(gated)
            dz = s.time_last(dout * y * sigmoid * (1 + gated * (1 - sigmoid)), like=z)
        ddelta = g.delta.addcmul_(g.du, s.u)
        if delta_softplus:
            ddelta.mul_(torch.sigmoid(s.raw_delta))
        du = g.du.mul_(s.delta)
        dD = None
        if D is not None:
            dD = (dy * s.u).sum((0, 1)).to(D.dtype)
            du.addcmul_(dy, D.to(s.dtype))
        dbias = None if delta_bias is None else ddelta.sum((0, 1)).to(delta_bias.dtype)
        dA = g.A.sum(0).t().to(A.dtype)
        rows = (s.time_last(x, like) for x, like in ((du, u), (ddelta, delta), (g.B, B), (g.C, C)))
        du, ddelta, dB, dC = rows
        return du, ddelta, dA, dB, dC, dD, dz, dbias, None, None


class _Gradients:
    """Gradients of the bare recurrence, filled chunk by chunk from the end.

    `du` is the gradient of delta * u, `delta` that of delta through the gate alone, `A` (b, n, d) is still per sample.
    """

    def __init__(self, s: _Sequences):
        self.s = s
        self.h = s.zero_state()
        self.A, self.scratch = torch.zeros_like(self.h), torch.empty_like(self.h)
        self.du, self.delta = torch.empty_like(s.u), torch.empty_like(s.u)
        self.B, self.C = torch.empty_like(s.B), torch.empty_like(s.C)

    def chunk(self, start: Tensor, steps: range, dy: Tensor, y: Tensor | None) -> None:
        """Recompute the states of `steps` from `start`, then walk back through them; y's rows are filled if given."""
        s = self.s
        states = start.new_empty(len(steps) + 1, *start.shape)
        gates = start.new_empty(len(steps), *start.shape)
        states[0] = start
        for i, t in enumerate(steps):
            s.add_input(torch.mul(states[i], s.gate(t, gates[i]), out=states[i + 1]), t)
            if y is not None:
                s.read(states[i + 1], t, y)
        of_chunk = torch.zeros_like(start)  # summed per chunk first: one running fp32 sum over l would lose digits
        for i, t in reversed(list(enumerate(steps))):
            self.h.addcmul_(s.C[t].unsqueeze(2), dy[t].unsqueeze(1))
            torch.bmm(states[i + 1], dy[t].unsqueeze(2), out=self.C[t].unsqueeze(2))
            torch.bmm(self.h, s.du[t].unsqueeze(2), out=self.B[t].unsqueeze(2))
            torch.bmm(s.B[t].unsqueeze(1), self.h, out=self.du[t].unsqueeze(1))
            through_gate = torch.mul(self.h.mul_(gates[i]), states[i], out=self.scratch)
            of_chunk.addcmul_(through_gate, s.delta[t].unsqueeze(1))
            torch.sum(through_gate.mul_(s.A), 1, out=self.delta[t])
        self.A += of_chunk
