"""What timm, its optimizers and its feature extractors ask of a model, apart from the forward pass itself."""

from __future__ import annotations

import torch
from einops import rearrange
from timm.layers import trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn


class TimmInterface(nn.Module):
    """Mixed into VisionMamba, which brings the layers, `_through_layers` and `_final_norm`."""

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay, beside biases and norms; the published code does decay A_log."""
        names = {"pos_embed", "cls_token", "reg_token"}
        for i, layer in enumerate(self.layers):
            names |= {f"layers.{i}.mixer.{name}" for name in layer.mixer.no_weight_decay()}
        return {n for n in names if not (self.init == "published" and n.endswith("_log"))}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        return {
            "stem": r"^cls_token|^reg_token|^pos_embed|^patch_embed",
            "blocks": [(r"^layers\.(\d+)", None), (r"^norm_f", (99999,))],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh head for `num_classes` (0: none). The read-out itself is fixed at construction."""
        if global_pool not in (None, self.pool, {"mean": "avg"}.get(self.pool)):
            raise ValueError(f"global_pool {global_pool!r}: this model was built with pool={self.pool!r}")
        self.num_classes = num_classes
        weight = self.pos_embed
        self.head = nn.Identity()
        if num_classes:
            self.head = nn.Linear(self.num_features, num_classes, device=weight.device, dtype=weight.dtype)
            trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ):
        """timm's feature extraction: (final tokens, [features after each block asked for]).

        Features are those of the residual stream, x + residual. With `stop_early` the final tokens are those of the
        last block that ran.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        taken, last = feature_take_indices(len(self.layers), indices)
        layers = last + 1 if stop_early else len(self.layers)
        size = x.shape[-2:]
        x, residual, stored, kept = self._through_layers(x, layers, set(taken))
        tokens = [self._final_norm(kept[i]) if norm else kept[i] for i in sorted(kept)]
        prefix = [t[:, : self.num_prefix_tokens] for t in tokens]
        features = [t[:, self.num_prefix_tokens :] for t in tokens]
        if output_fmt == "NCHW":
            features = [rearrange(f, "b (h w) d -> b d h w", h=self.patch_embed.grid(*size)[0]) for f in features]
        if return_prefix_tokens:
            features = list(zip(features, prefix, strict=True))
        return features if intermediates_only else (self._final_norm(x, residual, stored), features)

    def prune_intermediate_layers(self, indices=1, prune_norm: bool = False, prune_head: bool = True) -> list[int]:
        """Drop the layers after the last index and, where asked, the final norm and the head."""
        taken, last = feature_take_indices(len(self.layers), indices)
        self.layers = self.layers[: last + 1]
        if prune_norm:
            self.norm_f = nn.Identity()
        if prune_head:
            self.neck = self.norm_neck = nn.Identity()
            self.reset_classifier(0)
        return taken
