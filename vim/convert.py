"""Weights of published code into our models and back.

Our layout, "native", keeps prefix tokens first in `pos_embed` and calls registers `reg_token`; all other names are
those of the published checkpoints. `vim`, `shufflemamba` and `videomamba` weights share every name and shape, so a
foreign file's family must be named by the user.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from timm.models import adapt_input_conv
from torch import Tensor, nn

from .checkpoint import WeightsError, check_target, read_weights, save, strip_prefixes, unwrap
from .models import VisionMamba
from .runtime import UserError, exit_codes
from .zoo import FAMILIES

TRAITS = ("cls_position", "merge")
CLASS_IN_THE_MIDDLE = tuple(f for f, a in FAMILIES.items() if a["cls_position"] == "middle")


def convert_state_dict(state_dict: dict[str, Tensor], family: str, to: str = "native") -> dict[str, Tensor]:
    """The official layout of `family` -> ours (`to="native"`), or ours -> official (`to="official"`, or the family).

    Only names and row order change; tensors are not resized. Raises ValueError for an unknown family or target, and
    where the weights show another family than the one named.
    """
    if family not in FAMILIES:
        raise WeightsError(f"unknown family {family!r}; choose from {', '.join(FAMILIES)}")
    if to not in ("native", "official", family):
        raise WeightsError(f"to must be 'native', 'official' or {family!r}, got {to!r}")
    out = dict(state_dict)
    if to == "native":
        _check_family(out, family)
    if family == "mambareg":
        return _registers_in(out) if to == "native" else _registers_out(out)
    if family in CLASS_IN_THE_MIDDLE and "pos_embed" in out:
        rows = out["pos_embed"]
        middle = (rows.shape[1] - 1) // 2
        if to == "native":
            parts = (rows[:, middle : middle + 1], rows[:, :middle], rows[:, middle + 1 :])
        else:
            parts = (rows[:, 1 : middle + 1], rows[:, :1], rows[:, middle + 1 :])
        out["pos_embed"] = torch.cat(parts, 1)
    return out


def _check_family(weights: dict[str, Tensor], family: str) -> None:
    """What can be inferred from the names must agree with the family named."""
    seen = {
        "registers (pos_embed_cls)": ("pos_embed_cls" in weights, family == "mambareg"),
        "an MLP in each layer": (any(".mlp." in k for k in weights), family in ("mambamlp", "arm")),
    }
    for what, (there, wanted) in seen.items():
        if there != wanted:
            raise WeightsError(f"these weights have {'' if there else 'not '}{what}: they are not of family {family!r}")


def _registers_in(out: dict[str, Tensor]) -> dict[str, Tensor]:
    _need(out, "cls_token", "pos_embed", "pos_embed_cls")
    out["reg_token"] = out.pop("cls_token")
    out["pos_embed"] = torch.cat([out.pop("pos_embed_cls"), out["pos_embed"]], 1)
    return out


def _registers_out(out: dict[str, Tensor]) -> dict[str, Tensor]:
    _need(out, "reg_token", "pos_embed")
    out["cls_token"] = out.pop("reg_token")
    registers = out["cls_token"].shape[1]
    out["pos_embed_cls"], out["pos_embed"] = out["pos_embed"].split(
        [registers, out["pos_embed"].shape[1] - registers], 1
    )
    return out


def _need(weights: dict[str, Tensor], *names: str) -> None:
    if missing := [name for name in names if name not in weights]:
        raise WeightsError(f"these weights of family 'mambareg' lack {', '.join(missing)}")


@dataclass
class Report:
    """What `load_weights` did. `str(report)` is one line per kind of change."""

    source: str
    loaded: int = 0
    adapted: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.loaded} tensors loaded"]
        for name in ("adapted", "dropped", "missing"):
            if found := getattr(self, name):
                lines.append(f"  {name}: {', '.join(found)}")
        return "\n".join(lines)


def load_weights(
    model: nn.Module,
    path_or_state_dict: str | Path | dict[str, Tensor],
    family: str | None = None,
    use_ema: bool = True,
    resize_stride: bool = False,
) -> Report:
    """Load weights from a file (ours, official, safetensors) or a state dict into `model`, and say what was changed.

    Files are read without executing anything in them. `family` names a foreign file's layout; ours carry it, and a bare
    native state dict takes `family="native"`. Where the model differs, positions are resampled (bicubic, prefix rows
    kept), the first convolution is adapted to other channel counts and a head of another class count is left fresh;
    the report names each. `use_ema` prefers averaged weights where the file has both. Positions are never resampled
    across patch strides unless `resize_stride` says so.

    Raises ValueError where nothing matches, a key stays unexplained, a shape does not fit, or the family is unknown or
    does not fit the model; FileNotFoundError for a missing file.
    """
    if isinstance(path_or_state_dict, dict):
        source, weights, meta = "state dict", strip_prefixes(unwrap(path_or_state_dict, use_ema)), {}
    else:
        source = str(path_or_state_dict)
        weights, meta = read_weights(path_or_state_dict, use_ema)
    if family == "native":
        meta = {**meta, "layout": "native"}
    report = Report(source)
    if isinstance(model, VisionMamba):
        weights = _to_native(weights, meta, family, model, source)
        _check_traits(model, meta, meta.get("family") or family)
        _fit_positions(model, weights, meta, report, resize_stride)
    _fit_first_conv(model, weights, report)
    _fit_head(model, weights, report)
    _load(model, weights, report)
    return report


def _to_native(weights, meta, family, model, source) -> dict[str, Tensor]:
    known = meta.get("family")
    if known and family not in (None, "native", known):
        raise WeightsError(f"{source} says it is of family {known!r}, not {family!r}")
    if meta.get("layout") == "native":
        return dict(weights)
    family = family or known
    if not family:
        hint = getattr(model, "family", None)
        raise WeightsError(
            f"{source}: name the family of these weights (the families share names and shapes, so it cannot be told "
            f"from them): family= one of {', '.join(FAMILIES)}, or 'native' for this package's own layout"
            + (f"; the model is of family {hint!r}" if hint else "")
        )
    return convert_state_dict(weights, family)


def family_traits(family: str | None) -> dict[str, str | None]:
    """What no weight shows: where a family's class token sits and how it merges directions."""
    traits = FAMILIES.get(family, {})
    return {} if traits.get("directions") == 4 else {t: traits[t] for t in TRAITS if t in traits}


def _check_traits(model: VisionMamba, meta, family: str | None) -> None:
    """The model's traits must be those that the file records, or else its family's."""
    traits = family_traits(family) | {t: meta[t] for t in TRAITS if t in meta}
    for trait in traits:
        if getattr(model, trait) != traits[trait]:
            raise WeightsError(
                f"weights of family {family!r} want {trait}={traits[trait]!r}, "
                f"the model has {getattr(model, trait)!r}: use a {family}_* model or that argument"
            )


def _fit_positions(model: VisionMamba, weights, meta, report: Report, resize_stride: bool) -> None:
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


def _fit_first_conv(model: nn.Module, weights, report: Report) -> None:
    name = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv", "patch_embed.proj")
    wanted = model.state_dict().get(f"{name}.weight")
    found = weights.get(f"{name}.weight")
    if wanted is None or found is None or found.ndim != 4 or found.shape[1] == wanted.shape[1]:
        return
    if found.shape[1] != 3:
        raise WeightsError(f"{report.source}: {name} takes {found.shape[1]} channels; only 3 can be adapted")
    weights[f"{name}.weight"] = adapt_input_conv(wanted.shape[1], found)
    report.adapted.append(f"{name} 3 -> {wanted.shape[1]} channels")


def _fit_head(model: nn.Module, weights, report: Report) -> None:
    name = (getattr(model, "pretrained_cfg", None) or {}).get("classifier", "head")
    wanted, found = model.state_dict().get(f"{name}.weight"), weights.get(f"{name}.weight")
    if found is None or (wanted is not None and wanted.shape[0] == found.shape[0]):
        return
    classes = 0 if wanted is None else wanted.shape[0]
    for part in ("weight", "bias"):
        if weights.pop(f"{name}.{part}", None) is not None:
            report.dropped.append(f"{name}.{part} ({found.shape[0]} classes, the model has {classes})")


def _load(model: nn.Module, weights, report: Report) -> None:
    own = model.state_dict()
    if not own.keys() & weights.keys():
        names = ", ".join(sorted(weights)[:3]) or "none"
        raise WeightsError(f"{report.source}: no tensor matches the model's; its names: {names}")
    if unknown := sorted(weights.keys() - own.keys()):
        raise WeightsError(f"{report.source}: {len(unknown)} keys are not in the model: {', '.join(unknown[:5])}")
    fresh = {d.split(" ")[0] for d in report.dropped}
    if missing := sorted(own.keys() - weights.keys() - fresh):
        raise WeightsError(f"{report.source}: lacks {len(missing)} tensors of the model: {', '.join(missing[:5])}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise WeightsError(
                f"{report.source}: {name} is {tuple(tensor.shape)}, the model's is {tuple(own[name].shape)}"
            )
    model.load_state_dict(weights, strict=False)
    report.loaded, report.missing = len(weights), sorted(fresh & own.keys())


def convert_file(source: str, out: str, family: str, to: str = "native", use_ema: bool = True) -> int:
    """Write `source` in the other layout of `family` (`to`: "native" or "official") to `out`; how many tensors.

    Raises ValueError for a file that is already in that layout or says that it is of another family.
    """
    weights, meta = read_weights(source, use_ema)
    if meta.get("family") not in (None, "", family):
        raise WeightsError(f"{source} says it is of family {meta['family']!r}, not {family!r}")
    if (meta.get("layout") == "native") == (to == "native"):
        raise WeightsError(f"{source} {'is' if to == 'native' else 'is not'} in this package's layout")
    weights = {k: v.contiguous() for k, v in convert_state_dict(weights, family, to).items()}
    about = {"format": "pt", "family": family, "layout": to}
    if out.endswith(".safetensors"):
        save_file(weights, out, metadata=about)
    else:
        save({"model": weights} if to == "official" else {**about, "model": weights}, out)
    return len(weights)


def main(argv: list[str] | None = None) -> None:
    """python -m vim.convert SRC --family FAMILY --out DST, or --to FAMILY for the other way."""
    parser = argparse.ArgumentParser(prog="python -m vim.convert", description=main.__doc__)
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("--family", choices=list(FAMILIES), help="layout of a foreign SRC")
    parser.add_argument("--to", choices=list(FAMILIES), help="write the official layout of this family instead of ours")
    parser.add_argument("--out", required=True, metavar="DST", help="a .safetensors or .pth file")
    parser.add_argument("--no-ema", action="store_true", help="take the raw weights where SRC has both")
    args = parser.parse_args(argv)
    if (args.family is None) == (args.to is None):
        raise UserError("name one of --family (foreign -> ours) and --to (ours -> foreign)")
    check_target(args.out)
    layout = "native" if args.family else "official"
    count = convert_file(args.source, args.out, args.family or args.to, layout, not args.no_ema)
    sys.stdout.write(f"{args.out}: {count} tensors\n")


if __name__ == "__main__":
    with exit_codes("python -m vim.convert"):
        main()
