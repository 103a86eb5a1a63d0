"""Weights out: python -m vim.export --checkpoint FILE --format {safetensors,hf,official,onnx,pt2} --out PATH."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from timm.layers import to_2tuple
from timm.models import get_pretrained_cfg
from torch import Tensor

from . import checkpoint, convert, data, factory
from . import config as configuration
from .runtime import UserError, exit_codes
from .schema import Config
from .zoo import EXPORTED

FORMATS = ("safetensors", "hf", "official", "onnx", "pt2")
GRAPHS = ("onnx", "pt2")
PRIVATE = ("teacher.", "decoder.")  # of training alone


def export(
    source: str | Path, fmt: str, out: str | Path, use_ema: bool = True, dynamic_size: bool = False
) -> dict[str, Tensor]:
    """Write the weights of `source` (ours) in another format; returns what was written.

    "safetensors": native layout, with family, stride, classes, configuration and metrics as metadata.
    "hf": a folder with config.json and model.safetensors, which timm reads as local-dir:PATH or, uploaded, as
    hf-hub:NAME, both with pretrained=True and after `import vim`.
    "official": the published layout of the model's family, {"model": state dict} as a torch file.
    "onnx", "pt2": the model as a graph, images (b, c, h, w) after preprocessing -> logits, any b; h and w too with
    `dynamic_size`. Both are read again and compared with the model.
    Raises UserError for files that are not ours or do not say which model they belong to.
    """
    if dynamic_size and fmt not in GRAPHS:
        raise UserError(f"an image size that stays open is for {' and '.join(GRAPHS)}, not for {fmt}")
    _check_target(fmt, out)
    meta, config = checkpoint.read_config(source)
    if not meta:
        raise UserError(f"{source} is no checkpoint of this package; python -m vim.convert takes published ones")
    weights = checkpoint.read_weights(source, use_ema)[0]
    weights = {k: v for k, v in weights.items() if not k.startswith(PRIVATE)}
    everything = meta | {"config": config, "metrics": meta.pop("metrics", {})}
    if fmt == "safetensors":
        checkpoint.save_tensors(weights, out, everything)
    elif fmt == "official":
        weights = _official(source, meta, weights)
        checkpoint.save({"model": weights}, out)
    else:
        if not meta.get("name") or not config:
            raise UserError(f"{source} does not say which model it belongs to; an export of a run does")
        cfg = configuration.load(config, [], "vim.export")
        if fmt == "hf":
            Path(out).mkdir(exist_ok=True)
            checkpoint.save_tensors(weights, Path(out) / EXPORTED, everything)
            (Path(out) / "config.json").write_text(json.dumps(_timm_config(cfg, meta, weights), indent=2) + "\n")
        else:
            meta |= {"metrics": everything["metrics"]}  # and not the configuration: it names places of this machine
            _graph(source, cfg, fmt, out, meta, weights, dynamic_size)
    return weights


def _check_target(fmt: str, out: str | Path) -> None:
    if fmt != "hf":
        checkpoint.check_target(out)
    elif Path(out).exists() and not Path(out).is_dir():
        raise UserError(f"{out} is a file; --format hf writes a folder")
    elif not Path(out).parent.is_dir():
        raise UserError(f"{out}: there is no folder {Path(out).parent}")


def _official(source: str | Path, meta: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if not meta.get("family"):
        raise UserError(f"{source}: model {meta.get('name')!r} belongs to no published family")
    published = convert.family_traits(meta["family"])
    if other := [t for t in published if meta.get(t, published[t]) != published[t]]:
        raise UserError(f"{source}: {other[0]} {meta[other[0]]!r} is not that of the family {meta['family']}")
    return convert.convert_state_dict(weights, meta["family"], to="official")


def _preprocessing(cfg: Config, size: tuple[int, int], model_cfg: dict[str, Any]) -> dict[str, Any]:
    """What evaluation did to an image, in timm's words: input_size, mean, std, crop_pct, interpolation."""
    return data.transforms(cfg, size, cfg.model.in_chans, model_cfg)[2]


def _timm_config(cfg: Config, meta: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    """timm's config.json: the name, the arguments that build the model, and how images were treated."""
    known = get_pretrained_cfg(cfg.model.name).to_dict(remove_source=True)
    size = to_2tuple(cfg.model.img_size or known["input_size"][-2:])
    arguments = {k: v for k, v in cfg.model.kwargs.items() if k not in factory.TRAINING_ONLY}
    if cfg.model.in_chans != 3:
        arguments["in_chans"] = cfg.model.in_chans
    if cfg.model.img_size is not None and known.get("fixed_input_size"):
        arguments["img_size"] = list(size)
    classes = meta["num_classes"]
    about = {k: known[k] for k in ("fixed_input_size", "first_conv", "classifier", "license") if k in known}
    about |= _preprocessing(cfg, size, known) | {"num_classes": classes}
    ours = {k: meta[k] for k in ("family", "layout", "stride", "grid", "cls_position", "merge") if k in meta}
    return {
        "architecture": cfg.model.name,
        "num_classes": classes,
        "label_names": meta["classes"],
        "model_args": arguments,
        "pretrained_cfg": about,
        "slws_vim": ours,
    }


def _graph(source, cfg: Config, fmt: str, out, meta: dict[str, Any], weights, dynamic_size: bool) -> None:
    from . import portable  # which loads torch.export

    model = factory.inference_model(cfg, meta["num_classes"])
    convert.load_weights(model, weights, family="native")
    size, channels = factory.input_size(cfg, model), cfg.model.in_chans
    about = meta | {"preprocessing": _preprocessing(cfg, size, model.pretrained_cfg)}
    program = portable.trace(model, size, channels, dynamic_size)
    written = (portable.write_onnx if fmt == "onnx" else portable.write_pt2)(program, out, about)
    shapes = [(batch, channels, *size) for batch in (1, 2)]
    if dynamic_size:
        model.dynamic_img_size = True
        embed = model.patch_embed
        shapes.append((1, channels, *(n + s for n, s in zip(size, embed.stride, strict=True))))
    difference = portable.largest_difference(model, written, shapes)
    if not difference <= portable.TOLERANCE:
        raise UserError(f"{out} is {difference:.2g} off the model of {source}, more than {portable.TOLERANCE:g}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vim.export", description=__doc__)
    parser.add_argument("--checkpoint", required=True, metavar="FILE", help="last.pt, best.pt or an export")
    parser.add_argument("--format", choices=FORMATS, default="safetensors")
    parser.add_argument("--out", required=True, metavar="PATH", help="a file; for hf a folder")
    parser.add_argument("--weights", choices=("ema", "raw"), default="ema", help="where the file has both")
    parser.add_argument("--dynamic_size", action="store_true", help="onnx and pt2: take images of other sizes too")
    args = parser.parse_args(argv)
    weights = export(args.checkpoint, args.format, args.out, args.weights == "ema", args.dynamic_size)
    numbers = sum(v.numel() for v in weights.values())
    sys.stdout.write(f"{args.out}: {len(weights)} tensors, {numbers / 1e6:.2f}M parameters, {args.format}\n")


if __name__ == "__main__":
    with exit_codes("python -m vim.export"):
        main()
