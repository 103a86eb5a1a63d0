"""One small model per ecosystem, for the tests of attach_slws: how to build it, feed it and call one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn


class Layer(nn.Module):
    """Causal, so the order of its input matters: x + mix(cumulative mean of norm(x))."""

    def __init__(self, dim=8):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.mix(self.norm(x).cumsum(1).tanh())


class Stack(nn.Module):
    def __init__(self, depth=4, dim=8, layer=Layer):
        super().__init__()
        self.layers = nn.ModuleList(layer(dim) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class GridLayer(nn.Module):
    """(B, H, W, C), scanned along rows and columns."""

    def __init__(self, dim):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        h = self.norm(x)
        return x + self.mix(torch.cat([h.cumsum(1), h.cumsum(2)], -1).tanh())


class GridStages(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList()
        for dim in (6, 12):
            stage = nn.Module()
            stage.blocks = nn.ModuleList(GridLayer(dim) for _ in range(2))
            stage.grow = nn.Linear(dim, 2 * dim)
            self.stages.append(stage)

    def forward(self, x):
        for stage in self.stages:
            for block in stage.blocks:
                x = block(x)
            x = stage.grow(x)[:, ::2]
        return x


@dataclass
class Case:
    """`stack` and `options` go to attach_slws; `inputs` feed the model, `layer` gives the inputs of one layer."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    layer: Callable[[], tuple]
    stack: str
    options: dict[str, Any] = field(default_factory=dict)
    keywords: dict[str, Any] = field(default_factory=dict)


def loss_of(out: Any) -> torch.Tensor:
    out = getattr(out, "last_hidden_state", out)
    return out.float().square().mean()


def _tokens():
    mask = torch.ones(2, 11, dtype=torch.long)
    return {"input_ids": torch.randint(32, (2, 11)), "attention_mask": mask, "use_cache": False}


def _hf(kind):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the `hf` extra)")
    common = {"vocab_size": 32, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 4}
    if kind == "mamba":
        return transformers.MambaModel(transformers.MambaConfig(**common))
    heads = {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    return transformers.Mamba2Model(transformers.Mamba2Config(**common, **heads))


def _mambapy():
    mamba = pytest.importorskip("mambapy.mamba", reason="mambapy is not installed (pip install mambapy)")
    return mamba.Mamba(mamba.MambaConfig(d_model=16, n_layers=4, d_state=4))


def _mixer():
    try:
        from mamba_ssm_source import MixerModel
    except ConnectionError as reason:
        pytest.skip(str(reason))
    return MixerModel(d_model=16, n_layer=4, d_intermediate=0, vocab_size=32, ssm_cfg={"d_state": 4})


def _vit():
    timm = pytest.importorskip("timm")
    return timm.create_model("vit_tiny_patch16_224", img_size=48, embed_dim=24, depth=4, num_heads=2, num_classes=5)


def _x(*shape):
    return lambda: {"x": torch.randn(shape)}


def _in(*shape, tensors=1):
    return lambda: tuple(torch.randn(shape) for _ in range(tensors))


CASES = {
    "hf_mamba": Case(
        lambda: _hf("mamba"), _tokens, _in(2, 11, 16), "layers", keywords={"attention_mask": torch.ones(2, 11)}
    ),
    "hf_mamba2": Case(
        lambda: _hf("mamba2"), _tokens, _in(2, 11, 16), "layers", keywords={"attention_mask": torch.ones(2, 11)}
    ),
    "mambapy": Case(_mambapy, _x(2, 11, 16), _in(2, 11, 16), "layers"),
    "mamba_ssm": Case(
        _mixer,
        lambda: {"input_ids": torch.randint(32, (2, 11))},
        _in(2, 11, 16, tensors=2),
        "layers",
        keywords={"inference_params": None},
    ),
    "timm_vit": Case(_vit, _x(2, 3, 48, 48), _in(2, 10, 24), "blocks"),
    "grid_stages": Case(GridStages, _x(2, 4, 5, 6), _in(2, 4, 5, 6), "stages.*.blocks", {"seq_dim": (1, 2)}),
    "module_list": Case(Stack, _x(2, 11, 8), _in(2, 11, 8), "layers"),
}
