"""A folder of a few small images and the command line that trains a tiny Vim on it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vim import checkpoint

ROOT = Path(__file__).parents[2]


def image_tree(root: Path, train: int = 48, val: int = 21, classes: int = 3, size: int = 20) -> Path:
    """`train` and `val` images of noise whose mean tells the class, dealt out to the classes in turn."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            label = number % classes
            pixels = rng.integers(0, 128, (size, size, 3)) + label * 127 // max(classes - 1, 1)
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:03d}.png")
    return root


def arguments(data: Path, out: Path, *more: str) -> list[str]:
    """Overrides for a run of a few seconds; later ones win."""
    return [
        f"--out={out}",
        f"--data.root={data}",
        "--model.name=shufflemamba_tiny_patch16_224",
        "--model.img_size=16",
        "--model.kwargs={patch_size: 8, embed_dim: 16, depth: 3, d_state: 4}",
        "--data.batch_size=8",
        "--data.workers=0",
        "--train.epochs=2",
        "--train.precision=fp32",
        "--train.threads=1",
        "--train.device=cpu",
        "--train.ema_decay=0.9",
        "--optim.lr_batch=null",
        "--optim.warmup_epochs=1",
        *more,
    ]


PLAIN = ("--data.mixup=0", "--data.cutmix=0")  # without what is drawn per process


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(*args: str, processes: int = 1, script: str | Path = ROOT / "train.py") -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    return [sys.executable, *launcher, str(script), *args]


def run(*args: str, processes: int = 1, script: str | Path = ROOT / "train.py", timeout: int = 240):
    """The finished process; raises with its output where it failed."""
    done = subprocess.run(
        command(*args, processes=processes, script=script),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def assert_same(a, b, where=""):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}.{i}")
    else:
        assert a == b, where


def assert_same_runs(one, two, different=("out",)):
    assert (one / "metrics.jsonl").read_bytes() == (two / "metrics.jsonl").read_bytes()
    for name in ("last.pt", "best.pt"):
        a, b = checkpoint.read(one / name), checkpoint.read(two / name)
        for state in (a, b):
            for key in different:
                state["config"].pop(key)
        assert_same(a, b, name)


def kill_at_random(command, last, rng):
    """Start the command and SIGKILL it a random moment after its start, or after one or two more checkpoints."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    for line in process.stdout:
        assert "is finished" not in line, "the run ended before it was killed often enough"
        if line.startswith("global batch"):
            break
    for _ in range(rng.randint(0, 2)):
        before = last.stat().st_mtime_ns if last.exists() else 0
        while process.poll() is None and (not last.exists() or last.stat().st_mtime_ns == before):
            time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.3))
    assert process.poll() is None, "the run ended before it was killed often enough"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
