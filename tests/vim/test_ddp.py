"""Two gloo processes on one machine against one process."""

import json
import subprocess

import pytest
import tinyrun
import torch

from vim import checkpoint


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return tinyrun.image_tree(tmp_path_factory.mktemp("images"), train=36, val=21)


@pytest.mark.slow
def test_two_processes_equal_one_with_the_double_batch(images, tmp_path):
    """2 x 4 x accumulation 2 equals 1 x 8 x accumulation 2 to fp32 rounding; 21 of 21 images are evaluated."""
    more = (*tinyrun.PLAIN, "--train.accumulation=2")
    tinyrun.run(*tinyrun.arguments(images, tmp_path / "two", *more, "--data.batch_size=4"), processes=2)
    tinyrun.run(*tinyrun.arguments(images, tmp_path / "one", *more, "--data.batch_size=8"))
    two, one = (checkpoint.read(tmp_path / name / "last.pt") for name in ("two", "one"))
    for part in ("model", "ema"):
        for name, wanted in one[part].items():
            torch.testing.assert_close(two[part][name], wanted, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("two", "one")
    ]
    for a, b in zip(*rows, strict=True):
        assert a["images"] == b["images"] == 21
        assert (a["updates"], a["lr"], a["top1"]) == (b["updates"], b["lr"], b["top1"])
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)

    scored = tinyrun.run(f"--checkpoint={tmp_path / 'one' / 'last.pt'}", processes=2, script=tinyrun.ROOT / "eval.py")
    line = json.loads(scored.stdout.strip().splitlines()[-1])
    assert line["images"] == 21
    assert line["top1"] == rows[1][-1]["ema_top1"]


def on_two_ranks(tmp_path, source: str) -> dict[int, str]:
    """What each of two processes that run `source` writes to the file `rank<number>` in its argument's folder."""
    script = tmp_path / "script.py"
    script.write_text(source)
    tinyrun.run(str(tmp_path), processes=2, script=script)
    return {rank: (tmp_path / f"rank{rank}").read_text() for rank in (0, 1)}


BATCH_NORM = """
import sys
from pathlib import Path

import torch
from torch import nn
from vim import engine, runtime, schema
from vim.run import build_run

config = schema.Config(train=schema.TrainConfig(precision="fp32", device="cpu", epochs=1))
with runtime.exit_codes("train.py"):
    world = runtime.start("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model.num_classes = 2
    torch.manual_seed(world.rank + 1)
    batches = [(torch.randn(4, 2) + world.rank, torch.tensor([0, 1, 0, 1]), 0) for _ in range(3)]
    run = build_run(model, config, world, len(batches))

    def loss_of(model, images, targets):
        return {"loss": nn.functional.cross_entropy(model(images), targets)}

    engine.train_epoch(run, loss_of, batches, config, lambda loss: None, lambda: None)
    own = model[0].running_mean.tolist()
    engine.score(run, lambda m: engine.evaluate(m, batches, world, "fp32"), "top1", 1)
    Path(sys.argv[1], f"rank{world.rank}").write_text(
        f"{own if world.rank == 0 else model[0].running_mean.tolist()} {run.ema.module[0].running_mean.tolist()}"
    )
"""


@pytest.mark.slow
def test_evaluation_uses_the_batch_statistics_that_are_saved(tmp_path):
    found = on_two_ranks(tmp_path, BATCH_NORM)
    assert found[0] == found[1]


APART = """
import os
import sys

import train
from vim import runtime

with runtime.exit_codes("train.py"):
    train.main([*sys.argv[2:], f"--out={sys.argv[1]}{os.environ['RANK']}"])
"""


@pytest.mark.slow
def test_processes_that_see_different_run_directories_stop(images, tmp_path):
    """As on two machines that share no disk: the one would resume, the other start anew."""
    arguments = tinyrun.arguments(images, tmp_path / "run0", "--train.epochs=1")
    tinyrun.run(*arguments)
    script = tmp_path / "apart.py"
    script.write_text(APART)
    command = tinyrun.command(str(tmp_path / "run"), *arguments, processes=2, script=script)
    done = subprocess.run(command, capture_output=True, text=True, env=tinyrun.environment(), timeout=120)
    assert done.returncode != 0
    assert "run0/last.pt is seen by some processes only: all must share the run directory" in done.stderr


SUMS = """
import sys
from pathlib import Path

import torch
from torch import nn
from vim import engine, runtime, schema
from vim.run import build_run

config = schema.Config(train=schema.TrainConfig(precision="fp32", device="cpu", save_every_steps=20, ema_decay=None))
with runtime.exit_codes("train.py"):
    world = runtime.start("cpu")
    batches = [(torch.zeros(1), torch.zeros(1), 0)] * 60
    saved = []

    def build():
        model = nn.Linear(1, 1)
        model.num_classes = 1
        return build_run(model, config, world, len(batches))

    def loss_of(model, images, targets):
        return {"loss": model(images).sum() * 0 + 7 * torch.rand(())}  # seeded by epoch, batch and rank

    def train(run):
        rest = Rest(batches[run.batch :])
        engine.train_epoch(run, loss_of, rest, config, lambda loss: None, lambda: saved.append(run.state_dict()))
        return run.totals()[0]

    class Rest(list):
        def __len__(self):
            return len(batches)

    unbroken = train(build())
    resumed = build()
    resumed.load_state_dict(saved[0])
    Path(sys.argv[1], f"rank{world.rank}").write_text(f"{unbroken!r} {train(resumed)!r}")
"""


@pytest.mark.slow
def test_the_loss_of_a_resumed_epoch_is_that_of_the_unbroken_one(tmp_path):
    """The saved sum is over both processes, and rank 0 takes it up alone."""
    unbroken, resumed = on_two_ranks(tmp_path, SUMS)[0].split()
    assert unbroken == resumed


NAN_ON_ONE_RANK = """
import sys
from pathlib import Path

import torch
from torch import nn
from vim import engine, runtime, schema
from vim.run import build_run

config = schema.Config(train=schema.TrainConfig(precision="fp32", device="cpu", log_every=3, epochs=1))
with runtime.exit_codes("train.py"):
    world = runtime.start("cpu")
    model = nn.Linear(2, 2)
    model.num_classes = 2
    batches = [(torch.ones(2, 2), torch.zeros(2, dtype=torch.long), 0)] * 8
    run = build_run(model, config, world, len(batches))

    def loss_of(model, images, targets):
        loss = model(images).square().mean()
        return {"loss": loss * float("nan") if world.rank == 1 and run.batch == 4 else loss}

    try:
        engine.train_epoch(run, loss_of, batches, config, lambda loss: None, lambda: None)
    except runtime.NonFinite as error:
        Path(sys.argv[1], f"rank{world.rank}").write_text(f"{run.batch} {error}")
        raise
"""


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_process_stops_all(tmp_path):
    """Step 5 is bad on rank 1 only; both leave at step 6, where the check is, with the step's name."""
    script = tmp_path / "nan.py"
    script.write_text(NAN_ON_ONE_RANK)
    done = subprocess.run(
        tinyrun.command(str(tmp_path), processes=2, script=script),
        capture_output=True,
        text=True,
        env=tinyrun.environment(),
        timeout=120,
    )
    assert done.returncode == 1
    assert "train.py: error: the loss is not finite at epoch 1, step 5" in done.stderr
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}").read_text().startswith("6 the loss is not finite at epoch 1, step 5")
