"""A killed run ends as the unbroken one: weights, average, optimizer and metrics bit for bit."""

import random

import pytest
import tinyrun
import torch

import train
from vim import checkpoint

EVERYTHING_RANDOM = (
    "--slws.rate=0.8",
    "--model.drop_path=0.2",
    "--data.repeats=2",
    "--data.workers=1",
    "--train.epochs=12",
    "--train.save_every_steps=2",
    "--train.accumulation=2",
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return tinyrun.image_tree(tmp_path_factory.mktemp("images"), train=80)


@pytest.mark.slow
def test_ten_kills_at_random_moments(images, tmp_path):
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    tinyrun.run(*tinyrun.arguments(images, unbroken, *EVERYTHING_RANDOM))
    rng, moments = random.Random(0), set()
    for _ in range(10):
        tinyrun.kill_at_random(
            tinyrun.command(*tinyrun.arguments(images, killed, *EVERYTHING_RANDOM)), killed / "last.pt", rng
        )
        if (killed / "last.pt").exists():
            state = checkpoint.read(killed / "last.pt")["run"]
            moments.add((state["epoch"], state["batch"]))
    assert len(moments) > 3, f"the kills left the run at {moments} only"
    tinyrun.run(*tinyrun.arguments(images, killed, *EVERYTHING_RANDOM))
    tinyrun.assert_same_runs(unbroken, killed)
    assert len(list(killed.glob(".*.tmp"))) <= 1


class Killed(Exception):
    pass


@pytest.mark.parametrize("moment", ["after best.pt", "after metrics.jsonl", "while writing last.pt", "in an epoch"])
def test_every_moment_between_two_writes(images, tmp_path, monkeypatch, moment):
    """The same in one process, with the kill at a chosen place; best.pt is first written in the first epoch."""
    more = (
        "--data.workers=0",
        "--train.epochs=4",
        "--slws.rate=0.8",
        "--train.save_every_steps=3",
        "--train.ema_decay=0.5",
    )
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    train.main(tinyrun.arguments(images, unbroken, *more))

    save, record = checkpoint.save, train.Record.epoch

    def dying_save(obj, path):
        done = obj.get("run", {}).get("epoch", 0)
        if moment == "while writing last.pt" and path.name == "last.pt" and done == 3:
            path.with_name(".last.pt.tmp").write_bytes(b"half a file")
            raise Killed
        save(obj, path)
        if moment == "after best.pt" and path.name == "best.pt":
            raise Killed
        if moment == "in an epoch" and obj.get("run", {}).get("batch") == 6 and done == 2:
            raise Killed

    def dying_record(self, row, speed):
        record(self, row, speed)
        if moment == "after metrics.jsonl" and row["epoch"] == 3:
            with open(self.out / "metrics.jsonl", "a") as file:
                file.write('{"epoch": 4, "upd')
            raise Killed

    monkeypatch.setattr(checkpoint, "save", dying_save)
    monkeypatch.setattr(train.Record, "epoch", dying_record)
    with pytest.raises(Killed):
        train.main(tinyrun.arguments(images, killed, *more))
    monkeypatch.undo()
    train.main(tinyrun.arguments(images, killed, *more))
    tinyrun.assert_same_runs(unbroken, killed)


def test_results_do_not_depend_on_workers(images, tmp_path):
    more = ("--slws.rate=0.8", "--data.repeats=2", "--train.epochs=1")
    train.main(tinyrun.arguments(images, tmp_path / "a", *more, "--data.workers=0"))
    train.main(tinyrun.arguments(images, tmp_path / "b", *more, "--data.workers=2"))
    a, b = (checkpoint.read(tmp_path / name / "last.pt") for name in "ab")
    tinyrun.assert_same(a["model"], b["model"])


def test_another_seed_is_another_run(images, tmp_path):
    train.main(tinyrun.arguments(images, tmp_path / "a", "--train.epochs=1"))
    train.main(tinyrun.arguments(images, tmp_path / "b", "--train.epochs=1", "--seed=1"))
    a, b = (checkpoint.read(tmp_path / name / "last.pt")["model"]["head.weight"] for name in "ab")
    assert not torch.equal(a, b)
