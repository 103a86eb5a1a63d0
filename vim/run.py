"""The state of a training run: what changes while training, how it is built, saved and taken up again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .runtime import UserError, World, log
from .schema import Config, OptimConfig


def updates_per_epoch(batches: int, accumulation: int) -> int:
    return math.ceil(batches / accumulation)


def effective_lr(optim: OptimConfig, global_batch: int) -> float:
    """optim.lr scaled linearly from lr_batch to the global batch (processes * batch * accumulation)."""
    return optim.lr * global_batch / optim.lr_batch if optim.lr_batch else optim.lr


def build_optimizer(model: nn.Module, optim: OptimConfig, lr: float) -> torch.optim.Optimizer:
    """timm's optimizer: no decay on biases, norms and what the model's `no_weight_decay` names; layer-wise lr decay."""
    arguments: dict[str, Any] = {}
    if "adam" in optim.opt or optim.opt in ("lion", "lamb"):
        arguments = {"betas": tuple(optim.betas)} | ({"eps": optim.eps} if optim.opt != "lion" else {})
    try:
        return create_optimizer_v2(
            model, optim.opt, lr=lr, weight_decay=optim.weight_decay, layer_decay=optim.layer_decay, **arguments
        )
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        raise UserError(f"optim.opt {optim.opt!r}: {error}") from error


def build_schedule(optimizer, optim: OptimConfig, lr: float, epochs: int, updates: int) -> CosineLRScheduler:
    """Warm-up and cosine by update. The schedule is a function of the update's number, so a resume needs no state."""
    return CosineLRScheduler(
        optimizer,
        t_initial=epochs * updates,
        lr_min=lr if optim.schedule == "constant" else optim.min_lr,
        warmup_t=round(optim.warmup_epochs * updates),
        warmup_lr_init=optim.warmup_lr,
        t_in_epochs=False,
    )


@dataclass
class Run:
    """Everything that changes while training, and nothing else."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: CosineLRScheduler
    world: World
    ema: ModelEmaV3 | None = None
    scaler: torch.amp.GradScaler | None = None
    wrapped: nn.Module | None = None  # what the loss calls: the model, in DDP, compiled
    ddp: DistributedDataParallel | None = None
    epoch: int = 0
    batch: int = 0  # of this epoch, already done
    updates: int = 0
    best: float = -math.inf
    skipped: int = 0  # unreadable images of this epoch
    loss_sum: Tensor = field(init=False)

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and containers, the same on all processes; all must call it together."""
        loss_sum, skipped = self.totals()
        counters = {name: getattr(self, name) for name in ("epoch", "batch", "updates", "best")}
        counters["processes"] = self.world.size
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "run": counters | {"skipped": skipped, "loss_sum": self.loss_sum.new_tensor(loss_sum)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError for the state of a run on another number of processes, whose batches were others."""
        counters = dict(state["run"])
        if (before := counters.pop("processes", self.world.size)) != self.world.size:
            raise UserError(f"the run to resume had {before} process(es), this one has {self.world.size}")
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        for name, value in counters.items():
            setattr(self, name, value)
        self.loss_sum = self.loss_sum.to(self.world.device, self.world.wide)
        if not self.world.main:  # the saved sum and count are over all processes
            self.loss_sum.zero_()
            self.skipped = 0
        self.schedule.step_update(self.updates)

    @property
    def lr(self) -> float:
        """Of the last parameter group, the head's: the one that layer-wise decay leaves alone."""
        return self.optimizer.param_groups[-1]["lr"]

    def begin_epoch(self, epoch: int) -> None:
        self.epoch, self.batch, self.skipped = epoch, 0, 0
        # Wide: sums of fp32 losses are then exact, whichever process holds which part of them after a resume.
        self.loss_sum = torch.zeros((), dtype=self.world.wide, device=self.world.device)

    def step(self, clip: float | None) -> None:
        """One optimizer update, its schedule and its average."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self.schedule.step_update(self.updates)
        if self.ema is not None:
            self.ema.update(self.model, step=self.updates)

    def totals(self) -> tuple[float, int]:
        """(loss sum, skipped images) of the epoch so far over all processes."""
        both = torch.tensor([float(self.loss_sum), self.skipped], dtype=self.world.wide, device=self.world.device)
        loss_sum, skipped = self.world.sum(both).tolist()
        return loss_sum, int(skipped)


def build_run(model: nn.Module, config: Config, world: World, batches: int) -> Run:
    """A run at its beginning, for a model on its device and `batches` per epoch and process."""
    train = config.train
    global_batch = world.size * config.data.batch_size * train.accumulation
    updates = updates_per_epoch(batches, train.accumulation)
    lr = effective_lr(config.optim, global_batch)
    optimizer = build_optimizer(model, config.optim, lr)
    schedule = build_schedule(optimizer, config.optim, lr, train.epochs, updates)
    run = Run(model, optimizer, schedule, world)
    if train.ema_decay:
        run.ema = ModelEmaV3(model, train.ema_decay, use_warmup=train.ema_warmup)
    if train.precision == "fp16":
        run.scaler = torch.amp.GradScaler(world.device.type)
        log.warning("fp16 overflows easily in state-space models and waits for the device in every step; prefer bf16")
    if world.size > 1:
        run.ddp = DistributedDataParallel(model, [world.device] if world.device.type == "cuda" else None)
    run.wrapped = run.ddp or model
    if train.compile:  # outside DDP, so that the compiler cuts the graph where DDP's buckets of gradients end
        run.wrapped = torch.compile(run.wrapped)
    run.begin_epoch(0)
    if config.optim.warmup_epochs >= train.epochs:
        said = "optim.warmup_epochs %g are all of train.epochs %d: the lr never reaches optim.lr"
        log.warning(said, config.optim.warmup_epochs, train.epochs)
    if run.ema and not train.ema_warmup and 1 / (1 - min(train.ema_decay, 1 - 1e-9)) > train.epochs * updates:
        said = "train.ema_decay %g averages over %.0f updates and the run has %d: lower it, or set train.ema_warmup"
        log.warning(said, train.ema_decay, 1 / (1 - min(train.ema_decay, 1 - 1e-9)), train.epochs * updates)
    millions = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    what = f"{model.num_classes} classes" if model.num_classes else config.task
    where = f"{world.device} x {world.size}, {train.precision}"
    log.info("%s: %.2fM parameters, %s, %s", config.model.name, millions, what, where)
    log.info("global batch %d, effective lr %.3g, %d updates per epoch", global_batch, lr, updates)
    return run
