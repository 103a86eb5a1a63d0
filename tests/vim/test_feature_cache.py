"""The cache gives the same features read as computed, survives kills, and names what is wrong with it."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch

from vim.feature_cache import FeatureCache
from vim.runtime import UserError
from vim.teachers import Features

ROWS, TOKENS, WIDTH = 12, 3, 4
ABOUT = {"teacher": "a/clip", "seed": 0, "scale": (0.2, 1.0)}


def opened(folder, about=None, rows=ROWS):
    return FeatureCache(folder, {**ABOUT, **(about or {})}, rows, TOKENS, WIDTH)


def teach(rows):
    """Features that depend on the row alone and that fp16 cannot hold."""
    base = torch.as_tensor(list(rows)).float()
    tokens = (base[:, None, None] * 7 + torch.arange(TOKENS * WIDTH).view(TOKENS, WIDTH) + 1) / 3
    return Features(tokens, (base[:, None] + torch.arange(TOKENS) + 1) / 7)


def rounded(rows):
    found = teach(rows)
    return Features(found.tokens.to(torch.float16).to(torch.float32), found.attention)


class Compute:
    def __init__(self, rows):
        self.rows, self.calls = rows, 0

    def __call__(self):
        self.calls += 1
        return teach(self.rows)


def ask(cache, *rows):
    """(features, whether they were computed)"""
    rows = torch.tensor(rows)
    compute = Compute(rows)
    return cache.features(rows, compute), bool(compute.calls)


def same(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype == torch.float32
        assert torch.equal(x, y)


def test_read_is_what_was_computed_and_computes_once(tmp_path):
    cache = opened(tmp_path / "deep" / "c")
    assert not torch.equal(teach([3]).tokens, rounded([3]).tokens)
    for again in (False, True):
        got, computed = ask(cache, 3, 0, 11, 3)
        assert computed is not again
        same(got, rounded([3, 0, 11, 3]))
    same(ask(opened(tmp_path / "deep" / "c"), 11, 3)[0], rounded([11, 3]))
    assert not ask(opened(tmp_path / "deep" / "c"), 11, 3)[1]


def test_only_missing_rows_are_written(tmp_path):
    cache = opened(tmp_path / "c")
    ask(cache, 1, 2)
    others = Features(torch.zeros(3, TOKENS, WIDTH), torch.zeros(3, TOKENS))
    got = cache.features(torch.tensor([2, 5, 1]), lambda: others)
    same((got.tokens[0], got.tokens[2]), tuple(rounded([2, 1]).tokens))
    assert not got.tokens[1].any() and not got.attention[1].any()
    assert np.flatnonzero(np.fromfile(tmp_path / "c" / "present", np.uint8)).tolist() == [1, 2, 5]
    tokens = np.fromfile(tmp_path / "c" / "tokens", np.float16).reshape(ROWS, -1)
    assert np.flatnonzero(tokens.any(1)).tolist() == [1, 2]  # row 5 was computed as zeros


def test_row_without_its_byte_is_computed_again(tmp_path):
    cache = opened(tmp_path / "c")
    ask(cache, 4, 5)
    with open(tmp_path / "c" / "tokens", "r+b") as file:  # as a kill in the middle of row 4 leaves it
        file.seek(4 * TOKENS * WIDTH * 2)
        file.write(b"\x11" * 7)
    with open(tmp_path / "c" / "present", "r+b") as file:
        file.seek(4)
        file.write(b"\0")
    got, computed = ask(opened(tmp_path / "c"), 4, 5)
    assert computed
    same(got, rounded([4, 5]))
    assert not ask(cache, 4, 5)[1]


def processes(*work):
    """Exit codes of functions that run at once, each in a process of its own."""
    started = [multiprocessing.get_context("fork").Process(target=each) for each in work]
    for each in started:
        each.start()
    for each in started:
        each.join()
    return [each.exitcode for each in started]


@pytest.mark.parametrize("name, there", [("tokens", 6), ("attention", 6), ("present", 8)])
def test_killed_while_writing(tmp_path, name, there):
    """SIGKILL in the second row of a batch, half of it written: the next run gets the features of an unbroken one."""

    def killed():
        cache = opened(tmp_path / "c")
        put = cache._put

        def put_and_die(what, index, parts):
            parts = list(parts)
            if what == name and index[0] == 6:
                half = parts[1][1][: len(parts[1][1]) // 2 or 1]
                put(what, index, [parts[0], (1, half)])
                os.kill(os.getpid(), signal.SIGKILL)
            put(what, index, parts)

        cache._put = put_and_die
        for first in (0, 3, 6, 9):
            ask(cache, first, first + 1, first + 2)

    assert processes(killed) == [-signal.SIGKILL]
    assert np.fromfile(tmp_path / "c" / "present", np.uint8).sum() == there
    assert np.fromfile(tmp_path / "c" / "tokens", np.float16)[6 * TOKENS * WIDTH :].any()
    cache = opened(tmp_path / "c")
    for first in (0, 3, 6, 9):
        got, computed = ask(cache, first, first + 1, first + 2)
        assert computed is (first >= 6)
        same(got, rounded([first, first + 1, first + 2]))


def test_many_processes_open_and_fill_one_folder(tmp_path):
    barrier = multiprocessing.get_context("fork").Barrier(6, timeout=30)  # one that fails leaves the others waiting

    def one(number):
        barrier.wait()
        cache = opened(tmp_path / "c")
        barrier.wait()
        for first in range(0, ROWS, 3):
            rows = [(first + number * 2 + i) % ROWS for i in range(3)]
            same(ask(cache, *rows)[0], rounded(rows))

    assert processes(*(partial(one, n) for n in range(6))) == [0] * 6
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    got, computed = ask(opened(tmp_path / "c"), *range(ROWS))
    assert not computed
    same(got, rounded(range(ROWS)))


def test_another_process_is_first(tmp_path, monkeypatch):
    """It made and filled the folder between the look for it and the renaming."""
    rename = os.rename

    def late(source, target):
        monkeypatch.setattr(os, "rename", rename)
        ask(opened(tmp_path / "c"), 2)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert not ask(opened(tmp_path / "c"), 2)[1]
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_says_what_it_costs(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vim"), "propagate", True)
    with caplog.at_level(logging.INFO, "vim"):
        large = FeatureCache(tmp_path / "l14", ABOUT, 1000, 196, 1024)
    assert (
        f"distill.cache {tmp_path / 'l14'}: 402 KB per crop, 0.402 GB in all; 0 of 1000 crops are there" in caplog.text
    )
    assert sum(p.stat().st_size for p in (tmp_path / "l14").iterdir() if p.name != "about.json") == 1000 * 402193
    assert sum(p.stat().st_blocks for p in (tmp_path / "l14").iterdir()) * 512 < 1e6  # files with holes
    assert large.rows == 1000


@pytest.mark.parametrize(
    "about, rows, message",
    [
        ({"teacher": "b"}, ROWS, "was made with teacher 'a/clip', this run has 'b': name another folder"),
        ({"more": 1}, ROWS, "was made with more None, this run has 1"),
        ({"scale": (0.2, 0.9)}, ROWS, r"was made with scale \[0.2, 1.0\], this run has \[0.2, 0.9\]"),
        ({}, 13, "was made with rows 12, this run has 13"),
    ],
)
def test_another_runs_cache_is_refused(tmp_path, about, rows, message):
    opened(tmp_path / "c")
    with pytest.raises(UserError, match=f"distill.cache {tmp_path / 'c'} {message}"):
        opened(tmp_path / "c", about, rows)


def test_key_that_is_gone_is_named(tmp_path):
    opened(tmp_path / "c", {"crops": 4})
    with pytest.raises(UserError, match="was made with crops 4, this run has None"):
        opened(tmp_path / "c")


def test_folders_that_are_no_cache(tmp_path):
    with pytest.raises(UserError, match=f"distill.cache {tmp_path / 'c'}: there is nothing to keep"):
        opened(tmp_path / "c", rows=0)
    assert not (tmp_path / "c").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(UserError, match=f"distill.cache {tmp_path / 'full'}: Directory not empty"):
        opened(tmp_path / "full")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"] and (tmp_path / "full" / "note").exists()
    (tmp_path / "empty").mkdir()
    opened(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"distill.cache {tmp_path / 'file'}: Not a directory"):
        opened(tmp_path / "file")
    with pytest.raises(UserError, match=r"Not a directory|File exists"):
        opened(tmp_path / "file" / "c")
    opened(tmp_path / "c")
    os.truncate(tmp_path / "c" / "tokens", 5)
    with pytest.raises(UserError, match="tokens is 5 bytes, not complete"):
        opened(tmp_path / "c")
    (tmp_path / "c" / "about.json").write_text("{")
    with pytest.raises(UserError, match=r"about\.json is damaged"):
        opened(tmp_path / "c")
    (tmp_path / "c" / "about.json").write_text(json.dumps([1]))
    with pytest.raises(UserError, match=r"about\.json is damaged"):
        opened(tmp_path / "c")


def test_no_room(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 400))
    with pytest.raises(UserError, match=r"needs 4\.44e-07 GB, 4e-07 GB are free"):
        opened(tmp_path / "c")
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"distill\.cache .*: needs 1\.01e\+09 GB, "):
        FeatureCache(tmp_path / "c", ABOUT, 10**12, 2500, 200)


def test_disk_that_fills_up_later(tmp_path):
    cache = opened(tmp_path / "c")
    ask(cache, 0)
    cache._files["tokens"] = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115
    with pytest.raises(UserError, match=f"distill.cache {tmp_path / 'c'}: No space left on device") as caught:
        ask(cache, 0, 1)
    assert not caught.value.everywhere
    assert np.flatnonzero(np.fromfile(tmp_path / "c" / "present", np.uint8)).tolist() == [0]
    assert ask(opened(tmp_path / "c"), 1)[1]


@pytest.mark.parametrize(
    "value, shown", [(65505.0, "65505"), (-1e6, "1e.06"), (float("nan"), "nan"), (float("-inf"), "inf")]
)
def test_features_that_fp16_cannot_hold(tmp_path, value, shown):
    cache = opened(tmp_path / "c")
    found = teach([7])
    found.tokens[0, 1, 2] = value
    with pytest.raises(UserError, match=f"features reach {shown}, fp16 ends at 65504; train without distill.cache"):
        cache.features(torch.tensor([7]), lambda: found)
    assert ask(cache, 7)[1]
    found.tokens[0, 1, 2] = 65504
    assert cache.features(torch.tensor([8]), lambda: found).tokens.max() == 65504


def test_the_folder_that_one_is_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"distill.cache \.: "):
        opened(".")


def test_rows_outside_are_refused(tmp_path):
    cache = opened(tmp_path / "c")
    for row in (-1, ROWS):
        with pytest.raises(AssertionError):
            ask(cache, row)
