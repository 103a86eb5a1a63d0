"""Vision Mamba: one network for every published family; they differ in their arguments (vim/zoo.py).

Token order. `pos_embed` and the output of `forward_features` keep prefix tokens (class token or registers) first, then
the patches row by row, as timm does: the native order. The layers see the sequence order, in which the class token may
sit in the middle and registers are spread evenly. Going from one order to the other, and every SLWS shuffle, is a
permutation that the norm at the next block's entrance reads through, so none of them costs a pass of its own.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from timm.layers import lecun_normal_, resample_abs_pos_embed, to_2tuple, trunc_normal_
from timm.models import checkpoint
from torch import Tensor, nn

from slws import linear_rates
from ssm_kernels import inverse, permute_rows

from .blocks import EPS, NORMS, Block, MLPBlock, PatchEmbed, norm_of_sum
from .interface import TimmInterface
from .mixer import Mixer
from .tokens import Step, column_order, from_to, plan, prefix_positions, sequence_order


class VisionMamba(TimmInterface):
    """Vision Mamba image classifier, images (b, in_chans, H, W) -> logits (b, num_classes).

    Args:
        img_size: pixels, a number or (height, width).
        patch_size, stride: of the patch embedding; stride None is the patch size.
        directions: 1, 2 (forward, backward) or 4 (both over the transposed patch order too).
        merge: "mean" or "sum" over the directions.
        norm: "rms" or "layer".
        mlp: pre-norm blocks with a SwiGLU instead of mixer-only blocks.
        cls_position: class token in the "middle" (before patch M // 2 of M), "first", or None.
        num_registers: register tokens, spread evenly over the sequence; needs cls_position None.
        register_reduce: the read-out projects each register to embed_dim // register_reduce features.
        pool: read out "token" (class token or all registers) or the "mean" of the patch tokens; around a class token in
            the middle the mean of those before it plus the mean of those after, halved (arXiv 2406.07537).
        drop_rate: dropout before the head. drop_path_rate: stochastic depth; block i's branch is dropped per sample
            with probability drop_path_rate * i / (depth - 1).
        slws_rate: probability with which the last layer shuffles in training (arXiv 2408.17081); not with 4 directions.
        init: "mamba", or "published" for the initialisation and weight-decay set of the published SLWS code: every
            Linear truncated normal with zero bias, dt_proj's included, and A_log decayed.
        dynamic_img_size: take images of any size and resample the positions in every forward pass.

    Sources: arXiv 2401.09417 (Vim), 2408.17081 (SLWS), 2405.14858 (registers), 2403.06977 (sum of directions).
    Raises ValueError for values that do not fit together, TypeError for unknown arguments.
    """

    def __init__(
        self,
        img_size=224,
        patch_size=16,
        stride=None,
        in_chans=3,
        num_classes=1000,
        embed_dim=192,
        depth=24,
        d_state=16,
        d_conv=4,
        expand=2,
        directions=2,
        merge="mean",
        norm="rms",
        mlp=False,
        cls_position="middle",
        num_registers=0,
        register_reduce=1,
        pool="token",
        drop_rate=0.0,
        drop_path_rate=0.0,
        slws_rate=0.0,
        init="mamba",
        dynamic_img_size=False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        _check_choices(norm, cls_position, pool, init)
        if num_registers and cls_position is not None:
            raise ValueError(f"num_registers={num_registers} needs cls_position=None, got {cls_position!r}")
        no_grid = "four directions scan a patch grid, which a shuffled sequence is not" if directions == 4 else None
        if no_grid and slws_rate:
            raise ValueError(f"slws_rate={slws_rate} with directions=4: {no_grid}; set slws_rate=0 or directions=2")
        self.slws_refused = no_grid  # read by slws.attach_slws
        made = {"device": device, "dtype": dtype}
        self.patch_embed = PatchEmbed(img_size, patch_size, stride or patch_size, in_chans, embed_dim, **made)
        self.in_chans, self.num_classes, self.embed_dim = in_chans, num_classes, embed_dim
        self.cls_position, self.pool, self.init, self.dynamic_img_size = cls_position, pool, init, dynamic_img_size
        self.num_registers, self.merge, self.norm_kind, self.directions = num_registers, merge, norm, directions
        self.num_prefix_tokens = num_registers or int(cls_position is not None)
        self.grad_checkpointing = False

        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim, **made)) if cls_position else None
        self.reg_token = nn.Parameter(torch.zeros(1, num_registers, embed_dim, **made)) if num_registers else None
        positions = self.num_prefix_tokens + self.patch_embed.num_patches
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, embed_dim, **made))
        rates = zip(linear_rates(depth, drop_path_rate), linear_rates(depth, slws_rate), strict=True)
        block = MLPBlock if mlp else Block
        self.layers = nn.ModuleList(
            block(embed_dim, Mixer(embed_dim, d_state, d_conv, expand, directions, merge, **made), norm, *r, **made)
            for r in rates
        )
        self.norm_f = NORMS[norm](embed_dim, eps=EPS, **made)
        self.neck, self.norm_neck, self.num_features = nn.Identity(), nn.Identity(), embed_dim
        if pool == "token":
            self._build_token_readout(register_reduce, **made)
        self.head_hidden_size = self.num_features
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.num_features, num_classes, **made) if num_classes else nn.Identity()
        reduction = self.patch_embed.stride[0]
        self.feature_info = [
            {"module": f"layers.{i}", "num_chs": embed_dim, "reduction": reduction} for i in range(depth)
        ]
        self.init_weights()

    def _build_token_readout(self, reduce: int, **made) -> None:
        if not self.num_prefix_tokens:
            raise ValueError("pool='token' needs a class token or registers; without either, use pool='mean'")
        if not self.num_registers:
            return
        if self.embed_dim % reduce:
            raise ValueError(f"register_reduce={reduce} does not divide embed_dim={self.embed_dim}")
        self.num_features = self.num_registers * self.embed_dim // reduce
        if reduce > 1:
            self.neck = nn.Linear(self.embed_dim, self.embed_dim // reduce, bias=False, **made)
        self.norm_neck = NORMS[self.norm_kind](self.num_features, eps=EPS, **made)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Positions, tokens, head: truncated normal .02. Mixers: Mamba's own, out_proj scaled by 1/sqrt(depth)."""
        for tokens in (self.pos_embed, self.cls_token, self.reg_token):
            if tokens is not None:
                trunc_normal_(tokens, std=0.02)
        lecun_normal_(self.patch_embed.proj.weight)
        nn.init.zeros_(self.patch_embed.proj.bias)
        published = self.init == "published"
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                if published or not name.startswith("layers"):
                    trunc_normal_(module.weight, std=0.02)
                if module.bias is not None and (published or "dt_proj" not in name):
                    nn.init.zeros_(module.bias)
        for layer in self.layers:
            layer.mixer.out_proj.weight /= math.sqrt(len(self.layers))

    def set_input_size(self, img_size=None, patch_size=None) -> None:
        """Change the image size the model is made for and resample its positions (bicubic)."""
        if patch_size is not None and tuple(to_2tuple(patch_size)) != self.patch_embed.patch_size:
            raise ValueError(f"patch_size is fixed at {self.patch_embed.patch_size}, got {patch_size!r}")
        old = self.patch_embed.grid_size
        if img_size is not None:
            self.patch_embed.set_input_size(img_size)
        if self.patch_embed.grid_size != old:
            self.pos_embed = nn.Parameter(self._positions(self.patch_embed.grid_size, old).detach())

    def _positions(self, grid, old=None) -> Tensor:
        old = old or self.patch_embed.grid_size
        return resample_abs_pos_embed(self.pos_embed, list(grid), list(old), num_prefix_tokens=self.num_prefix_tokens)

    def _plan(self, patches: int, grid: tuple[int, int], device) -> tuple[list[Step], Tensor | None]:
        """Every layer's step, its shuffle drawn now, and the column-major order where four directions need it."""
        places = prefix_positions(patches, self.cls_position, self.num_registers)
        order = sequence_order(patches, places, device)
        columns = column_order(grid, order, len(places), device) if self.directions == 4 else None
        shuffles = [layer.slws.sample(patches + len(places), device) for layer in self.layers]
        return plan(shuffles, order), columns

    def _embed(self, x: Tensor, visible: Tensor | None = None) -> tuple[Tensor, tuple[int, int]]:
        """Images -> tokens (b, l, d) with positions, in native order, and the patch grid; of patches, those visible."""
        size = tuple(x.shape[-2:])
        if not self.dynamic_img_size and size != self.patch_embed.img_size:
            raise ValueError(
                f"images are {size}, the model is made for {self.patch_embed.img_size}: "
                "pass img_size or dynamic_img_size=True to the model, or call set_input_size"
            )
        grid = self.patch_embed.grid(*size)
        x = self.patch_embed(x)
        prefix = [t.expand(len(x), -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        x = torch.cat([*prefix, x], 1) + self._positions(grid)
        if visible is not None:
            rows = torch.arange(self.num_prefix_tokens, device=x.device).expand(len(x), -1)
            rows = torch.cat([rows, visible + self.num_prefix_tokens], 1)
            x = x.gather(1, rows[..., None].expand(-1, -1, self.embed_dim))
        return x, grid

    def _through_layers(self, images, layers, taken=(), visible=None):
        """Images through `layers` blocks: (x, residual, how they lie, {i: tokens after block i, native})."""
        x, grid = self._embed(images, visible)  # here, so that no caller holds the first tokens till the end
        steps, columns = self._plan(x.shape[1] - self.num_prefix_tokens, grid, x.device)
        residual, stored, kept = None, None, {}
        for i, (layer, step) in enumerate(zip(self.layers[:layers], steps, strict=False)):
            args = (x, residual, step.index, columns)
            checkpointed = self.grad_checkpointing and not torch.jit.is_scripting()
            x, residual = checkpoint(layer, *args) if checkpointed else layer(*args)
            stored = step.stored
            if i in taken:
                kept[i] = _native_sum(x, residual, stored)
        return x, residual, stored, kept

    def _final_norm(self, x, residual=None, stored=None) -> Tensor:
        if isinstance(self.norm_f, nn.Identity):  # pruned
            return _native_sum(x, residual, stored)
        return norm_of_sum(x, residual, self.norm_f, self.norm_kind, from_to(stored, None))[0]

    def forward_features(self, x: Tensor) -> Tensor:
        """Images -> normalised tokens (b, prefix + patches, d), prefix tokens first."""
        x, residual, stored, _ = self._through_layers(x, len(self.layers))
        return self._final_norm(x, residual, stored)

    def forward_visible(self, x: Tensor, visible: Tensor) -> Tensor:
        """Images and the patches to see, (b, k) int64 -> normalised tokens (b, prefix + k, d), patches in that order.

        The layers scan those tokens alone, each with its position in the whole image. Raises ValueError with four
        directions, which scan a whole grid.
        """
        if self.directions == 4:
            raise ValueError("four directions scan a whole patch grid: a masked image needs directions=2 or 1")
        x, residual, stored, _ = self._through_layers(x, len(self.layers), visible=visible)
        return self._final_norm(x, residual, stored)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens of `forward_features` -> logits, or the features (b, num_features) before the head."""
        if self.pool == "mean":
            x = x[:, self.num_prefix_tokens :]
            half = x.shape[1] // 2
            if self.cls_position == "middle" and x.shape[1] > 1:  # both sides of the class token count alike
                x = (x[:, :half].mean(1) + x[:, half:].mean(1)) / 2
            else:
                x = x.mean(1)
        else:
            tokens = self.neck(x[:, : self.num_prefix_tokens])
            x = self.norm_neck(rearrange(tokens, "b n d -> b (n d)"))
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _native_sum(x: Tensor, residual: Tensor | None, stored: Tensor | None) -> Tensor:
    total = x if residual is None else x + residual
    return total if stored is None else permute_rows(inverse(stored), total)


def _check_choices(norm, cls_position, pool, init) -> None:
    for name, value, choices in (
        ("norm", norm, tuple(NORMS)),
        ("cls_position", cls_position, ("middle", "first", None)),
        ("pool", pool, ("token", "mean")),
        ("init", init, ("mamba", "published")),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
