"""What is learned: the loss of a batch, and how the result is scored."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn

from ssm_kernels import OPS

from . import data, engine, masked, plots
from .feature_cache import FeatureCache
from .models import VisionMamba
from .runtime import UserError, World, derive_seed
from .schema import Config
from .teachers import Features, Teacher, build_teacher, check_teacher
from .zoo import VARIANTS


def check(config: Config) -> None:
    """Raises UserError for what does not fit the task, before any image is read and anything is built."""
    if config.task != "distill":
        return
    model, distill = config.model, config.distill
    if model.name not in VARIANTS:
        raise UserError(f"model.name: a student of task distill is one of this package's models, not {model.name!r}")
    if model.kwargs.get("directions", VARIANTS[model.name][1].get("directions")) == 4:
        raise UserError(
            f"model.name {model.name} scans in four directions, which needs every patch: "
            "set model.kwargs to {directions: 2, merge: sum} (fine-tuning makes them four)"
        )
    for key, value in (("model.num_classes", model.num_classes), ("optim.layer_decay", config.optim.layer_decay)):
        if value is not None:
            raise UserError(f"{key} is for task classify, got {value}")
    for key in ("mixup", "cutmix"):
        if getattr(config.data, key):
            raise UserError(f"data.{key} mixes images of two classes: set it to 0 for task distill")
    if distill.cache and not config.data.crops:
        raise UserError("distill.cache keeps features of fixed augmentations: set data.crops to their number per image")
    check_teacher(distill)


def check_kernels(config: Config, world: World) -> None:
    """With train.require_kernels: UserError where the selective scan would run on its plain PyTorch reference."""
    if not config.train.require_kernels:
        return
    scan = OPS["selective_scan"]
    if scan.resolve(torch.empty(0, device=world.device), None) is scan.load("reference", world.device):
        reasons = "; ".join(f"{name}: {why}" for name, why in scan.explain(world.device) if why)
        reasons = reasons or "SSM_KERNELS_BACKEND asks for the reference"
        raise UserError(f"train.require_kernels: no fast selective scan on {world.device} ({reasons})")


class Task:
    """A loss and a score. `model` is what is trained; of two results that with the greater sign * metric is better."""

    model: nn.Module
    metric: str
    sign: int

    def summary(self, best: float) -> str:
        """A run's best sign * metric in words."""
        return "not evaluated" if math.isinf(best) else f"best {self.metric} {self.sign * best:.4f}"

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """{"loss": scalar} of `model`, which may be wrapped, on images on its device and what the loader gives along
        with them, on the CPU.
        """
        raise NotImplementedError

    def evaluate(self, model: nn.Module, loader) -> dict[str, Any]:
        """Scores over all processes, `metric` among them."""
        raise NotImplementedError

    def draw(self, out: Path) -> None:
        """The run directory's figures, after each epoch."""
        plots.curves(out)


class Classify(Task):
    """Supervised classification: Mixup and CutMix (timm's), label smoothing, cross entropy; scored by top-1."""

    metric, sign = "top1", 1

    def __init__(self, config: Config, model: nn.Module, classes: int, world: World):
        self.model, self.world, self.precision = model, world, config.train.precision
        self.mixup = None
        data = config.data
        if data.mixup or data.cutmix:
            self.mixup = Mixup(
                mixup_alpha=data.mixup, cutmix_alpha=data.cutmix, label_smoothing=data.smoothing, num_classes=classes
            )
            self.criterion = SoftTargetCrossEntropy()
        else:
            self.criterion = nn.CrossEntropyLoss(label_smoothing=data.smoothing)

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """{"loss": scalar} of images (b, c, h, w) and classes (b,); draws from numpy's generator for Mixup."""
        targets = targets.to(images.device, non_blocking=True)
        if self.mixup is not None:
            images, targets = self.mixup(images, targets)
        logits = model(images)
        return {"loss": self.criterion(logits.float(), targets)}

    def evaluate(self, model: nn.Module, loader) -> dict[str, Any]:
        return engine.evaluate(model, loader, self.world, self.precision)

    def summary(self, best: float) -> str:
        return f"best top-1 {best:.2f} %"


class MaskedDistill(Task):
    """Masked feature distillation; scored by its own loss on the evaluation images, all masked by the same noise.

    `model` is the student with its decoder. The teacher is no part of it: it is neither saved nor averaged.
    """

    metric, sign = "loss", -1
    SHOWN = 8  # images of the figure

    def __init__(self, config: Config, encoder: VisionMamba, loaders: data.Data, world: World):
        self.distill, self.world, self.precision = config.distill, world, config.train.precision
        grid = encoder.patch_embed.grid_size
        self.patches = math.prod(grid)
        self.count = masked.visible_count(self.patches, self.distill.mask_ratio)
        if not self.count or (self.count == self.patches and self.distill.loss_on == "masked"):
            raise UserError(
                f"distill.mask_ratio {self.distill.mask_ratio} keeps {self.count} of {self.patches} patches, "
                f"too {'many' if self.count else 'few'}"
            )
        self.grid, self.look = grid, {key: loaders.preprocess[key] for key in ("mean", "std")}
        self.teacher = build_teacher(self.distill, grid, **self.look, channels=config.model.in_chans)
        self.cache = _open_cache(config, loaders, grid, self.teacher) if self.distill.cache else None
        self.teacher.to(world.device)
        try:
            self.model = masked.Student(encoder, self.teacher.width, self.distill)
        except AssertionError as error:
            raise UserError(f"model {config.model.name}: {error}") from error
        self.model.set_grad_checkpointing(config.model.grad_checkpointing)
        generator = torch.Generator().manual_seed(derive_seed(config.seed))
        self.noise = torch.empty(self.patches).exponential_(generator=generator).to(world.device)
        self.seen: list[tuple[Tensor, ...]] = []  # the first image of each of a few batches of the last evaluation

    def __call__(self, model: nn.Module, images: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """{"loss": scalar} of images (b, c, h, w), which are number `rows` (b,) of the cache."""
        if self.cache is None:
            features = self.teacher(images)
        else:
            features = self.cache.features(rows, lambda: self.teacher(images), images.device)
        return {"loss": self._compare(model, images, features)[0].mean()}

    def _compare(self, model, images: Tensor, features: Features, noise: Tensor | None = None) -> tuple[Tensor, ...]:
        """(loss (b,), prediction and target (b, n, d), patches kept (b, k)) of a batch."""
        distill = self.distill
        weights = features.attention if distill.mask == "attention" else torch.ones_like(features.attention)
        kept = masked.draw_visible(weights, self.count, distill.sort_visible, noise)
        target = masked.normalize(features.tokens, distill.normalize)
        predicted = model(images, kept).float()
        loss = masked.average(masked.distance(predicted, target, distill.loss), kept, distill.loss_on)
        return loss, predicted, target, kept

    def evaluate(self, model: nn.Module, loader) -> dict[str, Any]:
        """Mean loss and cosine over all images, which do not depend on the batch size (but for normalize: batch)."""
        self.seen = []

        def score(images: Tensor) -> tuple[Tensor, Tensor]:
            with engine.autocast(self.precision, self.world.device):
                loss, predicted, target, kept = self._compare(model, images, self.teacher(images), self.noise)
            cosine = nn.functional.cosine_similarity(predicted, target, dim=-1)
            if len(self.seen) < self.SHOWN:
                self.seen.append(tuple(x[0].cpu() for x in (images, kept, cosine)))
            return loss, cosine.mean(1)

        return engine.average(model, score, ("loss", "cosine"), loader, self.world)

    def draw(self, out: Path) -> None:
        super().draw(out)
        if self.seen:
            columns = (torch.stack(column) for column in zip(*self.seen, strict=True))
            plots.distillation(*columns, self.grid, self.look, out / "distillation.png")


def _open_cache(config: Config, loaders: data.Data, grid: tuple[int, int], teacher: Teacher) -> FeatureCache:
    """The cache of this configuration's teacher on this data, whose every training image has `data.crops` rows."""
    images = loaders.train.dataset
    about = {"images": images.fingerprint(), "seed": config.seed, "grid": grid, "teacher": teacher.fingerprint()}
    about |= {key: getattr(config.distill, key) for key in ("teacher_precision", "target")}
    about |= asdict(config.data) | {key: loaders.preprocess[key] for key in ("mean", "std", "input_size")}
    for key in ("root", "val_split", "batch_size", "eval_batch_size", "workers", "repeats", "crop_pct", "smoothing"):
        del about[key]  # training images look the same whatever these are
    return FeatureCache(config.distill.cache, about, len(images) * config.data.crops, math.prod(grid), teacher.width)


def build_task(config: Config, model: nn.Module, loaders: data.Data, world: World) -> Task:
    """The configuration's task around `model`; the task's own `model` is what is trained."""
    if config.task == "distill":
        return MaskedDistill(config, model, loaders, world)
    return Classify(config, model, len(loaders.classes), world)


def resolve_classes(config: Config, names: list[str] | None) -> list[str]:
    """Names of the model's classes: the data's, padded to model.num_classes where that is larger; none to distill.

    `names` None stands for data that has to be asked how many there are.
    """
    if config.task == "distill":
        return []
    names = [str(i) for i in range(data.count_classes(config))] if names is None else list(names)
    wanted = config.model.num_classes
    if wanted is not None and wanted < len(names):
        raise UserError(f"model.num_classes is {wanted}, the training data has {len(names)} classes")
    return names + [f"class {i}" for i in range(len(names), wanted or 0)]
