"""The shuffle of one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import ssm_kernels

from .schedule import check_rate


def permute(x: Tensor, index: Tensor, dim: int = 1) -> Tensor:
    """x with the positions of `dim` reordered: out[..., i, ...] = x[..., index[i], ...].

    `index` (l,) int64 must be a permutation. Differentiable: the gradient is the same row copy with the inverse
    permutation. Raises ValueError where x.shape[dim] is not l.
    """
    if x.shape[dim] != len(index):
        raise ValueError(f"permute: dimension {dim} of {tuple(x.shape)} is not of the index's length {len(index)}")
    if torch.compiler.is_compiling():
        return _TracedRows.apply(x, index, dim)
    if dim % x.ndim == 1:
        return ssm_kernels.permute_rows(index, x)
    if dim % x.ndim == 0:
        return ssm_kernels.permute_rows(index, x.unsqueeze(0)).squeeze(0)
    return ssm_kernels.permute_rows(index, x.movedim(dim, 1)).movedim(1, dim)


class _TracedRows(torch.autograd.Function):
    """The row copy for torch.compile, which cannot trace the choice of a backend."""

    @staticmethod
    def forward(ctx, x, index, dim):
        ctx.save_for_backward(index)
        ctx.dim = dim
        return x.index_select(dim, index)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(ctx.dim, ssm_kernels.inverse(*ctx.saved_tensors)), None, None


class SLWS(nn.Module):
    """Shuffle, layer, restore, for one layer with shuffle probability `rate` in [0, 1]; nothing in the state dict.

    In eval mode, and where the draw says no, the layer is simply called.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = check_rate(rate)

    def sample(self, length: int, device: torch.device | str | None = None) -> Tensor | None:
        """One draw: a uniform permutation (length,) int64 on `device`, or None for "do not shuffle".

        The coin is thrown on the CPU, so nothing waits for the device. Always None in eval mode.
        """
        if not self.training or torch.rand((), device="cpu").item() >= self.rate:
            return None
        return torch.randperm(length, device=device)

    def forward(self, layer: Callable, *inputs: Any, **kwargs: Any) -> Any:
        """layer(*inputs, **kwargs), its tokens shuffled on the way in and restored on the way out, if drawn.

        The first input is the sequence (b, l, ...); every tensor (b, l, ...) among inputs, keywords and outputs (in
        nested tuples, lists and dicts too) is permuted alike, so hidden and residual stay together.
        """
        batch, length = inputs[0].shape[:2]
        index = self.sample(length, inputs[0].device)
        if index is None:
            return layer(*inputs, **kwargs)

        def along(index: Tensor) -> Callable:
            def move(x: Any) -> Any:
                aligned = isinstance(x, Tensor) and x.ndim >= 2 and x.shape[:2] == (batch, length)
                return ssm_kernels.permute_rows(index, x) if aligned else x

            return move

        args, kwargs = tree_map(along(index), (inputs, kwargs))
        return tree_map(along(ssm_kernels.inverse(index)), layer(*args, **kwargs))

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"
