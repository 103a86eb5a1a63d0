"""From a configuration to its model, and what a file of its weights must say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
from timm.layers import to_2tuple, trunc_normal_
from timm.models import get_pretrained_cfg
from torch import Tensor, nn

import slws

from .models import VisionMamba
from .runtime import UserError
from .schema import Config
from .zoo import VARIANTS, near

TRAINING_ONLY = ("pretrained", "drop_rate", "drop_path_rate", "slws_rate", "attn_drop_rate", "proj_drop_rate")


def build_model(config: Config, classes: int) -> nn.Module:
    """The timm model (ours included) that the configuration names, with a head for `classes` classes.

    Raises UserError for unknown names and for arguments that do not fit the model.
    """
    name, model = config.model.name, config.model
    if not timm.is_model(name):
        raise UserError(f"model.name: timm knows no {name!r}{near(name)}")
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
        if model.head_std is not None and classes:
            _init_head(built.get_classifier(), model.head_std)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f"model {name}: {error}") from error
    return built


def _init_head(heads: nn.Module | tuple[nn.Module, ...], std: float) -> None:
    """Raises ValueError for a model whose heads, one or several, are no layers with weights."""
    for head in heads if isinstance(heads, tuple) else (heads,):
        if not isinstance(getattr(head, "weight", None), Tensor):
            raise ValueError(f"model.head_std is for a head with weights, the model's is a {type(head).__name__}")
        trunc_normal_(head.weight, std=std) if std else nn.init.zeros_(head.weight)


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


def inference_model(config: Config, classes: int) -> nn.Module:
    """The configuration's model without what only training has: SLWS, dropout, the weights that it began with.

    `config` loses these keys.
    """
    config.slws.rate = config.model.drop = config.model.drop_path = 0.0
    config.model.grad_checkpointing = False
    config.model.kwargs = {k: v for k, v in config.model.kwargs.items() if k not in TRAINING_ONLY}
    return build_model(config, classes).eval()


def skeleton(create: Callable[[], nn.Module]) -> nn.Module:
    """A model that is about to get its weights from a file: on the meta device, where it costs nothing."""
    try:
        with torch.device("meta"):
            return create()
    except (RuntimeError, UserError):  # timm 1.0.20 reads numbers from tensors while it builds; true errors come again
        return create()
