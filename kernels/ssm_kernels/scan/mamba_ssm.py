"""The CUDA scan of the package mamba-ssm, through its public `selective_scan_fn`: any version, no fork."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import probe
from . import reference

DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SIZES = range(1, 257)  # states, as the kernel says

PACKAGE = probe.Package(
    distribution="mamba-ssm",
    module="mamba_ssm.ops.selective_scan_interface",
    function="selective_scan_fn",
    extension="selective_scan_cuda",
    keep="MAMBA_KEEP_CUDA_BUILD=TRUE",
    force="MAMBA_FORCE_BUILD=TRUE",
)


def load(device: torch.device) -> Callable:
    def check(selective_scan_fn: Callable) -> Callable:
        scan = _adapt(selective_scan_fn)
        row, state = (2, 4, 8), (2, 3, 8)
        inputs = {
            "u": probe.waves(device, *row),
            "delta": probe.waves(device, *row) - 1,
            "A": -torch.exp(probe.waves(device, 4, 3)),
            "B": probe.waves(device, *state) + 1,
            "C": probe.waves(device, *state) - 1,
            "D": probe.waves(device, 4),
            "z": probe.waves(device, *row) + 0.5,
            "delta_bias": probe.waves(device, 4),
        }
        probe.compare(scan, reference.selective_scan, inputs, delta_softplus=True, reverse=True)
        return scan

    with probe.undisturbed(device):
        return PACKAGE.load(check)


def _adapt(selective_scan_fn: Callable) -> Callable:
    def scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse):
        """One call per group of samples that 32-bit offsets can reach, nearly always one in all."""
        if not u.numel():  # a launch of nothing is an error
            return reference.selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse)
        (b, d, length), n = u.shape, A.shape[1]
        chunks = -(-length // 2048)  # the kernel keeps 2 n numbers per row and chunk
        step = probe.samples_per_call(max(d * length, n * length, 2 * n * d * chunks))
        parts = []
        for i in range(0, b, step):
            rows = (None if x is None else x[i : i + step] for x in (u, delta, B, C, z))
            parts.append(_scan(selective_scan_fn, *rows, A, D, delta_bias, delta_softplus, reverse))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return scan


def _scan(selective_scan_fn, u, delta, B, C, z, A, D, delta_bias, delta_softplus, reverse):
    """The kernel wants all sequences in one dtype and A, D, delta_bias in fp32; it knows no direction.

    Where sequences differ in dtype they all run in fp32, so that none loses digits.
    """
    given = [x for x in (u, delta, B, C, z) if x is not None]
    dtype = u.dtype if all(x.dtype == u.dtype for x in given) else torch.float32

    def sequence(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x.to(dtype)
        return probe.aligned_rows(x.flip(2) if reverse else x)

    def weight(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.float().contiguous()

    y = selective_scan_fn(
        u=sequence(u),
        delta=sequence(delta),
        A=weight(A),
        B=sequence(B),
        C=sequence(C),
        D=weight(D),
        z=sequence(z),
        delta_bias=weight(delta_bias),
        delta_softplus=delta_softplus,
    )
    return (y.flip(2) if reverse else y).to(u.dtype)
