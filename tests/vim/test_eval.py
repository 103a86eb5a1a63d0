"""eval.py: the scores it prints, for every kind of file it takes."""

import csv
import json
import math

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from vim import checkpoint, export


def scores(done):
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


def by_hand(finished, tree, use_ema):
    """Top-1, top-5, loss and predictions, one image at a time, with nothing of eval.py."""
    weights, _ = checkpoint.read_weights(finished / "last.pt", use_ema=use_ema)
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_classes": 7}
    model = timm.create_model("vim_tiny_patch16_224", **arguments).eval()
    model.load_state_dict(weights)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    logits, labels = [], []
    for path in sorted((tree / "val").rglob("*.png")):
        image = Image.open(path).resize((18, 18), Image.Resampling.BICUBIC)  # 16 / 0.875
        pixels = (np.asarray(image)[1:17, 1:17] / 255 - mean) / std
        with torch.no_grad():
            logits.append(model(torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1)[None])[0])
        labels.append("abcdefg".index(path.parent.name))
    logits, labels = torch.stack(logits), torch.tensor(labels)
    ranks = (logits > logits[range(21), labels][:, None]).sum(1)
    top1, top5 = (100 * (ranks < k).double().mean().item() for k in (1, 5))
    return top1, top5, F.cross_entropy(logits, labels).item(), logits.argmax(1)


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_scores_equal_a_plain_loop(weights, finished, tree, run_eval):
    done = run_eval("--checkpoint", finished / "last.pt", "--weights", weights)
    assert f"tensors loaded, {'averaged' if weights == 'ema' else 'raw'} weights" in done.out
    found = scores(done)
    top1, top5, loss, _ = by_hand(finished, tree, weights == "ema")
    assert found["images"] == 21 and found["skipped"] == 0  # batches of 4 do not divide 21
    assert found["top1"] == pytest.approx(top1, abs=1e-9) and found["top5"] == pytest.approx(top5, abs=1e-9)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    row = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    prefix = "ema_" if weights == "ema" else ""
    assert found["loss"] == row[f"{prefix}loss"] and found["top1"] == row[f"{prefix}top1"]


def test_best_checkpoint_and_exports(finished, tree, run_eval, run_main, tmp_path):
    row = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    wanted = scores(run_eval("--checkpoint", finished / "best.pt"))
    assert wanted["top1"] == max(row["top1"], row["ema_top1"])
    for name, fmt in (("best.safetensors", "safetensors"), ("best.pth", "official")):
        arguments = ("--checkpoint", finished / "best.pt", "--format", fmt, "--out", tmp_path / name)
        assert run_main(export.main, *arguments).code == 0
    found = scores(run_eval("--checkpoint", tmp_path / "best.safetensors"))
    assert found == wanted | {"checkpoint": str(tmp_path / "best.safetensors")}

    foreign = ["--checkpoint", tmp_path / "best.pth", "--family", "vim", "--config", finished / "config.yaml"]
    assert scores(run_eval(*foreign)) == wanted | {"checkpoint": str(tmp_path / "best.pth")}
    done = run_eval("--checkpoint", tmp_path / "best.pth", "--config", finished / "config.yaml")
    assert done.code == 2 and "name the family of these weights" in done.err
    done = run_eval(*foreign, "--model.num_classes", "9")
    assert done.code == 2 and "does not fit the model's head: head.weight (7 classes, the model has 9)" in done.err


def test_another_folder_with_fewer_classes(finished, make_tree, tmp_path, run_eval):
    elsewhere = make_tree(tmp_path / "else", {}, {"g": 2, "b": 3})
    table = tmp_path / "table.csv"
    done = run_eval("--checkpoint", finished / "last.pt", "--data.root", elsewhere, "--per_class", table)
    assert scores(done)["images"] == 5
    rows = {row["class"]: row for row in csv.DictReader(table.open())}
    assert {name: int(row["images"]) for name, row in rows.items()} == dict.fromkeys("abcdefg", 0) | {"b": 3, "g": 2}
    assert math.isnan(float(rows["a"]["top1"]))
    strange = make_tree(tmp_path / "strange", {}, {"a": 1, "zebra": 1})
    done = run_eval("--checkpoint", finished / "last.pt", "--data.root", strange)
    assert done.code == 2 and "has 1 classes that training has not: zebra" in done.err


def test_table_and_plot_of_the_classes(finished, tree, tmp_path, run_eval):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, an extra")
    table, plot = tmp_path / "table.csv", tmp_path / "confusion.png"
    done = run_eval("--checkpoint", finished / "last.pt", "--per_class", table, "--confusion", plot)
    assert scores(done)["images"] == 21 and "confusion" not in scores(done)
    predictions = by_hand(finished, tree, True)[3].view(7, 3)
    for number, row in enumerate(csv.DictReader(table.open())):
        hits = int((predictions[number] == number).sum())
        assert (row["class"], row["images"]) == ("abcdefg"[number], "3")
        assert float(row["top1"]) == pytest.approx(100 * hits / 3, abs=0.01)
        wrong = [p for p in predictions[number].tolist() if p != number]
        most = {"abcdefg"[p] for p in wrong if wrong.count(p) == max(map(wrong.count, wrong))} or {""}
        assert row["most_confused_with"] in most
    with Image.open(plot) as image:
        assert image.format == "PNG" and min(image.size) > 300


def test_other_image_size_and_unreadable_images(finished, make_tree, tmp_path, run_eval):
    done = run_eval("--checkpoint", finished / "last.pt", "--model.img_size", "[16, 32]")
    assert scores(done)["images"] == 21 and "adapted: pos_embed 2x2 -> 2x4" in done.out
    root = make_tree(tmp_path / "broken", {}, {"a": 2, "b": 3})
    (root / "val/b/1.png").write_bytes(b"")
    done = run_eval("--checkpoint", finished / "last.pt", "--data.root", root)
    assert done.code == 2 and f"{root}/val/b/1.png: cannot be read" in done.err and done.err.count("\n") == 1
    found = scores(run_eval("--checkpoint", finished / "last.pt", "--data.root", root, "--data.skip_corrupt", "true"))
    assert (found["images"], found["skipped"]) == (4, 1)


REFUSED = {
    (): "--checkpoint FILE is missing",
    ("--checkpoint", "no.pt"): "no.pt: no such file",
    ("--checkpoint", "LAST", "--data.rot", "x"): "unknown key data.rot; did you mean data.root?",
    ("--checkpoint", "LAST", "--weight", "raw"): "unknown key weight",
    ("--checkpoint", "LAST", "--data.root", "nowhere"): "data.root: no such folder: nowhere",
    ("--checkpoint", "LAST", "--family", "arm"): "says it is of family 'vim', not 'arm'",
    ("--checkpoint", "LAST", "--per_class", "nowhere/a.csv"): "there is no folder nowhere",
    ("--checkpoint", "LAST", "--model.name", "shufflemamba_tiny_patch16_224"): "want cls_position='middle'",
}


@pytest.mark.parametrize("argv", REFUSED, ids=lambda a: " ".join(a[1:]) or "nothing")
def test_refusals(argv, finished, run_eval):
    done = run_eval(*(str(finished / "last.pt") if a == "LAST" else a for a in argv))
    assert done.code == 2 and REFUSED[argv] in done.err and done.err.count("\n") == 1, done.err


@pytest.mark.slow
def test_as_a_process(finished, run_process):
    found = scores(run_process("eval.py", "--checkpoint", finished / "best.pt"))
    assert found.keys() >= {"top1", "top5", "loss", "images", "checkpoint"}


def test_a_folder_is_no_checkpoint(tmp_path, run_eval):
    done = run_eval("--checkpoint", tmp_path)
    assert done.code == 2 and "is a folder; name a file in it, such as model.safetensors" in done.err
