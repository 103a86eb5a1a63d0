"""Files of weights and of whole runs: read without executing anything, written so that a crash leaves the old file."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .runtime import UserError

FORMAT = "slws-vim/1"
JSON_KEYS = ("grid", "stride", "num_classes", "classes", "config", "metrics")  # in safetensors, which holds strings
PREFIXES = ("module.", "_orig_mod.")


class WeightsError(UserError):
    """A file or state dict that cannot be used; the message names it and says why."""


class MissingFile(WeightsError, FileNotFoundError):
    """A FileNotFoundError that commands report in one line."""


def save(obj: Any, path: str | Path) -> None:
    """torch.save under a temporary name, flushed to disk, then renamed over `path`."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        torch.save(obj, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read(path: str | Path) -> Any:
    """The object in a torch file, on the CPU; tensors, numbers, containers and argparse.Namespace only.

    Raises FileNotFoundError, and WeightsError for a damaged file or one that would need code to run.
    """
    if not Path(path).is_file():
        raise MissingFile(f"{path}: no such file")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for damaged and for hostile files
        raise WeightsError(f"{path}: cannot be read as weights ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def read_config(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metadata, configuration) of a checkpoint or an export of ours; two empty dictionaries for a foreign file."""
    if str(path).endswith(".safetensors"):
        meta = _read_safetensors(path)[1]
        return meta, meta.pop("config", {})
    found = read(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return {}, {}
    return dict(found.get("meta") or {}), dict(found.get("config") or {})


def read_weights(path: str | Path, use_ema: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(state dict, metadata) of a checkpoint of ours, a published one, or a safetensors file.

    Metadata of ours (vim/tasks.py: describe): empty for foreign files. Wrappers ({"model": ...},
    {"state_dict": ...}) are opened, averaged weights preferred with `use_ema`, `module.` and `_orig_mod.` stripped.
    """
    if str(path).endswith(".safetensors"):
        weights, meta = _read_safetensors(path)
    else:
        found = read(path)
        if not isinstance(found, dict):
            raise WeightsError(f"{path}: holds a {type(found).__name__}, not a dictionary of tensors")
        meta = dict(found.get("meta") or {}) if found.get("format") == FORMAT else {}
        meta |= {k: found[k] for k in ("family", "layout") if isinstance(found.get(k), str)}
        weights = _unwrap(found, use_ema)
    if not weights:
        raise WeightsError(f"{path}: holds no tensors")
    return strip_prefixes(weights), meta


def _read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import safe_open

    if not Path(path).is_file():
        raise MissingFile(f"{path}: no such file")
    try:
        with safe_open(path, "pt") as file:
            meta = dict(file.metadata() or {})
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        meta = {k: json.loads(v) if k in JSON_KEYS else v for k, v in meta.items()}
    except Exception as error:
        raise WeightsError(f"{path}: cannot be read as safetensors ({_first_line(error)})") from error
    return weights, meta


def _unwrap(found: dict, use_ema: bool) -> dict[str, Tensor]:
    """The state dict inside a checkpoint, opened as often as it is wrapped."""
    averaged = ("ema", "model_ema", "state_dict_ema")
    raw = ("model", "state_dict")
    for key in (*averaged, *raw) if use_ema else (*raw, *averaged):
        if isinstance(found.get(key), dict) and found[key]:
            return _unwrap(found[key], use_ema)
    return {k: v for k, v in found.items() if isinstance(v, Tensor)}


def strip_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without the prefixes that DDP and torch.compile put in front."""
    out = {}
    for name, tensor in weights.items():
        while name.startswith(PREFIXES):
            name = name.split(".", 1)[1]
        out[name] = tensor
    return out
