"""Train a model: python train.py --config FILE [--config FILE2] [--group.key VALUE ...]

`--help` lists every key. The same command again resumes from the run directory's last.pt.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from vim import checkpoint, config, convert, data, engine, factory, runtime, tasks
from vim.record import Progress, Record
from vim.run import Run, build_run
from vim.runtime import UserError, log
from vim.schema import Config


def main(argv: list[str] | None = None) -> None:
    # Parse, and refuse what cannot work before anything is built or read.
    cfg = config.parse(argv, "train.py")
    out = Path(cfg.out)
    tasks.check(cfg)
    classes = data.check_sources(cfg)
    saved = checkpoint.read_run(out / "last.pt") if (out / "last.pt").exists() else None
    if saved is not None:
        config.check_resumable(cfg, saved["config"], out)

    # Join the other processes, take a device, start the log.
    world = runtime.start(cfg.train.device, cfg.train.threads)
    runtime.setup_log(world.main)
    if not world.agree(saved is not None):
        raise UserError(f"{out / 'last.pt'} is seen by some processes only: all must share the run directory")
    tasks.check_kernels(cfg, world)
    runtime.seed_everything(runtime.derive_seed(cfg.seed))

    # Build: the model with a head for the data's classes, the loaders, the task around it, the run.
    classes = tasks.resolve_classes(cfg, classes)
    model = factory.build_model(cfg, len(classes))
    loaders = data.build(cfg, world, factory.input_size(cfg, model), model.pretrained_cfg, classes)
    task = tasks.build_task(cfg, model, loaders, world)
    if cfg.train.init_from and saved is None:
        stride = cfg.train.init_resize_stride
        log.info("%s", convert.load_weights(model, cfg.train.init_from, cfg.train.init_family, resize_stride=stride))
    meta = factory.describe(model, cfg, classes)
    run = build_run(task.model.to(world.device), cfg, world, len(loaders.train))

    # Resume where the last checkpoint left off, or start the run directory.
    if saved is not None:
        run.load_state_dict(saved)
        if run.epoch < cfg.train.epochs:
            log.info("resuming %s: %d epochs and %d batches are done", out, run.epoch, run.batch)
    elif world.main:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.yaml").write_text(config.dump(cfg))
    del saved  # weights, average and optimizer once more, in the memory of every process
    if run.epoch >= cfg.train.epochs:
        log.info("%s is finished: %s; nothing to do", out, task.summary(run.best))
        return
    about = {"format": checkpoint.FORMAT, "meta": meta, "config": asdict(cfg)}
    train(cfg, out, run, loaders, task, about)
    log.info("finished: %s; checkpoints, metrics.jsonl and figures are in %s", task.summary(run.best), out)


def train(cfg: Config, out: Path, run: Run, loaders: data.Data, task: tasks.Task, about: dict) -> None:
    """The rest of the run, from run.epoch and run.batch on. `about` is what every checkpoint says of itself."""
    record = Record(out, run.world.main, run.epoch)

    def save(name: str, state: dict) -> None:
        if run.world.main:
            checkpoint.save(about | state, out / name)

    for epoch in range(run.epoch, cfg.train.epochs):
        # Train for one epoch, or for the rest of the one that was interrupted.
        progress = Progress(run, cfg, len(loaders.train))
        loader = loaders.start_epoch(epoch, run.batch)
        engine.train_epoch(run, task, loader, cfg, progress.show, lambda: save("last.pt", run.state_dict()))
        progress.close()
        loss_sum, skipped = run.totals()
        row = {"epoch": epoch + 1, "updates": run.updates, "lr": run.lr}
        row |= {"train_loss": loss_sum / (len(loaders.train) * run.world.size), "train_skipped": skipped}

        # Evaluate the raw and the averaged weights; keep the better ones where they are the best so far.
        due = (epoch + 1) % cfg.train.eval_every == 0 or epoch + 1 == cfg.train.epochs
        if due and loaders.val is not None:
            evaluate = partial(task.evaluate, loader=loaders.val)
            scores, result, weights, kind = engine.score(run, evaluate, task.metric, task.sign)
            row |= scores
            if result > run.best:
                run.best = result
                meta = about["meta"] | {"weights": kind}
                save("best.pt", {"meta": meta, "metrics": row, "model": weights.state_dict()})

        # Record, then save: a kill between the two repeats this epoch and replaces its rows.
        record.epoch(row, progress.speed())
        run.begin_epoch(epoch + 1)
        save("last.pt", run.state_dict())
        if run.world.main:
            task.draw(out)
    record.close()


if __name__ == "__main__":
    with runtime.exit_codes("train.py"):
        main(sys.argv[1:])
