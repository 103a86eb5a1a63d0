"""Weights of published code into our models and back.

Our layout, "native", keeps prefix tokens first in `pos_embed` and calls registers `reg_token`; all other names are
those of the published checkpoints. `vim`, `shufflemamba` and `videomamba` weights share every name and shape, so a
foreign file's family must be named by the user.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from . import fit
from .checkpoint import WeightsError, check_target, read_weights, save, save_tensors, strip_prefixes, unwrap
from .fit import Report
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


def load_weights(
    model: nn.Module,
    path_or_state_dict: str | Path | dict[str, Tensor],
    family: str | None = None,
    use_ema: bool = True,
    resize_stride: bool = False,
) -> Report:
    """Load weights from a file (ours, official, safetensors) or a state dict into `model`, and say what was changed.

    A file is a path or, on the Hugging Face hub, "hf_hub:OWNER/REPO[@REVISION]/FILE" (by its client, extra `hf`).
    Files are read without executing anything in them. `family` names a foreign file's layout; ours carry it, and a bare
    native state dict takes `family="native"`. Where the model differs, positions are resampled (bicubic, prefix rows
    kept), the first convolution is adapted to other channel counts, weights of two directions become four, the new ones
    copies, and a head of another class count is left fresh; the report names each. `use_ema` prefers averaged weights
    where the file has both. Positions are never resampled across patch strides unless `resize_stride` says so.

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
    report = Report(source, meta.get("weights", ""))
    if isinstance(model, VisionMamba):
        weights = _to_native(weights, meta, family, model, source)
        fit.pretraining(model, weights, report)
        widened = fit.directions(model, weights, report)
        _check_traits(model, meta, meta.get("family") or family, widened)
        fit.positions(model, weights, meta, report, resize_stride)
    fit.first_conv(model, weights, report)
    fit.head(model, weights, meta, report)
    _load(model, weights, report)
    return report


def _to_native(weights, meta, family, model, source) -> dict[str, Tensor]:
    known = meta.get("family")
    if known and known not in FAMILIES:
        raise WeightsError(f"{source} says it is of family {known!r}; there are {', '.join(FAMILIES)}")
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
    return {t: traits[t] for t in TRAITS if t in traits}


def _check_traits(model: VisionMamba, meta, family: str | None, widened: bool) -> None:
    """The model's traits must be those that the file records, or else its family's.

    Two directions are summed in pretraining, the four made of them are averaged: `widened` weights may differ in that.
    """
    traits = family_traits(family) | {t: meta[t] for t in TRAITS if t in meta}
    if family == "mambamlp" and model.directions == 2:  # as it is pretrained; its four directions are averaged
        traits.setdefault("merge", "sum")
    for trait in (t for t in traits if not (widened and t == "merge")):
        if getattr(model, trait) != traits[trait]:
            raise WeightsError(
                f"weights of family {family!r} want {trait}={traits[trait]!r}, "
                f"the model has {getattr(model, trait)!r}: use a {family}_* model or that argument"
            )


def _load(model: nn.Module, weights, report: Report) -> None:
    own = model.state_dict()
    if not own.keys() & weights.keys():
        names = ", ".join(sorted(weights)[:3]) or "none"
        raise WeightsError(f"{report.source}: no tensor matches the model's; its names: {names}")
    if unknown := sorted(weights.keys() - own.keys()):
        raise WeightsError(f"{report.source}: {len(unknown)} keys are not in the model: {', '.join(unknown[:5])}")
    if missing := sorted(own.keys() - weights.keys() - report.fresh):
        raise WeightsError(f"{report.source}: lacks {len(missing)} tensors of the model: {', '.join(missing[:5])}")
    for name, tensor in weights.items():
        if tensor.is_floating_point() != own[name].is_floating_point():
            raise WeightsError(f"{report.source}: {name} is {tensor.dtype}, the model's is {own[name].dtype}")
        if tensor.shape != own[name].shape:
            raise WeightsError(
                f"{report.source}: {name} is {tuple(tensor.shape)}, the model's is {tuple(own[name].shape)}"
            )
    model.load_state_dict(weights, strict=False)
    report.loaded, report.missing = len(weights), sorted(report.fresh & own.keys() - weights.keys())


def convert_file(source: str, out: str, family: str, to: str = "native", use_ema: bool = True) -> int:
    """Write `source` in the other layout of `family` (`to`: "native" or "official") to `out`; how many tensors.

    Raises ValueError for a file that is already in that layout or says that it is of another family.
    """
    weights, meta = read_weights(source, use_ema)
    if meta.get("family") not in (None, "", family):
        raise WeightsError(f"{source} says it is of family {meta['family']!r}, not {family!r}")
    if (meta.get("layout") == "native") == (to == "native"):
        raise WeightsError(f"{source} {'is' if to == 'native' else 'is not'} in this package's layout")
    if to == "official":
        weights = {k: v for k, v in weights.items() if not k.startswith("decoder.")}  # of our masked pretraining
    weights = {k: v.contiguous() for k, v in convert_state_dict(weights, family, to).items()}
    about = {"format": "pt", "family": family, "layout": to}
    if out.endswith(".safetensors"):
        save_tensors(weights, out, about)
    else:
        save({"model": weights} if to == "official" else {**about, "model": weights}, out)
    return len(weights)


def main(argv: list[str] | None = None) -> None:
    """python -m vim.convert SRC --family FAMILY --out DST, or --to FAMILY for the other way."""
    parser = argparse.ArgumentParser(prog="python -m vim.convert", description=main.__doc__)
    parser.add_argument("source", metavar="SRC", help="a file, or hf_hub:OWNER/REPO[@REVISION]/FILE")
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
