"""Row permutation by a Triton kernel: all tensors in one launch, values and gradients without atomics."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from .. import probe, triton_support
from . import reference

DEVICES = triton_support.DEVICES
DTYPES = reference.DTYPES


def load(device: torch.device) -> Callable:
    def check(kernels: ModuleType) -> Callable:
        inputs = {"x": probe.waves(device, 2, 5, 3), "index": torch.tensor([3, 0, 4, 1, 2], device=device)}
        one = lambda permute: lambda x, index: permute(index, x)[0]  # noqa: E731
        probe.compare(one(kernels.permute), one(reference.permute_rows), inputs)
        return kernels.permute

    return triton_support.load(device, f"{__package__}.triton_kernels", check)
