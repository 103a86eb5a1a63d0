"""Permutation of the rows of a sequence."""

import torch
from torch import Tensor

from ..backend import register

_op = register("permute_rows", __name__)


def inverse(index: Tensor) -> Tensor:
    """The permutation that undoes `index` (l,): inverse(index)[index[i]] = i."""
    out = torch.empty_like(index)
    out[index] = torch.arange(len(index), device=index.device, dtype=index.dtype)
    return out


def permute_rows(index: Tensor, *tensors: Tensor, backend: str | None = None) -> Tensor | tuple[Tensor, ...]:
    """out[b, i] = x[b, index[i]] for each x of `tensors` (b, l, ...), all in one launch where the backend can.

    `index` (l,) int64 must be a permutation of 0..l-1 (not checked: that would wait for the device); the backward is
    the same row copy with the inverse permutation. Returns one tensor for one, else a tuple.
    Raises ValueError where a tensor's second dimension is not the index's length.
    """
    if not tensors:
        raise ValueError("permute_rows: no tensor given")
    for x in tensors:
        if x.ndim < 2 or index.ndim != 1 or x.shape[1] != len(index):
            raise ValueError(
                f"permute_rows: tensors must be (b, l, ...) beside an index (l,), "
                f"got {tuple(x.shape)} and {tuple(index.shape)}"
            )
    out = _op.resolve(tensors[0], backend)(index, *tensors)
    return out[0] if len(tensors) == 1 else out
