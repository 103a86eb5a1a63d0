"""Data sets and their loaders: checked before anything is read, with errors that name the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from timm.data import create_dataset, create_transform
from torch import Generator
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from .images import EvalBatches, Images, TrainBatches, collate, die_with_parent
from .runtime import UserError, World, derive_seed
from .schema import Config, DataConfig

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
KINDS = ("torch", "hfds", "hfids", "tfds", "wds")


@dataclass
class Data:
    """What a task trains and evaluates on. `train` is None for an evaluation, `val` where data.val_split is null."""

    train: DataLoader | Stream | None
    val: DataLoader | Stream | None
    classes: list[str]
    preprocess: dict[str, Any] = field(default_factory=dict)

    def start_epoch(self, epoch: int, batch: int = 0) -> DataLoader | Stream:
        """The training loader, set to an epoch and its first batch."""
        order = self.train if isinstance(self.train, Stream) else self.train.batch_sampler
        order.epoch, order.start = epoch, batch
        return self.train


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the class folders in `folder`.

    Raises UserError where the folder, class folders in it, or images in one of those are missing.
    """
    if not folder.is_dir():
        raise UserError(
            f"data.root: {folder} is missing (an ImageFolder tree has train/ and val/ with one folder per class)"
        )
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not names:
        raise UserError(f"data.root: {folder} holds no class folders")
    for name in names:
        files = (folder / name).rglob("*")
        if not any(f.suffix.lower() in IMG_EXTENSIONS for f in files):
            raise UserError(f"data.root: class folder {folder / name} holds no images")
    return names


def images_under(folder: Path) -> list[tuple[str, int]]:
    """All images in `folder` and the folders in it, sorted, as one class. Raises UserError where there are none."""
    if not folder.is_dir():
        raise UserError(f"data.root: {folder} is missing (a folder of images; data.val_split null: no evaluation)")
    paths = (os.path.join(where, name) for where, _, names in os.walk(folder, followlinks=True) for name in names)
    found = sorted(path for path in paths if path.lower().endswith(IMG_EXTENSIONS))
    if not found:
        raise UserError(f"data.root: {folder} holds no images")
    return [(path, 0) for path in found]


def _folder(config: DataConfig, split: str, classes: list[str]) -> list[tuple[str, int]]:
    folder = Path(config.root) / split
    found = class_folders(folder)
    if unknown := [name for name in found if name not in classes]:
        raise UserError(
            f"data.root: {folder} has {len(unknown)} classes that training has not: {', '.join(unknown[:5])}"
        )
    indices = {name: classes.index(name) for name in found}
    return make_dataset(str(folder), indices, extensions=IMG_EXTENSIONS, allow_empty=True)


def check_sources(config: Config, evaluation: bool = False) -> list[str] | None:
    """Class names of a folder data set, or None for a named one; errors before any image is read.

    Raises UserError for missing folders, empty classes, and classes of val/ that train/ lacks. Distillation needs no
    classes: any tree of images will do.
    """
    data = config.data
    if data.crops and data.repeats > 1 and not evaluation:
        raise UserError(f"data.repeats {data.repeats} with data.crops: copies of an image in an epoch would be equal")
    if data.dataset:
        return None
    if not data.root:
        raise UserError("data.root: name a folder with train/ and val/, or a timm data set in data.dataset")
    if not Path(data.root).is_dir():
        raise UserError(f"data.root: no such folder: {data.root}")
    if config.task == "distill":
        for split in filter(None, (data.train_split, data.val_split)):
            images_under(Path(data.root) / split)
        return []
    if evaluation:
        return class_folders(Path(data.root) / data.val_split)
    classes = class_folders(Path(data.root) / data.train_split)
    _folder(data, data.val_split, classes)
    return classes


def _named(config: DataConfig, split: str, training: bool, batch_size: int, mode: str, seed: int):
    if config.dataset.partition("/")[0].lower() not in KINDS:  # timm would take data.root for a folder of images
        raise UserError(f"data.dataset must begin with {'/, '.join(KINDS)}/, got {config.dataset!r}")
    try:
        return create_dataset(
            config.dataset,
            root=config.root,
            split=split,
            is_training=training,
            batch_size=batch_size,
            seed=seed,
            input_img_mode=mode,
        )
    except Exception as error:  # each reader has its own
        raise UserError(f"data.dataset: {config.dataset!r}, split {split!r}: {error}") from error


def count_classes(config: Config) -> int:
    """Classes of a named data set, from whatever it tells about itself; model.num_classes where that is set."""
    if config.model.num_classes is not None:
        return config.model.num_classes
    dataset = _named(config.data, config.data.train_split, True, 1, "RGB", config.seed)
    reader = getattr(dataset, "reader", dataset)
    if names := getattr(reader, "class_to_idx", None) or getattr(dataset, "classes", None):
        return len(names)
    features = getattr(getattr(reader, "dataset", None), "features", None) or {}
    for feature in features.values():
        if hasattr(feature, "num_classes"):
            return feature.num_classes
    raise UserError(f"data.dataset: {config.data.dataset} does not tell its number of classes: set model.num_classes")


def transforms(config: Config, size: tuple[int, int], channels: int, cfg: dict[str, Any]):
    """(training transform, evaluation transform, what the latter does); `cfg` is the model's own preprocessing."""
    data = config.data
    mean, std = (_per_channel(given or cfg[key], channels) for key, given in (("mean", data.mean), ("std", data.std)))
    shared = {"input_size": (channels, *size), "mean": mean, "std": std}
    try:
        train = create_transform(
            **shared,
            is_training=True,
            scale=tuple(data.scale),
            ratio=tuple(data.ratio),
            hflip=data.hflip,
            color_jitter=data.color_jitter or None,
            auto_augment=data.auto_augment,
            interpolation=data.interpolation,
            re_prob=data.erase,
            re_mode="pixel",
        )
    except (AssertionError, ValueError, KeyError, IndexError) as error:  # of timm's parser of policies
        raise UserError(f"data.auto_augment: timm knows no policy {data.auto_augment!r} ({error})") from error
    how = {
        "crop_pct": data.crop_pct or cfg["crop_pct"],
        "interpolation": data.interpolation.replace("random", "bicubic"),
    }
    return train, create_transform(**shared, **how), {**shared, **how}


def _per_channel(values, channels: int) -> tuple[float, ...]:
    """Means or deviations of three channels for one (their average) or four (the average for the fourth)."""
    values = tuple(values)
    if len(values) == channels:
        return values
    average = sum(values) / len(values)
    return (average,) * channels if len(values) != 3 or channels == 1 else (*values, average)


def _processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build(config: Config, world: World, size: tuple[int, int], cfg: dict[str, Any], classes, evaluation=False) -> Data:
    """Loaders of this process. `classes` are the class names to train on, from `check_sources` or a checkpoint."""
    data, mode = config.data, MODES[config.model.in_chans]
    train_transform, val_transform, how = transforms(config, size, config.model.in_chans, cfg)
    eval_size = data.eval_batch_size or data.batch_size
    count = min(data.workers, _processors())  # results do not depend on it
    workers = {"num_workers": count, "persistent_workers": count > 0, "worker_init_fn": die_with_parent}
    workers |= {"pin_memory": world.device.type == "cuda", "collate_fn": collate}

    def source(split: str, training: bool, batch_size: int):
        if data.dataset:
            return _named(data, split, training, batch_size, mode, config.seed)
        if config.task == "distill":
            return images_under(Path(data.root) / split)
        return _folder(data, split, classes)

    val = source(data.val_split, False, eval_size) if data.val_split else None
    if val is None:
        val_loader = None
    elif isinstance(val, IterableDataset):
        val.transform = val_transform
        val_loader = Stream(val, eval_size, data.workers, world, config.seed)
    else:
        images = Images(val, val_transform, mode, config.seed, data.skip_corrupt)
        val_loader = DataLoader(images, batch_sampler=EvalBatches(len(val), eval_size, world), **workers)
    if evaluation:
        return Data(None, val_loader, classes, how)
    train = source(data.train_split, True, data.batch_size)
    if isinstance(train, IterableDataset):
        if data.crops:
            raise UserError(f"data.crops: {data.dataset} streams its images, which then have no numbers")
        train.transform = train_transform
        return Data(Stream(train, data.batch_size, data.workers, world, config.seed, True), val_loader, classes, how)
    _check_same_classes(config, train, val)
    more = {"replace": True, "crops": data.crops, "rows": config.task == "distill"}
    images = Images(train, train_transform, mode, config.seed, data.skip_corrupt, **more)
    batches = TrainBatches(len(train), data.batch_size, world, config.seed, data.repeats)
    if not len(batches):
        given = f"data.batch_size {data.batch_size} x {world.size} processes"
        fits = f"give --data.batch_size {max(1, len(train) // world.size)} or less"
        raise UserError(f"{given} is more than the {len(train)} training images: {fits}")
    return Data(DataLoader(images, batch_sampler=batches, **workers), val_loader, classes, how)


def _check_same_classes(config: Config, train, val) -> None:
    """torch/image_folder numbers the classes of each split by itself: a class missing from one shifts the labels."""
    names, others = (getattr(source, "class_to_idx", None) for source in (train, val))
    if names and others and any(names.get(name) != number for name, number in others.items()):
        raise UserError(
            f"data.dataset: {config.data.dataset}: {config.data.val_split} numbers its classes unlike "
            f"{config.data.train_split}; a folder in data.root without data.dataset may lack classes"
        )


class Stream:
    """Batches of a streaming data set (wds/, tfds/, hfids/), which shuffles and deals out its samples itself.

    What comes when depends on (seed, epoch, rank) and the number of loader processes. At least one of those is used,
    started anew for every epoch, so no state is left over from the epoch before. A start in the middle of an epoch
    reads the batches before it and drops them. Unreadable samples are skipped by the data set, uncounted.
    Raises UserError where an epoch of training ends early, as it does on a loader process that gets no shard.
    """

    def __init__(self, dataset, batch_size: int, workers: int, world: World, seed: int, training: bool = False):
        self.dataset, self.world, self.seed, self.training = dataset, world, seed, training
        self.epoch = self.start = 0
        self.generator = Generator()
        workers = max(1, workers)
        if not training and world.size > 1:
            _each_shard_once(dataset.reader, world)
        dataset.set_loader_cfg(num_workers=workers)
        arguments = {"num_workers": workers, "drop_last": training, "generator": self.generator}
        arguments |= {"pin_memory": world.device.type == "cuda", "collate_fn": _collate_stream}
        self.loader = DataLoader(dataset, batch_size, **arguments)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator:
        self.dataset.set_epoch(self.epoch)
        self.generator.manual_seed(derive_seed(self.seed, self.epoch, self.world.rank))
        batch = self.start
        for samples in islice(iter(self.loader), self.start, None):
            batch += 1
            yield samples
        if self.training and batch < len(self):
            raise EndedEarly(
                f"data.dataset: a process got {batch} of {len(self)} batches; every loader process needs a shard, "
                f"so lower data.workers (now {self.loader.num_workers}) or make more shards"
            )


class EndedEarly(UserError):
    """Raised by a process that the data set gave too little, while others wait for its gradients."""

    everywhere = False


def _each_shard_once(reader, world: World) -> None:
    """Evaluation reads every shard once, on one loader process of one rank, to its end.

    Left alone, timm's webdataset reader makes all ranks read equally many samples: some twice and some never.
    """
    if hasattr(reader, "_split_by_node_and_worker"):
        reader.dist_rank, reader.dist_num_replicas = 0, 1
        reader._split_by_node_and_worker = partial(_own_shards, reader, world)


def _own_shards(reader, world: World, shards: Iterator) -> Iterator:
    first = world.rank * reader.num_workers + reader.worker_id
    return islice(shards, first, None, world.size * reader.num_workers)


def _collate_stream(samples: list):
    return (*default_collate(samples), 0)
