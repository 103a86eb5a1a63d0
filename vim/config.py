"""From YAML files and the command line to a typed configuration and back.

Unknown keys, wrong types and values out of range are errors of one line that name the key.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace

from .runtime import UserError
from .schema import Config

# Keys that a resumed run may have different from the unbroken one: they do not change its numbers.
FREE_ON_RESUME = {"out", "data.root", "data.workers", "train.log_every", "train.save_every_steps", "train.device"}
STREAMED = ("wds/", "tfds/", "hfids/")


class _Strict(yaml.SafeLoader):
    """YAML in which a key given twice is an error: plain YAML silently keeps the last one."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parser(prog: str) -> ArgumentParser:
    about = "Every key of the configuration, as --group.key."
    made = ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False, description=about)
    made.add_argument("--config", action="config", help="YAML file; may be given several times, later ones win")
    made.add_class_arguments(Config)
    return made


def _types() -> dict[str, Any]:
    """{"train.epochs": int, ...}: the type of every key."""
    groups = get_type_hints(Config)
    found = {}
    for name, kind in groups.items():
        if name in GROUPS:
            found |= {f"{name}.{key}": each for key, each in get_type_hints(kind).items()}
        else:
            found[name] = kind
    return found


GROUPS = {f.name for f in fields(Config) if hasattr(f.default_factory, "__dataclass_fields__")}
TYPES = _types()


def _check_key(key: str, where: str = "") -> None:
    """Raises UserError for a key that the configuration lacks, with the nearest one that it has."""
    free_form = any(key.startswith(f"{k}.") for k, kind in TYPES.items() if get_origin(kind) is dict)
    if key in TYPES or key in GROUPS or free_form:
        return
    leaf = key.rsplit(".", 1)[-1]
    near = [k for k in TYPES if k.rsplit(".", 1)[-1] == leaf]
    near = near or difflib.get_close_matches(key, [*TYPES, *GROUPS], 1)
    near = near or [k for k in TYPES if difflib.get_close_matches(leaf, [k.rsplit(".", 1)[-1]])]
    raise UserError(f"{where}unknown key {key}" + (f"; did you mean {near[0]}?" if near else ""))


def _check_file(path: str) -> None:
    """Raises UserError where a `--config` file is missing, is no YAML mapping, or names an unknown or repeated key."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _Strict)
    except (OSError, UnicodeDecodeError) as error:
        reason = "is no text file" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"--config {path}: {reason}") from error
    except yaml.MarkedYAMLError as error:
        tab = " (indent with spaces, not tabs)" if "\\t" in (error.problem or "") else ""
        raise UserError(f"{path}, line {error.problem_mark.line + 1}: {error.problem}{tab}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: no YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        kind = "nothing" if values is None else f"a {type(values).__name__}"
        raise UserError(f"{path}: holds {kind} at its top level, not keys such as model: and data:")
    for key, value in values.items():
        _check_key(str(key), f"{path}: ")
        if key in GROUPS:
            if not isinstance(value, dict):
                raise UserError(f"{path}: {key} is a group of keys, not {value!r}")
            for name in value:
                _check_key(f"{key}.{name}", f"{path}: ")


def _check(argv: list[str]) -> None:
    """What jsonargparse would let pass or say less clearly: the files of `--config`, and the names of all keys."""
    for position, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if not name.startswith("--"):
            continue
        if name == "--config":
            for path in [value] if equals else argv[position + 1 : position + 2]:
                _check_file(path)
        elif name not in ("--help", "--print_config"):
            _check_key(name[2:].removesuffix("+"))


def _parse(made: ArgumentParser, argv: list[str] | None, defaults: dict | None = None) -> Namespace:
    argv = sys.argv[1:] if argv is None else argv
    _check(argv)
    try:
        if defaults is not None:
            made.set_defaults({k: v for k, v in defaults.items() if v != {}})
        return made.parse_args(argv)
    except (argparse.ArgumentError, TypeError, ValueError, OSError) as error:
        raise UserError(_one_line(str(error))) from error


def _wanted(kind: Any) -> str:
    """A type in plain words."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is list:
        return f"a list of {'whole ' if get_args(kind) == (int,) else ''}numbers"
    if get_origin(kind) is dict:
        return "a mapping"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names[kind] if kind in names else " or ".join(_wanted(each) for each in get_args(kind))


def _one_line(message: str) -> str:
    """jsonargparse's account of a bad value in one line that starts with the key."""
    keys = re.findall(r'Parser key "([\w.]+)"', message)
    given = re.search(r"(?s)Given value: (.*)", message) or re.search(r"(?s)Got value: (.*)", message)
    if keys and keys[-1] in TYPES and given:
        return f"{keys[-1]} must be {_wanted(TYPES[keys[-1]])}, got {' '.join(given[1].split())}"
    message = re.sub(r"Group '([\w.]+)' does not accept option '([\w.]+)'", r"unknown key \1.\2", message)
    message = re.sub(r"Parser key \"([\w.]+)\":\s*", r"\1: ", message)
    return "; ".join([line.strip(" -") for line in message.splitlines() if line.strip(" -")][:3])


def parse(argv: list[str] | None = None, prog: str = "train.py") -> Config:
    """The configuration from `--config` files and `--group.key` overrides. Raises UserError with one line."""
    made = parser(prog)
    return build(made, _parse(made, argv))


def build(made: ArgumentParser, namespace: Namespace) -> Config:
    for key, kind in TYPES.items():
        # jsonargparse takes null in a file for a value that is not there
        if namespace[key] is None and type(None) not in get_args(kind):
            raise UserError(f"{key} must be {_wanted(kind)}, got null")
    try:
        instantiate = getattr(made, "instantiate", None) or made.instantiate_classes  # the name before 4.49
        values = instantiate(namespace).as_dict()
    except (TypeError, ValueError) as error:
        raise UserError(_one_line(str(error))) from error
    values = {k: v for k, v in values.items() if k in Config.__dataclass_fields__}
    return Config(**values)


def dump(config: Config) -> str:
    """The complete configuration as YAML, which `--config` reads again."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def load(values: dict[str, Any], argv: list[str], prog: str) -> Config:
    """The configuration of a checkpoint with overrides from the command line."""
    where = "the configuration in the checkpoint: "
    for key in flatten(values):
        _check_key(key, where)
        if key in GROUPS:
            raise UserError(f"{where}{key} is a group of keys, not {values[key]!r:.60}")
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
    free = FREE_ON_RESUME
    if (config.data.dataset or "").lower().startswith(STREAMED):
        free = free - {"data.workers"}  # each loader process streams shards of its own
    changed = [k for k in now if k not in free and now[k] != then.get(k, now[k])]
    if changed:
        details = ", ".join(f"{k} {then[k]!r} -> {now[k]!r}" for k in changed)
        raise UserError(
            f"{where} holds a run with another configuration ({details}); choose another --out, "
            f"or one with --train.init_from {Path(where) / 'last.pt'}"
        )
