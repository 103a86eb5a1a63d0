"""The parts a Vision Mamba is stacked from: patch embedding, SwiGLU, and the two kinds of block."""

from __future__ import annotations

import math

import torch.nn.functional as F
from einops import rearrange
from timm.layers import DropPath, to_2tuple
from torch import Tensor, nn

from slws import SLWS
from ssm_kernels import add_norm

EPS = 1e-5
NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


class PatchEmbed(nn.Module):
    """Convolution (b, c, H, W) -> (b, rows * columns, dim); a stride below the patch size makes patches overlap."""

    def __init__(self, img_size, patch_size, stride, in_chans, dim, device=None, dtype=None):
        super().__init__()
        self.patch_size, self.stride = to_2tuple(patch_size), to_2tuple(stride)
        self.proj = nn.Conv2d(in_chans, dim, self.patch_size, self.stride, device=device, dtype=dtype)
        self.set_input_size(img_size)

    def set_input_size(self, img_size) -> None:
        self.img_size = tuple(to_2tuple(img_size))
        self.grid_size = self.grid(*self.img_size)
        self.num_patches = math.prod(self.grid_size)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of patches; raises ValueError where they do not cover the image exactly."""
        grid = []
        for name, size, patch, stride in zip(
            ("height", "width"), (height, width), self.patch_size, self.stride, strict=True
        ):
            if size < patch or (size - patch) % stride:
                raise ValueError(f"image {name} {size} is not covered by patches of {patch} at stride {stride}")
            grid.append((size - patch) // stride + 1)
        return tuple(grid)

    def forward(self, x: Tensor) -> Tensor:
        return rearrange(self.proj(x), "b d h w -> b (h w) d")


class SwiGLU(nn.Module):
    """w3(silu(w1 x) * w2 x), hidden width 2/3 of `ratio` times dim."""

    def __init__(self, dim: int, ratio: int = 4, device=None, dtype=None):
        super().__init__()
        hidden = dim * ratio * 2 // 3
        self.w1 = nn.Linear(dim, hidden, device=device, dtype=dtype)
        self.w2 = nn.Linear(dim, hidden, device=device, dtype=dtype)
        self.w3 = nn.Linear(hidden, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.w3(F.silu(self.w1(x)) * self.w2(x))


def norm_of_sum(x, residual, norm, kind, index=None):
    """(norm(x + residual), x + residual), rows in the order of `index`; `norm` holds the weights, `kind` names it."""
    return add_norm(x, residual, norm.weight, getattr(norm, "bias", None), EPS, kind, index)


class Block(nn.Module):
    """(x, residual) -> (mixer(norm(residual + x)), residual + x), read through `index`; the residual stays fp32."""

    def __init__(self, dim, mixer, norm, drop_path, slws_rate, device=None, dtype=None):
        super().__init__()
        self.kind = norm
        self.norm = NORMS[norm](dim, eps=EPS, device=device, dtype=dtype)
        self.mixer = mixer
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.slws = SLWS(slws_rate)

    def forward(self, x, residual, index=None, transposed=None):
        x, residual = norm_of_sum(x, residual, self.norm, self.kind, index)
        return self.drop_path(self.mixer(x, transposed)), residual


class MLPBlock(nn.Module):
    """x += mixer(norm1(x)); x += mlp(norm2(x)), with the last addition left to the next block, as in `Block`."""

    def __init__(self, dim, mixer, norm, drop_path, slws_rate, device=None, dtype=None):
        super().__init__()
        self.kind = norm
        self.norm1 = NORMS[norm](dim, eps=EPS, device=device, dtype=dtype)
        self.mixer = mixer
        self.norm2 = NORMS[norm](dim, eps=EPS, device=device, dtype=dtype)
        self.mlp = SwiGLU(dim, device=device, dtype=dtype)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.slws = SLWS(slws_rate)

    def forward(self, x, residual, index=None, transposed=None):
        x, residual = norm_of_sum(x, residual, self.norm1, self.kind, index)
        x = self.drop_path(self.mixer(x, transposed))
        x, residual = norm_of_sum(x, residual, self.norm2, self.kind)
        return self.drop_path(self.mlp(x)), residual
