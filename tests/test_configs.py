"""Every configuration parses, builds its model, says where it comes from, and holds its recipe's numbers."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch

from vim import config, tasks
from vim.run import build_schedule, effective_lr

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
CHOSEN = {"vim_base", *(f"shufflemamba_{size}" for size in ("tiny", "small", "middle", "large"))}


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
        model = tasks.build_model(read(name), 10 if "no GPU" in header(name) else 1000)
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

    # All of these rows augment alike.
    data = cfg.data
    assert (data.auto_augment, data.mixup, data.cutmix) == ("rand-m9-mstd0.5-inc1", 0.8, 1.0)
    assert (data.smoothing, data.erase, data.repeats, data.crop_pct) == (0.1, 0.25, 3, 0.875)
    assert (data.scale, data.interpolation, data.hflip) == ([0.08, 1.0], "bicubic", 0.5)
    assert (optim.opt, optim.eps, optim.layer_decay) == ("adamw", 1e-8, None)

    top1 = wanted[-1]
    assert f"Expected top-1: {f'{top1} (published)' if top1 else 'not published'}" in header(name)
    assert ("This project's choice" in header(name)) == (name in CHOSEN or name.endswith("_ft"))


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


def test_schedule_of_the_base_row():
    found = lrs("shufflemamba_base", 4)
    assert found[0] == pytest.approx(5e-7) and found[-1] == pytest.approx(5e-6)
    assert found[60] == pytest.approx((5e-7 + 2e-3) / 2)  # half of the 30 epochs of warm-up
    for epoch in (30, 150, 270):  # the cosine runs over all 300 epochs, the warm-up only hides its beginning
        cosine = 5e-6 + (2e-3 - 5e-6) * (1 + math.cos(math.pi * epoch / 300)) / 2
        assert found[4 * epoch] == pytest.approx(cosine)


@pytest.mark.parametrize("name", RECIPES)
def test_published_numbers_of_slws_come_with_the_published_initialisation(name):
    published = name in ("shufflemamba_small", "shufflemamba_base")
    assert read(name).model.kwargs == ({"init": "published"} if published else {})
