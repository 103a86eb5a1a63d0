"""What is learned: the model a configuration asks for, and the loss of a batch."""

from __future__ import annotations

import difflib
from typing import Any

import timm
import torch
from timm.data import Mixup
from timm.layers import to_2tuple
from timm.loss import SoftTargetCrossEntropy
from timm.models import get_pretrained_cfg
from torch import Tensor, nn

import slws
from ssm_kernels import OPS

from .models import VisionMamba
from .runtime import UserError, World
from .schema import Config, DataConfig
from .zoo import VARIANTS


def build_model(config: Config, classes: int) -> nn.Module:
    """The timm model (ours included) that the configuration names, with a head for `classes` classes.

    Raises UserError for unknown names and for arguments that do not fit the model.
    """
    name, model = config.model.name, config.model
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), 3)
        raise UserError(f"model.name: timm knows no {name!r}" + (f"; near it: {', '.join(near)}" if near else ""))
    arguments: dict[str, Any] = {"num_classes": classes, "in_chans": model.in_chans}
    if model.drop:
        arguments["drop_rate"] = model.drop
    if model.drop_path:
        arguments["drop_path_rate"] = model.drop_path
    if model.img_size is not None and getattr(get_pretrained_cfg(name), "fixed_input_size", False):
        arguments["img_size"] = to_2tuple(model.img_size)
    ours = name in VARIANTS
    if config.slws.rate and ours:
        arguments["slws_rate"] = config.slws.rate
    try:
        built = timm.create_model(name, **{**arguments, **model.kwargs})
        if config.slws.rate and not ours:
            slws.attach_slws(built, config.slws.rate)
        if model.grad_checkpointing:
            built.set_grad_checkpointing(True)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f"model {name}: {error}") from error
    return built


def input_size(config: Config, model: nn.Module) -> tuple[int, int]:
    """(height, width) of the images the model is fed."""
    return tuple(to_2tuple(config.model.img_size or model.pretrained_cfg["input_size"][-2:]))


def describe(model: nn.Module, config: Config, classes: list[str]) -> dict[str, Any]:
    """What a file of weights must say about itself: plain strings, numbers and lists."""
    meta = {"name": config.model.name, "layout": "native", "num_classes": len(classes), "classes": list(classes)}
    if isinstance(model, VisionMamba):
        embed = model.patch_embed
        meta |= {"family": getattr(model, "family", ""), "stride": embed.stride[0], "grid": list(embed.grid_size)}
        meta |= {"cls_position": model.cls_position, "merge": model.merge}
    return meta


def check_kernels(config: Config, world: World) -> None:
    """With train.require_kernels: UserError where the selective scan would run on its plain PyTorch reference."""
    if not config.train.require_kernels:
        return
    scan = OPS["selective_scan"]
    if scan.resolve(torch.empty(0, device=world.device), None) is scan.load("reference", world.device):
        reasons = "; ".join(f"{name}: {why}" for name, why in scan.explain(world.device) if why)
        reasons = reasons or "SSM_KERNELS_BACKEND asks for the reference"
        raise UserError(f"train.require_kernels: no fast selective scan on {world.device} ({reasons})")


class Classify:
    """Supervised classification: Mixup and CutMix (timm's), label smoothing, cross entropy."""

    def __init__(self, data: DataConfig, classes: int):
        self.mixup = None
        if data.mixup or data.cutmix:
            self.mixup = Mixup(
                mixup_alpha=data.mixup, cutmix_alpha=data.cutmix, label_smoothing=data.smoothing, num_classes=classes
            )
            self.criterion = SoftTargetCrossEntropy()
        else:
            self.criterion = nn.CrossEntropyLoss(label_smoothing=data.smoothing)

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """{"loss": scalar} of images (b, c, h, w) and classes (b,); draws from numpy's generator for Mixup."""
        if self.mixup is not None:
            images, targets = self.mixup(images, targets)
        logits = model(images)
        return {"loss": self.criterion(logits.float(), targets)}


def build_task(config: Config, classes: int) -> Classify:
    if config.task == "distill":
        raise UserError("task: distill (masked feature distillation) is not in this version; use classify")
    return Classify(config.data, classes)


def resolve_classes(config: Config, names: list[str] | None, counted: int | None) -> list[str]:
    """Names of the model's classes: the data's, padded to model.num_classes where that is larger."""
    names = list(names) if names is not None else [str(i) for i in range(counted or 0)]
    wanted = config.model.num_classes
    if wanted is not None and wanted < len(names):
        raise UserError(f"model.num_classes is {wanted}, the training data has {len(names)} classes")
    return names + [f"class {i}" for i in range(len(names), wanted or 0)]
