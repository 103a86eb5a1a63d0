"""Files of weights and of whole runs: read without executing anything, written so that a crash leaves the old file."""

from __future__ import annotations

import argparse
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import hub
from .runtime import UserError

FORMAT = "slws-vim/1"
JSON_KEYS = (
    "grid",
    "stride",
    "num_classes",
    "classes",
    "config",
    "metrics",
    "cls_position",
)  # in safetensors, which holds strings
PREFIXES = ("module.", "_orig_mod.")
CHECKSUM = "crc32"  # of all tensors, in the metadata of our safetensors files: the format itself has none


class WeightsError(UserError):
    """A file or state dict that cannot be used; the message names it and says why."""


class MissingFile(WeightsError, FileNotFoundError):
    """A FileNotFoundError that commands report in one line."""


def check_target(path: str | Path) -> None:
    """Raises UserError where nothing can be written to `path`, before any work is done for it."""
    path = Path(path)
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"{path} is a folder")


@contextmanager
def _replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside `path`; what was written to it is flushed to disk and renamed over `path`."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")  # one name, so that kills leave one such file at most
    try:
        yield temporary
        os.umask(mask := os.umask(0))
        temporary.chmod(0o666 & ~mask)  # safetensors' own files are for their owner alone
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save(obj: Any, path: str | Path) -> None:
    """torch.save under a temporary name, flushed to disk, then renamed over `path`."""
    with _replacing(path) as temporary, open(temporary, "wb") as file:
        torch.save(obj, file)


def save_tensors(weights: dict[str, Tensor], path: str | Path, meta: dict[str, Any]) -> None:
    """A safetensors file, replaced as `save` does. Metadata as it holds them: strings, JSON for JSON_KEYS."""
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    text = {k: json.dumps(v) if k in JSON_KEYS else str(v) for k, v in meta.items()}
    with _replacing(path) as temporary:
        save_file(weights, temporary, {"format": "pt", **text, CHECKSUM: checksum(weights)})


def checksum(weights: dict[str, Tensor]) -> str:
    """CRC-32 of names, dtypes and values of tensors on the CPU, in hexadecimal."""
    value = 0
    for name in sorted(weights):
        tensor = weights[name].contiguous().reshape(-1)
        value = zlib.crc32(tensor.view(torch.uint8).numpy(), zlib.crc32(f"{name}{tensor.dtype}".encode(), value))
    return f"{value:08x}"


def read(path: str | Path) -> Any:
    """The object in a torch file, on the CPU; tensors, numbers, containers and argparse.Namespace only.

    Here and below a path may name a file of the hub (vim/hub.py: local).
    Raises FileNotFoundError, and WeightsError for a damaged file or one that would need code to run.
    """
    path = hub.local(path)
    if Path(path).is_dir():
        raise WeightsError(f"{path}: is a folder; name a file in it, such as model.safetensors")
    if not Path(path).is_file():
        raise MissingFile(f"{path}: no such file")
    try:
        _check_records(path)
        with open(path, "rb"), torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except WeightsError:
        raise
    except PermissionError as error:
        raise WeightsError(f"{path}: {error.strerror}") from error
    except Exception as error:  # torch raises many kinds for damaged and for hostile files
        if code := re.search(r"GLOBAL:? ([\w.]+)|global (\S+)", str(error)):
            raise WeightsError(f"{path}: holds code ({code[1] or code[2]}), which is not run; only tensors") from error
        raise WeightsError(f"{path}: is damaged or no torch file") from error


def _check_records(path: str | Path) -> None:
    """Raises where a record of a torch file does not match its checksum, which torch does not look at, or is packed.

    torch packs none; a record larger than the file is there to fill the memory.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":  # the format before torch 1.6 is no zip file, and has no checksums
            return
        with zipfile.ZipFile(file) as records:
            unpacked = sum(entry.file_size for entry in records.infolist())
            if unpacked > os.path.getsize(path):
                raise WeightsError(
                    f"{path}: is packed, {unpacked} bytes in {os.path.getsize(path)}; torch packs nothing"
                )
            if bad := records.testzip():
                raise WeightsError(f"{path}: is damaged ({bad} does not match its checksum)")


def read_run(path: str | Path) -> dict[str, Any]:
    """A run's last.pt, to resume from. Raises WeightsError where it is damaged or another kind of file."""
    hint = "; move it away or choose another --out"
    try:
        found = read(path)
    except WeightsError as error:
        raise WeightsError(f"{error}{hint}") from error
    needed = {"format", "config", "model", "optimizer", "run"}
    if not isinstance(found, dict) or found.get("format") != FORMAT or needed - found.keys():
        raise WeightsError(f"{path}: is no checkpoint to resume from{hint}")
    return found


def read_config(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metadata, configuration) of a checkpoint or an export of ours; two empty dictionaries for a foreign file.

    The metadata holds the metrics under their own key where the file has them.
    """
    if str(path).endswith(".safetensors"):
        meta = _read_safetensors(path)[1]
        return meta, meta.pop("config", {})
    found = read(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return {}, {}
    found = {key: found.get(key) or {} for key in ("meta", "config")} | {
        k: found[k] for k in ("metrics",) if k in found
    }
    if wrong := [key for key in ("meta", "config") if not isinstance(found[key], dict)]:
        raise WeightsError(f"{path}: its {wrong[0]} is no dictionary")
    config = found.pop("config")
    return {**found.pop("meta"), **found}, dict(config)


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
        meta = _checked(meta | {k: found[k] for k in ("family", "layout") if isinstance(found.get(k), str)}, path)
        if "run" in found:  # all of a run, which may have both
            meta["weights"] = "ema" if use_ema and isinstance(found.get("ema"), dict) else "raw"
        weights = unwrap(found, use_ema)
        if not weights:
            raise WeightsError(f"{path}: holds no weights; its keys: {', '.join(map(str, list(found)[:5])) or 'none'}")
    if not weights:
        raise WeightsError(f"{path}: holds no tensors")
    return strip_prefixes(weights), meta


def _checked(meta: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """`meta` where what the loader goes by has its type. Raises WeightsError for another."""
    grid = meta.get("grid", [1, 1])
    fits = {
        "family": isinstance(meta.get("family", ""), str),
        "layout": isinstance(meta.get("layout", ""), str),
        "stride": isinstance(meta.get("stride", 1), int),
        "config": isinstance(meta.get("config", {}), dict),
        "grid": isinstance(grid, list) and len(grid) == 2 and all(isinstance(n, int) and n > 0 for n in grid),
    }
    if wrong := [key for key, fit in fits.items() if not fit]:
        raise WeightsError(f"{path}: its metadata has {wrong[0]} {meta[wrong[0]]!r:.60}")
    return meta


def _read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    path = hub.local(path)
    if not Path(path).is_file():
        raise MissingFile(f"{path}: no such file")
    try:
        with safe_open(path, "pt") as file:
            meta = dict(file.metadata() or {})
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        meta = {k: json.loads(v) if k in JSON_KEYS else v for k, v in meta.items()}
    except Exception as error:
        raise WeightsError(f"{path}: is damaged or no safetensors file") from error
    if meta.pop(CHECKSUM, None) not in (None, checksum(weights)):
        raise WeightsError(f"{path}: is damaged (its tensors do not match their checksum)")
    return weights, _checked(meta, path)


def unwrap(found: dict, use_ema: bool) -> dict[str, Tensor]:
    """The state dict inside a checkpoint, opened as often as it is wrapped."""
    averaged = ("ema", "model_ema", "state_dict_ema")
    raw = ("model", "state_dict")
    for key in (*averaged, *raw) if use_ema else (*raw, *averaged):
        if isinstance(found.get(key), dict) and found[key]:
            return unwrap(found[key], use_ema)
    return {k: v for k, v in found.items() if isinstance(k, str) and isinstance(v, Tensor)}


def strip_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without the prefixes that DDP, torch.compile and masked pretraining put in front."""
    out = {}
    for name, tensor in weights.items():
        while name.startswith(PREFIXES):
            name = name.split(".", 1)[1]
        out[name] = tensor
    if all(name.startswith(("encoder.", "decoder.")) for name in out):
        out = {name.removeprefix("encoder."): tensor for name, tensor in out.items()}
    return out
