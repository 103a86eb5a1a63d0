"""The published families and sizes, registered with timm.

Numbers: arXiv 2401.09417 (vim), 2408.17081 (shufflemamba, mambamlp), 2405.14858 (mambareg), 2403.06977 (videomamba),
2406.07537 (arm).

A family is a set of constructor arguments; two families may share every weight name and shape and still mean different
networks, so the family of a checkpoint must be known (vim/convert.py).
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import NamedTuple

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    list_models,
    register_model,
    resolve_pretrained_cfg,
)

from . import hub
from .models import VisionMamba
from .runtime import UserError, log

TINY, SMALL, BASE = ({"embed_dim": width, "depth": 24} for width in (192, 384, 768))
MIDDLE, LARGE = {"embed_dim": 576, "depth": 32}, {"embed_dim": 1024, "depth": 48}
PLAIN = {"tiny": TINY, "small": SMALL, "base": BASE}
MLP = {
    f"{name}": {"embed_dim": w, "depth": d}
    for name, w, d in (("base", 768, 12), ("large", 1024, 24), ("huge", 1536, 24))
}

FAMILIES = {
    "vim": {"cls_position": "middle", "merge": "mean"},
    "shufflemamba": {"cls_position": "first", "merge": "mean"},
    "mambareg": {"cls_position": None, "merge": "mean"},
    "videomamba": {"cls_position": "first", "merge": "sum"},
    "mambamlp": {"cls_position": "first", "directions": 4, "pool": "mean", "mlp": True, "norm": "layer", "expand": 1},
    "arm": {"cls_position": "middle", "directions": 4, "pool": "mean", "mlp": True, "norm": "layer", "expand": 1},
}
SIZES = {
    "vim": PLAIN,
    "shufflemamba": {**PLAIN, "middle": {**MIDDLE, "norm": "layer"}, "large": LARGE},
    "mambareg": {
        "tiny": {**TINY, "num_registers": 12, "register_reduce": 1},
        "small": {**SMALL, "num_registers": 12, "register_reduce": 2},
        "base": {**BASE, "num_registers": 12, "register_reduce": 4},
        "large": {**LARGE, "num_registers": 16, "register_reduce": 8},
    },
    "videomamba": {**PLAIN, "middle": MIDDLE},
    "mambamlp": MLP,
    "arm": MLP,
}

VARIANTS = {
    f"{family}_{size}_patch16_224": (family, {**FAMILIES[family], **arguments})
    for family, sizes in SIZES.items()
    for size, arguments in sizes.items()
}
VARIANTS |= {
    f"vim_{size}_patch16_stride8_224": ("vim", {**FAMILIES["vim"], **arguments, "stride": 8})
    for size, arguments in PLAIN.items()
}

_CFG = {
    "url": "",
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": None,
    "crop_pct": 0.875,
    "interpolation": "bicubic",
    "fixed_input_size": True,
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "first_conv": "patch_embed.proj",
    "classifier": "head",
    "license": "apache-2.0",
}


class Weights(NamedTuple):
    """Where public weights lie on the Hugging Face hub. `note` says what this project knows of them at first hand."""

    repository: str
    file: str
    revision: str = "main"
    note: str = "not downloaded here"


# Weights whose repository and file names are known for certain, all in the official layout of the name's family. Other
# public weights (Mamba-Reg's, those of SLWS, VideoMamba's base) need no row: whoever knows their place names it and the
# family, as in vim.load_weights(model, "hf_hub:OWNER/REPO/FILE", family="mambareg"); see vim/hub.py.
PUBLIC = {
    "vim_tiny_patch16_224": Weights("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth"),
    "vim_small_patch16_224": Weights("hustvl/Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth"),
    "vim_base_patch16_224": Weights("hustvl/Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth"),
    "vim_tiny_patch16_stride8_224": Weights("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_ft_78p3acc.pth"),
    "vim_small_patch16_stride8_224": Weights("hustvl/Vim-small-midclstok", "vim_s_midclstok_ft_81p6acc.pth"),
    "videomamba_tiny_patch16_224": Weights("OpenGVLab/VideoMamba", "videomamba_t16_in1k_res224.pth"),
    "videomamba_small_patch16_224": Weights("OpenGVLab/VideoMamba", "videomamba_s16_in1k_res224.pth"),
    "videomamba_middle_patch16_224": Weights("OpenGVLab/VideoMamba", "videomamba_m16_in1k_res224.pth"),
}
EXPORTED = "model.safetensors"  # the weights in a folder or repository that python -m vim.export --format hf wrote


def near(name: str) -> str:
    """The end of an error about a model's name: the names of timm's models, ours included, that are like it."""
    found = difflib.get_close_matches(name, list_models(), 3)
    return f"; near it: {', '.join(found)}" if found else ""


def _cfg(name: str) -> dict:
    """timm's configuration of a name, with the place of its weights where it has one."""
    row = PUBLIC.get(name)
    return (
        _CFG if row is None else {**_CFG, "hf_hub_id": f"{row.repository}@{row.revision}", "hf_hub_filename": row.file}
    )


default_cfgs = generate_default_cfgs({name: _cfg(name) for name in VARIANTS})


def _source(name: str, cfg: dict, cache_dir: str | None) -> str:
    """The file of weights that timm's configuration of a model points at. Raises UserError where there is none."""
    if cfg.get("file"):  # local-dir: names a folder, pretrained_cfg_overlay a folder or a file
        path = Path(cfg["file"])
        return str(path / EXPORTED if path.is_dir() else path)
    if cfg.get("hf_hub_id"):
        repository, _, revision = cfg["hf_hub_id"].partition("@")
        return hub.download(repository, cfg.get("hf_hub_filename") or EXPORTED, revision or None, cache_dir)
    raise UserError(
        f"pretrained=True: no public weights of {name} are known; there are some of {', '.join(PUBLIC)}. "
        f"Load others with vim.load_weights(model, 'FILE or hf_hub:OWNER/REPO/FILE', family={VARIANTS[name][0]!r})"
    )


def _load(model: VisionMamba, name: str, cfg: dict, cache_dir: str | None) -> None:
    from .convert import load_weights  # which imports the families from here

    log.info("%s", load_weights(model, _source(name, cfg, cache_dir), VARIANTS[name][0]))


def _entry_point(name: str):
    family, arguments = VARIANTS[name]

    def create(pretrained: bool = False, **kwargs) -> VisionMamba:
        def build(**given) -> VisionMamba:
            model = VisionMamba(**given)
            model.family = family
            if pretrained:  # here and not by timm, which knows no family; and before features_only drops layers
                cfg = resolve_pretrained_cfg(name, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
                _load(model, name, cfg.to_dict(), kwargs.get("cache_dir"))
            return model

        return build_model_with_cfg(
            build,
            name,
            False,
            feature_cfg={"out_indices": 3, "feature_cls": "getter"},
            **{**arguments, **kwargs},
        )

    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    create.__doc__ = f"{name}: VisionMamba({', '.join(f'{k}={v!r}' for k, v in arguments.items())})."
    return create


for _name in VARIANTS:
    globals()[_name] = register_model(_entry_point(_name))
