"""Teachers equal transformers' CLIP and plain attention at every grid; frozen; fp32 and bf16."""

import pytest
import torch
import torch.nn.functional as F
from tinyteachers import IMAGENET, by_name, close, distill, hf, resampled, seen_by_teacher, shrink, student_images
from torch import nn
from transformers import CLIPModel, CLIPVisionModelWithProjection

from vim.runtime import UserError
from vim.teachers import Features, build_teacher


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
@pytest.mark.parametrize(
    "native, grid, size",
    [(4, (4, 4), (16, 16)), (4, (3, 3), (12, 12)), (16, (14, 14), (30, 30)), (4, (3, 5), (16, 16))],
)
def test_equals_transformers_clip(tmp_path, act, native, grid, size):
    theirs = hf(tmp_path, size=native * 4, hidden_act=act)
    teacher = build_teacher(distill(tmp_path), grid, *IMAGENET, 3)
    images = student_images(size)
    with torch.no_grad():
        pixels = seen_by_teacher(images, (grid[0] * 4, grid[1] * 4))
        out = theirs(pixels, interpolate_pos_encoding=grid != (native, native), output_attentions=True)
    got = teacher(images)
    assert isinstance(got, Features) and teacher.width == 28
    assert out.last_hidden_state[:, 1:].std() > 0.5  # else closeness says little
    close(got.tokens, out.last_hidden_state[:, 1:])
    close(got.attention, out.attentions[-1][:, :, 0, 1:].mean(1))
    # before the final norm: the published target
    close(theirs.post_layernorm(out.last_hidden_state[:, 0]).detach(), out.pooler_output)


@pytest.mark.parametrize("kind", [CLIPVisionModelWithProjection, CLIPModel])
def test_projection_of_every_token(tmp_path, kind):
    theirs = hf(tmp_path, kind)
    teacher = build_teacher(distill(tmp_path, target="projected"), (4, 4), *IMAGENET, 3)
    images = student_images()
    with torch.no_grad():
        vision = theirs.vision_model
        hidden = vision(seen_by_teacher(images, (16, 16))).last_hidden_state[:, 1:]
        wanted = theirs.visual_projection(vision.post_layernorm(hidden))
    assert teacher.width == 24
    close(teacher(images).tokens, wanted)
    tokens = build_teacher(distill(tmp_path), (4, 4), *IMAGENET, 3)
    close(tokens(images).tokens, hidden)


def row(query, keys, layer):
    """(b, keys): the first row of the full softmax, mean over heads, head by head. query, keys (b, n, d)."""
    heads = []
    for head in range(layer.num_heads):
        own = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
        scores = layer.q_norm(query[..., own]) @ layer.k_norm(keys[..., own]).mT / layer.head_dim**0.5
        heads.append(scores.softmax(-1)[:, 0])
    return torch.stack(heads).mean(0)


def by_hand(model, images, grid):
    """(last block's input, its output, prefix tokens) of a shrunk model, from its parts."""
    names = ("cls_token", "dist_token", "reg_token")
    prefix = [t.expand(2, -1, -1) for n, t in model.named_parameters() if n in names]
    count = sum(t.shape[1] for t in prefix)
    x = model.patch_embed.proj(images).flatten(2).mT
    kept = model.pos_embed.shape[1] - 64
    assert kept in (0, count)
    rows = model.pos_embed[:, kept:] if grid == (8, 8) else resampled(model.pos_embed[:, kept:], (8, 8), grid)
    x = torch.cat([*prefix, x], 1) + F.pad(rows, (0, 0, count, 0))
    x[:, :kept] += model.pos_embed[:, :kept]
    x = model.blocks[0](model.norm_pre(x))
    return x, model.blocks[1](x), count


@pytest.mark.parametrize("grid", [(8, 8), (5, 6)])
@pytest.mark.parametrize(
    "name, extra",
    [
        ("vit_small_patch14_reg4_dinov2", {}),
        ("vit_small_patch14_dinov2", {}),
        ("vit_base_patch16_siglip_224", {}),
        ("vit_so150m_patch16_reg4_map_256", {}),
        ("vit_so150m_patch16_reg4_map_256", {"pool_include_prefix": True}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("vit_base_patch16_clip_quickgelu_224.openai", {}),
        ("vit_medium_patch16_reg4_gap_256", {}),
        ("vit_base_patch16_224", {"qk_norm": True}),
        ("vit_base_patch16_224", {"qkv_bias": False, "dynamic_img_size": True}),
    ],
)
def test_named_models_by_plain_computation(tmp_path, monkeypatch, name, extra, grid):
    """Class tokens, registers and DeiT's two, with and without positions; SigLIP's pooling; normed queries and keys."""
    patch = int(name.split("_patch")[1][:2])
    shrink(monkeypatch, patch, **extra)
    settings, model = by_name(tmp_path, name, mask="random" if "gap" in name else "attention")
    teacher = build_teacher(settings, grid, *IMAGENET, 3)
    images, how = student_images((50, 60)), model.pretrained_cfg
    with torch.no_grad():
        seen = seen_by_teacher(images, (grid[0] * patch, grid[1] * patch), how["mean"], how["std"])
        before, after, count = by_hand(model, seen, grid)
        if model.attn_pool is not None:
            pool = model.attn_pool
            keys = after if model.pool_include_prefix else after[:, count:]
            attention = row(pool.q(pool.latent), pool.kv(model.norm(keys)).chunk(2, -1)[0], pool)
        elif "gap" in name:  # neither class token nor attention pooling
            attention = torch.ones(after.shape[:2])
        else:
            attn = model.blocks[1].attn
            attention = row(*attn.qkv(model.blocks[1].norm1(before)).chunk(3, -1)[:2], attn)
    got = teacher(images)
    assert got.tokens.shape == (2, grid[0] * grid[1], 32) and teacher.width == 32
    close(got.tokens, after[:, count:])
    close(got.attention, attention[:, -grid[0] * grid[1] :])
    assert "gap" in name or got.attention.std() > 1e-4


def test_projection_of_a_classifier_that_averages(tmp_path, monkeypatch):
    """timm then norms after pooling: fc_norm, not norm."""
    shrink(monkeypatch, 16, num_classes=7)
    settings, model = by_name(tmp_path, "vit_medium_patch16_reg4_gap_256", mask="random", target="projected")
    teacher, images = build_teacher(settings, (8, 8), *IMAGENET, 3), student_images((128, 128))
    seen = seen_by_teacher(images, (128, 128), model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    with torch.no_grad():
        wanted = model.head(model.fc_norm(model.forward_intermediates(seen, 1, output_fmt="NLC")[1][0]))
    assert teacher.width == 7
    close(teacher(images).tokens, wanted)


def test_frozen_and_always_evaluating(tmp_path):
    hf(tmp_path)
    teacher = build_teacher(distill(tmp_path), (4, 4), *IMAGENET, 3)
    whole = nn.ModuleList([teacher]).train()
    assert whole.training and not any(m.training for m in teacher.modules())
    images = student_images((16, 16)).requires_grad_()
    got = teacher(images)
    assert not got.tokens.requires_grad and not got.attention.requires_grad
    assert not any(p.requires_grad for p in teacher.parameters())
    assert not [k for k in teacher.state_dict() if not k.startswith("vit.")]


def test_fp32_inside_autocast_and_bf16(tmp_path):
    hf(tmp_path)
    images = student_images((16, 16))
    plain = build_teacher(distill(tmp_path), (3, 3), *IMAGENET, 3)
    half = build_teacher(distill(tmp_path, teacher_precision="bf16"), (3, 3), *IMAGENET, 3)
    wanted = plain(images)
    with torch.autocast("cpu", torch.bfloat16):
        got = plain(images)
    for a, b in zip(got, wanted, strict=True):
        close(a, b, 0)
    assert {p.dtype for p in half.vit.parameters()} == {torch.bfloat16}
    # positions are resampled before they are rounded
    close(half.vit.pos_embed, plain.vit.pos_embed.bfloat16(), 0)
    outer = half(images)
    with torch.autocast("cpu", torch.float16):
        inner = half(images)
    for ours, same, exact in zip(outer, inner, wanted, strict=True):
        assert ours.dtype == torch.float32
        close(ours, same, 0)
        error = (ours - exact).norm() / exact.norm()
        assert 1e-4 < error < 0.02


def test_one_channel_is_repeated(tmp_path):
    hf(tmp_path)
    gray = student_images((20, 20), 1)
    teacher = build_teacher(distill(tmp_path), (4, 4), (0.4,), (0.2,), 1)
    color = build_teacher(distill(tmp_path), (4, 4), (0.4,) * 3, (0.2,) * 3, 3)
    for a, b in zip(teacher(gray), color(gray.expand(-1, 3, -1, -1)), strict=True):
        close(a, b, 0)
    for count in (2, 4):
        with pytest.raises(UserError, match=f"takes 3 channels, model.in_chans is {count}"):
            build_teacher(distill(tmp_path), (4, 4), (0.4,) * count, (0.2,) * count, count)
