"""Which tensors of a layer's inputs and outputs follow the sequence, and how their positions are moved."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from .shuffle import permute

Named = dict[str, tuple[int, ...]]


def walk(tree: Any, visit: Callable[[str, Tensor], Any], path: str = "") -> Any:
    """`tree` with each tensor replaced by visit(path, tensor), through tuples, lists, dicts and dataclasses.

    Paths join keys, positions and field names with dots. A container in which nothing changed is returned itself.
    """
    if isinstance(tree, Tensor):
        return visit(path, tree)
    if not isinstance(tree, (tuple, list, Mapping)) and (isinstance(tree, type) or not dataclasses.is_dataclass(tree)):
        return tree
    old = dict(_items(tree))
    new = {key: walk(value, visit, f"{path}.{key}" if path else str(key)) for key, value in old.items()}
    changed = {key: value for key, value in new.items() if value is not old[key]}
    if not changed:
        return tree
    if dataclasses.is_dataclass(tree):
        return dataclasses.replace(tree, **changed)
    if type(tree) is dict:
        return tree | changed
    if isinstance(tree, Mapping):
        tree = copy.copy(tree)
        for key, value in changed.items():
            tree[key] = value
        return tree
    return tree._make(new.values()) if hasattr(tree, "_make") else type(tree)(new.values())


def _items(tree: Any) -> Iterator[tuple[Any, Any]]:
    if dataclasses.is_dataclass(tree):
        return ((f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree) if f.init)
    return iter(tree.items()) if isinstance(tree, Mapping) else enumerate(tree)


def named(value: Any, what: str, dims: tuple[int, ...]) -> Named:
    """`sequence_args` or `sequence_outputs` as {path: where the sequence starts}; () means it does not follow it.

    Takes names alone (they follow `seq_dim`) or {name: dim, tuple of dims, or None}. Raises ValueError.
    """
    if value is None:
        return {}
    if isinstance(value, (str, int)):
        value = [value]
    if not isinstance(value, Mapping):
        value = dict.fromkeys(value, dims[0])
    found = {}
    for name, starts in value.items():
        starts = () if starts is None else (starts,) if isinstance(starts, int) else tuple(starts)
        if not all(isinstance(d, int) and d >= 0 for d in starts):
            raise ValueError(f"{what}[{name!r}] must be a dimension, a tuple of them or None, got {value[name]!r}")
        found[str(name)] = starts
    return found


def look_up(table: Named, path: str) -> tuple[int, ...] | None:
    """What is said about `path` or the nearest container of it; None where nothing is."""
    while path not in table:
        path, dot, _ = path.rpartition(".")
        if not dot:
            return None
    return table[path]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shape of the sequence in one call: `shape` of the leading tensor, `dims` (one or two) where it lies."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.shape[d] for d in self.dims)

    @property
    def length(self) -> int:
        length = 1
        for size in self.sizes:
            length *= size
        return length

    @property
    def batch(self) -> int:
        return self.shape[1 if self.dims[0] == 0 else 0]

    def starts(self, shape: tuple[int, ...]) -> list[int]:
        """Every place in `shape` that has the sequence's size, as a grid or flat."""
        width = len(self.dims)
        grid = [d for d in range(len(shape)) if shape[d : d + width] == self.sizes]
        flat = [d for d, size in enumerate(shape) if size == self.length]
        return sorted({*grid, *flat})

    def place(self, path: str, x: Tensor, table: Named, what: str) -> tuple[int, ...]:
        """The dimensions of x that follow the sequence: usually one, () for none.

        Raises ValueError where sizes alone cannot say and `table` does not either.
        """
        if x.is_nested:
            raise ValueError(f"{what} {path!r} is a nested tensor; SLWS needs one common sequence length")
        shape = tuple(x.shape)
        places = self.starts(shape)
        said = look_up(table, path)
        if said is not None:
            wrong = [d for d in said if d not in places]
            if wrong:
                raise ValueError(
                    f"{what} {path!r} of shape {shape} was named as following the sequence at dimension {wrong[0]}, "
                    f"but has not its size {self._size()} there"
                )
            return said
        if shape == self.shape:
            return self.dims[:1]
        if not places:
            return ()
        if len(places) == 1 and len(self.starts(self.shape)) == 1:
            at = places[0]
            if at == 0 or (at in (1, self.dims[0]) and shape[0] in (1, self.batch)):
                return (at,)
        raise ValueError(
            f"{what} {path!r} of shape {shape} may or may not follow the sequence (size {self._size()}, leading tensor "
            f"{self.shape}): name it in sequence_{what}s={{{path!r}: {places[0]}}}, or with None if it does not follow"
        )

    def _size(self) -> str:
        return " x ".join(map(str, self.sizes))

    def move(self, x: Tensor, index: Tensor, start: int) -> Tensor:
        """x with the positions that begin at dimension `start` reordered by `index` (l,), or (b * l,): one per sample.

        Raises ValueError where each sample has its own order and x has no batch dimension for it.
        """
        shape = x.shape
        if shape[start] != self.length:
            x = x.flatten(start, start + 1)
        if len(index) != self.length:
            x = self._per_sample(x, index, start)
            return x.reshape(x.shape[0], *shape[1:])
        return _rows(x, index, start).reshape(shape)

    def _per_sample(self, x: Tensor, index: Tensor, start: int) -> Tensor:
        if start == 0:
            raise ValueError(f"per_sample=True, but a tensor of shape {tuple(x.shape)} that follows has no batch")
        x = x.expand(self.batch, *x.shape[1:]).movedim(start, 1)
        rows = x.reshape(1, len(index), *x.shape[2:])
        return _rows(rows, index, 1).reshape(x.shape).movedim(1, start)


def _rows(x: Tensor, index: Tensor, dim: int) -> Tensor:
    # Masks and positions need no gradient, and come in dtypes that kernels do not take.
    return permute(x, index, dim) if x.is_floating_point() else x.index_select(dim, index)
