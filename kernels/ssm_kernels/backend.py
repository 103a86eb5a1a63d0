"""Which implementation of an op runs, and why a faster one does not.

An op is a folder with a `reference.py` and any of `mamba_ssm.py`, `triton.py`, `cpu.py` beside it: a faster backend
only adds a file. A backend module offers

    DEVICES: tuple[str, ...]         device types it runs on
    DTYPES: tuple[torch.dtype, ...]  dtypes of the first tensor it takes
    SIZES: range, optional           sizes it takes, of what the op calls its size: states, window width, row width
    load(device) -> callable         the implementation, called once per device type; raises Unavailable(reason)

and its callable takes what the op's public function takes, without `backend`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

BACKENDS = ("mamba_ssm", "triton", "cpu", "reference")
ENV = "SSM_KERNELS_BACKEND"

_log = logging.getLogger("ssm_kernels")
_wanted: list[str] = []  # of the whole process: a backward that recomputes on autograd's own threads must see it too
_said: set[tuple[str, str]] = set()


class Unavailable(RuntimeError):
    """A backend cannot run here; the message is the reason, in words for a user."""


class _OtherDevice(Unavailable):
    """Not a shortcoming of this machine: the tensors live on a device the backend is not for."""


def _check(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"unknown kernel backend {name!r}; choose from {', '.join(BACKENDS)}")
    return name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every op that has a backend `name` on it, inside this block; the environment's SSM_KERNELS_BACKEND likewise.

    An op without such a backend keeps its automatic choice. An op that has it but cannot run it here raises
    RuntimeError. Raises ValueError for an unknown name.
    """
    _wanted.append(_check(name))
    try:
        yield
    finally:
        _wanted.pop()


@dataclass
class Op:
    """One op and its backends. `package` is the folder's import name."""

    name: str
    package: str
    _loaded: dict[tuple[str, str], Callable | Unavailable] = field(default_factory=dict)
    _chosen: dict[tuple, Callable] = field(default_factory=dict)

    def has(self, backend: str) -> bool:
        return importlib.util.find_spec(f"{self.package}.{backend}") is not None

    def load(
        self, backend: str, device: torch.device, dtype: torch.dtype | None = None, size: int | None = None
    ) -> Callable:
        """The backend's implementation; raises Unavailable with the reason."""
        if not self.has(backend):
            raise Unavailable(f"{self.name} has no {backend} backend")
        module = importlib.import_module(f"{self.package}.{backend}")
        if device.type not in module.DEVICES:
            raise _OtherDevice(f"runs on {', '.join(module.DEVICES)}, not on {device.type}")
        if dtype is not None and dtype not in module.DTYPES:
            raise Unavailable(f"does not take {dtype}")
        sizes = getattr(module, "SIZES", None)
        if size is not None and sizes is not None and size not in sizes:
            raise Unavailable(f"takes sizes {sizes[0]} to {sizes[-1]}, not {size}")
        key = (backend, device.type)
        if key not in self._loaded:
            try:
                self._loaded[key] = module.load(device)
            except Unavailable as reason:
                self._loaded[key] = reason
        if isinstance(self._loaded[key], Unavailable):
            raise self._loaded[key]
        return self._loaded[key]

    def resolve(self, x: torch.Tensor, backend: str | None, size: int | None = None) -> Callable:
        """The implementation for tensor `x`: the one asked for, else the fastest that runs, said once in the log.

        `size` is the number that a backend's SIZES limits. Inside torch.compile the choice is made while tracing.
        """
        wanted = backend or (_wanted[-1] if _wanted else None) or os.environ.get(ENV)
        key = (x.device, x.dtype, size, backend, wanted)
        self._choose(key)
        return self._chosen[key]

    @torch.compiler.assume_constant_result  # run, not traced: no graph can hold the imports and probes of the search
    def _choose(self, key: tuple) -> None:
        if key not in self._chosen:
            self._chosen[key] = self._resolve(*key)

    def _resolve(
        self, device: torch.device, dtype: torch.dtype, size: int | None, backend: str | None, wanted: str | None
    ) -> Callable:
        if wanted and (backend or self.has(_check(wanted))):
            _check(wanted)
            try:
                return self.load(wanted, device, dtype, size)
            except Unavailable as reason:
                raise RuntimeError(
                    f"{self.name}: backend {wanted!r} was asked for but cannot run: {reason}"
                ) from reason
        reasons = []
        for name in filter(self.has, BACKENDS):
            try:
                found = self.load(name, device, dtype, size)
            except _OtherDevice:
                continue
            except Unavailable as reason:
                reasons.append(f"{name}: {reason}")
                continue
            self._say(name, device.type, reasons)
            return found
        raise RuntimeError(f"{self.name}: no backend runs here ({'; '.join(reasons)})")

    def _say(self, name: str, device: str, reasons: list[str]) -> None:
        if (key := (self.name, f"{name} {device} {reasons}")) not in _said:
            _said.add(key)
            why = f" ({'; '.join(reasons)})" if reasons else ""
            level = logging.WARNING if reasons else logging.INFO
            _log.log(level, "%s on %s: backend %s%s", self.name, device, name, why)

    def explain(self, device: torch.device) -> list[tuple[str, str | None]]:
        """(backend, None) for each that runs on the device, (backend, reason) for each that does not."""
        rows = []
        for name in filter(self.has, BACKENDS):
            try:
                self.load(name, device)
                rows.append((name, None))
            except Unavailable as reason:
                rows.append((name, str(reason)))
        return rows


OPS: dict[str, Op] = {}


def register(name: str, package: str) -> Op:
    OPS[name] = Op(name, package)
    return OPS[name]


def available_backends(op: str, device: str | torch.device | None = None) -> list[str]:
    """Backends of `op` that run on `device` (default: cuda where there is one, else cpu), fastest first.

    Raises ValueError for an unknown op.
    """
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; choose from {', '.join(OPS)}")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return [name for name, reason in OPS[op].explain(device) if reason is None]
