"""A teacher's features on disk, for runs whose augmentations come again: read where they are, computed where not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from .runtime import UserError, log
from .teachers import Features

ABOUT = "about.json"
LARGEST = torch.finfo(torch.float16).max


class CacheError(UserError):
    """A fault in one process's share of the cache: the others may not meet it."""

    everywhere = False


class FeatureCache:
    """One row of features per (image, crop); the folder is written once and shared by processes and by runs.

    Tokens are kept in fp16, attention in fp32, in files as long as all rows: files with holes until those are written.
    A byte per row, written after its data, says that the row is there, so a killed process leaves no half row (a
    machine that loses power may).
    """

    def __init__(self, folder: str | Path, about: dict[str, Any], rows: int, tokens: int, width: int):
        """Make the folder, or take up the one that is there.

        `about`: plain values that the features depend on. Raises UserError where the folder was made with others, is no
        cache, or has no room; `rows` times `tokens` times `width` numbers are kept.
        """
        if rows < 1:
            raise UserError(f"distill.cache {folder}: there is nothing to keep, the training data has no images")
        self.folder, self.rows = Path(folder), rows
        about = json.loads(json.dumps({**about, "rows": rows, "tokens": tokens, "width": width}))
        layout = {"tokens": ("float16", (tokens, width)), "attention": ("float32", (tokens,)), "present": ("uint8", ())}
        sizes = {name: np.dtype(kind).itemsize * int(np.prod(shape)) for name, (kind, shape) in layout.items()}
        try:
            if not (self.folder / ABOUT).exists():
                self._create(about, sizes)
            self._check(about)
            self._maps, self._files, self._sizes = {}, {}, sizes
            for name, (kind, shape) in layout.items():
                path = self.folder / name
                if path.stat().st_size != rows * sizes[name]:
                    raise UserError(f"distill.cache {folder}: {path.name} is {path.stat().st_size} bytes, not complete")
                self._maps[name] = np.memmap(path, kind, "r", shape=(rows, *shape))
                self._files[name] = open(path, "r+b")  # noqa: SIM115 (open as long as the cache is)
        except OSError as error:
            raise UserError(f"distill.cache {folder}: {error.strerror or error}") from error
        each, there = sum(sizes.values()), int(np.count_nonzero(self._maps["present"]))
        full = f"{each / 1e3:.0f} KB per crop, {each * rows / 1e9:.3g} GB in all"
        log.info("distill.cache %s: %s; %d of %d crops are there", folder, full, there, rows)

    def _create(self, about: dict[str, Any], sizes: dict[str, int]) -> None:
        """The complete empty folder under a temporary name, then renamed: of several processes, one succeeds."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        needed, free = self.rows * sum(sizes.values()), shutil.disk_usage(self.folder.parent).free
        if needed > free:
            raise UserError(f"distill.cache {self.folder}: needs {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free")
        temporary = self.folder.parent / f".{self.folder.name}.{uuid4().hex}.tmp"
        temporary.mkdir()
        try:
            for name, size in sizes.items():
                with open(temporary / name, "wb") as file:
                    file.truncate(self.rows * size)
            (temporary / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
            os.rename(temporary, self.folder)
        except OSError:
            if not (self.folder / ABOUT).exists():  # else another process was first
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _check(self, about: dict[str, Any]) -> None:
        try:
            there = dict(json.loads((self.folder / ABOUT).read_text()))
        except (ValueError, TypeError) as error:
            raise UserError(f"distill.cache {self.folder}: {ABOUT} is damaged") from error
        for key in [*about, *there]:
            if about.get(key) != there.get(key):
                raise UserError(
                    f"distill.cache {self.folder} was made with {key} {there.get(key)!r}, this run has "
                    f"{about.get(key)!r}: name another folder"
                )

    def features(self, rows: Tensor, compute: Callable[[], Features], device: torch.device | str = "cpu") -> Features:
        """The features of `rows` (b,), int64 on the CPU, on `device`: tokens (b, n, width) and attention (b, n), fp32.

        `compute` gives those of the whole batch; it is called where a row is missing, and only the missing are written.
        What is returned comes from the files in either case, so its rounding is the same in all epochs. Raises
        UserError for features beyond fp16 and for a full disk.
        """
        index = rows.numpy()
        assert index.ndim == 1 and (not index.size or 0 <= index.min() <= index.max() < self.rows), rows
        if not self._maps["present"][index].all():
            self._write(index, compute())
        return Features(*(torch.from_numpy(self._maps[n][index]).to(device).float() for n in ("tokens", "attention")))

    def _write(self, index: np.ndarray, found: Features) -> None:
        largest = found.tokens.abs().max().item()
        if not largest <= LARGEST:  # NaN too
            reach = f"the teacher's features reach {largest:g}, fp16 ends at {LARGEST:g}"
            raise CacheError(f"distill.cache {self.folder}: {reach}; train without distill.cache")
        values = {"tokens": found.tokens.half().cpu().numpy(), "attention": found.attention.float().cpu().numpy()}
        missing = np.flatnonzero(self._maps["present"][index] == 0)
        for name, array in values.items():
            assert array[0].nbytes == self._sizes[name], (name, array.shape)
            self._put(name, index, ((i, array[i].tobytes()) for i in missing))
        self._put("present", index, ((i, b"\1") for i in missing))

    def _put(self, name: str, index: np.ndarray, parts) -> None:
        """Into the file and not through the map: on a full disk that would end the process without a word."""
        file = self._files[name]
        try:
            for i, data in parts:
                file.seek(int(index[i]) * self._sizes[name])
                file.write(data)
            file.flush()
        except OSError as error:
            raise CacheError(f"distill.cache {self.folder}: {error.strerror or error}") from error
