"""A folder of a few small images and the command line that trains a tiny Vim on it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

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
