"""Every key of a run's configuration, its type, default and range. Durations are in epochs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from .runtime import UserError, at_least, within


@dataclass
class ModelConfig:
    """The network.

    Args:
        name: any timm model, this package's families included (python -m vim.doctor lists those).
        img_size: pixels, a number or [height, width]; null: the model's own.
        in_chans: image channels, 1, 3 or 4.
        num_classes: null: as many as the data has.
        drop: dropout before the head.
        drop_path: stochastic depth of the last block; grows linearly from 0.
        grad_checkpointing: recompute activations in the backward pass to save memory.
        head_std: standard deviation of the head's weights at the start; null: the model's own.
        kwargs: further arguments of the model, e.g. {init: published, dynamic_img_size: true}.
    """

    name: str = "vim_tiny_patch16_224"
    img_size: int | list[int] | None = None
    in_chans: int = 3
    num_classes: int | None = None
    drop: float = 0.0
    drop_path: float = 0.0
    grad_checkpointing: bool = False
    head_std: float | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        within(0, 1, self, "model", "drop", "drop_path")
        if self.in_chans not in (1, 3, 4):
            raise UserError(f"model.in_chans must be 1, 3 or 4, got {self.in_chans}")
        at_least(1, self, "model", "num_classes")
        at_least(0, self, "model", "head_std")
        sides = self.img_size if isinstance(self.img_size, list) else [self.img_size] * 2
        if self.img_size is not None and (len(sides) != 2 or min(sides) < 1):
            raise UserError(f"model.img_size must be at least 1, a number or [height, width], got {self.img_size}")
        for key in ("img_size", "in_chans", "num_classes"):  # the data and the head follow these
            if key in self.kwargs:
                raise UserError(f"model.kwargs.{key}: set model.{key} instead")


@dataclass
class DataConfig:
    """Images and their augmentation (timm's).

    Args:
        root: an ImageFolder tree with train/ and val/, one folder per class in each; or the root of `dataset`.
        dataset: a timm dataset instead, e.g. hfds/imagenet-1k, torch/cifar10, wds/....
        train_split: folder or split to train on.
        val_split: folder or split to evaluate on; null, with task distill: none.
        batch_size: images per process and step.
        eval_batch_size: null: batch_size.
        workers: loader processes per training process; results do not depend on it, but for wds/, tfds/ and hfids/.
        scale: area range of the random resized crop.
        ratio: aspect range of the random resized crop.
        hflip: probability of a horizontal flip.
        color_jitter: strength; ignored where a RandAugment policy is set, as in timm.
        auto_augment: timm policy such as rand-m9-mstd0.5-inc1, or 3a for 3-Augment; null: none (as 4 channels need).
        interpolation: of the resizes, in training and evaluation.
        erase: probability of random erasing.
        mixup: alpha of Mixup, 0: off.
        cutmix: alpha of CutMix, 0: off.
        smoothing: label smoothing.
        repeats: repeated augmentation, copies of each image per epoch (the epoch keeps its length); 1: off.
        crops: augmentations of each training image, the same ones all along, by turns; null: new ones in each epoch.
        crop_pct: share of the resized image kept in evaluation; null: the model's.
        mean: of each channel, or one for all; null: the model's.
        std: of each channel, or one for all; null: the model's.
        skip_corrupt: replace unreadable training images and leave out unreadable evaluation images, and count them.
    """

    root: str | None = None
    dataset: str | None = None
    train_split: str = "train"
    val_split: str | None = "val"
    batch_size: int = 128
    eval_batch_size: int | None = None
    workers: int = 8
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    ratio: list[float] = field(default_factory=lambda: [0.75, 1.3333333333333333])
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    interpolation: Literal["bicubic", "bilinear", "nearest", "random"] = "bicubic"
    erase: float = 0.25
    mixup: float = 0.8
    cutmix: float = 1.0
    smoothing: float = 0.1
    repeats: int = 1
    crops: int | None = None
    crop_pct: float | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    skip_corrupt: bool = False

    def __post_init__(self):
        at_least(1, self, "data", "batch_size", "eval_batch_size", "repeats", "crops")
        at_least(0, self, "data", "workers", "color_jitter", "mixup", "cutmix")
        within(0, 1, self, "data", "hflip", "erase", "smoothing")
        if not 0 < (1 if self.crop_pct is None else self.crop_pct) <= 1:
            raise UserError(f"data.crop_pct must be above 0 and at most 1, got {self.crop_pct}")
        if not all(0 < s < math.inf for s in self.std or []):
            raise UserError(f"data.std must be above 0, got {self.std}")
        for name, pair in (("scale", self.scale), ("ratio", self.ratio)):
            if len(pair) != 2 or not 0 < pair[0] <= pair[1]:
                raise UserError(f"data.{name} must be [low, high] with 0 < low <= high, got {pair}")
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise UserError(f"data.batch_size must be even with Mixup or CutMix, got {self.batch_size}")


@dataclass
class OptimConfig:
    """Optimizer and learning rate.

    Args:
        opt: any timm optimizer.
        lr: at a global batch (processes * batch_size * accumulation) of lr_batch; scaled linearly to the real one.
        lr_batch: null: lr is taken as it is.
        schedule: cosine with warm-up by update, or constant after the warm-up.
        min_lr: at the end of the cosine, not scaled.
        warmup_epochs: linear from warmup_lr.
        warmup_lr: not scaled.
        weight_decay: not on biases, norms, tokens, positions, A and D.
        betas: of AdamW.
        eps: of AdamW.
        clip_grad: norm; null: no clipping.
        layer_decay: factor of the lr from each layer to the one before; null: none.
    """

    opt: str = "adamw"
    lr: float = 1e-3
    lr_batch: int | None = 1024
    schedule: Literal["cosine", "constant"] = "cosine"
    min_lr: float = 1e-5
    warmup_epochs: float = 5
    warmup_lr: float = 1e-6
    weight_decay: float = 0.05
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    clip_grad: float | None = None
    layer_decay: float | None = None

    def __post_init__(self):
        at_least(0, self, "optim", "lr", "min_lr", "warmup_epochs", "warmup_lr", "weight_decay", "eps")
        at_least(1, self, "optim", "lr_batch")
        within(0, 1, self, "optim", "layer_decay")
        if self.clip_grad is not None and not 0 < self.clip_grad < math.inf:
            raise UserError(f"optim.clip_grad must be above 0, or null for no clipping, got {self.clip_grad}")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise UserError(f"optim.betas must be two numbers in [0, 1), got {self.betas}")


@dataclass
class TrainConfig:
    """The loop.

    Args:
        epochs: in all.
        accumulation: batches per optimizer step.
        precision: autocast dtype; fp32: none, and on CUDA matrix products in TF32.
        ema_decay: of the averaged weights, per update; null: no average.
        ema_warmup: let the decay grow from 0 in early updates.
        eval_every: epochs between evaluations; the last epoch is always evaluated.
        save_every_steps: batches between checkpoints within an epoch; null: at the end of each epoch only.
        log_every: batches between log lines; finiteness is checked as often.
        init_from: weights to start from (vim.load_weights).
        init_family: the family of a foreign init_from.
        init_resize_stride: resample positions across patch strides.
        device: auto, cpu, cuda, mps.
        threads: CPU threads of the main process; null: torch's choice. Bit-equal runs need the same number.
        compile: torch.compile the model.
        require_kernels: fail rather than run the selective scan on its plain PyTorch reference.
    """

    epochs: int = 300
    accumulation: int = 1
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    ema_decay: float | None = 0.9999
    ema_warmup: bool = False
    eval_every: int = 1
    save_every_steps: int | None = None
    log_every: int = 50
    init_from: str | None = None
    init_family: str | None = None
    init_resize_stride: bool = False
    device: str = "auto"
    threads: int | None = None
    compile: bool = False
    require_kernels: bool = False

    def __post_init__(self):
        at_least(1, self, "train", "epochs", "accumulation", "eval_every", "log_every", "save_every_steps", "threads")
        within(0, 1, self, "train", "ema_decay")
        if not re.fullmatch(r"auto|[a-z]+(:\d+)?", self.device):
            raise UserError(f"train.device must be auto, cpu, cuda, cuda:1, mps or the like, got {self.device!r}")


@dataclass
class SlwsConfig:
    """Stochastic layer-wise shuffle (arXiv 2408.17081).

    Args:
        rate: probability with which the last layer shuffles; grows linearly from 0 at the first.
    """

    rate: float = 0.0

    def __post_init__(self):
        within(0, 1, self, "slws", "rate")


@dataclass
class DistillConfig:
    """Masked feature distillation: a student that sees part of an image predicts a teacher's features of all of it.

    Args:
        teacher: a timm ViT with its public weights, a folder of a Hugging Face CLIP, or train.py's checkpoint of a ViT.
        teacher_weights: a file of weights for a timm name, instead of the public ones.
        teacher_precision: dtype of the teacher's weights and of its forward pass.
        target: patch tokens as the teacher's last layer gives them, or after its last norm and projection.
        normalize: whiten (layer norm without weights), l2 (unit length), batch (each channel over the batch), none.
        mask: keep patches with probabilities from the teacher's class attention, or all alike (random).
        mask_ratio: share of the patches that the student does not see.
        sort_visible: the patches the student sees in raster order; false: in the order drawn, as published.
        loss: smooth_l1 (beta 1), l1 or l2, mean over channels; or cosine, 2 - 2 cos.
        loss_on: the patches it is averaged over.
        decoder_width: of the ViT blocks that fill in what is masked.
        decoder_depth: their number; 0: one linear layer instead, for loss_on visible.
        decoder_heads: theirs.
        init: xavier in every linear layer with zero biases, but for dt_proj (mamba) or there too (published).
        cache: a folder for the teacher's features, kept from epoch to epoch; needs data.crops.
    """

    teacher: str = "vit_large_patch14_clip_quickgelu_224.openai"
    teacher_weights: str | None = None
    teacher_precision: Literal["fp32", "bf16"] = "fp32"
    target: Literal["tokens", "projected"] = "tokens"
    normalize: Literal["whiten", "l2", "batch", "none"] = "whiten"
    mask: Literal["attention", "random"] = "attention"
    mask_ratio: float = 0.6
    sort_visible: bool = False
    loss: Literal["smooth_l1", "l1", "l2", "cosine"] = "smooth_l1"
    loss_on: Literal["all", "masked", "visible"] = "all"
    decoder_width: int = 512
    decoder_depth: int = 4
    decoder_heads: int = 16
    init: Literal["mamba", "published"] = "mamba"
    cache: str | None = None

    def __post_init__(self):
        within(0, 1, self, "distill", "mask_ratio")
        at_least(1, self, "distill", "decoder_width", "decoder_heads")
        at_least(0, self, "distill", "decoder_depth")
        if self.decoder_width % self.decoder_heads:
            raise UserError(f"distill.decoder_width {self.decoder_width} must divide by decoder_heads")
        if self.decoder_depth == 0 and self.loss_on != "visible":
            raise UserError("distill.decoder_depth 0 predicts visible patches only: set distill.loss_on to visible")


@dataclass
class Config:
    """A run.

    Args:
        out: run directory; the same command again resumes from its last.pt.
        seed: of everything random; with (epoch, position, rank) it fixes every draw.
        task: classify, or distill (masked feature distillation).
    """

    out: str = "runs/run"
    seed: int = 0
    task: Literal["classify", "distill"] = "classify"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    slws: SlwsConfig = field(default_factory=SlwsConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)

    def __post_init__(self):
        within(0, 2**62, self, "", "seed")
        if self.data.val_split is None and self.task == "classify":
            raise UserError("data.val_split is null: only task distill trains without evaluation images")
        channels = self.model.in_chans
        for name, values in (("mean", self.data.mean), ("std", self.data.std)):
            if values is not None and len(values) not in (1, 3, channels):
                raise UserError(f"data.{name} must have 1, 3 or model.in_chans ({channels}) numbers, got {values}")
        if channels == 4 and self.data.auto_augment:
            raise UserError(f"data.auto_augment {self.data.auto_augment!r} cannot treat 4 channels: set it to null")
