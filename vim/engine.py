"""The training loop and the evaluation. Knows no model and no task: it is handed a callable that returns the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .run import Run
from .runtime import NonFinite, UserError, World, derive_seed, seed_everything
from .schema import Config, TrainConfig

NO_IMAGES = "the evaluation set holds no readable image"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device):
    return torch.autocast(device.type, DTYPES[precision]) if precision in DTYPES else nullcontext()


class Watch:
    """Finds non-finite losses on the device and stops all processes at the same batch, without a wait per step."""

    def __init__(self, run: Run):
        self.run = run
        self.never = torch.iinfo(torch.int64).max
        self.first = torch.full((), self.never, dtype=torch.int64, device=run.world.device)

    def see(self, loss: Tensor, batch: int) -> None:
        self.first = torch.where(torch.isfinite(loss) | (self.first < self.never), self.first, batch)

    def check(self, weights: bool = False) -> None:
        """Raises NonFinite on every process, naming the first bad step anywhere. Called at the same batch by all."""
        run = self.run
        first = int(run.world.min(self.first.clone()))
        where = f"epoch {run.epoch + 1}"
        if first < self.never:
            raise NonFinite(f"the loss is not finite at {where}, step {first + 1}; last checkpoint untouched")
        if weights:
            norms = torch.stack(torch._foreach_norm([p.detach().float() for p in run.model.parameters()]))
            if not int(run.world.min(norms.isfinite().all().long())):
                raise NonFinite(f"a weight is not finite at {where}, step {run.batch}; last checkpoint untouched")


def train_epoch(
    run: Run,
    loss_of: Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]],
    loader,
    config: Config,
    on_log: Callable[[float], None],
    on_save: Callable[[], None],
) -> None:
    """The rest of the run's current epoch. `loader` starts at batch run.batch.

    `loss_of` gets the model, images on its device, and targets where the loader left them: on the CPU, for a cache's
    row numbers are needed there and to fetch them from the device would wait for it at every step.
    `on_log(loss)` is called every train.log_every batches with this process's last loss, `on_save()` where
    train.save_every_steps says so, after an optimizer step and on all processes at the same batch.
    """
    train: TrainConfig = config.train
    batches = len(loader)
    watch = Watch(run)
    run.model.train()
    save_due = False
    for images, targets, skipped in loader:
        batch, rank = run.batch, run.world.rank
        seed_everything(derive_seed(config.seed, run.epoch, batch, rank))
        images = images.to(run.world.device, non_blocking=True)
        first_of_step = batch - batch % train.accumulation
        step_size = min(train.accumulation, batches - first_of_step)
        last = batch + 1 == first_of_step + step_size
        with run.ddp.no_sync() if run.ddp and not last else nullcontext():
            with autocast(train.precision, run.world.device):
                loss = loss_of(run.wrapped, images, targets)["loss"]
            part = loss / step_size
            (part if run.scaler is None else run.scaler.scale(part)).backward()
        run.loss_sum += loss.detach()
        run.skipped += skipped
        watch.see(loss.detach(), batch)
        if last:
            run.step(config.optim.clip_grad)
        run.batch += 1
        if run.batch % train.log_every == 0 or run.batch == batches:
            watch.check()
            on_log(float(loss.detach()))
        save_due = save_due or bool(train.save_every_steps and run.batch % train.save_every_steps == 0)
        if save_due and last and run.batch < batches:
            watch.check(weights=True)
            on_save()
            save_due = False
    watch.check(weights=True)


def score(
    run: Run, evaluate: Callable[[nn.Module], dict[str, Any]], metric: str, sign: int
) -> tuple[dict[str, Any], float, nn.Module, str]:
    """Scores of the raw and, prefixed `ema_`, the averaged weights; the greater sign * metric, its model and kind."""
    run.world.share_buffers(run.model)
    row = evaluate(run.model)
    result = sign * row[metric]
    if run.ema is None:
        return row, result, run.model, "raw"
    run.world.share_buffers(run.ema.module)
    averaged = evaluate(run.ema.module)
    row |= {f"ema_{name}": value for name, value in averaged.items() if name not in ("images", "skipped")}
    if sign * averaged[metric] >= result:
        return row, sign * averaged[metric], run.ema.module, "ema"
    return row, result, run.model, "raw"


@torch.inference_mode()
def average(
    model: nn.Module, score: Callable[[Tensor], tuple[Tensor, ...]], names: tuple[str, ...], loader, world: World
) -> dict[str, Any]:
    """Means over all images of all processes of what `score(images)` returns, one (b,) per name; images, skipped."""
    model.eval()
    totals = torch.zeros(2 + len(names), dtype=world.wide, device=world.device)  # images, skipped, the sums
    for images, _, skipped in loader:
        totals[1] += skipped
        if len(images):
            totals[0] += len(images)
            scores = score(images.to(world.device, non_blocking=True))
            totals[2:] += torch.stack([s.to(world.wide).sum() for s in scores])
    images, skipped, *sums = world.sum(totals).tolist()
    if not images:
        raise UserError(NO_IMAGES)
    means = {name: value / images for name, value in zip(names, sums, strict=True)}
    return means | {"images": int(images), "skipped": int(skipped)}


@torch.inference_mode()
def evaluate(model: nn.Module, loader, world: World, precision: str, confusion: bool = False) -> dict[str, Any]:
    """Exact scores over all processes: top1 and top5 in percent, mean cross entropy, images, skipped.

    With `confusion` also the counts (class, prediction) as an int64 tensor.
    """
    model.eval()
    counts = torch.zeros(4, dtype=torch.int64, device=world.device)  # images, top1, top5, skipped
    loss_sum = torch.zeros((), dtype=world.wide, device=world.device)
    table = None
    for images, targets, skipped in loader:
        counts[3] += skipped
        if not len(images):
            continue
        images, targets = images.to(world.device, non_blocking=True), targets.to(world.device, non_blocking=True)
        with autocast(precision, world.device):
            logits = model(images).float()
        loss_sum += F.cross_entropy(logits, targets, reduction="sum")
        classes = logits.shape[1]
        ranked = logits.topk(min(5, classes)).indices  # serves the confusion too: argmax breaks ties otherwise
        top = ranked == targets[:, None]
        counts[:3] += torch.stack([torch.full_like(counts[0], len(targets)), top[:, 0].sum(), top.sum()])
        if confusion:
            pairs = torch.bincount(targets * classes + ranked[:, 0], minlength=classes**2)
            table = pairs if table is None else table + pairs
    world.sum(counts)
    world.sum(loss_sum)
    images = int(counts[0])
    if not images:
        raise UserError(NO_IMAGES)
    scores = {
        "top1": 100 * int(counts[1]) / images,
        "top5": 100 * int(counts[2]) / images,
        "loss": float(loss_sum) / images,
        "images": images,
        "skipped": int(counts[3]),
    }
    if confusion:
        table = _all_tables(table, model, world)
        side = math.isqrt(table.numel())
        scores["confusion"] = table.view(side, side).cpu()
    return scores


def _all_tables(table: Tensor | None, model: nn.Module, world: World) -> Tensor:
    """The sum of every process's counts; one that saw no image brings zeros."""
    if table is None:
        table = torch.zeros(model.num_classes**2, dtype=torch.int64, device=world.device)
    return world.sum(table)
