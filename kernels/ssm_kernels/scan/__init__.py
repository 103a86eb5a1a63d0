"""Selective scan (Gu and Dao 2023, arXiv 2312.00752, algorithm 2)."""

from torch import Tensor

from ..backend import register

_op = register("selective_scan", __name__)


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    reverse: bool = False,
    backend: str | None = None,
) -> Tensor:
    """y_t = C_t . h_t + D u_t with h_t = exp(delta_t A) h_(t-1) + delta_t B_t u_t; then y * silu(z) where z is given.

    Shapes: u, delta, z (b, d, l); A (d, n); B, C (b, n, l); D, delta_bias (d,). Any strides. Returns (b, d, l) in
    the dtype of u. States are kept in fp32 (fp64 for fp64 input). `delta_bias` is added to delta, then
    `delta_softplus` applies softplus. `reverse` scans from the last position to the first.
    Same meaning as mamba_ssm's `selective_scan_fn`. Raises ValueError where shapes disagree, RuntimeError where an
    explicitly named `backend` cannot run.
    """
    _check(u, delta, A, B, C, D, z, delta_bias)
    run = _op.resolve(u, backend, size=A.shape[1])
    return run(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse)


def scan_keeping(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(`selective_scan` without autograd, what `scan_again` can take up): for a caller with a backward of its own.

    The second is None on a backend that keeps nothing.
    """
    run = _op.resolve(u, None, size=A.shape[1])
    keep = getattr(run, "keep", None)
    arguments = (u, delta, A, B, C, D, None, delta_bias, delta_softplus, reverse)
    return keep(*arguments) if keep else (run(*arguments), None)


def scan_over(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    reverse: bool = False,
) -> Tensor:
    """`selective_scan` without autograd whose output takes the place of u, which is returned."""
    run = _op.resolve(u, None, size=A.shape[1])
    arguments = (u, delta, A, B, C, D, None, delta_bias, delta_softplus, reverse)
    if hasattr(run, "over"):
        run.over(*arguments)
        return u
    return u.copy_(run(*arguments))


def scan_again(
    kept: Tensor | None,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    reverse: bool = False,
) -> Tensor:
    """An output to differentiate, of the scan that `scan_keeping` ran on the same inputs. Its values are undefined.

    Where nothing was kept, or another backend has been chosen since, the scan runs again.
    """
    run = _op.resolve(u, None, size=A.shape[1])
    arguments = (u, delta, A, B, C, D, None, delta_bias, delta_softplus, reverse)
    return run(*arguments) if kept is None or not hasattr(run, "again") else run.again(kept, *arguments)


def _check(u, delta, A, B, C, D, z, delta_bias) -> None:
    if u.ndim != 3 or A.ndim != 2:
        raise ValueError(f"selective_scan: u must be (b, d, l) and A (d, n), got {tuple(u.shape)} and {tuple(A.shape)}")
    (b, d, length), n = u.shape, A.shape[1]
    expected = {
        "delta": (delta, (b, d, length)),
        "A": (A, (d, n)),
        "B": (B, (b, n, length)),
        "C": (C, (b, n, length)),
        "D": (D, (d,)),
        "z": (z, (b, d, length)),
        "delta_bias": (delta_bias, (d,)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"selective_scan: {name} must be {shape} beside u {tuple(u.shape)} and A {tuple(A.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
