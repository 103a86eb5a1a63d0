"""What the parity tests of every backend share: textbook definitions in fp64, and the law that sets the tolerance.

The textbook functions are written for reading, not speed: autograd goes through every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTHS = (1, 7, 63, 197, 500)


def textbook_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, reverse=False):
    """The selective scan, step by step, in the dtype of its inputs."""
    if reverse:
        u, delta, B, C = (x.flip(2) for x in (u, delta, B, C))
    if delta_bias is not None:
        delta = delta + delta_bias[:, None]
    if delta_softplus:
        delta = F.softplus(delta)
    h, rows = torch.zeros(*u.shape[:2], A.shape[1], dtype=u.dtype, device=u.device), []
    for t in range(u.shape[2]):
        h = torch.exp(delta[:, :, t, None] * A) * h + delta[:, :, t, None] * B[:, None, :, t] * u[:, :, t, None]
        rows.append((h * C[:, None, :, t]).sum(-1))
    y = torch.stack(rows, 2)
    if D is not None:
        y = y + D[:, None] * u
    if reverse:
        y = y.flip(2)
    return y if z is None else y * F.silu(z)


def textbook_conv(x, weight, bias=None, activation=None, reverse=False):
    """The causal convolution through torch's grouped Conv1d."""
    x = x.flip(2) if reverse else x
    y = F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=x.shape[1])
    y = F.silu(y) if activation else y
    return y.flip(2) if reverse else y


def textbook_add_norm(x, residual, weight, bias=None, eps=1e-5, norm="rms", index=None, residual_in_fp32=True):
    """Add, gather, then torch's own norms."""
    total = x if residual is None else x + residual
    total = total if index is None else total[:, index]
    if norm == "layer":
        return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total
    normed = F.rms_norm(total, total.shape[-1:], weight, eps)
    return normed if bias is None else normed + bias, total


def run(fn: Callable, inputs: dict[str, Tensor | None], grads: Sequence[Tensor] | None, **options) -> dict[str, Tensor]:
    """Outputs and input gradients of fn(**inputs, **options), named; `grads` weigh the outputs (None: no backward)."""
    leaves = {k: v.detach().clone().requires_grad_() if _differentiable(v) else v for k, v in inputs.items()}
    out = fn(**leaves, **options)
    out = out if isinstance(out, tuple) else (out,)
    found = {f"output {i}": x.detach() for i, x in enumerate(out)}
    if grads is not None:
        torch.autograd.backward(out, [g.to(x.dtype) for g, x in zip(grads, out, strict=True)])
        found |= {f"grad {k}": v.grad for k, v in leaves.items() if _differentiable(v)}
    return found


def _differentiable(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point()


def to(inputs: dict[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor | None]:
    return {k: v.to(dtype) if _differentiable(v) else v for k, v in inputs.items()}


def assert_parity(fn, textbook, inputs, grads, dtype=torch.float32, **options) -> None:
    """Law 1: fn's error against an fp64 run is at most twice that of plain PyTorch in the same dtype.

    `inputs` are rounded to `dtype` first, so all three see the same numbers. Errors are maxima relative to the largest
    entry; one rounding step of the dtype is always allowed, since plain PyTorch may happen to be exact.
    """
    inputs = to(inputs, dtype)
    wanted = run(textbook, to(inputs, torch.float64), [g.double() for g in grads], **options)
    plain = run(textbook, inputs, grads, **options)
    found = run(fn, inputs, grads, **options)
    for name, exact in wanted.items():
        scale = exact.abs().max().clamp_min(1e-30)
        error = float((found[name].double() - exact).abs().max() / scale)
        bound = float((plain[name].double() - exact).abs().max() / scale)
        allowed = 2 * bound + 2 * torch.finfo(dtype).eps
        assert error <= allowed, f"{name}: error {error:.3g}, plain PyTorch {bound:.3g} in {dtype}, shape {exact.shape}"


@contextmanager
def poisoned_empties() -> Iterator[None]:
    """torch.empty and its kin return NaN inside this block, so that a row a kernel forgets to write shows."""
    saved = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}
    saved_method = Tensor.new_empty

    def poison(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    try:
        for name, make in saved.items():
            setattr(torch, name, poison(make))
        Tensor.new_empty = poison(saved_method)
        yield
    finally:
        for name, make in saved.items():
            setattr(torch, name, make)
        Tensor.new_empty = saved_method
