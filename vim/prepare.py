"""Known small data sets as ImageFolder trees, so that they run the very path ImageNet runs.

python -m vim.prepare digits OUT              scikit-learn's digits, 1,797 images 8x8, every fifth one held out
python -m vim.prepare idx OUT --source DIR    MNIST-format files (train-images-idx3-ubyte[.gz], ...), e.g. the
                                              folder of Debian's dataset-fashion-mnist
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from .runtime import UserError, exit_codes


def write_tree(out: Path, splits: dict[str, tuple[np.ndarray, np.ndarray]]) -> int:
    """{split: (images uint8 (n, h, w) or (n, h, w, 3), classes (n,))} as out/split/class/number.png; the image count.

    Written under a temporary name and renamed: a tree that exists is complete, and is left alone.
    """
    if out.exists():
        return sum(1 for _ in out.rglob("*.png"))
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    written = 0
    for split, (images, classes) in splits.items():
        for number, (image, name) in enumerate(zip(images, classes, strict=True)):
            folder = temporary / split / str(name)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number:05d}.png")
            written += 1
    try:
        temporary.rename(out)
    except OSError:  # another process was faster
        shutil.rmtree(temporary)
    return written


def digits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """scikit-learn's handwritten digits; every fifth image is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("digits come with scikit-learn: pip install 'slws-vim[demo]'") from error
    found = load_digits()
    images, classes = np.round(found.images * (255 / 16)).astype(np.uint8), found.target
    held_out = np.arange(len(images)) % 5 == 4
    return {"train": (images[~held_out], classes[~held_out]), "val": (images[held_out], classes[held_out])}


def _idx(folder: Path, name: str) -> np.ndarray:
    """An IDX file, gzipped or not: magic 0 0 8 ndim, big-endian sizes, bytes."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            try:
                raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                if raw[:3] != b"\0\0\x08":
                    raise UserError(f"{path} is no IDX file of bytes")
                shape = np.frombuffer(raw, ">u4", raw[3], 4)
                return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
            except UserError:
                raise
            except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
                raise UserError(f"{path} is damaged ({error})") from error
    raise UserError(f"{folder} holds no {name} (or {name}.gz)")


def idx(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The two splits of a data set in MNIST's files."""
    splits = {"train": "train", "val": "t10k"}
    return {
        s: (_idx(folder, f"{n}-images-idx3-ubyte"), _idx(folder, f"{n}-labels-idx1-ubyte")) for s, n in splits.items()
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vim.prepare", description="Data sets as ImageFolder trees.")
    parser.add_argument("kind", choices=("digits", "idx"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, help="folder of the IDX files")
    args = parser.parse_args(argv)
    if args.kind == "idx" and args.source is None:
        raise UserError("idx needs --source DIR")
    count = 0 if args.out.exists() else write_tree(args.out, digits() if args.kind == "digits" else idx(args.source))
    sys.stdout.write(f"{args.out}: {f'{count} images written' if count else 'is there already, left alone'}\n")


if __name__ == "__main__":
    with exit_codes("python -m vim.prepare"):
        main()
