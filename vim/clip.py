"""Folders of Hugging Face's CLIP as timm's VisionTransformer: transformers itself is not needed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.data import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from .checkpoint import read_weights
from .factory import skeleton
from .runtime import UserError

# What transformers takes for a number that a CLIP's config.json leaves out.
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
FILES = ("model.safetensors", "pytorch_model.bin")
DROPPED = re.compile(r"text_model\.|text_projection\.|logit_scale$|.*\.position_ids$")
NAMES = (
    ("vision_model.", ""),
    ("embeddings.class_embedding", "cls_token"),
    ("embeddings.patch_embedding", "patch_embed.proj"),
    ("embeddings.position_embedding.weight", "pos_embed"),
    ("pre_layrnorm", "norm_pre"),
    ("post_layernorm", "norm"),
    ("visual_projection", "head"),
    ("encoder.layers.", "blocks."),
    ("layer_norm", "norm"),
    ("self_attn", "attn"),
    ("out_proj", "proj"),
)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"distill.teacher: {path} is no JSON file ({error})") from error
    if not isinstance(found, dict):
        raise UserError(f"distill.teacher: {path} holds no JSON object")
    return found


def from_folder(folder: Path) -> tuple[VisionTransformer, Sequence[float], Sequence[float], Callable]:
    """A CLIP, or its vision model alone, as transformers save it: (model, mean, std, what reads its weights).

    The model is `skeleton`; mean and std are CLIP's where preprocessor_config.json does not say others. Raises
    UserError for a folder without config.json or weights, and for another kind of model.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"distill.teacher: folder {folder} has no config.json")
    whole = _json(folder / "config.json")
    kind = whole.get("model_type")
    if kind not in ("clip", "clip_vision_model"):
        raise UserError(f"distill.teacher: {folder} holds a model of type {kind!r}, not clip or clip_vision_model")
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"distill.teacher: folder {folder} has neither {' nor '.join(FILES)}")
    vision = whole.get("vision_config") or {} if kind == "clip" else whole
    if not isinstance(vision, dict):
        raise UserError(f"distill.teacher: {folder / 'config.json'} has vision_config {vision!r:.60}")
    given = {**DEFAULTS, **vision}
    if given["hidden_act"] not in ("quick_gelu", "gelu"):
        raise UserError(f"distill.teacher: {folder} has hidden_act {given['hidden_act']!r}, not quick_gelu or gelu")
    projected = kind == "clip" or "CLIPVisionModelWithProjection" in str(whole.get("architectures"))
    try:
        vit = skeleton(
            lambda: VisionTransformer(
                img_size=given["image_size"],
                patch_size=given["patch_size"],
                in_chans=given["num_channels"],
                embed_dim=given["hidden_size"],
                depth=given["num_hidden_layers"],
                num_heads=given["num_attention_heads"],
                mlp_ratio=(given["intermediate_size"] + 0.5) / given["hidden_size"],  # timm rounds the product down
                num_classes=0,
                pre_norm=True,
                norm_layer=partial(nn.LayerNorm, eps=float(given["layer_norm_eps"])),
                act_layer=given["hidden_act"],
            )
        )
        if projected:
            width = whole.get("projection_dim", DEFAULTS["projection_dim"])
            vit.head = nn.Linear(vit.embed_dim, width, bias=False, device="meta")
    except (TypeError, ValueError, AssertionError, RuntimeError, ArithmeticError) as error:
        raise UserError(f"distill.teacher: {folder / 'config.json'}: {error}") from error
    mean, std = _preprocessing(folder / "preprocessor_config.json", given["num_channels"])
    return vit, mean, std, lambda: rename(read_weights(file)[0])


def _preprocessing(path: Path, channels: int) -> list[Sequence[float]]:
    """Mean and std, of each channel or one for all; CLIP's where the file is missing or says none."""
    how = _json(path) if path.is_file() else {}
    found = []
    for key, default, low in (("image_mean", OPENAI_CLIP_MEAN, -math.inf), ("image_std", OPENAI_CLIP_STD, 0)):
        values = how.get(key) or default
        values = values if isinstance(values, list | tuple) else [values]
        if len(values) not in (1, channels) or not all(
            isinstance(v, float | int) and low < v < math.inf for v in values
        ):
            wanted = f"{channels} numbers" + (" above 0" if low == 0 else "")
            raise UserError(f"distill.teacher: {path}: {key} must be {wanted}, got {values!r:.60}")
        found.append(values)
    return found


def rename(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's names of a CLIP's vision model -> timm's; the text model is left out, the rest all kept."""
    weights = {}
    for name, tensor in found.items():
        if not DROPPED.match(name):
            for theirs, ours in NAMES:
                name = name.replace(theirs, ours)
            weights[name] = tensor
    for name in [n for n in weights if ".q_proj." in n]:
        three = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        # Of another shape they stay as they are: then they are named as what the teacher has not.
        if weights.keys() >= set(three) and len({weights[n].shape for n in three}) == 1 and weights[name].ndim:
            weights[name.replace("q_proj", "qkv")] = torch.cat([weights.pop(n) for n in three])
    for name, leading in (("cls_token", (None, None)), ("pos_embed", (None,))):
        if name in weights:
            weights[name] = weights[name][leading]
    return weights
