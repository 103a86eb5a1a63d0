"""The published families and sizes, registered with timm.

Numbers: arXiv 2401.09417 (vim), 2408.17081 (shufflemamba, mambamlp), 2405.14858 (mambareg), 2403.06977 (videomamba),
2406.07537 (arm).

A family is a set of constructor arguments; two families may share every weight name and shape and still mean different
networks, so the family of a checkpoint must be known (vim/convert.py).
"""

from __future__ import annotations

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from .models import VisionMamba

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
default_cfgs = generate_default_cfgs(dict.fromkeys(VARIANTS, _CFG))


def _entry_point(name: str):
    family, arguments = VARIANTS[name]

    def create(pretrained: bool = False, **kwargs) -> VisionMamba:
        if pretrained:
            raise ValueError(
                f"pretrained=True: no weights of {name} can be downloaded by name; load a file with "
                f"vim.load_weights(model, path, family={family!r})"
            )
        model = build_model_with_cfg(
            VisionMamba,
            name,
            False,
            feature_cfg={"out_indices": 3, "feature_cls": "getter"},
            **{**arguments, **kwargs},
        )
        model.family = family
        return model

    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    create.__doc__ = f"{name}: VisionMamba({', '.join(f'{k}={v!r}' for k, v in arguments.items())})."
    return create


for _name in VARIANTS:
    globals()[_name] = register_model(_entry_point(_name))
