"""The selective-state-space mixer of Vision Mamba (Zhu et al., ICML 2024, arXiv 2401.09417) in 1, 2 or 4 directions.

Every direction has its own convolution, projections, A and D; in_proj and out_proj are shared. Parameter names are
those of the published checkpoints: no suffix for the forward scan, `_b` for the backward one, `_c` and `_c_b` for the
two over the column-major (transposed) patch order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .mix import Direction, mix

SUFFIXES = {1: ("",), 2: ("", "_b"), 4: ("", "_b", "_c", "_c_b")}
DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 0.1, 1e-4


def _log_name(suffix: str) -> str:
    return f"A{suffix}_log"


class Mixer(nn.Module):
    """Token mixer (b, l, dim) -> (b, l, dim).

    `merge` "mean" divides the sum over directions by their number, "sum" does not. A_log and D stay fp32 in the scan
    whatever the autocast dtype.
    """

    def __init__(
        self,
        dim: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        directions: int = 2,
        merge: str = "mean",
        device=None,
        dtype=None,
    ):
        super().__init__()
        if directions not in SUFFIXES:
            raise ValueError(f"directions must be 1, 2 or 4, got {directions!r}")
        if merge not in ("mean", "sum"):
            raise ValueError(f"merge must be 'mean' or 'sum', got {merge!r}")
        made = {"device": device, "dtype": dtype}
        self.inner, self.d_state, self.dt_rank = expand * dim, d_state, math.ceil(dim / 16)
        self.suffixes = SUFFIXES[directions]
        self.scale = 1 / directions if merge == "mean" else 1.0
        self.in_proj = nn.Linear(dim, 2 * self.inner, bias=False, **made)
        for suffix in self.suffixes:
            conv = nn.Conv1d(self.inner, self.inner, d_conv, groups=self.inner, padding=d_conv - 1, **made)
            self.add_module(f"conv1d{suffix}", conv)
            self.add_module(f"x_proj{suffix}", nn.Linear(self.inner, self.dt_rank + 2 * d_state, bias=False, **made))
            self.add_module(f"dt_proj{suffix}", nn.Linear(self.dt_rank, self.inner, **made))
            self.register_parameter(_log_name(suffix), nn.Parameter(torch.empty(self.inner, d_state, **made)))
            self.register_parameter(f"D{suffix}", nn.Parameter(torch.empty(self.inner, **made)))
        self.out_proj = nn.Linear(self.inner, dim, bias=False, **made)
        self.init_ssm()

    @torch.no_grad()
    def init_ssm(self) -> None:
        """Mamba's own initialisation of A (S4D-real), D, and dt: softplus(dt bias) log-uniform in [1e-3, 0.1]."""
        for suffix in self.suffixes:
            states = torch.arange(1, self.d_state + 1, dtype=torch.float32)
            getattr(self, _log_name(suffix)).copy_(states.log().expand(self.inner, -1))
            getattr(self, f"D{suffix}").fill_(1.0)
            dt_proj = getattr(self, f"dt_proj{suffix}")
            nn.init.uniform_(dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
            dt = torch.exp(torch.rand(self.inner) * math.log(DT_MAX / DT_MIN) + math.log(DT_MIN)).clamp_min(DT_FLOOR)
            dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def no_weight_decay(self) -> set[str]:
        return {name for s in self.suffixes for name in (_log_name(s), f"D{s}")}

    def directions(self) -> list[Direction]:
        """The parameters of each direction, in the order of `mix`."""
        found = []
        for suffix in self.suffixes:
            conv, x_proj, dt_proj = (getattr(self, f"{name}{suffix}") for name in ("conv1d", "x_proj", "dt_proj"))
            log_A, D = getattr(self, _log_name(suffix)), getattr(self, f"D{suffix}")
            found.append(Direction(conv.weight, conv.bias, x_proj.weight, dt_proj.weight, dt_proj.bias, log_A, D))
        return found

    def forward(self, x: Tensor, transposed: Tensor | None = None) -> Tensor:
        """x (b, l, dim); `transposed` (l,) int64 is the column-major token order, needed by four directions only."""
        xz = self.in_proj(x)
        kept = self.in_proj._forward_hooks  # one of these may have kept xz
        return self.out_proj(mix(xz, self.directions(), transposed, self.scale, disposable=not kept))
