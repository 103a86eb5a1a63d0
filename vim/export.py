"""Weights out: python -m vim.export --checkpoint FILE --format {safetensors,official} --out PATH."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from . import checkpoint, convert
from .runtime import UserError, exit_codes

FORMATS = ("safetensors", "hf", "official", "onnx", "pt2")


def _as_text(meta: dict[str, Any], config: dict[str, Any], metrics: dict[str, Any]) -> dict[str, str]:
    """Metadata as safetensors holds it: strings, JSON where they are not."""
    everything = {"format": "pt", **meta, "config": config, "metrics": metrics}
    return {k: json.dumps(v) if k in checkpoint.JSON_KEYS else str(v) for k, v in everything.items()}


def export(source: str | Path, fmt: str, out: str | Path, use_ema: bool = True) -> dict[str, Tensor]:
    """Write the weights of `source` (ours) in another format; returns what was written.

    "safetensors": native layout, with family, stride, classes, configuration and metrics as metadata.
    "official": the published layout of the model's family, {"model": state dict} as a torch file.
    Raises UserError for files that are not ours and for formats this version does not write.
    """
    if fmt not in ("safetensors", "official"):
        raise UserError(f"--format {fmt} is not in this version; safetensors and official are")
    checkpoint.check_target(out)
    meta, config = checkpoint.read_config(source)
    if not meta:
        raise UserError(f"{source} is no checkpoint of this package; python -m vim.convert takes published ones")
    weights = checkpoint.read_weights(source, use_ema)[0]
    metrics = meta.pop("metrics", {})
    if fmt == "safetensors":
        weights = {k: v.contiguous() for k, v in weights.items()}
        save_file(weights, str(out), metadata=_as_text(meta, config, metrics))
    else:
        if not meta.get("family"):
            raise UserError(f"{source}: model {meta.get('name')!r} belongs to no published family")
        published = convert.family_traits(meta["family"])
        if other := [t for t in published if meta.get(t, published[t]) != published[t]]:
            raise UserError(f"{source}: {other[0]} {meta[other[0]]!r} is not that of the family {meta['family']}")
        weights = convert.convert_state_dict(weights, meta["family"], to="official")
        checkpoint.save({"model": weights}, out)
    return weights


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vim.export", description=__doc__)
    parser.add_argument("--checkpoint", required=True, metavar="FILE", help="last.pt, best.pt or an export")
    parser.add_argument("--format", choices=FORMATS, default="safetensors")
    parser.add_argument("--out", required=True, metavar="PATH")
    parser.add_argument("--weights", choices=("ema", "raw"), default="ema", help="where the file has both")
    args = parser.parse_args(argv)
    weights = export(args.checkpoint, args.format, args.out, args.weights == "ema")
    numbers = sum(v.numel() for v in weights.values())
    sys.stdout.write(f"{args.out}: {len(weights)} tensors, {numbers / 1e6:.2f}M numbers, {args.format}\n")


if __name__ == "__main__":
    with exit_codes("python -m vim.export"):
        main()
