"""SLWS on a model that knows nothing of it.

Design. `attach_slws` puts a callable in front of each layer's `forward`, as an attribute of that layer object:

- Not hooks: the permutation lives in a local variable between entry and exit, so an exception or a checkpoint that
  stops its recomputation early leaves nothing behind, and other people's hooks, FSDP's included, see the layer as if
  it never shuffled. Not a wrapping module: state-dict keys stay. Not a new class: pickle and isinstance keep working.
- The callable knows its layer and the options, neither the model nor the other layers, so copies and pickles of a
  model, or of one layer, carry their own. It looks up the layer's class when called: `fully_shard` may change it.
- The coin is thrown per call of a layer, not in a plan per forward of the model: models are entered by many doors
  (`forward_features`, a backbone inside a larger model, layers called one by one), and a plan could not know where a
  forward begins. What a plan would give, the same permutation in a recomputation, `draw.py` gives by remembering
  draws.
- Under torch.compile the draw breaks the graph before each layer. With `static=True` it is part of the graph: the coin
  is on the device, and the layer's input is always gathered, by the identity where the coin says no.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from .align import named
from .attached import Attached, Options
from .find import find_layers
from .schedule import layer_rates
from .shuffle import SLWS


class Handle:
    """What `attach_slws` returns. `remove()` takes SLWS off again, as does leaving a `with` block."""

    def __init__(self, attached: list[Attached], options: Options):
        self._attached, self._options = attached, options

    @property
    def rates(self) -> dict[str, float]:
        """The full shuffle probability of each layer, by its dotted name."""
        return {a.name: a.rate for a in self._attached}

    def set_epoch(self, epoch: float) -> None:
        """Says how far the warm-up is: rates are min(1, epoch / warmup_epochs) of their full value.

        `epoch` counts from 0 and may be fractional. Raises ValueError if negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch!r}")
        warmup = self._options.warmup_epochs
        self._options.scale = min(1.0, epoch / warmup) if warmup else 1.0
        for a in self._attached:
            if self._options.static:
                a.threshold.fill_(a.current_rate)

    def stats(self) -> dict[str, dict[str, float]]:
        """Per layer: `calls` in training mode, `shuffled` of them, their ratio `measured` and the full `rate`.

        A recomputation under activation checkpointing is no call. In a compiled or captured graph (static mode)
        recomputations count too, and reading waits for the device.
        """
        found = {}
        for a in self._attached:
            calls, shuffled = a.counts()
            measured = shuffled / calls if calls else 0.0
            found[a.name] = {"calls": calls, "shuffled": shuffled, "measured": measured, "rate": a.rate}
        return found

    def remove(self) -> None:
        """Gives each layer its own forward back. Does nothing the second time."""
        for a in self._attached:
            if a.layer.__dict__.get("forward") is a:
                if a.previous is None:
                    del a.layer.forward
                else:
                    a.layer.forward = a.previous
            a.active = False  # whoever wrapped the layer since keeps calling this
        self._attached = []

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Handle({len(self._attached)} layers)"


def attach_slws(
    model: nn.Module,
    rate: float,
    *,
    layers: str | Iterable[str] | None = None,
    seq_dim: int | tuple[int, int] = 1,
    schedule: str | Sequence[float] = "linear",
    warmup_epochs: float = 0,
    per_sample: bool = False,
    keep_first: int = 0,
    window: int | None = None,
    sequence_args: Iterable[str] | Mapping[str, Any] | None = None,
    sequence_outputs: Iterable[str | int] | Mapping[str | int, Any] | None = None,
    static: bool = False,
    per_rank: bool = True,
) -> Handle:
    """Regularises the layers of any model with SLWS (arXiv 2408.17081): in training, a layer's sequence is shuffled
    with the layer's probability and its output put back in order. In eval mode nothing happens.

    rate            probability of the last layer, in [0, 1]
    layers          dotted name(s) of the stack or stacks ("backbone.layers", "stages.*.blocks") or of single layers, in
                    order of depth; None finds the only stack
    seq_dim         where the sequence lies in the layers' input: a dimension, or a pair of neighbours for grids: (1, 2)
                    for (B, H, W, C), (2, 3) for (B, C, H, W)
    schedule        "linear" (the paper's: from 0 at the first layer), "constant", "cosine" or a list, one probability
                    per layer, `rate` being their ceiling
    warmup_epochs   epochs over which all rates rise linearly from 0; needs `handle.set_epoch` (paper: none)
    per_sample      one permutation per sample (paper: one for the whole batch)
    keep_first      tokens at the start that stay (paper: 0, the class token moves too)
    window          confine moves to consecutive runs of so many tokens (paper: none)
    sequence_args   which inputs follow the sequence, where sizes alone cannot say: names, or {name: dimension, tuple of
                    dimensions, or None for an input that does not follow}; parts of an input by dotted path
    sequence_outputs  the same for outputs, by position ("0" is a lone tensor too), key or field name
    static          always gather, by the identity where the coin says no, so that torch.compile(fullgraph=True) and
                    CUDA graphs can record it; the draw then comes from the device's generator
    per_rank        each rank of torch.distributed draws its own. False for ranks that share a sequence (tensor
                    parallel); in static mode seed the ranks differently instead

    `state_dict()`, parameters and eval outputs stay as they are. Raises ValueError where the stack is not found or
    ambiguous, where a layer is attached already and for a wrong option; the layers raise ValueError in training where
    an input or output may or may not follow the sequence, and where a recurrent cache is passed.
    """
    dims = _dims(seq_dim)
    found = find_layers(model, layers)
    rates = layer_rates(schedule, len(found), rate)
    if keep_first < 0:
        raise ValueError(f"keep_first must not be negative, got {keep_first!r}")
    if window is not None and window < 2:
        raise ValueError(f"window must be at least 2, got {window!r}")
    if warmup_epochs < 0:
        raise ValueError(f"warmup_epochs must not be negative, got {warmup_epochs!r}")
    if per_sample and dims[0] == 0:
        raise ValueError("per_sample=True needs the batch in dimension 0, but seq_dim is 0")
    _refuse_twice(model, found)
    options = Options(
        dims=dims,
        args=named(sequence_args, "sequence_args", dims),
        outputs=named(sequence_outputs, "sequence_outputs", dims),
        per_sample=per_sample,
        keep_first=keep_first,
        window=window,
        static=static,
        per_rank=per_rank,
        warmup_epochs=warmup_epochs,
        scale=None if warmup_epochs else 1.0,
    )
    attached = [Attached(name, layer, p, options) for (name, layer), p in zip(found.items(), rates, strict=True)]
    for one in attached:
        unknown = {name.partition(".")[0] for name in options.args} - {*one.order}
        if unknown and not one.open:
            raise ValueError(f"sequence_args names {sorted(unknown)}, but {one.name} takes {list(one.order)}")
    for one in attached:
        one.layer.forward = one
    return Handle(attached, options)


def _dims(seq_dim: int | tuple[int, int]) -> tuple[int, ...]:
    dims = (seq_dim,) if isinstance(seq_dim, int) else tuple(seq_dim)
    if len(dims) not in (1, 2) or dims[0] < 0 or (len(dims) == 2 and dims[1] != dims[0] + 1):
        raise ValueError(f"seq_dim must be a dimension >= 0 or a pair of neighbours like (1, 2), got {seq_dim!r}")
    return dims


def _refuse_twice(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, SLWS) and module.rate > 0:
            raise ValueError(f"{type(model).__name__} already shuffles by itself ({name} is {module})")
        if reason := getattr(module, "slws_refused", None):
            raise ValueError(f"{name or type(model).__name__} refuses SLWS: {reason}")
    for name, layer in layers.items():
        if isinstance(layer.__dict__.get("forward"), Attached):
            raise ValueError(f"{name} is attached already; remove() the other handle first")


def describe(model: nn.Module) -> str:
    """Prints, and returns, the table of a model's SLWS layers: name, class, shuffle probability and what was measured.

    `now` differs from `rate` during a warm-up. "nothing attached" where there is none.
    """
    rows = [("layer", "class", "rate", "now", "shuffled/calls")]
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, Attached):
            now = "set_epoch?" if forward.current_rate is None else f"{forward.current_rate:.3f}"
            calls, shuffled = forward.counts()
            rows.append((name, type(module).__name__, f"{forward.rate:.3f}", now, f"{shuffled}/{calls}"))
        elif isinstance(module, SLWS):
            rows.append((name, "SLWS", f"{module.rate:.3f}", f"{module.rate:.3f}", "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    text = "\n".join(lines) if len(rows) > 1 else "SLWS: nothing attached"
    print(text)  # noqa: T201
    return text
