"""Teachers: equal to transformers' CLIP and to plain attention, from every source, at every grid; each error's line."""

import json

import huggingface_hub
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
)

from vim import checkpoint, clip, config, tasks
from vim.runtime import UserError
from vim.schema import Config, DataConfig, DistillConfig, ModelConfig
from vim.teachers import Features, build_teacher, check_teacher

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 4,
    "projection_dim": 24,
}


def channels(values):
    return torch.tensor(values).view(1, -1, 1, 1)


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights far from their initial values, so that no bias or norm is left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.1 if parameter.ndim > 1 else 0.2
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def hf(folder, kind=CLIPVisionModel, size=16, **changes):
    """A random CLIP of Hugging Face in `folder`, and itself."""
    vision = CLIPVisionConfig(image_size=size, **{**SMALL, **changes})
    if kind is CLIPModel:
        text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        text |= {"vocab_size": 20, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1}
        made = CLIPModel(CLIPConfig(text_config=text, vision_config=vision.to_dict(), projection_dim=24))
    else:
        vision._attn_implementation = "eager"
        made = kind(vision)
    shaken(made).save_pretrained(folder)
    return made


def distill(folder, **changes):
    return DistillConfig(teacher=str(folder), **changes)


def student_images(rows, columns, size=(20, 20), seed=1):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed))


def seen_by_teacher(images, size, mean=CLIP[0], std=CLIP[1]):
    """The definition, one step at a time."""
    pixels = images * channels(IMAGENET[1]) + channels(IMAGENET[0])
    if images.shape[-2:] != size:
        pixels = F.interpolate(pixels, size=size, mode="bicubic", align_corners=False, antialias=False)
    return (pixels - channels(mean)) / channels(std)


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
@pytest.mark.parametrize(
    "native, grid, size",
    [(4, (4, 4), (16, 16)), (4, (3, 3), (12, 12)), (16, (14, 14), (30, 30)), (4, (3, 5), (16, 16))],
)
def test_equals_transformers_clip(tmp_path, act, native, grid, size):
    theirs = hf(tmp_path, size=native * 4, hidden_act=act)
    teacher = build_teacher(distill(tmp_path), grid, *IMAGENET, 3)
    images = student_images(*grid, size)
    with torch.no_grad():
        pixels = seen_by_teacher(images, (grid[0] * 4, grid[1] * 4))
        out = theirs(pixels, interpolate_pos_encoding=grid != (native, native), output_attentions=True)
    got = teacher(images)
    assert isinstance(got, Features) and teacher.width == 32
    assert out.last_hidden_state[:, 1:].std() > 0.5  # else closeness says little
    close(got.tokens, out.last_hidden_state[:, 1:])
    close(got.attention, out.attentions[-1][:, :, 0, 1:].mean(1))
    # before the final norm: the published target
    close(theirs.post_layernorm(out.last_hidden_state[:, 0]).detach(), out.pooler_output)


@pytest.mark.parametrize("kind", [CLIPVisionModelWithProjection, CLIPModel])
def test_projection_of_every_token(tmp_path, kind):
    theirs = hf(tmp_path, kind)
    teacher = build_teacher(distill(tmp_path, target="projected"), (4, 4), *IMAGENET, 3)
    images = student_images(4, 4)
    with torch.no_grad():
        vision = theirs.vision_model
        hidden = vision(seen_by_teacher(images, (16, 16))).last_hidden_state[:, 1:]
        wanted = theirs.visual_projection(vision.post_layernorm(hidden))
    assert teacher.width == 24
    close(teacher(images).tokens, wanted)
    tokens = build_teacher(distill(tmp_path), (4, 4), *IMAGENET, 3)
    close(tokens(images).tokens, hidden)
