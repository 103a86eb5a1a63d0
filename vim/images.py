"""Which image comes when, and how it is read: every result depends on the seed alone.

A training image is augmented with generators seeded from (seed, epoch, its place in the epoch), so the pixels are the
same for any number of loader processes, for one process or several, and after a resume in the middle of an epoch.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from .runtime import UserError, World, derive_seed

SIZED = 1000  # files, whose sizes tell one data set from another of the same names


class Images(Dataset):
    """(epoch, place, index) -> (image tensor, class), its generators seeded from (seed, epoch, place).

    `source` is a list of (path, class) or a data set of (PIL image, class). With `skip_corrupt` an unreadable image
    becomes None, or, with `replace`, the next readable one; without it, it is an error that names the file.
    With `crops` an image has that many augmentations, seeded from (seed, epoch % crops, index). With `rows` the number
    of the image's augmentation, index * crops + epoch % crops, takes the class's place.
    """

    def __init__(
        self,
        source,
        transform,
        mode: str,
        seed: int,
        skip_corrupt: bool = False,
        replace: bool = False,
        crops: int | None = None,
        rows: bool = False,
    ):
        self.source, self.transform, self.mode = source, transform, mode
        self.seed, self.skip_corrupt, self.replace = seed, skip_corrupt, replace
        self.crops, self.rows = crops, rows

    def __len__(self) -> int:
        return len(self.source)

    def fingerprint(self) -> str:
        """Of which images these are: their number, the names of those that are files, and the sizes of some.

        Copies of a data set at another resolution have the same names; all sizes would take minutes over a network.
        """
        digest = blake2b(digest_size=8)
        if isinstance(self.source, list):
            root = os.path.commonpath([path for path, _ in self.source])
            every = -(-len(self) // SIZED)
            for number, (path, _) in enumerate(self.source):
                size = 0 if number % every or not os.path.exists(path) else os.path.getsize(path)
                digest.update(f"{os.path.relpath(path, root)}\0{size}\0".encode())
        return f"{len(self)} {digest.hexdigest()}"

    def _read(self, index: int) -> tuple[Image.Image, int]:
        if isinstance(self.source, list):
            image, target = self.source[index]
        else:  # timm's own sets hide unreadable files behind the next one, so their reader is asked instead
            image, target = getattr(self.source, "reader", self.source)[index][:2]
        if not isinstance(image, Image.Image):
            with Image.open(image) as opened:
                return opened.convert(self.mode), target
        return image.convert(self.mode), target

    def _name(self, index: int) -> str:
        if isinstance(self.source, list):
            return self.source[index][0]
        if samples := getattr(self.source, "samples", None):  # torchvision's folders
            return samples[index][0]
        named = getattr(self.source, "filename", None)
        return named(index) if named else f"image {index}"

    def __getitem__(self, key: tuple[int, int, int]) -> tuple[Tensor, int, int] | None:
        epoch, place, first = key
        for skipped in range(len(self)):
            index = (first + skipped) % len(self)
            try:
                image, target = self._read(index)
            except Exception as error:  # decoders raise nearly anything
                if not self.skip_corrupt:
                    raise UnreadableImage.of(self._name(index), error) from error
                if not self.replace:
                    return None
                continue
            crop = epoch % self.crops if self.crops else 0
            seed = derive_seed(self.seed, crop, index) if self.crops else derive_seed(self.seed, epoch, place)
            target = index * (self.crops or 1) + crop if self.rows else target
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            return self.transform(image), int(target), skipped
        raise UnreadableImage("none of the training images can be read")


class UnreadableImage(UserError):
    """Raised in a loader process; torch raises it anew in the main one, with the traceback as its message."""

    everywhere = False  # each process reads its own images

    @classmethod
    def of(cls, name: str, error: Exception) -> UnreadableImage:
        return cls(f"{name}: cannot be read ({error}); data.skip_corrupt skips and counts such images")

    def __str__(self) -> str:
        return super().__str__().rstrip().rsplit("UnreadableImage: ", 1)[-1]


def die_with_parent(worker: int) -> None:
    """In a loader process: end when the training process is killed, where the system can (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # 1: PR_SET_PDEATHSIG


def collate(samples: list) -> tuple[Tensor, Tensor, int]:
    """Images, classes, and how many images were unreadable; the readable ones only."""
    kept = [s for s in samples if s is not None]
    skipped = len(samples) - len(kept) + sum(s[2] for s in kept)
    if not kept:
        return torch.empty(0), torch.empty(0, dtype=torch.long), skipped
    images, targets = default_collate([s[:2] for s in kept])
    return images, targets, skipped


class TrainBatches:
    """Batches of (epoch, place, index) of one process for one epoch; iteration may start at a later batch.

    The epoch's order is one permutation from (seed, epoch). Each global batch is a run of it, dealt out to the
    processes in turn, so one process with batch 2b sees what two with batch b see. With `repeats` > 1 every image comes
    that many times in a row, for as many places as there are images (repeated augmentation as in DeiT). The last,
    incomplete global batch is dropped.
    """

    def __init__(self, images: int, batch_size: int, world: World, seed: int, repeats: int = 1):
        self.images, self.batch_size, self.world, self.seed, self.repeats = images, batch_size, world, seed, repeats
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return self.images // (self.batch_size * self.world.size)

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order = torch.randperm(self.images, generator=generator)
        order = order.repeat_interleave(self.repeats)[: self.images].tolist()
        size = self.batch_size * self.world.size
        for batch in range(self.start, len(self)):
            places = range(batch * size + self.world.rank, (batch + 1) * size, self.world.size)
            yield [(self.epoch, place, order[place]) for place in places]


class EvalBatches:
    """Process r gets images r, r + size, ...: every image once, none twice, also when they do not divide evenly."""

    def __init__(self, images: int, batch_size: int, world: World):
        self.places = range(world.rank, images, world.size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.places) // self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        for first in range(0, len(self.places), self.batch_size):
            yield [(0, i, i) for i in self.places[first : first + self.batch_size]]
