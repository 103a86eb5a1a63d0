"""Inputs for the tests of the `cpu` backend."""

import torch

import ssm_kernels


def scan(**inputs):
    return ssm_kernels.selective_scan(**inputs, backend="cpu")


def conv(**inputs):
    return ssm_kernels.causal_conv1d(**inputs, backend="cpu")


def scan_inputs(b=2, d=37, length=70, n=16, seed=0):
    """As the mixer has them: channel-last memory, u and z slices of one projection, B and C of another."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    xz, bc = rand(b, length, 2 * d), rand(b, length, 5 + 2 * n)
    inputs = {
        "u": xz[..., :d].transpose(1, 2),
        "delta": (0.5 * rand(b, length, d) - 1).transpose(1, 2),
        "A": -torch.exp(0.5 * rand(d, n)),
        "B": bc[..., 5 : 5 + n].transpose(1, 2),
        "C": bc[..., 5 + n :].transpose(1, 2),
        "D": rand(d),
        "z": xz[..., d:].transpose(1, 2),
        "delta_bias": rand(d) - 1,
    }
    return inputs, [rand(b, length, d).transpose(1, 2)]


def conv_inputs(b=2, d=37, length=70, width=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    x = rand(b, length, 2 * d)[..., :d].transpose(1, 2)
    return {"x": x, "weight": rand(d, width), "bias": rand(d)}, [rand(b, length, d).transpose(1, 2)]


CASES = {
    "scan": (scan, scan_inputs, {"delta_softplus": True}),
    "conv": (conv, conv_inputs, {"activation": "silu"}),
}
