"""From YAML files and the command line to a typed configuration and back.

Unknown keys, wrong types and values out of range are errors of one line that name the key.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from .runtime import UserError
from .schema import Config

# Keys that a resumed run may have different from the unbroken one: they do not change its numbers.
FREE_ON_RESUME = {"out", "data.root", "data.workers", "train.log_every", "train.save_every_steps", "train.device"}


def parser(prog: str) -> ArgumentParser:
    made = ArgumentParser(prog=prog, exit_on_error=False, description="Every key of the configuration, as --group.key.")
    made.add_argument("--config", action="config", help="YAML file; may be given several times, later ones win")
    made.add_class_arguments(Config)
    return made


def _parse(made: ArgumentParser, argv: list[str] | None, defaults: dict | None = None) -> Namespace:
    try:
        if defaults is not None:
            made.set_defaults({k: v for k, v in defaults.items() if v != {}})
        return made.parse_args(argv)
    except (argparse.ArgumentError, TypeError, ValueError, OSError) as error:
        raise UserError(_one_line(str(error))) from error


def _one_line(message: str) -> str:
    """jsonargparse's account of a bad key or value in one line that starts with the key."""
    message = re.sub(r"(?s)\s*Given value type: .*?(?=\n\s*-|$)", "", message)
    message = re.sub(r"Group '([\w.]+)' does not accept option '([\w.]+)'", r"unknown key \1.\2", message)
    message = re.sub(r"Parser key \"([\w.]+)\":\s*", r"\1: ", message)
    message = re.sub(r"<class '(\w+)'>|typing\.(\w+)", lambda m: m[1] or m[2], message)
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    return "; ".join(lines[:3])


def parse(argv: list[str] | None = None, prog: str = "train.py") -> Config:
    """The configuration from `--config` files and `--group.key` overrides. Raises UserError with one line."""
    made = parser(prog)
    return build(made, _parse(made, argv))


def build(made: ArgumentParser, namespace: Namespace) -> Config:
    try:
        values = made.instantiate_classes(namespace).as_dict()
    except (TypeError, ValueError) as error:
        raise UserError(_one_line(str(error))) from error
    values = {k: v for k, v in values.items() if k in Config.__dataclass_fields__}
    return Config(**values)


def dump(config: Config) -> str:
    """The complete configuration as YAML, which `--config` reads again."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def load(values: dict[str, Any], argv: list[str], prog: str) -> Config:
    """The configuration of a checkpoint with overrides from the command line."""
    made = parser(prog)
    return build(made, _parse(made, argv, values))


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train.epochs": 3, ...}: one level of dots per group; free-form dictionaries stay whole."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and not prefix:
            flat |= flatten(value, f"{key}.")
        else:
            flat[prefix + key] = value
    return flat


def check_resumable(config: Config, saved: dict[str, Any], where: str | Path) -> None:
    """Raises UserError where a key that changes the numbers differs from the run in `where`."""
    now, then = flatten(asdict(config)), flatten(saved)
    changed = [k for k in now if k not in FREE_ON_RESUME and now[k] != then.get(k, now[k])]
    if changed:
        details = ", ".join(f"{k} {then[k]!r} -> {now[k]!r}" for k in changed)
        raise UserError(f"{where} holds a run with another configuration ({details}); choose another --out")
