"""What `import slws` needs, and what an attached layer costs."""

import statistics
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import slws

ALONE = """
import sys
for absent in ("triton", "timm", "vim", "einops", "transformers", "numpy"):
    sys.modules[absent] = None
import torch, slws
assert not {"timm.models", "transformers.models", "vim.models"} & set(sys.modules)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(3)))
handle = slws.attach_slws(model, 1.0, schedule="constant")
model(torch.randn(2, 5, 4)).sum().backward()
assert [s["shuffled"] for s in handle.stats().values()] == [1, 1, 1]
assert slws.SLWS(1.0)(lambda x: x, torch.ones(1, 3, 2)).shape == (1, 3, 2)
"""


def test_import_needs_torch_only():
    """Any import of one of the absent modules raises ImportError there."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Nothing(nn.Module):
    def forward(self, x):
        return x


def microseconds(calls=400, rounds=9):
    """Median time of one call, (plain, attached but not drawn, attached in eval), calls interleaved."""
    model, x = nn.ModuleList(nn.Sequential(Nothing()) for _ in range(3)), torch.randn(2, 197, 8)
    slws.attach_slws(model, 1e-12, schedule="constant", layers=["1", "2"])
    model[2].eval()
    times = [[], [], []]
    for _ in range(rounds * calls):
        for layer, into in zip(model, times, strict=True):
            start = time.perf_counter()
            layer(x)
            into.append(time.perf_counter() - start)
    return [1e6 * min(statistics.median(t[i * calls : (i + 1) * calls]) for i in range(rounds)) for t in times]


def test_a_layer_that_is_not_drawn_costs_microseconds():
    """The quietest of nine medians of 400 calls: noise only ever adds."""
    plain, idle, evaluating = microseconds()
    assert idle - plain < 20
    assert evaluating - plain < 5


def test_a_layer_that_never_shuffles_draws_nothing():
    model = nn.Sequential(nn.Sequential(Nothing()), nn.Sequential(Nothing()))
    slws.attach_slws(model, 0.0)
    state = torch.get_rng_state()
    model(torch.randn(0, 2, 2))
    model.train()(torch.ones(2, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("length", [3, 197])
def test_the_coin_costs_one_number_whether_it_shuffles_or_not(length):
    """So that what a layer draws does not depend on how the layers before it fell."""
    after = []
    for rate in (1e-12, 1.0):
        model = nn.Sequential(nn.Sequential(Nothing()))
        slws.attach_slws(model, rate, schedule="constant", layers=["0"])
        torch.manual_seed(0)
        model(torch.ones(2, length, 4))
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


if __name__ == "__main__":
    print(dict(zip(("plain", "attached, not drawn", "attached, eval"), microseconds(1000, 15), strict=True)))
