"""Depthwise causal convolution over short windows, as in front of every Mamba scan."""

from torch import Tensor

from ..backend import register

_op = register("causal_conv1d", __name__)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    reverse: bool = False,
    backend: str | None = None,
) -> Tensor:
    """y[b, c, t] = act(bias[c] + sum_k weight[c, k] x[b, c, t - (w - 1) + k]), zeros before the first position.

    Shapes: x (b, d, l), weight (d, w), bias (d,); any strides. Returns (b, d, l). `activation` is None, "silu" or
    "swish". `reverse` looks ahead instead of back: the result of flipping, convolving and flipping back.
    Same meaning as causal_conv1d's `causal_conv1d_fn`. Raises ValueError where shapes or the activation are wrong,
    RuntimeError where an explicitly named `backend` cannot run.
    """
    _check(x, weight, bias, activation)
    run = _op.resolve(x, backend, size=weight.shape[1])
    return run(x, weight, bias, activation, reverse)


def conv_over(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, reverse: bool = False
) -> Tensor:
    """`causal_conv1d` without autograd whose output takes the place of x, which is returned."""
    _check(x, weight, bias, activation)
    run = _op.resolve(x, None, size=weight.shape[1])
    if hasattr(run, "over"):
        run.over(x, weight, bias, activation, reverse)
        return x
    return x.copy_(run(x, weight, bias, activation, reverse))


def _check(x, weight, bias, activation) -> None:
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(
            f"causal_conv1d: x must be (b, d, l) and weight (d, w), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (x.shape[1],):
        raise ValueError(f"causal_conv1d: bias must be ({x.shape[1]},), got {tuple(bias.shape)}")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"causal_conv1d: activation must be None, 'silu' or 'swish', got {activation!r}")
