"""What a run leaves behind beside its checkpoints: metrics.jsonl, speed.jsonl, TensorBoard files, curves.png.

metrics.jsonl holds nothing that depends on the clock, so a resumed run's file equals the unbroken run's byte for byte;
how fast each epoch was goes to speed.jsonl.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .run import Run
from .runtime import log, peak_memory
from .schema import Config

SHOWN = ("lr", "train_loss", "top1", "ema_top1", "loss", "ema_loss", "cosine", "ema_cosine")


class Record:
    """Writes on the main process only; every method is harmless on the others."""

    def __init__(self, out: str | Path, main: bool, epochs_done: int):
        self.out, self.main, self.board = Path(out), main, None
        if not main:
            return
        for name in ("metrics.jsonl", "speed.jsonl"):
            self._keep(self.out / name, epochs_done)
        with suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.out), purge_step=epochs_done + 1)

    @staticmethod
    def _keep(path: Path, epochs: int) -> None:
        """Drop what a killed run wrote after its last checkpoint, a half-written line included."""
        if not path.exists():
            return
        kept = []
        for line in path.read_text().splitlines():
            with suppress(ValueError, TypeError, KeyError):
                if json.loads(line)["epoch"] <= epochs:
                    kept.append(line + "\n")
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept))
        temporary.replace(path)

    def epoch(self, metrics: dict[str, Any], speed: dict[str, Any]) -> None:
        """One line of each file, one of the log, and TensorBoard's scalars, for the epoch `metrics` names."""
        if not self.main:
            return
        number = metrics["epoch"]
        for name, row in (("metrics", metrics), ("speed", {"epoch": number, **speed})):
            with open(self.out / f"{name}.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            if self.board is not None:
                for key in row.keys() - {"epoch"}:
                    self.board.add_scalar(f"{name}/{key}", row[key], number)
        if self.board is not None:
            self.board.flush()
        shown = (f"{k} {v:.4g}" for k, v in metrics.items() if k in SHOWN)
        log.info("epoch %d done: %s, %.0f images/s", number, ", ".join(shown), speed["images_per_second"])

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


class Progress:
    """A tqdm bar with images/s and time left where stderr is a terminal, plain lines otherwise."""

    def __init__(self, run: Run, config: Config, batches: int):
        self.run, self.epochs, self.batches = run, config.train.epochs, batches
        self.images = run.world.size * config.data.batch_size
        self.first, self.start = run.batch, time.perf_counter()
        self.bar = None
        if run.world.main and sys.stderr.isatty():
            name = f"epoch {run.epoch + 1}/{self.epochs}"
            self.bar = tqdm(total=batches, initial=run.batch, desc=name, leave=False)

    def speed(self) -> dict[str, float]:
        """Seconds and images per second of this epoch's training so far, and the run's peak of memory in GB."""
        seconds = max(time.perf_counter() - self.start, 1e-9)
        rate = (self.run.batch - self.first) * self.images / seconds
        peak = peak_memory(self.run.world.device)
        row = {"seconds": round(seconds, 3), "images_per_second": round(rate, 2)}
        return row if peak is None else row | {"peak_memory_gb": round(peak / 1e9, 3)}

    def show(self, loss: float) -> None:
        run, rate = self.run, self.speed()["images_per_second"]
        left = ((self.epochs - run.epoch) * self.batches - run.batch) * self.images / max(rate, 1e-9)
        text = f"loss {loss:.4f}, lr {run.lr:.2e}, {rate:.0f} images/s, {timedelta(seconds=round(left))} left"
        if self.bar is not None:
            self.bar.update(run.batch - self.bar.n)
            self.bar.set_postfix_str(text)
        elif run.world.main:
            log.info("epoch %d/%d, batch %d/%d: %s", run.epoch + 1, self.epochs, run.batch, self.batches, text)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
