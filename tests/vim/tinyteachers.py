"""Small random teachers, Hugging Face's in folders and timm's with files, and what a teacher sees."""

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPConfig, CLIPModel, CLIPVisionConfig, CLIPVisionModel

from vim.schema import DistillConfig

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
SMALL = {
    "hidden_size": 28,
    "intermediate_size": 61,  # 28 * (61 / 28) is less than 61
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


def student_images(size=(20, 20), count=3):
    return torch.randn(2, count, *size, generator=torch.Generator().manual_seed(1))


def seen_by_teacher(images, size, mean=CLIP[0], std=CLIP[1]):
    """The definition, one step at a time."""
    pixels = images * channels(IMAGENET[1]) + channels(IMAGENET[0])
    if images.shape[-2:] != size:
        pixels = F.interpolate(pixels, size=size, mode="bicubic", align_corners=False, antialias=False)
    return (pixels - channels(mean)) / channels(std)


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def resampled(rows, before, after):
    """Position rows (1, n, d) of patches, from one grid to another."""
    image = rows.mT.reshape(1, -1, *before)
    return F.interpolate(image, size=after, mode="bicubic", align_corners=False).flatten(2).mT


def shrink(monkeypatch, patch, **extra):
    """timm.create_model makes models of 2 layers, 32 channels and 8 x 8 patches, otherwise as named."""
    small = {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 8 * patch, **extra}
    real = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, **arguments: real(name, **{**small, **arguments}))


def by_name(folder, name, **changes):
    """(configuration, model): a timm name and a file of random weights for it."""
    model = shaken(timm.create_model(name))
    save_file(model.state_dict(), folder / "w.safetensors")
    return distill(name, teacher_weights=str(folder / "w.safetensors"), **changes), model
