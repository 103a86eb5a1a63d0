"""Evaluate a checkpoint: python eval.py --checkpoint FILE [--data.root DIR] [--group.key VALUE ...]

Everything else comes from the configuration inside the file. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys

from vim import checkpoint, config, convert, data, engine, factory, plots, runtime, tasks
from vim.runtime import UserError, log


def main(argv: list[str] | None = None) -> None:
    about = {"description": __doc__, "epilog": "All keys of train.py --help too."}
    options = argparse.ArgumentParser(prog="eval.py", allow_abbrev=False, **about)
    options.add_argument("--checkpoint", metavar="FILE", help="last.pt, best.pt, an export, or published weights")
    options.add_argument("--weights", choices=("ema", "raw"), default="ema", help="where the file has both")
    options.add_argument("--family", help="family of published weights, e.g. vim; with --model.name")
    options.add_argument("--per_class", metavar="FILE", help="write a table of images and accuracy per class (CSV)")
    options.add_argument("--confusion", metavar="FILE", help="write a confusion plot (PNG; needs matplotlib)")
    args, overrides = options.parse_known_args(argv)
    if not args.checkpoint:
        raise UserError("--checkpoint FILE is missing")
    for target in filter(None, (args.per_class, args.confusion)):
        checkpoint.check_target(target)

    # The file says how it was trained; the command line may say otherwise.
    meta, trained = checkpoint.read_config(args.checkpoint)
    cfg = config.load(trained, overrides, "eval.py")
    if cfg.task != "classify" or meta.get("num_classes") == 0:
        raise UserError(f"{args.checkpoint} is of task distill, without a head: fine-tune it with train.init_from")
    classes = meta.get("classes")
    found = data.check_sources(cfg, evaluation=True)
    if classes is None:
        classes = tasks.resolve_classes(cfg, found)

    world = runtime.start(cfg.train.device, cfg.train.threads)
    runtime.setup_log(world.main)
    tasks.check_kernels(cfg, world)
    model = factory.build_model(cfg, len(classes))
    report = convert.load_weights(model, args.checkpoint, args.family, args.weights == "ema")
    if report.dropped:
        raise UserError(f"{args.checkpoint} does not fit the model's head: {', '.join(report.dropped)}")
    log.info("%s", report)
    model.to(world.device)
    loaders = data.build(cfg, world, factory.input_size(cfg, model), model.pretrained_cfg, classes, evaluation=True)
    wanted = bool(args.per_class or args.confusion)
    scores = engine.evaluate(model, loaders.val, world, cfg.train.precision, confusion=wanted)
    table = scores.pop("confusion", None)
    if world.main:
        if args.per_class:
            plots.per_class(table, classes, args.per_class)
        if args.confusion and plots.confusion(table, classes, args.confusion) is None:
            log.info("no confusion plot: matplotlib is not installed (pip install 'slws-vim[plot]')")
        sys.stdout.write(json.dumps({"checkpoint": args.checkpoint, **scores}) + "\n")


if __name__ == "__main__":
    with runtime.exit_codes("eval.py"):
        main(sys.argv[1:])
