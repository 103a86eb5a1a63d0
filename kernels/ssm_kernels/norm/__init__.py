"""Residual add and normalisation at a block's entrance, read through a permutation."""

from torch import Tensor

from ..backend import register

_op = register("add_norm", __name__)


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    norm: str = "rms",
    index: Tensor | None = None,
    residual_in_fp32: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """residual = x + residual; normed = norm(residual) * weight + bias; both returned, both in the index's order.

    Shapes: x, residual (b, l, d); weight, bias (d,); index (l,) int64, a permutation: row i of the results comes from
    row index[i] of the inputs. `residual` None counts as zero. `norm` is "rms" or "layer"; statistics in fp32 (fp64 for
    fp64 input). `normed` has x's dtype; `residual` is fp32 where `residual_in_fp32` (fp64 stays), else x's dtype.
    Raises ValueError where shapes disagree or `norm` is unknown.
    """
    if norm not in ("rms", "layer"):
        raise ValueError(f"add_norm: norm must be 'rms' or 'layer', got {norm!r}")
    if x.ndim != 3 or (residual is not None and residual.shape != x.shape):
        got = None if residual is None else tuple(residual.shape)
        raise ValueError(f"add_norm: x must be (b, l, d) and residual alike, got {tuple(x.shape)} and {got}")
    for name, tensor, size in (
        ("weight", weight, x.shape[2]),
        ("bias", bias, x.shape[2]),
        ("index", index, x.shape[1]),
    ):
        if tensor is not None and tuple(tensor.shape) != (size,):
            raise ValueError(f"add_norm: {name} must be ({size},) beside x {tuple(x.shape)}, got {tuple(tensor.shape)}")
    return _op.resolve(x, backend, size=x.shape[2])(x, residual, weight, bias, eps, norm, index, residual_in_fp32)
