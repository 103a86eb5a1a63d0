import math

import pytest
import torch
from torch import nn

import slws


def test_rates_grow_linearly_from_zero():
    assert slws.linear_rates(5, 0.4) == [0.0, 0.1, 0.2, pytest.approx(0.3), 0.4]
    assert slws.linear_rates(1, 0.9) == [0.0]
    wanted = torch.linspace(0, 0.5, 24, dtype=torch.float64)  # the published code
    torch.testing.assert_close(torch.tensor(slws.linear_rates(24, 0.5), dtype=torch.float64), wanted)


@pytest.mark.parametrize(("depth", "rate"), [(0, 0.5), (4, -0.1), (4, 1.1), (4, float("nan"))])
def test_wrong_rates_are_refused(depth, rate):
    with pytest.raises(ValueError, match=r"depth must be at least 1|rate must lie in \[0, 1\]"):
        slws.linear_rates(depth, rate)


def test_each_layers_rate_is_linear_in_depth():
    """20,000 draws per layer: every observed rate within 4 standard errors; the first layer never shuffles."""
    torch.manual_seed(0)
    draws, rates = 20_000, slws.linear_rates(6, 0.6)
    for rate in rates:
        layer = slws.SLWS(rate)
        seen = sum(layer.sample(2) is not None for _ in range(draws)) / draws
        assert abs(seen - rate) <= 4 * math.sqrt(rate * (1 - rate) / draws)


def test_permutations_are_uniform():
    """All 24 permutations of four tokens, 12,000 draws: chi-square below its 99.99 % quantile (23 degrees: 54.0)."""
    torch.manual_seed(0)
    layer, counts = slws.SLWS(1.0), {}
    for _ in range(12_000):
        key = tuple(layer.sample(4).tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 24
    assert sum((n - 500) ** 2 / 500 for n in counts.values()) < 54.0


def test_eval_mode_never_draws_and_touches_nothing():
    layer = slws.SLWS(1.0).eval()
    state = torch.get_rng_state()
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    assert layer.sample(5) is None
    assert layer(lambda t: t, x) is x
    assert torch.equal(state, torch.get_rng_state())


def test_nothing_in_the_state_dict():
    assert not slws.SLWS(0.5).state_dict()


def test_a_tokenwise_layer_is_unchanged():
    torch.manual_seed(0)
    tokenwise, layer = nn.Linear(3, 4), slws.SLWS(1.0)
    x = torch.randn(2, 7, 3)
    assert layer.sample(7) is not None
    torch.testing.assert_close(layer(tokenwise, x), tokenwise(x), rtol=0, atol=1e-6)


def test_a_mixing_layer_sees_shuffled_tokens():
    torch.manual_seed(0)
    x = torch.randn(2, 7, 3)
    cumulate = lambda t: t.cumsum(1)  # noqa: E731
    torch.manual_seed(1)
    found = slws.SLWS(1.0)(cumulate, x)
    torch.manual_seed(1)
    index = slws.SLWS(1.0).sample(7)
    wanted = torch.empty_like(x)
    wanted[:, index] = cumulate(x[:, index])
    assert torch.equal(found, wanted)
    assert not torch.allclose(found, cumulate(x))


def test_hidden_and_residual_move_together():
    torch.manual_seed(0)
    x, residual = torch.randn(2, 7, 3), torch.randn(2, 7, 3)
    seen = []

    def layer(hidden, residual, scale):
        seen.append((hidden, residual))
        return hidden * scale, residual

    hidden, out = slws.SLWS(1.0)(layer, x, residual, scale=2.0)
    index = [int((seen[0][0][0] == row).all(1).nonzero()) for row in x[0]]
    assert index != list(range(7))
    assert torch.equal(seen[0][1][:, index], residual)
    assert torch.equal(hidden, 2 * x) and torch.equal(out, residual)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_permute_equals_the_papers_gather(dim):
    """Values and gradients of torch.gather on the expanded index, along any dimension."""
    torch.manual_seed(0)
    x = torch.randn(5, 6, 7, requires_grad=True)
    length = x.shape[dim]
    index, weigh = torch.randperm(length), torch.randn(5, 6, 7)
    shape = [1, 1, 1]
    shape[dim] = length
    gathered = torch.gather(x, dim, index.view(shape).expand_as(x))
    (wanted,) = torch.autograd.grad((gathered * weigh).sum(), x)
    moved = slws.permute(x, index, dim)
    (found,) = torch.autograd.grad((moved * weigh).sum(), x)
    assert torch.equal(moved, gathered) and torch.equal(found, wanted)


def test_permute_names_a_wrong_length():
    with pytest.raises(ValueError, match=r"dimension 1 of \(2, 5\) is not of the index's length 4"):
        slws.permute(torch.zeros(2, 5), torch.arange(4))
