"""How the probability of a shuffle grows with depth (arXiv 2408.17081, section 3.2), and the schedules beyond it."""

from __future__ import annotations

import math
from collections.abc import Sequence

SCHEDULES = ("linear", "constant", "cosine")


def check_rate(rate: float, name: str = "rate") -> float:
    """`rate` as a float; raises ValueError unless it lies in [0, 1]."""
    if not 0 <= rate <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {rate!r}")
    return float(rate)


def linear_rates(depth: int, rate: float) -> list[float]:
    """rate * l / (depth - 1) for l = 0 .. depth-1: the first layer never shuffles, the last with probability `rate`.

    One layer gives [0.0]. Raises ValueError for a depth below 1 or a rate outside [0, 1].
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth!r}")
    rate = check_rate(rate)
    return [rate * layer / max(depth - 1, 1) for layer in range(depth)]


def layer_rates(schedule: str | Sequence[float], depth: int, rate: float) -> list[float]:
    """The shuffle probability of each of `depth` layers.

    "linear" is the paper's (see `linear_rates`); "constant" gives every layer `rate`; "cosine" rises from 0 to `rate`
    along half a cosine, flat at both ends. A list holds the probabilities themselves, one per layer, `rate` being
    their ceiling. Raises ValueError for an unknown name, a wrong length or a probability outside [0, rate].
    """
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {schedule!r}; choose from {', '.join(SCHEDULES)} or give a list")
        linear = linear_rates(depth, rate)
        if schedule == "constant":
            return [float(rate)] * depth
        if schedule == "cosine":
            return [rate * (1 - math.cos(math.pi * layer / max(depth - 1, 1))) / 2 for layer in range(depth)]
        return linear
    rate = check_rate(rate)
    rates = [check_rate(p, "each entry of schedule") for p in schedule]
    if len(rates) != depth:
        raise ValueError(f"schedule lists {len(rates)} probabilities for {depth} layers")
    if max(rates) > rate:
        raise ValueError(f"schedule lists probabilities up to {max(rates):g}, above rate={rate:g}, their ceiling")
    return rates
