"""Masked feature distillation: which patches a student sees, the student, and its distance from the teacher.

Sources: arXiv 2408.17081 (the method), 2111.06377 (the decoder), 2205.14141 (whitened targets), 2208.06049 (masks).
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import build_sincos2d_pos_embed
from timm.models import checkpoint
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from .models import VisionMamba
from .schema import DistillConfig

NORM = partial(nn.LayerNorm, eps=1e-6)  # of ViTs; versions of timm differ in their default
TINY = 1e-12  # a weight that stands for 0, so that every patch can be drawn once the others are


def visible_count(patches: int, ratio: float) -> int:
    """How many of `patches` patches are kept where the share `ratio` is masked: 78 of 196 for 0.6."""
    return int(patches * (1 - ratio) + 1e-9)  # 10 * (1 - 0.9) is a little below 1


def draw_visible(weights: Tensor, count: int, sort: bool = False, noise: Tensor | None = None) -> Tensor:
    """Indices (b, count) of patches drawn one after the other without replacement with probabilities ~ weights (b, n).

    In the order drawn, or with `sort` ascending. A race: patch i arrives after an exponential time of rate weights[i],
    and the first ones are kept (Efraimidis and Spirakis, 2006). torch.multinomial draws from the same distribution but
    waits for the device. `noise`, exponential numbers that broadcast to (b, n), makes the draw a function of weights.
    """
    if noise is None:
        noise = torch.empty_like(weights).exponential_()
    kept = (noise / weights.clamp_min(TINY)).topk(count, largest=False, sorted=True).indices
    return kept.sort(dim=1).values if sort else kept


def normalize(tokens: Tensor, how: str) -> Tensor:
    """Features (b, n, d) as a target: "whiten" (each token), "l2" (each token), "batch" (each channel), "none"."""
    if how == "whiten":
        return F.layer_norm(tokens, tokens.shape[-1:])
    if how == "l2":
        return F.normalize(tokens, dim=-1)
    if how == "batch":
        return F.batch_norm(tokens.flatten(0, 1), None, None, training=True).view_as(tokens)
    return tokens


def distance(predicted: Tensor, target: Tensor, kind: str) -> Tensor:
    """Of each patch, (b, n, d) twice -> (b, n): smooth_l1 with beta 1, l1 or l2, mean over d; or 2 - 2 cos."""
    if kind == "cosine":
        return 2 - 2 * F.cosine_similarity(predicted, target, dim=-1)
    measure = {"smooth_l1": F.smooth_l1_loss, "l1": F.l1_loss, "l2": F.mse_loss}[kind]
    return measure(predicted, target, reduction="none").mean(-1)


def average(distances: Tensor, kept: Tensor, where: str) -> Tensor:
    """Mean (b,) of distances (b, n) over "all" patches, the "visible" ones, kept (b, k), or the "masked" ones."""
    if where == "all":
        return distances.mean(1)
    if where == "visible":
        return distances.gather(1, kept).mean(1)
    masked = torch.ones_like(distances).scatter(1, kept, 0)
    return (distances * masked).sum(1) / masked.sum(1)


class Decoder(nn.Module):
    """The student's tokens -> predictions for every patch: mask tokens put back, a few ViT blocks, a linear layer.

    With depth 0 a linear layer alone; the predictions for what is masked are then zeros.

    Args:
        grid: rows and columns of the image's patches.
        prefix: tokens that come before the patches, which are decoded with them and then left out.
        features: width of the student's tokens.
        targets: width of the predictions.
        distill: width, depth and heads of the blocks.
    """

    def __init__(self, grid: tuple[int, int], prefix: int, features: int, targets: int, distill: DistillConfig):
        super().__init__()
        width, self.prefix, self.patches = distill.decoder_width, prefix, math.prod(grid)
        self.grad_checkpointing = False
        self.blocks = nn.ModuleList(
            Block(width, distill.decoder_heads, mlp_ratio=4, qkv_bias=True, norm_layer=NORM)
            for _ in range(distill.decoder_depth)
        )
        self.head = nn.Linear(width if self.blocks else features, targets)
        if self.blocks:
            self.embed = nn.Linear(features, width)
            self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
            self.norm = NORM(width)
            self.register_buffer("positions", build_sincos2d_pos_embed(list(grid), width), persistent=False)

    def forward(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """tokens (b, prefix + k, features) with the patches in the order of kept (b, k) -> (b, patches, targets)."""
        if not self.blocks:
            predicted = self.head(tokens[:, self.prefix :])
            return self._put_back(predicted, predicted.new_zeros(1, 1, 1), kept)
        x = self.embed(tokens)
        patches = self._put_back(x[:, self.prefix :], self.mask_token.to(x.dtype), kept)
        x = torch.cat([x[:, : self.prefix], patches + self.positions.to(x.dtype)], 1)
        for block in self.blocks:
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
        return self.head(self.norm(x[:, self.prefix :]))

    def _put_back(self, seen: Tensor, elsewhere: Tensor, kept: Tensor) -> Tensor:
        size = seen.shape[0], self.patches, seen.shape[-1]
        return elsewhere.expand(size).scatter(1, kept[..., None].expand_as(seen), seen)


class Student(nn.Module):
    """An encoder that sees a part of the patches, and the decoder that predicts a teacher's features of all of them.

    The encoder's positions become fixed 2-D sine-cosine ones, none for prefix tokens. Its read-out is not trained.
    Init: xavier for every Linear with zero biases, normal .02 for tokens; `distill.init` "mamba" leaves dt_proj alone,
    "published" does not. `targets`: the width of what is predicted. Raises AssertionError for a width of encoder or
    decoder that does not divide by 4, as the positions need.
    """

    num_classes = 0

    def __init__(self, encoder: VisionMamba, targets: int, distill: DistillConfig):
        super().__init__()
        grid, prefix = encoder.patch_embed.grid_size, encoder.num_prefix_tokens
        self.encoder = encoder
        self.decoder = Decoder(grid, prefix, encoder.embed_dim, targets, distill)
        for unused in (encoder.neck, encoder.norm_neck, encoder.head):
            unused.requires_grad_(False)
        self.init_weights(distill.init)

    @torch.no_grad()
    def init_weights(self, init: str) -> None:
        encoder = self.encoder
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and (init == "published" or "dt_proj" not in name):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for token in (encoder.cls_token, encoder.reg_token, getattr(self.decoder, "mask_token", None)):
            if token is not None:
                nn.init.normal_(token, std=0.02)
        encoder.pos_embed.zero_().requires_grad_(False)
        positions = build_sincos2d_pos_embed(list(encoder.patch_embed.grid_size), encoder.embed_dim)
        encoder.pos_embed[:, encoder.num_prefix_tokens :] = positions

    def forward(self, images: Tensor, kept: Tensor) -> Tensor:
        """Images (b, c, h, w) and the patches seen (b, k), int64 -> predicted features (b, patches, targets)."""
        return self.decoder(self.encoder.forward_visible(images, kept), kept)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {f"encoder.{name}" for name in self.encoder.no_weight_decay()} | {"decoder.mask_token"}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.encoder.set_grad_checkpointing(enable)
        self.decoder.grad_checkpointing = enable
