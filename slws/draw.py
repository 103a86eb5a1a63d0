"""The draws of an attached layer: coin and permutation from one remembered number.

Each call draws one integer from PyTorch's CPU generator. It is the coin and the seed of the permutation, so a draw
waits for no device, costs one random number whether the layer shuffles or not, and takes 8 bytes to remember.

A layer recomputed under activation checkpointing must shuffle as it did in the forward pass. The recomputation draws
again, so that a replayed generator stays in step. If the number is one of those remembered, the generator was
replayed and all is well. If not (`preserve_rng_state=False`), the call that is being recomputed is found by autograd's
sequence numbers: the node whose backward asks for the recomputation was made just before the call under a reentrant
checkpoint, and just after it under a non-reentrant one. This holds for any number of forwards before a backward. Where
nothing fits, the recomputation raises instead of shuffling otherwise.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

BITS = 62
MEMORY = 1024


@dataclass
class Draws:
    """What one layer drew: the counts, and the last draws as (sequence number at the call, grad mode, number)."""

    calls: int = 0
    shuffled: int = 0
    past: deque = field(default_factory=lambda: deque(maxlen=MEMORY))

    def __getstate__(self) -> dict:
        """A copy or pickle has no backward to come, so it need not remember."""
        return vars(self) | {"past": deque(maxlen=MEMORY)}

    def seed(self, rate: float, per_rank: bool) -> int | None:
        """The permutation's seed where the coin says shuffle, else None; counted.

        Raises RuntimeError in a recomputation that cannot be told from the others.
        """
        number = int(torch.randint(1 << BITS, (), device="cpu"))
        node = torch._C._current_autograd_node()
        if node is None:
            self.past.append((torch._C._autograd._get_sequence_nr(), torch.is_grad_enabled(), number))
        else:
            number = self._recall(number, node)
        number = _for_this_rank(number) if per_rank else number
        drawn = number < rate * (1 << BITS)
        self.count(drawn)
        return number if drawn else None

    def count(self, drawn: bool) -> None:
        """One more call, unless it is a recomputation."""
        if torch._C._current_autograd_node() is None:
            self.calls += 1
            self.shuffled += drawn

    def _recall(self, number: int, node: torch.autograd.graph.Node) -> int:
        if any(number == known for *_, known in reversed(self.past)):
            return number
        made = node._sequence_nr()
        if "checkpoint" in node.name().lower():
            at = next((i for i, (entry, *_) in enumerate(self.past) if entry > made), None)
            # The oldest one remembered may not be the first there was.
            fits = at is not None and not self.past[at][1] and (at > 0 or len(self.past) < MEMORY)
            fits = fits and torch.is_grad_enabled()
        else:
            at = next((i for i in reversed(range(len(self.past))) if self.past[i][0] <= made), None)
            fits = at is not None and self.past[at][1]
        if not fits:
            raise RuntimeError(
                "SLWS cannot tell which forward call this recomputation repeats; "
                "checkpoint with preserve_rng_state=True (PyTorch's default)"
            )
        return self.past[at][2]


def _for_this_rank(number: int) -> int:
    """Data-parallel ranks are often seeded alike, yet each must draw its own: mix the rank in (splitmix64's finish)."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized() and (rank := dist.get_rank())):
        return number
    mask = (1 << 64) - 1
    z = (number + rank * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> (64 - BITS)


def generator(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def new_index(
    length: int,
    device: torch.device,
    source: torch.Generator | None,
    rows: int = 1,
    keep_first: int = 0,
    window: int | None = None,
) -> Tensor:
    """A uniform permutation (rows * length,) int64 that moves every row of `length` positions within itself.

    The first `keep_first` of a row stay; `window` confines a move to consecutive runs of that many positions after
    them, the last run being what is left. `source` None draws from the device's own generator.
    """
    if source is not None and rows == 1 and not keep_first and window is None:
        return torch.randperm(length, generator=source, device=device)
    free = max(length - keep_first, 0)
    run = min(window or free, free) or 1
    runs = -(-free // run)
    keys = torch.rand(rows, runs * run, generator=source, device=device)
    # Padding gets the largest keys: it sorts to the end of the last run, past what is kept.
    keys = keys.masked_fill(torch.arange(runs * run, device=device) >= free, 2.0).view(rows, runs, run)
    order = keys.argsort(-1) + torch.arange(runs, device=device)[:, None] * run
    kept = torch.arange(min(keep_first, length), device=device).expand(rows, -1)
    index = torch.cat([kept, order.flatten(1)[:, :free] + kept.shape[1]], 1)
    return (index + torch.arange(rows, device=device)[:, None] * length).flatten()
