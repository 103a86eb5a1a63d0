"""Fine-tuning published weights at another size, shape, number of channels and of classes: by configuration alone."""

import numpy as np
import pytest
import torch
from PIL import Image

import vim
from vim import checkpoint, convert
from vim.zoo import VARIANTS

SMALL = {"embed_dim": 16, "depth": 1, "d_state": 4}
CASES = {
    "384 px": ("vim_tiny_patch16_224", "[384, 384]", (24, 24)),
    "192 x 320": ("vim_tiny_patch16_224", "[192, 320]", (12, 20)),
    "registers": ("mambareg_tiny_patch16_224", "[192, 320]", (12, 20)),
    "four directions": ("mambamlp_base_patch16_224", "[192, 320]", (12, 20)),
}


def published(name, path, **kwargs):
    """A converted checkpoint of 1000 classes at 224 px; its native weights."""
    family, arguments = VARIANTS[name]
    torch.manual_seed(1)
    model = vim.VisionMamba(**{**arguments, **kwargs})
    torch.save({"model": vim.convert_state_dict(model.state_dict(), family, to="official")}, path.with_suffix(".pth"))
    convert.main([str(path.with_suffix(".pth")), "--family", family, "--out", str(path)])
    return model.state_dict()


@pytest.fixture(scope="module")
def rgba(tmp_path_factory):
    """Seven classes of 4-channel images, one each to train on and to evaluate on."""
    root = tmp_path_factory.mktemp("rgba")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in "abcdefg":
            (root / split / name).mkdir(parents=True)
            pixels = rng.integers(0, 256, (40, 60, 4)).astype(np.uint8)
            Image.fromarray(pixels, "RGBA").save(root / split / name / "0.png")
    return root


def yaml_of(path, name, size, weights, root, out, kwargs=SMALL):
    path.write_text(
        f"""
out: {out}
model: {{name: {name}, img_size: {size}, in_chans: 4, kwargs: {kwargs}}}
data: {{root: {root}, batch_size: 2, workers: 0, auto_augment: null, mean: [0.5], std: [0.25]}}
optim: {{lr: 1.0e-5, lr_batch: null, warmup_epochs: 0}}
train: {{epochs: 1, precision: fp32, ema_decay: null, init_from: {weights}, device: cpu}}
"""
    )
    return path


@pytest.mark.parametrize("case", CASES)
def test_by_configuration_alone(case, rgba, tmp_path, run_train, run_eval):
    name, size, grid = CASES[case]
    before = published(name, tmp_path / "ours.safetensors", **SMALL)
    file = yaml_of(tmp_path / "c.yaml", name, size, tmp_path / "ours.safetensors", rgba, tmp_path / "run")
    done = run_train("--config", file)
    assert (done.code, done.err) == (0, ""), done.err
    assert f"adapted: pos_embed 14x14 -> {grid[0]}x{grid[1]}, patch_embed.proj 3 -> 4 channels" in done.out
    assert "dropped: head.weight (1000 classes, the model has 7), head.bias (1000" in done.out
    after, meta = checkpoint.read_weights(tmp_path / "run" / "best.pt")
    prefix = 12 if "mambareg" in name else 1
    assert meta["grid"] == list(grid) and after["pos_embed"].shape == (1, prefix + grid[0] * grid[1], 16)
    assert after["patch_embed.proj.weight"].shape == (16, 4, 16, 16) and len(after["head.bias"]) == 7
    # It started there: three steps at this lr move no weight of the mixers by more than about 3e-5.
    for key in (key for key in after if ".mixer." in key):
        torch.testing.assert_close(after[key], before[key], rtol=0, atol=1e-4)
    assert any(not torch.equal(after[key], before[key]) for key in after if ".mixer." in key)
    done = run_eval("--checkpoint", tmp_path / "run" / "best.pt")
    assert done.code == 0 and '"images": 7' in done.out, done.err


@pytest.mark.slow
def test_vim_tiny_as_it_is(rgba, tmp_path, run_train):
    """The real model, from a file of its real size, at 192 x 320."""
    name = "vim_tiny_patch16_224"
    published(name, tmp_path / "ours.safetensors")
    file = yaml_of(tmp_path / "c.yaml", name, "[192, 320]", tmp_path / "ours.safetensors", rgba, tmp_path / "run", {})
    done = run_train("--config", file, "--data.batch_size", "6")
    assert (done.code, done.err) == (0, ""), done.err
    assert "vim_tiny_patch16_224: 7.0" in done.out and "7 classes" in done.out
    weights = checkpoint.read_weights(tmp_path / "run" / "last.pt")[0]
    assert weights["pos_embed"].shape == (1, 241, 192) and all(v.isfinite().all() for v in weights.values())
