"""Shared fixtures: tiny folders of images, commands run in this process or as their own, a tiny finished run."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vim import runtime

ROOT = Path(__file__).parents[1]
TINY = {"patch_size": 8, "embed_dim": 16, "depth": 2}


def _script(name: str):
    spec = importlib.util.spec_from_file_location(f"_script_{name}", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@contextmanager
def _own_log():
    """The loggers as they were: a command points them at a stdout that ends with it."""
    loggers = [logging.getLogger(name) for name in ("vim", "ssm_kernels")]
    kept = [(each.handlers[:], each.propagate, each.level) for each in loggers]
    try:
        yield
    finally:
        for each, (handlers, propagate, level) in zip(loggers, kept, strict=True):
            each.handlers[:], each.propagate, each.level = handlers, propagate, level
            each.manager._clear_cache()


def _command(main, argv, prog: str) -> SimpleNamespace:
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with _own_log(), redirect_stdout(out), redirect_stderr(err):
        try:
            with runtime.exit_codes(prog):
                main([str(a) for a in argv])
        except SystemExit as stop:
            code = stop.code or 0
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


@pytest.fixture(scope="session")
def run_train():
    """run_train(*argv) -> code, out, err of train.py, in this process."""
    main = _script("train")
    return lambda *argv: _command(main, argv, "train.py")


@pytest.fixture(scope="session")
def run_eval():
    main = _script("eval")
    return lambda *argv: _command(main, argv, "eval.py")


@pytest.fixture(scope="session")
def run_main():
    """run_main(main, *argv) for the other commands' `main`."""
    return lambda main, *argv: _command(main, argv, "command")


@pytest.fixture(scope="session")
def run_process():
    """run_process(*argv) -> code, out, err of `python *argv` as its own process."""

    def run(*argv) -> SimpleNamespace:
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, *map(str, argv)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
        return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)

    return run


@pytest.fixture(scope="session")
def make_tree():
    """make_tree(root, train={class: images}, val=...) writes an ImageFolder tree of noise, another for each class."""

    def make(root: Path, train: dict[str, int], val: dict[str, int], size=(16, 16)) -> Path:
        rng = np.random.default_rng(0)
        for split, classes in (("train", train), ("val", val)):
            for number, (name, images) in enumerate(classes.items()):
                folder = root / split / name
                folder.mkdir(parents=True)
                for i in range(images):
                    pixels = rng.integers(0, 128, (*size, 3)) + 127 * (number % 2)
                    Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
        return root

    return make


@pytest.fixture(scope="session")
def tree(make_tree, tmp_path_factory) -> Path:
    """Seven classes a to g, 4 images each to train on and 3 to evaluate on. Tests must not write into it."""
    return make_tree(
        tmp_path_factory.mktemp("images") / "tree", dict.fromkeys("abcdefg", 4), dict.fromkeys("abcdefg", 3)
    )


@pytest.fixture(scope="session")
def tiny_args(tree) -> list[str]:
    """Arguments of train.py for a tiny Vim on `tree`, one epoch; lacks --out."""
    return [
        *("--model.name", "vim_tiny_patch16_224", "--model.img_size", "16", "--model.kwargs", str(TINY)),
        *("--data.root", str(tree), "--data.batch_size", "4", "--data.workers", "0", "--data.auto_augment", "null"),
        *("--data.mixup", "0", "--data.cutmix", "0", "--train.epochs", "1", "--train.precision", "fp32"),
        *("--optim.lr_batch", "null", "--optim.warmup_epochs", "0", "--train.ema_decay", "0.5"),
    ]


@pytest.fixture(scope="session")
def finished(run_train, tiny_args, tmp_path_factory) -> Path:
    """The directory of a finished run of `tiny_args`. Tests must not write into it."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    done = run_train(*tiny_args, "--out", out)
    assert (done.code, done.err) == (0, ""), done.err
    return out
