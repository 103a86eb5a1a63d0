"""Where tokens sit, and the plan of a forward pass: every permutation it needs, drawn before the first layer.

Native order: prefix tokens (class token or registers) first, then patches row by row. Sequence order: what the layers
scan. Orders are int64 (l,) tensors that name, for every row, the native token it holds; None stands for native order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ssm_kernels import inverse


class Step(NamedTuple):
    """One layer's part of the plan."""

    index: Tensor | None  # the permutation through which the layer reads its input; None: as it lies
    stored: Tensor | None  # the order the activations lie in from then on


def prefix_positions(patches: int, cls_position: str | None, registers: int) -> list[int]:
    """Places of the class token or of the registers in a sequence with `patches` patches.

    The class token sits first or before patch patches // 2. Registers are spread evenly: with
    step = patches // (registers + 1), register k sits at step * (k + 1) + k (arXiv 2405.14858).
    """
    if registers:
        step = patches // (registers + 1)
        return [step * (k + 1) + k for k in range(registers)]
    return {"middle": [patches // 2], "first": [0], None: []}[cls_position]


def sequence_order(patches: int, places: list[int], device) -> Tensor | None:
    """The sequence order with prefix token k at places[k]; None where that is the native order."""
    prefix = len(places)
    if places == list(range(prefix)):
        return None
    patch = torch.arange(prefix, prefix + patches, device=device)
    parts, done = [], 0
    for k, place in enumerate(places):
        parts += [patch[done : place - k], torch.arange(k, k + 1, device=device)]
        done = place - k
    return torch.cat([*parts, patch[done:]])


def column_order(grid: tuple[int, int], order: Tensor | None, prefix: int, device) -> Tensor:
    """A permutation of the sequence: its patches column by column, prefix tokens where they are."""
    patches = grid[0] * grid[1]
    out = torch.arange(prefix + patches, device=device)
    places = (out if order is None else inverse(order))[prefix:]
    out = out.clone()
    out[places] = places[torch.arange(patches, device=device).view(grid).t().reshape(-1)]
    return out


def from_to(stored: Tensor | None, wanted: Tensor | None) -> Tensor | None:
    """The permutation that brings rows lying in order `stored` into order `wanted`; None: nothing to do."""
    if wanted is stored:
        return None
    if stored is None:
        return wanted
    back = inverse(stored)
    return back if wanted is None else back[wanted]


def plan(shuffles: list[Tensor | None], order: Tensor | None) -> list[Step]:
    """Steps of layers that shuffle the sequence by `shuffles`, starting from native order.

    Undoing one layer's shuffle and applying the next layer's compose into one permutation per layer.
    """
    steps, stored = [], None
    for shuffle in shuffles:
        wanted = order if shuffle is None else shuffle if order is None else order[shuffle]
        steps.append(Step(from_to(stored, wanted), wanted))
        stored = wanted
    return steps
