"""Finding the stack of layers in a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_layers(model: nn.Module, layers: str | Iterable[str] | None) -> dict[str, nn.Module]:
    """The layers to shuffle, by dotted name, in order of depth; several stacks are one after the other.

    `layers` names containers (each stands for its children) or single layers; "*" stands for one part of a name, as in
    "stages.*.blocks". None finds the stack. Raises ValueError, naming the candidates, where there is none or more
    than one, where a name does not exist and where a layer appears twice.
    """
    names = _only_stack(model) if layers is None else [layers] if isinstance(layers, str) else list(layers)
    found: dict[str, nn.Module] = {}
    for name in names:
        matches = _match(model, name)
        if not matches:
            raise ValueError(f"layers={name!r} is no module of {type(model).__name__}; {_advice(_candidates(model))}")
        for path, module in matches.items():
            if isinstance(module, CONTAINERS):
                found |= {_join(path, child): layer for child, layer in _children(module)}
            else:
                found[path] = module
    if not found:
        raise ValueError(f"layers={layers!r} names no layer; {_advice(_candidates(model))}")
    first: dict[int, str] = {}
    for name, layer in found.items():
        if (twin := first.setdefault(id(layer), name)) != name:
            raise ValueError(f"{twin} and {name} are the same module, which can have only one rate; name one in layers")
    return found


def _join(path: str, child: str) -> str:
    return f"{path}.{child}" if path else child


def _children(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Like named_children, but a module that appears twice is listed twice."""
    return module._modules.items()


def _match(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    found = {"": model}
    for part in pattern.split(".") if pattern else ():
        found = {
            _join(path, child): module
            for path, parent in found.items()
            for child, module in _children(parent)
            if module is not None and part in ("*", child)
        }
    return found


def _candidates(model: nn.Module) -> dict[str, tuple[list[int], str]]:
    """Name, with "*" for positions inside it -> (layers in each such stack, class of a layer)."""
    composite: dict[str, tuple[list[int], str]] = {}
    plain: dict[str, tuple[list[int], str]] = {}
    for path, module in model.named_modules():
        kids = [kid for _, kid in _children(module)] if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        alike = len({type(kid) for kid in kids}) == 1
        whole = all(next(kid.children(), None) is not None for kid in kids)
        # Hybrid models list layers of several classes; a Sequential of several is a network, not a stack.
        if len(kids) < 2 or not (alike or (whole and isinstance(module, nn.ModuleList))):
            continue
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        counts, _ = (composite if whole else plain).setdefault(pattern, ([], type(kids[0]).__name__))
        counts.append(len(kids))
    return composite or plain


def _only_stack(model: nn.Module) -> list[str]:
    candidates = _candidates(model)
    if len(candidates) != 1:
        what = "several stacks of layers" if candidates else "no stack of layers"
        raise ValueError(f"{type(model).__name__} has {what}; {_advice(candidates)}")
    return list(candidates)


def _advice(candidates: dict[str, tuple[list[int], str]]) -> str:
    if not candidates:
        return "candidates: none. Give dotted names in layers=[...]"
    listed = (
        f"{name or '(the model itself)'} ({' + '.join(map(str, counts))} x {kind})"
        for name, (counts, kind) in candidates.items()
    )
    return f"name one in layers=...; candidates: {', '.join(listed)}"
