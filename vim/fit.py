"""What `load_weights` changes about weights so that they fit a model of another shape, and its account of that."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from timm.layers import resample_abs_pos_embed
from timm.models import adapt_input_conv
from torch import nn

from .checkpoint import WeightsError
from .models import VisionMamba

PRETRAINING_ONLY = ("norm.", "decoder", "mask_token")


@dataclass
class Report:
    """What `load_weights` did. `str(report)` is one line per kind of change."""

    source: str
    kind: str = ""  # "ema" or "raw", where the file says
    loaded: int = 0
    adapted: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)  # what the model may keep as it was initialised

    def __str__(self) -> str:
        kind = {"ema": ", averaged weights", "raw": ", raw weights"}.get(self.kind, "")
        lines = [f"{self.source}: {self.loaded} tensors loaded{kind}"]
        for name in ("adapted", "dropped", "missing"):
            if found := getattr(self, name):
                lines.append(f"  {name}: {', '.join(found)}")
        return "\n".join(lines)


def pretraining(model: VisionMamba, weights, report: Report) -> None:
    """Weights of masked pretraining: an encoder without a head, and a decoder, which stays behind.

    The encoder of this package's own pretraining ends in norm_f, which is loaded. The published one ends in `norm`; its
    fine-tuning starts `norm_f` fresh (arXiv 2408.17081), and so it is done here.
    """
    published = "norm.weight" in weights and "norm_f.weight" not in weights
    if not published and not any(name.startswith("decoder.") for name in weights):
        return
    names = [name for name in weights if name.startswith(PRETRAINING_ONLY)]
    for name in names:
        del weights[name]
    listed = names if published else [f"{len(names)} tensors decoder*"]
    report.dropped += [f"{each} (of pretraining)" for each in listed]
    fresh = ("head.", "norm_f.") if published else ("head.",)
    report.fresh |= {name for name in model.state_dict() if name.startswith(fresh)} - weights.keys()


def directions(model: VisionMamba, weights, report: Report) -> bool:
    """Weights of two directions for a model of four: the transposed pair, `_c` and `_c_b`, starts as copies.

    Returns whether it was so.
    """
    names = [name for name in weights if re.search(r"\.mixer\.(A_b_log|D_b|\w+_b\.(weight|bias))$", name)]
    if model.directions != 4 or not names or any("_c" in name for name in weights):
        return False
    for backward in names:
        forward = re.sub(r"_b(?=_log$|\.weight$|\.bias$|$)", "", backward)
        if forward not in weights:
            raise WeightsError(f"{report.source}: has {backward} and no {forward}")
        for name in (forward, backward):
            tail = re.search(r"(_b)?(_log|\.weight|\.bias)?$", name)
            weights[f"{name[: tail.start()]}_c{tail[0]}"] = weights[name].clone()
    report.adapted.append("mixers of 2 directions -> 4, the transposed pair as copies")
    return True


def positions(model: VisionMamba, weights, meta, report: Report, resize_stride: bool) -> None:
    rows = weights.get("pos_embed")
    if rows is None or rows.ndim != 3:
        return
    prefix, embed = model.num_prefix_tokens, model.patch_embed
    patches = rows.shape[1] - prefix
    stride = meta.get("stride") or _stride_of(patches, weights)
    if stride and stride != embed.stride[0] and not resize_stride:
        raise WeightsError(
            f"{report.source} has positions of patch stride {stride} ({patches} patches), the model's stride is "
            f"{embed.stride[0]}: build the model with stride={stride}, or pass resize_stride=True to resample them"
        )
    side, fits = math.isqrt(patches), patches == embed.num_patches
    if meta.get("grid"):
        old = tuple(meta["grid"])
    elif fits and (meta.get("layout") == "native" or side * side != patches):
        old = embed.grid_size
    elif side * side == patches:  # published files are of square images, also where the model has as many patches
        old = (side, side)
    else:
        raise WeightsError(f"{report.source}: {patches} positions are no square grid, and no grid is recorded")
    if math.prod(old) != patches:
        raise WeightsError(f"{report.source}: {patches} positions are no grid of {old[0]}x{old[1]}")
    if old != embed.grid_size:
        new = resample_abs_pos_embed(rows.float(), list(embed.grid_size), list(old), num_prefix_tokens=prefix)
        weights["pos_embed"] = new.to(rows.dtype)
        report.adapted.append(f"pos_embed {old[0]}x{old[1]} -> {embed.grid_size[0]}x{embed.grid_size[1]}")


def _stride_of(patches: int, weights) -> int | None:
    """The stride that published files with 16-pixel patches were trained with: 27x27 positions at 224 mean 8."""
    conv = weights.get("patch_embed.proj.weight")
    if conv is None or conv.shape[-1] != 16:
        return None
    return 8 if patches == 27 * 27 else 16


def first_conv(model: nn.Module, weights, report: Report) -> None:
    name = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv", "patch_embed.proj")
    wanted = model.state_dict().get(f"{name}.weight")
    found = weights.get(f"{name}.weight")
    if wanted is None or found is None or found.ndim != 4 or found.shape[1] == wanted.shape[1]:
        return
    if found.shape[1] != 3:
        raise WeightsError(f"{report.source}: {name} takes {found.shape[1]} channels; only 3 can be adapted")
    weights[f"{name}.weight"] = adapt_input_conv(wanted.shape[1], found)
    report.adapted.append(f"{name} 3 -> {wanted.shape[1]} channels")


def head(model: nn.Module, weights, meta, report: Report) -> None:
    """A head of another class count stays behind; weights that say that they have none leave the model's fresh."""
    name = (getattr(model, "pretrained_cfg", None) or {}).get("classifier", "head")
    wanted, found = model.state_dict().get(f"{name}.weight"), weights.get(f"{name}.weight")
    if found is None and meta.get("num_classes") == 0:
        report.fresh |= {key for key in model.state_dict() if key.startswith(f"{name}.")}
    if found is None or (wanted is not None and wanted.shape[0] == found.shape[0]):
        return
    classes = 0 if wanted is None else wanted.shape[0]
    for part in ("weight", "bias"):
        if weights.pop(f"{name}.{part}", None) is not None:
            report.dropped.append(f"{name}.{part} ({found.shape[0]} classes, the model has {classes})")
            report.fresh.add(f"{name}.{part}")
