"""One layer with SLWS in front of its `forward`; `attach.py` says why it is built so."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ssm_kernels

from .align import Layout, Named, look_up, walk
from .draw import Draws, generator, new_index

CACHES = frozenset(("cache", "cache_params", "past_key_value", "past_key_values", "layer_past", "inference_params"))
STATES = frozenset(("initial_state", "recurrent_state", "conv_state", "ssm_state"))
PACKED = frozenset(("seq_idx", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens_q", "cu_seq_lens_k"))


@dataclass
class Options:
    """What all layers of one attachment share; see `attach_slws`."""

    dims: tuple[int, ...]
    args: Named
    outputs: Named
    per_sample: bool
    keep_first: int
    window: int | None
    static: bool
    per_rank: bool
    warmup_epochs: float
    scale: float | None = None


class Attached:
    """Stands in front of one layer's `forward`."""

    def __init__(self, name: str, layer: nn.Module, rate: float, options: Options):
        self.name, self.layer, self.rate, self.options = name, layer, rate, options
        self.previous = layer.__dict__.get("forward")
        self.draws = Draws()
        # Bools, not the numbers behind them: compiled code specialises on what it reads, and layers share it.
        self.active, self.checked = rate > 0, False
        parameters = list(inspect.signature(self.__wrapped__).parameters.values())
        self.names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        self.order = self.names + tuple(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)
        self.open = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
        if options.static:
            first = next(layer.parameters(), None)
            self._settle(torch.device("cpu") if first is None else first.device)

    def _settle(self, device: torch.device) -> None:
        """Puts what a recorded graph reads and counts on the device: the rate now, and (calls, shuffles)."""
        self.threshold = torch.tensor(self.current_rate or 0.0, device=device)
        self.tally = getattr(self, "tally", torch.zeros(2, dtype=torch.int64)).to(device)
        for tensor in (self.threshold, self.tally):
            torch._dynamo.mark_static_address(tensor)

    @property
    def current_rate(self) -> float | None:
        """The probability now; None before `set_epoch` where there is a warm-up."""
        scale = self.options.scale
        return None if scale is None and self.rate else self.rate * (scale or 0.0)

    def counts(self) -> tuple[int, int]:
        """Calls in training mode, and shuffles; waits for the device in static mode."""
        calls, shuffled = self.tally.tolist() if self.options.static else (0, 0)
        return calls + self.draws.calls, shuffled + self.draws.shuffled

    @property
    def __wrapped__(self):
        return self.previous or partial(type(self.layer).forward, self.layer)

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.layer.training:
            return self.inner(*args, **kwargs)
        if not self.active:
            if not torch.compiler.is_compiling():
                self.draws.count(False)
            return self.inner(*args, **kwargs)
        names = [*self.names[: len(args)], *map(str, range(len(self.names), len(args)))]
        bound = dict(zip(names, args, strict=True)) | kwargs
        if self._decodes(bound):
            return self.inner(*args, **kwargs)
        recorded = self.options.static and self._recorded()
        seed = None if recorded else self._seed()
        if seed is None and self.checked and not self.options.static:
            return self.inner(*args, **kwargs)
        path, lead = self._lead(bound)
        layout = Layout(tuple(lead.shape), self.options.dims)
        if layout.length == 1:
            return self.inner(*args, **kwargs)
        starts = self._starts(layout, path, bound)
        index = self._index(layout, lead.device, seed, recorded)
        if index is not None:
            bound = walk(bound, lambda path, x: self._move(layout, x, index, starts[path]))
            args, kwargs = [bound[name] for name in names], {name: bound[name] for name in kwargs}
        return self._restore(layout, self.inner(*args, **kwargs), index)

    def _recorded(self) -> bool:
        """Whether this call is being recorded, for a compiled or CUDA graph: then the draw must be part of it."""
        if torch.compiler.is_compiling():
            return True
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    # A compiled graph must neither trace the drawing nor the counting, which would compile again at each call.
    @torch.compiler.disable
    def _seed(self) -> int | None:
        if (rate := self.current_rate) is None:
            raise RuntimeError("warmup_epochs was given: call handle.set_epoch(epoch) before training")
        return self.draws.seed(rate, self.options.per_rank)

    def _decodes(self, bound: dict[str, Any]) -> bool:
        """Whether this call generates step by step. Raises ValueError where it would train with a cache."""
        for name, value in bound.items():
            if value is None:
                continue
            if name in PACKED:
                raise ValueError(f"{self.name}: {name} packs several sequences into one; SLWS would mix them")
            if name not in CACHES | STATES and not type(value).__name__.endswith(("Cache", "InferenceParams")):
                continue
            if torch.is_grad_enabled():
                raise ValueError(
                    f"{self.name}: {name} is a recurrent cache, whose order a shuffle would break; "
                    "train without it (use_cache=False), or call model.eval() to decode"
                )
            return True
        return False

    def _lead(self, bound: dict[str, Any]) -> tuple[str, Tensor]:
        """The tensor that says how long the sequence is: the first that can hold it, in the signature's order."""
        found: list[tuple[str, Tensor]] = []

        def look(path: str, x: Tensor) -> Tensor:
            if x.is_floating_point() and x.ndim > max(1, *self.options.dims):
                found.extend([(path, x)] if look_up(self.options.args, path) != () else [])
            return x

        ordered = dict.fromkeys([name for name in self.order if name in bound]) | bound
        walk(ordered, look)
        if not found:
            dims = " and ".join(map(str, self.options.dims))
            shapes = {name: tuple(x.shape) for name, x in bound.items() if isinstance(x, Tensor)}
            raise ValueError(f"{self.name}: no input holds a sequence at dimension {dims}; its tensors are {shapes}")
        return found[0]

    def _starts(self, layout: Layout, lead: str, bound: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        starts = {lead: self.options.dims[:1]}

        def place(path: str, x: Tensor) -> Tensor:
            if path != lead:
                starts[path] = self._place(layout, path, x, self.options.args, "arg")
            return x

        walk(bound, place)
        return starts

    def _place(self, layout: Layout, path: str, x: Tensor, table: Named, what: str) -> tuple[int, ...]:
        try:
            return layout.place(path, x, table, what)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def _index(self, layout: Layout, where: torch.device, seed: int | None, recorded: bool) -> Tensor | None:
        """The permutation of this call; where there is none, None, or in static mode the identity."""
        o = self.options
        rows = layout.batch if o.per_sample else 1
        new = partial(new_index, layout.length, where, rows=rows, keep_first=o.keep_first, window=o.window)
        if recorded:
            drawn = torch.rand((), device=where) < self.threshold.to(where)
            self.tally.add_(torch.stack([torch.ones_like(drawn), drawn]).to(self.tally.device))
            return torch.where(drawn, new(None), torch.arange(rows * layout.length, device=where))
        if o.static and self.threshold.device != where:  # the model was moved after attaching
            self._settle(where)
        if seed is not None:
            return new(generator(seed, where))
        return torch.arange(rows * layout.length, device=where) if o.static else None

    @staticmethod
    def _move(layout: Layout, x: Tensor, index: Tensor, starts: tuple[int, ...]) -> Tensor:
        for start in starts:
            x = layout.move(x, index, start)
        return x

    def _restore(self, layout: Layout, out: Any, index: Tensor | None) -> Any:
        back = None if index is None else ssm_kernels.inverse(index)
        restored: list[str] = []
        shapes: list[tuple[int, ...]] = []

        def visit(path: str, x: Tensor) -> Tensor:
            starts = self._place(layout, path or "0", x, self.options.outputs, "output")
            restored.extend([path] if starts else [])
            shapes.append(tuple(x.shape))
            return x if back is None else self._move(layout, x, back, starts)

        out = walk(out, visit)
        if not restored:
            raise ValueError(
                f"{self.name}: no output keeps the sequence (length {layout.length}), so its order cannot be restored; "
                f"the outputs are {shapes}"
            )
        if not torch.compiler.is_compiling():
            self.checked = True
        return out
