"""How the probability of a shuffle grows with depth (arXiv 2408.17081, section 3.2)."""


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
