"""Add, permute and normalise in one pass over memory, by Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from .. import probe, triton_support
from . import reference

DEVICES = triton_support.DEVICES
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SIZES = range(1, 8193)  # row widths that fit in the registers of one program


def load(device: torch.device) -> Callable:
    def check(kernels: ModuleType) -> Callable:
        inputs = {
            "x": probe.waves(device, 2, 5, 12),
            "residual": probe.waves(device, 2, 5, 12) + 0.5,
            "weight": probe.waves(device, 12),
            "bias": probe.waves(device, 12),
            "index": torch.tensor([3, 0, 4, 1, 2], device=device),
        }
        for norm in ("rms", "layer"):
            options = {"eps": 1e-5, "norm": norm, "residual_in_fp32": True}
            probe.compare(kernels.fused_add_norm, reference.add_norm, inputs, outputs=2, **options)
        return kernels.fused_add_norm

    return triton_support.load(device, f"{__package__}.triton_kernels", check)
