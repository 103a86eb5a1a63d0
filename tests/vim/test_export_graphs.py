"""ONNX and torch.export files: the same logits, one loop per scan, metadata, nothing else inside.

`python tests/vim/test_export_graphs.py` does it with the whole of Vim-Tiny, which takes minutes.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F

import vim
from ssm_kernels import use_backend
from ssm_kernels.conv1d import causal_conv1d
from vim import checkpoint, export, portable
from vim.runtime import UserError
from vim.zoo import FAMILIES

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "d_state": 4, "num_classes": 7}
MODE = "bicubic"
EXTRA = {"mambareg": {"num_registers": 4, "register_reduce": 2}}


def tiny(family="vim", **changed):
    torch.manual_seed(0)
    model = vim.VisionMamba(**{**TINY, **FAMILIES[family], **EXTRA.get(family, {}), **changed}).eval()
    with torch.no_grad():  # large positions and steps, so that an error in either shows
        model.pos_embed.normal_()
        model.head.weight.normal_()
    return model


@pytest.mark.parametrize("reverse", [False, True])
def test_the_scan_is_the_recurrence(reverse):
    draw = torch.Generator().manual_seed(0)
    b, d, length, n = 2, 3, 5, 4
    u, delta = (torch.randn(b, d, length, generator=draw) for _ in range(2))
    B, C = (torch.randn(b, n, length, generator=draw) for _ in range(2))
    A, D, bias = -torch.rand(d, n, generator=draw), torch.randn(d, generator=draw), torch.randn(d, generator=draw)
    wanted = torch.zeros(b, d, length, dtype=torch.float64)
    for i in range(b):
        for k in range(d):
            h = torch.zeros(n, dtype=torch.float64)
            for t in reversed(range(length)) if reverse else range(length):
                step = torch.log1p(torch.exp(delta[i, k, t].double() + bias[k]))
                h = torch.exp(step * A[k]) * h + step * B[i, :, t] * u[i, k, t]
                wanted[i, k, t] = (C[i, :, t] * h).sum() + D[k] * u[i, k, t]
    found = portable.selective_scan(u, delta, A, B, C, D, None, bias, True, reverse)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 3, 9])
def test_the_convolution_is_the_kernels(reverse, length):
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=draw) for s in ((2, 3, length), (3, 4), (3,)))
    for activation in (None, "silu"):
        with use_backend("reference"):
            wanted = causal_conv1d(x, weight, bias, activation, reverse)
        torch.testing.assert_close(portable.causal_conv1d(x, weight, bias, activation, reverse), wanted)


@pytest.mark.parametrize("sizes", [((4, 4), (4, 4)), ((4, 4), (7, 3)), ((3, 5), (2, 9)), ((14, 14), (12, 20))])
def test_positions_are_resized_as_torch_resizes(sizes):
    old, new = sizes
    x = torch.randn(1, 6, *old, generator=torch.Generator().manual_seed(0))
    rows, columns = (portable.resize_weights(*pair) for pair in zip(new, old, strict=True))
    found, plain = torch.einsum("hi,wj,bdij->bdhw", rows, columns, x), F.interpolate(x, new, mode=MODE, antialias=True)
    exact = F.interpolate(x.double(), new, mode=MODE, antialias=True)
    assert (found - exact).abs().max() <= 2 * (plain - exact).abs().max()


# Three families; ONNX with an open image size and with a fixed one, pt2 open here and fixed below.
CASES = [("vim", "onnx", True), ("mambareg", "onnx", False), ("mambamlp", "pt2", True)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fmt", "dynamic"), CASES)
def test_same_logits_for_batches_and_image_sizes(family, fmt, dynamic, tmp_path):
    model = tiny(family, dynamic_img_size=dynamic)
    program = portable.trace(model, (32, 32), 3, dynamic)
    out = tmp_path / f"a.{fmt}"
    if fmt == "onnx":
        onnx = pytest.importorskip("onnx", reason="ONNX needs the export extra")
        written = portable.write_onnx(program, out, {})
        nodes = onnx.load(out).graph.node
        assert Counter(node.op_type for node in nodes)["Scan"] == model.directions  # of the one layer
        assert not any(node.metadata_props for node in nodes)
        # The graph's size does not grow with the width: so much per layer is 1.2 times Vim-Tiny's weights in all.
        graph = out.stat().st_size - sum(4 * p.numel() for p in model.parameters())
        assert graph < 0.2 * 4 * 7_148_008 / 24
    else:
        written = portable.write_pt2(program, out, {})
    sizes = [(32, 32), (24, 48), (64, 16)] if dynamic else [(32, 32)]
    shapes = [(batch, 3, *size) for batch in (1, 5) for size in sizes]
    assert portable.largest_difference(model, written, shapes) < 1e-4
    assert str(Path(vim.__file__).parent).encode() not in out.read_bytes()


@pytest.mark.slow
def test_two_layers_of_one_size_by_command(finished, run_main, tmp_path):
    """Class token in the middle, size fixed; read again by another process that has not imported this package."""
    onnx = pytest.importorskip("onnx", reason="ONNX needs the export extra")
    model = timm.create_model("vim_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=2, num_classes=7)
    model.load_state_dict(checkpoint.read(finished / "best.pt")["model"])
    for fmt in ("onnx", "pt2"):
        argv = ("--checkpoint", finished / "best.pt", "--format", fmt, "--out", tmp_path / f"a.{fmt}")
        done = run_main(export.main, *argv)
        assert done.code == 0 and done.out.endswith(f"{fmt}\n"), done.err
    found = onnx.load(tmp_path / "a.onnx")
    onnx.checker.check_model(found, full_check=True)
    about = {entry.key: entry.value for entry in found.metadata_props}
    assert about["family"] == "vim" and json.loads(about["classes"]) == list("abcdefg")
    assert json.loads(about["preprocessing"])["mean"] == [0.485, 0.456, 0.406] and "top1" in about["metrics"]
    numbers = sum(torch.Size(each.dims).numel() for each in found.graph.initializer)
    own = sum(p.numel() for p in model.parameters())
    assert own <= numbers < 1.1 * own  # a few indices and constants, and no second set of weights
    code = f"""
import json, sys, torch
extra = {{"slws-vim.json": ""}}
program = torch.export.load({str(tmp_path / "a.pt2")!r}, extra_files=extra)
images = torch.ones(4, 3, 16, 16)
torch.save(program.module()(images).detach(), {str(tmp_path / "logits.pt")!r})
print(json.loads(extra["slws-vim.json"])["family"], "vim" in sys.modules, len(program.state_dict))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout == f"vim False {len(model.state_dict())}\n", done.stderr
    wanted = model.eval()(torch.ones(4, 3, 16, 16))
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), wanted.detach(), rtol=0, atol=1e-4)


def test_what_cannot_be_traced_or_is_wrong_is_said(finished, run_main, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="stays open is for this package's own models"):
        portable.trace(torch.nn.Linear(2, 2), (1, 1), 1, dynamic_size=True)

    class Untraceable(torch.nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    with pytest.raises(UserError, match=rf"torch {torch.__version__.split('+')[0]}.* cannot trace this model: "):
        portable.trace(Untraceable(), (4, 4), 1)
    monkeypatch.setattr(portable, "trace", lambda *args: None)
    monkeypatch.setattr(portable, "write_pt2", lambda *args: lambda images: torch.full((len(images), 7), 1e9))
    argv = ("--checkpoint", finished / "best.pt", "--format", "pt2", "--out", tmp_path / "a.pt2")
    done = run_main(export.main, *argv)
    assert done.code == 2 and "1e+09 off the model of" in done.err, done.err


def test_the_kernels_are_back_after_a_trace():
    before = vim.mix.selective_scan, vim.mix.causal_conv1d
    with pytest.raises(UserError):
        portable.trace(tiny(), (31, 31), 3)
    assert (vim.mix.selective_scan, vim.mix.causal_conv1d) == before


def whole_vim_tiny() -> None:
    """Vim-Tiny with random weights and an open image size, both formats: time, size and difference, one line each."""
    torch.manual_seed(0)
    model = timm.create_model("vim_tiny_patch16_224", dynamic_img_size=True).eval()
    weights = sum(4 * p.numel() for p in model.parameters())
    shapes = [(batch, 3, *size) for batch in (1, 3) for size in ((224, 224), (160, 256))]
    start = time.process_time()
    program = portable.trace(model, (224, 224), 3, dynamic_size=True)
    print(f"trace: {time.process_time() - start:.0f} s of CPU time")
    for fmt, write in (("onnx", portable.write_onnx), ("pt2", portable.write_pt2)):
        with tempfile.TemporaryDirectory() as folder:
            start, out = time.process_time(), Path(folder) / f"a.{fmt}"
            written = write(program, out, {})
            took, size = time.process_time() - start, out.stat().st_size
            difference = portable.largest_difference(model, written, shapes)
        print(f"{fmt}: {took:.0f} s, {size / 1e6:.2f} MB, {size / weights:.3f} of the weights, {difference:.2g} off")
        assert difference < 1e-4 and (fmt == "pt2" or size <= 1.2 * weights)


if __name__ == "__main__":
    whole_vim_tiny()
