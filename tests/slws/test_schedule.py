import math

import pytest
import torch
from attach_models import Stack

import slws
from slws.attached import Attached
from slws.draw import Draws, new_index
from slws.schedule import layer_rates


def test_linear_is_the_papers():
    """torch.linspace(0, rate, depth), as the published code has it."""
    for depth, rate in ((24, 0.5), (2, 1.0), (1, 0.6)):
        wanted = torch.linspace(0, rate, depth, dtype=torch.float64).tolist()
        assert slws.linear_rates(depth, rate) == pytest.approx(wanted, abs=1e-12)
        assert layer_rates("linear", depth, rate) == slws.linear_rates(depth, rate)


def test_other_schedules():
    assert layer_rates("constant", 3, 0.4) == [0.4] * 3
    wanted = [0.25 * (1 - math.cos(math.pi * t)) for t in (0, 0.25, 0.5, 0.75, 1)]
    assert layer_rates("cosine", 5, 0.5) == pytest.approx(wanted, abs=1e-12)
    assert layer_rates("cosine", 1, 0.5) == [0.0] and layer_rates("constant", 1, 0.5) == [0.5]
    assert layer_rates([0.1, 0, 0.3], 3, 0.3) == [0.1, 0.0, 0.3]


@pytest.mark.parametrize(
    ("schedule", "rate", "message"),
    [
        ("quadratic", 0.5, "unknown schedule 'quadratic'; choose from linear, constant, cosine"),
        ([0.1], 0.5, "lists 1 probabilities for 3 layers"),
        ([0.1, 0.2, 0.7], 0.5, "up to 0.7, above rate=0.5"),
        ([0.1, -0.2, 0.3], 0.5, r"each entry of schedule must lie in \[0, 1\], got -0.2"),
        ("linear", 1.5, r"rate must lie in \[0, 1\], got 1.5"),
        ("constant", -1, "got -1"),
        ("cosine", float("nan"), "got nan"),
    ],
)
def test_wrong_schedules(schedule, rate, message):
    with pytest.raises(ValueError, match=message):
        layer_rates(schedule, 3, rate)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"keep_first": -1}, "keep_first must not be negative, got -1"),
        ({"window": 1}, "window must be at least 2, got 1"),
        ({"warmup_epochs": -2}, "warmup_epochs must not be negative, got -2"),
        ({"seq_dim": -1}, "seq_dim must be a dimension"),
        ({"seq_dim": (1, 3)}, r"a pair of neighbours like \(1, 2\), got \(1, 3\)"),
        ({"seq_dim": (1, 2, 3)}, "seq_dim"),
        ({"seq_dim": 0, "per_sample": True}, "per_sample=True needs the batch"),
    ],
)
def test_wrong_options(option, message):
    model = Stack()
    with pytest.raises(ValueError, match=message):
        slws.attach_slws(model, 0.5, **option)
    assert not any("forward" in vars(m) for m in model.modules())


def test_warmup_rises_over_epochs():
    torch.manual_seed(0)
    model = Stack(depth=2).train()
    handle = slws.attach_slws(model, 0.8, warmup_epochs=4)
    with pytest.raises(RuntimeError, match="set_epoch"):
        model(torch.randn(1, 5, 8))
    last = vars(model.layers[1])["forward"]
    for epoch, wanted in ((0, 0), (1, 0.2), (2.5, 0.5), (4, 0.8), (9, 0.8)):
        handle.set_epoch(epoch)
        assert last.current_rate == pytest.approx(wanted)
        before = last.draws.shuffled
        with torch.no_grad():
            for _ in range(300):
                model(torch.zeros(1, 3, 8))
        assert abs((last.draws.shuffled - before) / 300 - wanted) <= 4 * math.sqrt(wanted * (1 - wanted) / 300)
    with pytest.raises(ValueError, match="got -1"):
        handle.set_epoch(-1)


def index_of(seed, **options):
    return new_index(12, torch.device("cpu"), torch.Generator().manual_seed(seed), **options)


def test_a_permutation_per_sample():
    for seed in range(20):
        index = index_of(seed, rows=3).view(3, 12)
        local = index - torch.arange(3)[:, None] * 12
        assert torch.equal(local.sort().values, torch.arange(12).expand(3, -1))
        assert len({tuple(row) for row in local.tolist()}) == 3


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_first_tokens_stay(window, rows):
    met = set()
    for seed in range(60):
        index = index_of(seed, rows=rows, keep_first=3, window=window).view(rows, 12) % 12
        assert index[:, :3].tolist() == [[0, 1, 2]] * rows
        assert torch.equal(index.sort().values, torch.arange(12).expand(rows, -1))
        met |= set(index[:, 3].tolist())
    assert met == set(range(3, 12 if window is None else 8))


def test_windows_keep_tokens_near():
    """Runs of 5 over 12 positions: 0-4, 5-9, 10-11; each position of a run takes all its places."""
    met = [set() for _ in range(12)]
    for seed in range(200):
        index = index_of(seed, window=5)
        for i, j in enumerate(index.tolist()):
            met[i].add(j)
    assert met == [set(range(5))] * 5 + [set(range(5, 10))] * 5 + [{10, 11}] * 2


def test_keeping_more_tokens_than_there_are_keeps_all():
    assert torch.equal(index_of(0, keep_first=12), torch.arange(12))
    assert torch.equal(index_of(0, keep_first=50, rows=2), torch.arange(24))


@pytest.mark.parametrize("options", [{}, {"window": 24}, {"rows": 2}], ids=str)
def test_permutations_are_uniform(options):
    """24 orders of 4 positions, chi-square over 4800 draws below its 99.9% quantile."""
    counts = {}
    for seed in range(4800):
        index = new_index(4, torch.device("cpu"), torch.Generator().manual_seed(seed * 7919), **options)[:4]
        counts[tuple(index.tolist())] = counts.get(tuple(index.tolist()), 0) + 1
    assert len(counts) == 24 and sum((n - 200) ** 2 / 200 for n in counts.values()) < 49.7


def test_the_coin_does_not_choose_the_permutation():
    """Coin and seed are one number: the first place must stay uniform among the draws that shuffle rarely."""
    torch.manual_seed(0)
    draws, counts = Draws(), [0] * 4
    while sum(counts) < 2000:
        seed = draws.seed(0.1, per_rank=False)
        if seed is not None:
            counts[int(new_index(4, torch.device("cpu"), torch.Generator().manual_seed(seed))[0])] += 1
    assert sum((n - 500) ** 2 / 500 for n in counts) < 16.3


@pytest.mark.parametrize("options", [{"per_sample": True}, {"keep_first": 2}, {"window": 3}], ids=str)
@pytest.mark.parametrize(("shape", "seq_dim"), [((2, 12, 8), 1), ((2, 3, 4, 8), (1, 2)), ((2, 8, 12), 2)], ids=str)
def test_options_reach_the_layers(options, shape, seq_dim, monkeypatch):
    """Through a layer that does nothing: each sample's positions are what the option allows, and come back."""
    torch.manual_seed(0)
    model, seen, inner = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity()), [], Attached.inner
    monkeypatch.setattr(Attached, "inner", lambda self, *a, **k: seen.append(a) or inner(self, *a, **k))
    slws.attach_slws(model, 1.0, schedule="constant", seq_dim=seq_dim, **options)
    x = torch.randn(shape)
    assert torch.equal(model(x), x)
    dim = seq_dim if isinstance(seq_dim, int) else 1
    tokens = lambda t: (t.flatten(1, 2) if t.ndim == 4 else t).movedim(dim, 1)  # noqa: E731
    moved, given = tokens(seen[0][0]), tokens(x)
    index = (moved[:, :, None] == given[:, None]).all(-1).float().argmax(2)
    assert torch.equal(index.sort().values, torch.arange(12).expand(2, -1))
    assert torch.equal(index[0], index[1]) is not options.get("per_sample", False)
    if "keep_first" in options:
        assert index[:, :2].tolist() == [[0, 1]] * 2
    if "window" in options:
        assert torch.equal(index // 3, torch.arange(12).expand(2, -1) // 3)


def test_per_sample_takes_shared_positions_apart():
    """(1, L) positions become one row per sample; (L,) ones have no batch to do so in."""
    got = []

    class Block(torch.nn.Module):
        def forward(self, x, positions):
            got.append(positions)
            return x

    torch.manual_seed(0)
    model = torch.nn.ModuleList([Block(), Block()])
    slws.attach_slws(model, 1.0, layers="", per_sample=True)
    x = torch.arange(24.0).view(2, 12, 1)
    model[1](x, torch.arange(12)[None])
    assert got[0].shape == (2, 12) and not torch.equal(got[0][0], got[0][1])
    with pytest.raises(ValueError, match="has no batch"):
        model[1](x, torch.arange(12))
