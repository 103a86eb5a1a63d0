"""What the Triton backends share: where they run, why they do not, and the guard of the current device.

Nothing here imports Triton: the backend modules must load where it is missing. Kernels live in each op's
`triton_kernels.py`, imported on first use.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from . import probe
from .backend import Unavailable

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when a kernel is defined
DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)  # "cuda" is also what ROCm builds of torch say


def load(device: torch.device, kernels: str, check: Callable[[object], Callable]) -> Callable:
    """check(module `kernels`), after which the module's op is believed; Unavailable with reason and cure otherwise."""
    try:
        import triton
    except ImportError as error:
        name = "triton-windows" if sys.platform == "win32" else "triton"
        raise Unavailable(
            f"Triton cannot be imported ({probe.text(error)}); get it with `pip install {name}`"
        ) from error
    try:
        with probe.undisturbed(device):
            return check(importlib.import_module(kernels))
    except Exception as error:
        text = probe.text(error)
        cure = "; install one (`apt install gcc`) or name it in CC" if "C compiler" in text else ""
        raise Unavailable(f"Triton {triton.__version__} fails its check ({text}){cure}") from error


def current(x: Tensor) -> AbstractContextManager:
    """Makes x's device the current one: Triton launches on the current device, whatever its arguments live on."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
