"""Folders that timm reads, and what never leaves: python -m vim.export, formats that hold weights."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from vim import checkpoint, export

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2}
IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def best(finished):
    """The finished run's best model, built by hand."""
    model = timm.create_model("vim_tiny_patch16_224", num_classes=7, **TINY)
    model.load_state_dict(checkpoint.read(finished / "best.pt")["model"])
    return model.eval()


@pytest.fixture(scope="module")
def folder(finished, run_main, tmp_path_factory):
    out = tmp_path_factory.mktemp("hf") / "exported"
    done = run_main(export.main, "--checkpoint", finished / "best.pt", "--format", "hf", "--out", out)
    assert (done.code, done.err) == (0, ""), done.err
    return out


def test_timm_reads_the_folder(folder, finished):
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    wanted = best(finished)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch.equal(model(IMAGES), wanted(IMAGES)) and model.family == "vim"
    fresh = timm.create_model(f"local-dir:{folder}").eval()  # timm: no weights unless they are asked for
    assert fresh.head.weight.shape == (7, 16) and not torch.equal(fresh.head.weight, wanted.head.weight)
    changed = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=3, img_size=(16, 32))
    assert changed.head.weight.shape == (3, 16) and changed.pos_embed.shape == (1, 9, 16)
    assert torch.equal(changed.norm_f.weight, wanted.norm_f.weight)


def test_timm_reads_the_hub(folder, finished, offline, cached):
    """A repository with the two files, as huggingface_hub's client keeps it: nothing is downloaded."""
    for file in folder.iterdir():
        cached(offline, "someone/tiny", file.name, file.read_bytes(), commit=COMMIT)
    for name in ("hf_hub:someone/tiny", f"hf-hub:someone/tiny@{COMMIT}"):
        model = timm.create_model(name, pretrained=True).eval()
        assert torch.equal(model(IMAGES), best(finished)(IMAGES))


def test_the_folder_says_how_images_are_treated(folder, finished, run_eval):
    about = json.loads((folder / "config.json").read_text())
    assert about["architecture"] == "vim_tiny_patch16_224" and about["label_names"] == list("abcdefg")
    assert about["slws_vim"] == {
        **{"family": "vim", "layout": "native", "stride": 8, "grid": [2, 2], "cls_position": "middle", "merge": "mean"}
    }
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    found = timm.data.resolve_model_data_config(model)
    assert found["input_size"] == (3, 16, 16) and found["crop_pct"] == 0.875 and found["interpolation"] == "bicubic"
    assert tuple(found["mean"]) == (0.485, 0.456, 0.406)
    row = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    done = run_eval("--checkpoint", folder / "model.safetensors")  # which carries the run's configuration
    assert json.loads(done.out.splitlines()[-1])["top1"] == max(row["top1"], row["ema_top1"]), done.err


def test_a_model_of_timm_leaves_as_well(tree, tiny_args, run_train, run_main, tmp_path):
    """A run with SLWS attached to timm's ViT, and gray images: nothing of SLWS is in the folder."""
    kwargs = "{embed_dim: 16, depth: 2, num_heads: 2, patch_size: 8}"
    changed = ("--model.name", "vit_tiny_patch16_224", "--model.kwargs", kwargs, "--model.in_chans", "1")
    done = run_train(*tiny_args, *changed, "--slws.rate", "0.5", "--data.mean", "[0.4]", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    argv = ("--checkpoint", tmp_path / "run" / "last.pt", "--format", "hf", "--out", tmp_path / "hf")
    assert run_main(export.main, *argv).code == 0
    model = timm.create_model(f"local-dir:{tmp_path / 'hf'}", pretrained=True).eval()
    weights = checkpoint.read_weights(tmp_path / "run" / "last.pt")[0]
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert model(IMAGES[:, :1]).shape == (3, 7) and timm.data.resolve_model_data_config(model)["mean"] == [0.4]


def with_company(finished, path):
    """A checkpoint in which the model is not alone."""
    held = checkpoint.read(finished / "last.pt")
    others = {"teacher.visual.weight": torch.ones(3), "decoder.0.bias": torch.ones(2)}
    torch.save({**held, "model": held["model"] | others, "ema": held["ema"] | others}, path)
    return held["ema"].keys()


@pytest.mark.parametrize("fmt", ["safetensors", "hf", "official"])
def test_teacher_decoder_and_optimizer_stay(fmt, finished, run_main, tmp_path):
    own = with_company(finished, tmp_path / "all.pt")
    out = tmp_path / ("a" if fmt == "hf" else "a.safetensors" if fmt == "safetensors" else "a.pth")
    done = run_main(export.main, "--checkpoint", tmp_path / "all.pt", "--format", fmt, "--out", out)
    assert done.code == 0, done.err
    if fmt == "official":
        assert torch.load(out, weights_only=True).keys() == {"model"}
        found = torch.load(out, weights_only=True)["model"]
    else:
        found = load_file(out / "model.safetensors" if fmt == "hf" else out)
    assert found.keys() == own


def test_refusals(finished, run_main, tmp_path):
    (tmp_path / "a_file").write_text("")
    bare = tmp_path / "bare.safetensors"
    save_file(best(finished).state_dict(), bare, {"layout": "native", "family": "vim"})
    last = finished / "last.pt"
    for argv, message in (
        (
            ("--checkpoint", last, "--format", "hf", "--out", tmp_path / "a_file"),
            "a_file is a file; --format hf writes",
        ),
        (("--checkpoint", last, "--format", "hf", "--out", tmp_path / "no" / "a"), "there is no folder"),
        (("--checkpoint", last, "--format", "onnx", "--out", tmp_path), "is a folder"),
        (("--checkpoint", last, "--dynamic_size", "--out", tmp_path / "x"), "is for onnx and pt2, not for safetensors"),
        (("--checkpoint", bare, "--format", "hf", "--out", tmp_path / "x"), "does not say which model it belongs to"),
        (("--checkpoint", bare, "--format", "pt2", "--out", tmp_path / "x"), "does not say which model it belongs to"),
    ):
        done = run_main(export.main, *argv)
        assert done.code == 2 and message in done.err and done.err.count("\n") == 1, done.err
        assert not (tmp_path / "x").exists()


def test_a_damaged_folder_is_refused(folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes()[: 400 if name.startswith("model") else None])
    with pytest.raises(ValueError, match=r"model\.safetensors: is damaged or no safetensors file"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors: no such file"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
