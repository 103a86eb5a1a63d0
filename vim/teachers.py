"""Frozen vision transformers whose features a student learns to predict: CLIP, DINO, DINOv2, SigLIP, our own.

A teacher gives the tokens of its last layer and where its class token looks. It is timm's VisionTransformer whatever
its weights come from; its patch grid is the student's, so each token belongs to one patch of the student.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import timm
import torch
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent, PatchEmbed, QuickGELU, resample_abs_pos_embed
from timm.models import get_pretrained_cfg
from timm.models.vision_transformer import Attention, Block, VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from . import clip, config, data, hub
from .checkpoint import checksum, read_config, read_weights
from .factory import inference_model, input_size, skeleton
from .runtime import UserError, log
from .schema import DistillConfig
from .zoo import near


class Features(NamedTuple):
    """What a teacher says of images, in fp32.

    Attributes:
        tokens: (b, n, width), of each patch in raster order: the last layer's output before its final norm, or
            projected; not normalised.
        attention: (b, n), of the class token to the patches in the last layer, mean over heads. The softmax goes over
            all keys, so a row sums to less than 1.
    """

    tokens: Tensor
    attention: Tensor


class Source(NamedTuple):
    """A teacher without its weights, its preprocessing, and what reads them."""

    vit: nn.Module
    mean: Sequence[float]
    std: Sequence[float]
    read: Callable[[], dict[str, Tensor]]


class Teacher(nn.Module):
    """A frozen VisionTransformer: always in evaluation mode, never a gradient.

    In fp32 autocast is off; on CUDA matrix products still follow torch's TF32 switch.
    """

    def __init__(
        self,
        vit: VisionTransformer,
        projected: bool,
        dtype: torch.dtype,
        student: tuple[Sequence[float], Sequence[float]],
        own: tuple[Sequence[float], Sequence[float]],
    ):
        """`student` and `own`: (mean, std) that the student's images have and that the teacher's must have."""
        super().__init__()
        self.vit, self.projected, self.dtype = vit.to(dtype).requires_grad_(False), projected, dtype
        self.width: int = vit.head.out_features if projected else vit.embed_dim
        for name, values in zip(("student_mean", "student_std", "mean", "std"), (*student, *own), strict=True):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1), persistent=False)
        self.train(False)

    def train(self, mode: bool = True) -> Teacher:
        """Evaluation mode, whatever `mode` says: a task that is set to training leaves its teacher alone."""
        return super().train(False)

    def fingerprint(self) -> str:
        """Of what the features depend on: weights on the CPU, preprocessing, and what of layers no weight shows."""
        hidden = ("num_heads", "eps")
        layers = [
            (n, type(m).__name__, *(getattr(m, key, None) for key in hidden)) for n, m in self.vit.named_modules()
        ]
        looks = {"mean": self.mean, "std": self.std}
        return f"{checksum(self.state_dict() | looks)}{zlib.crc32(repr(layers).encode()):08x}"

    @torch.no_grad()
    def forward(self, images: Tensor) -> Features:
        """Features of images (b, c, h, w), normalised with the student's mean and std."""
        vit = self.vit
        with torch.autocast(images.device.type, enabled=False):
            x = self._prepare(images.float()).to(self.dtype)
            x = vit.norm_pre(vit._pos_embed(vit.patch_embed(x)))
            *body, last = vit.blocks
            for block in body:
                x = block(x)
            row = _class_row(last, x) if vit.has_class_token else None
            x = last(x)
            tokens = x[:, vit.num_prefix_tokens :]
            if row is None and isinstance(vit.attn_pool, AttentionPoolLatent):
                row = _latent_row(vit.attn_pool, vit.norm(x if vit.pool_include_prefix else tokens))
            if self.projected:
                tokens = vit.head(vit.fc_norm(vit.norm(tokens)))
            attention = tokens.new_ones(tokens.shape[:2]) if row is None else row[:, -tokens.shape[1] :]
            return Features(tokens.float(), attention.float())

    def _prepare(self, images: Tensor) -> Tensor:
        """The student's images as the teacher was trained to see them, at the size that gives the student's grid."""
        images = images * self.student_std + self.student_mean
        size = self.vit.patch_embed.img_size
        if images.shape[-2:] != size:
            images = F.interpolate(images, size, mode="bicubic", align_corners=False)
        return (images - self.mean) / self.std  # one channel becomes as many as the teacher has


def _class_row(block: Block, x: Tensor) -> Tensor:
    """(b, keys): the class token's attention in a block with the input x (b, keys, d); only that row is computed."""
    x, attn = block.norm1(x), block.attn
    width = attn.num_heads * attn.head_dim
    query = _slice(attn.qkv, 0, width)(x[:, :1])
    return _attention(attn, query, _slice(attn.qkv, width, 2 * width)(x))


def _latent_row(pool: AttentionPoolLatent, x: Tensor) -> Tensor:
    """(b, keys): the attention of the pooling's latent to tokens x (b, keys, d)."""
    return _attention(pool, pool.q(pool.latent), _slice(pool.kv, 0, x.shape[-1])(x))


def _slice(linear: nn.Linear, start: int, stop: int) -> Callable[[Tensor], Tensor]:
    """Some outputs of a linear layer."""
    bias = None if linear.bias is None else linear.bias[start:stop]
    return lambda x: F.linear(x, linear.weight[start:stop], bias)


def _attention(layer: nn.Module, query: Tensor, keys: Tensor) -> Tensor:
    """(b, keys): softmax in fp32, mean over heads and queries."""
    query, keys = (x.unflatten(-1, (layer.num_heads, layer.head_dim)).transpose(1, 2) for x in (query, keys))
    query, keys = layer.q_norm(query).float(), layer.k_norm(keys).float()
    return (query * layer.scale @ keys.transpose(-2, -1)).softmax(-1).mean((1, 2))


def check_teacher(distill: DistillConfig) -> None:
    """UserError for a teacher that cannot be one: name, file, folder, architecture. Its weights are not looked at."""
    _check(_open(distill).vit, distill)


def build_teacher(
    distill: DistillConfig, grid: tuple[int, int], mean: Sequence[float], std: Sequence[float], channels: int
) -> Teacher:
    """The teacher that the configuration names, with its weights, on the CPU.

    `grid`: rows and columns of the student's patches; the images are resized so that the teacher's are as many, and its
    position embedding is resampled (bicubic, no antialiasing, as Hugging Face does). `mean`, `std`, `channels`: of the
    student's images. One channel is repeated for a teacher of three. Raises UserError for what cannot be a teacher,
    for weights that do not fit or cannot be downloaded, and for another number of channels.
    """
    source = _open(distill)
    vit = source.vit
    _check(vit, distill)
    wanted = vit.patch_embed.proj.in_channels
    if channels != wanted and (channels, wanted) != (1, 3):
        raise UserError(f"distill.teacher {distill.teacher}: takes {wanted} channels, model.in_chans is {channels}")
    if distill.target == "tokens":
        vit.reset_classifier(0)
    if distill.teacher_weights:
        _resize(vit, grid)  # at once from the file's grid, whichever that is, to the student's, by timm's filter
    _load(vit, source.read(), distill.teacher_weights or distill.teacher)
    _resize(vit, grid)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[distill.teacher_precision]
    return Teacher(vit, distill.target == "projected", dtype, (mean, std), (source.mean, source.std))


def _open(distill: DistillConfig) -> Source:
    path = Path(hub.local(distill.teacher))
    if not path.exists():
        return _named(distill)
    if distill.teacher_weights:
        raise UserError(f"distill.teacher_weights is for timm names, {path} has weights of its own")
    return Source(*clip.from_folder(path)) if path.is_dir() else _own(path)


def _check(vit: nn.Module, distill: DistillConfig) -> None:
    """Raises UserError for a network that cannot be the teacher asked for."""
    what = f"distill.teacher {distill.teacher}:"
    if not isinstance(vit, VisionTransformer):
        raise UserError(f"{what} is a {type(vit).__name__}, only timm's VisionTransformer can be a teacher")
    if not vit.blocks:
        raise UserError(f"{what} has no layers")
    last = vit.blocks[-1]
    for part, kind in ((last, Block), (getattr(last, "attn", None), Attention), (vit.patch_embed, PatchEmbed)):
        if type(part) is not kind:
            raise UserError(f"{what} is a VisionTransformer with {type(part).__name__}, a teacher has {kind.__name__}")
    if distill.mask == "attention" and not vit.has_class_token and not isinstance(vit.attn_pool, AttentionPoolLatent):
        raise UserError(f"{what} has neither a class token nor attention pooling: set distill.mask to random")
    if distill.target == "projected" and not isinstance(vit.head, nn.Linear):
        raise UserError(f"{what} has no projection: set distill.target to tokens")


def _resize(vit: VisionTransformer, grid: tuple[int, int]) -> None:
    """Set the image size that gives `grid` patches and resample the positions from the grid that it had."""
    embed = vit.patch_embed
    before = embed.grid_size
    embed.set_input_size((grid[0] * embed.patch_size[0], grid[1] * embed.patch_size[1]))
    if vit.pos_embed is not None:
        kept = 0 if vit.no_embed_class else vit.num_prefix_tokens
        rows = resample_abs_pos_embed(vit.pos_embed.detach(), list(grid), list(before), kept, antialias=False)
        vit.pos_embed = nn.Parameter(rows, requires_grad=False)


def _load(vit: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Put weights in fp32 in place of the model's; a head only where it is used.

    Raises UserError where the two differ in anything else.
    """
    own = vit.state_dict()
    if isinstance(vit.head, nn.Identity):
        weights = {k: w for k, w in weights.items() if not k.startswith("head")}
    for problem, names in (
        ("has what the teacher has not", weights.keys() - own.keys()),
        ("lacks", own.keys() - weights.keys()),
        ("has another shape of", {k for k in own.keys() & weights.keys() if own[k].shape != weights[k].shape}),
    ):
        if names:
            raise UserError(f"{source}: {problem}: {', '.join(sorted(names)[:5])} ({len(names)} tensors)")
    vit.load_state_dict({k: w.float() for k, w in weights.items()}, assign=True)


def _named(distill: DistillConfig) -> Source:
    """A model of timm's with its public weights, or with those in distill.teacher_weights."""
    name, file = distill.teacher, distill.teacher_weights
    if not timm.is_model(name):
        raise UserError(f"distill.teacher: no file or folder, and no timm model, is named {name!r}{near(name)}")
    if file and not Path(hub.local(file)).is_file():
        raise UserError(f"distill.teacher_weights: no such file: {file}")
    try:
        cfg = get_pretrained_cfg(name)
    except RuntimeError as error:
        tags = ", ".join(timm.list_pretrained(f"{name.partition('.')[0]}.*")) or "none"
        raise UserError(f"distill.teacher: timm has no weights {name!r}; it has: {tags}") from error
    if not file and not cfg.has_weights:
        raise UserError(f"distill.teacher {name}: timm has no weights of it; name a file in distill.teacher_weights")
    vit = skeleton(lambda: timm.create_model(name))

    def read() -> dict[str, Tensor]:
        if "QuickGELU" in str(cfg.notes) and not isinstance(getattr(vit.blocks[0].mlp, "act", None), QuickGELU):
            log.warning("distill.teacher %s: its weights were trained with QuickGELU, this model has another", name)
        if file:
            wide = {k: w.float() for k, w in read_weights(file)[0].items()}  # the filter resamples positions
            try:
                return checkpoint_filter_fn(wide, vit, antialias=False)
            except (RuntimeError, IndexError, ValueError) as error:  # of its reshapes
                raise UserError(f"{file}: its tensors are not of {name}'s shapes ({error})") from error
        try:
            return timm.create_model(name, pretrained=True).state_dict()
        except Exception as error:  # of the network, the hub's client, or the file: each has its own
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"distill.teacher {name}: its weights cannot be downloaded ({reason}); offline, name a file of them "
                "in distill.teacher_weights, or a folder of a Hugging Face CLIP in distill.teacher"
            ) from error

    return Source(vit, cfg.mean, cfg.std, read)


def _own(path: Path) -> Source:
    """A VisionTransformer that train.py trained: a checkpoint or an export; averaged weights preferred."""
    meta, values = read_config(path)
    if not values:
        raise UserError(f"distill.teacher: {path} is no checkpoint of train.py")
    cfg = config.load(values, [], "train.py")
    vit = skeleton(lambda: inference_model(cfg, meta.get("num_classes", 0)))
    how = data.transforms(cfg, input_size(cfg, vit), cfg.model.in_chans, vit.pretrained_cfg)[2]
    return Source(vit, how["mean"], how["std"], lambda: read_weights(path)[0])
