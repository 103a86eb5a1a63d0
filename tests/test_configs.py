"""Every configuration parses, builds its model, says where it comes from, and holds its recipe's numbers."""

import dataclasses
import functools
import math
import re
from pathlib import Path

import pytest
import torch

from vim import checkpoint, config, factory, tasks
from vim.run import build_schedule, effective_lr
from vim.schema import DistillConfig

FOLDER = Path(__file__).parents[1] / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

# The published recipes, written down from their sources and not from the files: images per update and the lr at it,
# lr at the end, warm-up (epochs, from), decay, betas, clip, drop path, SLWS rate, EMA, precision, epochs, top-1.
# Drop path and rate of shufflemamba tiny, small, middle and large, and all of vim_base, are this project's choices.
D, M = [0.9, 0.999], [0.9, 0.95]
RECIPES = {
    "vim_tiny": (1024, 1e-3, 1e-5, (5, 1e-6), 0.1, D, None, 0.0, 0.0, 0.99996, "fp32", 300, "76.1"),
    "vim_small": (512, 1e-3, 1e-5, (5, 1e-6), 0.05, D, None, 0.05, 0.0, 0.99996, "fp32", 300, "80.5"),
    "vim_base": (512, 1e-3, 1e-5, (5, 1e-6), 0.05, D, None, 0.3, 0.0, 0.99996, "fp32", 300, "81.9"),
    "vim_tiny_stride8_ft": (1024, 1e-5, 1e-5, (5, 1e-5), 1e-8, D, None, 0.0, 0.0, 0.99996, "fp32", 30, "78.3"),
    "vim_small_stride8_ft": (1024, 1e-5, 1e-5, (5, 1e-5), 1e-8, D, None, 0.0, 0.0, 0.99996, "fp32", 30, "81.6"),
    "shufflemamba_tiny": (2048, 2e-3, 5e-6, (30, 5e-7), 0.1, M, 3.0, 0.1, 0.1, 0.9999, "bf16", 300, None),
    "shufflemamba_small": (2048, 2e-3, 5e-6, (30, 5e-7), 0.1, M, 3.0, 0.15, 0.15, 0.9999, "bf16", 300, "81.2"),
    "shufflemamba_middle": (2048, 2e-3, 5e-6, (30, 5e-7), 0.1, M, 3.0, 0.4, 0.4, 0.9999, "bf16", 300, None),
    "shufflemamba_base": (2048, 2e-3, 5e-6, (30, 5e-7), 0.1, M, 3.0, 0.5, 0.5, 0.9999, "bf16", 300, "82.6"),
    "shufflemamba_large": (2048, 2e-3, 5e-6, (30, 5e-7), 0.1, M, 3.0, 0.5, 0.5, 0.9999, "bf16", 300, None),
}
# The register recipe in three stages. Published for base: all but the first lr of the warm-up, the EMA of stages 2, 3
# and what of the augmentation its row leaves open; drop path of small and large is this project's choice.
for _size, _drop, _top1 in (
    ("small", (0.05, 0.15, 0.15), None),
    ("base", (0.1, 0.4, 0.4), "83.1"),
    ("large", (0.15, 0.5, 0.5), "83.6"),
):
    for _stage, (_images, _lr, _decay, _epochs) in enumerate(
        ((1024, 1e-3, 0.05, 300), (1024, 4e-4, 0.05, 100), (512, 1e-5, 0.1, 20)), start=1
    ):
        _numbers = (_images, _lr, 1e-5, (5, 1e-6), _decay, D, None, _drop[_stage - 1], 0.1, 0.99996, "bf16", _epochs)
        RECIPES[f"mambareg_{_size}_stage{_stage}"] = (*_numbers, _top1 if _stage == 3 else None)
# Masked feature distillation and the fine-tuning after it: the first lr of the warm-up is this project's choice.
for _size, _rate, _epochs, _images, _lr, _drop, _top1 in (
    ("base", 0.4, 60, 1024, 1.2e-3, 0.1, None),
    ("large", 0.5, 50, 512, 6e-4, 0.3, None),
    ("huge", 0.6, 50, 512, 6e-4, 0.3, "87.6"),
):
    RECIPES[f"mfd_{_size}"] = (1024, 6e-4, 0.0, (30, 1e-6), 0.05, M, 3.0, 0.2, _rate, None, "bf16", 300, None)
    _numbers = (_images, _lr, 1e-6, (5, 1e-6), 0.05, D, None, _drop, 0.0, 0.9999, "bf16", _epochs)
    RECIPES[f"mfd_{_size}_ft"] = (*_numbers, _top1)
CHOSEN = {"vim_base", *(f"shufflemamba_{size}" for size in ("tiny", "small", "middle", "large"))}

# auto_augment, colour jitter, label smoothing, random erasing, copies of an image, evaluation crop.
AUGMENT = {
    "vim": ("rand-m9-mstd0.5-inc1", 0, 0.1, 0.25, 3, 0.875),
    "stage1": ("3a", 0.3, 0.0, 0.0, 3, 0.875),
    "stage2": ("3a", 0.3, 0.0, 0.0, 3, 0.875),
    "stage3": ("rand-m9-mstd0.5-inc1", 0, 0.1, 0.0, 1, 1.0),
}
AUGMENT["mfd"] = (*AUGMENT["vim"][:4], 1, 0.875)
LAYER_DECAY = {"mfd_base_ft": 0.65, "mfd_large_ft": 0.75, "mfd_huge_ft": 0.75}


def header(name):
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


@functools.cache
def read(name):
    """The configuration as the file's own command reads it, from several files where it names several."""
    files = re.findall(r"--config configs/(\w+)\.yaml", header(name)) or [name]
    assert files[-1] == name
    return config.parse([word for file in files for word in ("--config", str(FOLDER / f"{file}.yaml"))])


def gpus(name):
    """The GPUs that the header's account "GPUs x batch x accumulation = images" assumes, the product checked."""
    cfg, numbers = read(name), re.search(r"(\d+) x (\d+) x (\d+) = (\d+) images per update", header(name))
    assert numbers, f"{name}: no line like '8 x 128 x 1 = 1024 images per update'"
    count, batch, accumulation, total = map(int, numbers.groups())
    assert (batch, accumulation) == (cfg.data.batch_size, cfg.train.accumulation)
    assert count * batch * accumulation == total
    return count


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_is_complete_and_says_where_it_comes_from(name):
    cfg, head = read(name), header(name)
    for line in ("# Source: ", "Expected top-1: ", "# Command: ", "Assumes: "):
        assert line in head, line
    assert re.search(
        r"Expected top-1: (not published|(at least|above) \d+ %|\d\d\.\d \(published\)|docs/results)", head
    )
    assert f"--config configs/{name}.yaml" in head or re.search(r"# Command: make \w+", head)
    if match := re.search(r"--nproc_per_node (\d+)", head):
        assert int(match[1]) == gpus(name)
    else:
        assert "no GPU" in head
    assert cfg.out == f"runs/{name}"
    assert cfg.data.root is None or not Path(cfg.data.root).is_absolute()


@pytest.mark.parametrize("name", NAMES)
def test_model_builds(name):
    with torch.device("meta"):
        classes = 10 if "no GPU" in header(name) else 1000
        model = factory.build_model(read(name), 0 if read(name).task == "distill" else classes)
    stated = re.search(r"([\d.]+)M(?:-| )parameter", header(name))
    if stated:  # as exact as it is written
        digits = len(stated[1].partition(".")[2])
        assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.{digits}f}" == stated[1]
    else:
        assert name.endswith("_ft")


@pytest.mark.parametrize("name", RECIPES)
def test_numbers_of_the_recipe(name):
    cfg, wanted = read(name), RECIPES[name]
    images = gpus(name) * cfg.data.batch_size * cfg.train.accumulation
    optim = cfg.optim
    warmup = (optim.warmup_epochs, optim.warmup_lr)
    found = (images, effective_lr(optim, images), optim.min_lr, warmup, optim.weight_decay, optim.betas)
    found += (optim.clip_grad, cfg.model.drop_path, cfg.slws.rate, cfg.train.ema_decay, cfg.train.precision)
    assert (*found, cfg.train.epochs) == wanted[:-1]

    assert (optim.opt, optim.eps, optim.layer_decay) == ("adamw", 1e-8, LAYER_DECAY.get(name))
    _check_augmentation(name, cfg)
    top1 = wanted[-1]
    assert f"Expected top-1: {f'{top1} (published)' if top1 else 'not published'}" in header(name)
    assert ("This project's choice" in header(name)) == (
        name in CHOSEN or name.endswith("_ft") or name.startswith(("mambareg", "mfd"))
    )


def _check_augmentation(name, cfg):
    data = cfg.data
    if cfg.task == "distill":
        off = (data.auto_augment, data.color_jitter, data.erase, data.mixup, data.cutmix)
        assert off == (None, 0, 0, 0, 0)
        assert (data.scale, data.interpolation, data.hflip, data.repeats) == ([0.2, 1.0], "bicubic", 0.5, 1)
        return
    augment = (data.auto_augment, data.color_jitter, data.smoothing, data.erase, data.repeats, data.crop_pct)
    wanted = AUGMENT["mfd"] if name.startswith("mfd") else AUGMENT.get(name.rsplit("_", 1)[1], AUGMENT["vim"])
    assert augment == wanted
    assert (data.mixup, data.cutmix) == (0.8, 1.0)
    assert (data.scale, data.interpolation, data.hflip) == ([0.08, 1.0], "bicubic", 0.5)


def lrs(name, updates):
    """The lr at every update of a run with so many updates per epoch, from the run's own schedule."""
    cfg = read(name)
    lr = effective_lr(cfg.optim, gpus(name) * cfg.data.batch_size * cfg.train.accumulation)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = build_schedule(optimizer, cfg.optim, lr, cfg.train.epochs, updates)
    found = []
    for update in range(cfg.train.epochs * updates + 1):
        schedule.step_update(update)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_fine_tuning_is_flat_and_starts_from_the_pretraining(size):
    assert lrs(f"vim_{size}_stride8_ft", 4) == pytest.approx([1e-5] * 121, rel=1e-12)
    train = read(f"vim_{size}_stride8_ft").train
    assert train.init_from == f"{read(f'vim_{size}').out}/best.pt" and train.init_resize_stride


@pytest.mark.parametrize("size", ["small", "base", "large"])
def test_each_stage_of_the_register_recipe_starts_from_the_one_before(size):
    stages = [read(f"mambareg_{size}_stage{number}") for number in (1, 2, 3)]
    assert [cfg.train.init_from for cfg in stages] == [None, *(f"{cfg.out}/best.pt" for cfg in stages[:2])]
    assert [cfg.model.img_size for cfg in stages] == [128, 224, 224]
    assert {cfg.model.name for cfg in stages} == {f"mambareg_{size}_patch16_224"}
    assert not any(cfg.train.init_family or cfg.train.init_resize_stride or cfg.model.kwargs for cfg in stages)


def test_three_stages_on_a_few_images(tree, run_train, tmp_path):
    """The base row's own files, with a model, images and a length for a test: 128 px become 32, 224 become 56."""
    kwargs = "{embed_dim: 16, depth: 2, num_registers: 3, register_reduce: 2, patch_size: 8}"
    small = ["--data.root", tree, "--data.batch_size", "4", "--data.workers", "0", "--train.epochs", "1"]
    small += ["--train.accumulation", "1", "--optim.warmup_epochs", "0", "--model.kwargs", kwargs]
    small += ["--train.device", "cpu", "--train.precision", "fp32"]
    before, grids = None, []
    for stage, size in ((1, 32), (2, 56), (3, 56)):
        cfg = read(f"mambareg_base_stage{stage}")
        out = tmp_path / cfg.out
        start = ["--train.init_from", tmp_path / cfg.train.init_from] if before else []
        file = FOLDER / f"mambareg_base_stage{stage}.yaml"
        done = run_train("--config", file, *small, "--model.img_size", size, "--out", out, *start)
        assert (done.code, done.err) == (0, ""), done.err
        assert ("adapted: pos_embed 4x4 -> 7x7" in done.out) == (stage == 2)
        found = checkpoint.read_weights(out / "best.pt")[0]
        grids.append(found["pos_embed"].shape[1] - 3)
        if before:  # an lr of 4e-4 or less moves no weight far in one epoch of 7 updates; a fresh start would be far
            moved = max((found[k] - before[k]).abs().max() for k in found if k.endswith("in_proj.weight"))
            assert 0 < moved < 0.005
        before = found
    assert grids == [16, 49, 49]


def test_schedule_of_the_base_row():
    found = lrs("shufflemamba_base", 4)
    assert found[0] == pytest.approx(5e-7) and found[-1] == pytest.approx(5e-6)
    assert found[60] == pytest.approx((5e-7 + 2e-3) / 2)  # half of the 30 epochs of warm-up
    for epoch in (30, 150, 270):  # the cosine runs over all 300 epochs, the warm-up only hides its beginning
        cosine = 5e-6 + (2e-3 - 5e-6) * (1 + math.cos(math.pi * epoch / 300)) / 2
        assert found[4 * epoch] == pytest.approx(cosine)


@pytest.mark.parametrize("name", RECIPES)
def test_published_numbers_of_slws_come_with_the_published_initialisation(name):
    cfg = read(name)
    if cfg.task == "distill":
        assert (cfg.distill.init, cfg.model.kwargs) == ("published", {"directions": 2, "merge": "sum"})
    else:
        published = name in ("shufflemamba_small", "shufflemamba_base")
        assert cfg.model.kwargs == ({"init": "published"} if published else {})


@pytest.mark.parametrize("size", ["base", "large", "huge"])
def test_masked_distillation_is_as_published(size):
    pretraining, tuning = read(f"mfd_{size}"), read(f"mfd_{size}_ft")
    wanted = DistillConfig(teacher_precision="bf16", init="published")
    assert pretraining.distill == wanted and wanted.teacher == "vit_large_patch14_clip_quickgelu_224.openai"
    assert (wanted.normalize, wanted.mask, wanted.mask_ratio, wanted.sort_visible) == (
        "whiten",
        "attention",
        0.6,
        False,
    )
    assert (wanted.target, wanted.loss, wanted.loss_on) == ("tokens", "smooth_l1", "all")
    assert (wanted.decoder_width, wanted.decoder_depth, wanted.decoder_heads) == (512, 4, 16)
    assert tuning.train.init_from == f"{pretraining.out}/last.pt" and tuning.model.head_std == 2e-5
    assert pretraining.model.name == tuning.model.name == f"mambamlp_{size}_patch16_224"
    tasks.check(pretraining)


def test_similar_methods_differ_from_the_base_row_in_what_they_name():
    base = read("mfd_base")
    wanted = {
        "milan": {"target": "projected", "normalize": "l2", "mask_ratio": 0.75, "loss": "cosine"},
        "maskdistill": {"mask": "random", "loss_on": "masked"},
        "umt": {
            "normalize": "l2",
            "mask_ratio": 0.8,
            "sort_visible": True,
            "loss": "cosine",
            "loss_on": "visible",
            "decoder_depth": 0,
        },
    }
    for name, changes in wanted.items():
        cfg = read(f"mfd_{name}")
        changes = {**changes, "teacher": "vit_base_patch16_clip_quickgelu_224.openai"}
        assert cfg.distill == dataclasses.replace(base.distill, **changes), name
        assert dataclasses.replace(cfg, out=base.out, distill=base.distill) == base
        tasks.check(cfg)
