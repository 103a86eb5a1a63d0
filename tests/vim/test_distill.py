"""Masked feature distillation from the command line: pretrain, resume, fine-tune, export, and what is refused."""

import json
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import tinyrun
import torch
from PIL import Image

import train
import vim
from vim import checkpoint, config, convert, data, export, factory, images, runtime, tasks
from vim.runtime import UserError
from vim.schema import Config, ModelConfig

VIT = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SHAPE = "{patch_size: 8, embed_dim: 32, depth: 3, d_state: 4%s}"
STUDENT = SHAPE % ", directions: 2, merge: sum"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tinyrun.image_tree(tmp_path_factory.mktemp("images"), train=48, size=32)


@pytest.fixture(scope="module")
def teacher(folder, tmp_path_factory):
    """The checkpoint of a tiny ViT, trained for an epoch."""
    out = tmp_path_factory.mktemp("teacher")
    more = ("--model.name=vit_tiny_patch16_224", f"--model.kwargs={json.dumps(VIT)}", "--model.img_size=32")
    train.main(tinyrun.arguments(folder, out, *more, "--train.epochs=1"))
    return out / "best.pt"


def arguments(folder, out, teacher, *more):
    return tinyrun.arguments(
        folder,
        out,
        "--task=distill",
        f"--distill.teacher={teacher}",
        "--distill.decoder_width=24",
        "--distill.decoder_depth=1",
        "--distill.decoder_heads=2",
        "--model.name=mambamlp_base_patch16_224",
        f"--model.kwargs={STUDENT}",
        "--model.img_size=32",
        "--data.auto_augment=null",
        "--data.erase=0",
        "--train.ema_decay=null",
        *tinyrun.PLAIN,
        *more,
    )


@pytest.fixture(scope="module")
def pretrained(folder, teacher, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained")
    train.main(arguments(folder, out, teacher, "--train.ema_decay=0.9"))
    return out


def task_of(folder, teacher, *more):
    """A MaskedDistill in its world, and its loaders."""
    cfg = config.parse(arguments(folder, "unused", teacher, *more))
    world = runtime.World(torch.device("cpu"))
    runtime.seed_everything(0)
    encoder = factory.build_model(cfg, 0)
    loaders = data.build(cfg, world, (32, 32), encoder.pretrained_cfg, [])
    return tasks.build_task(cfg, encoder, loaders, world), loaders


def test_what_a_run_leaves(pretrained):
    names = {path.name for path in pretrained.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "last.pt", "best.pt", "curves.png", "distillation.png"} <= names
    rows = [json.loads(line) for line in (pretrained / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all({"train_loss", "loss", "cosine", "ema_loss", "ema_cosine"} <= row.keys() for row in rows)
    assert all(row["images"] == 21 and "top1" not in row for row in rows)
    assert rows[1]["train_loss"] < rows[0]["train_loss"] and rows[1]["cosine"] > rows[0]["cosine"]
    with Image.open(pretrained / "distillation.png") as picture:
        assert np.asarray(picture.convert("L")).std() > 10


def test_neither_teacher_nor_its_shadow_is_saved(pretrained):
    state = checkpoint.read(pretrained / "last.pt")
    assert {name.partition(".")[0] for name in state["model"]} == {"encoder", "decoder"}
    assert state["model"].keys() == state["ema"].keys()
    trained = [p for p in state["model"] if p != "encoder.pos_embed"]
    assert len(state["optimizer"]["state"]) == len(trained)


def test_loss_step_by_step(folder, teacher):
    """spec/mfd.md in numpy: the teacher's class attention draws the patches, its whitened tokens are the target."""
    task, loaders = task_of(folder, teacher)
    batch, _, _ = next(iter(loaders.start_epoch(0)))
    features = task.teacher(batch)
    runtime.seed_everything(7)
    noise = torch.empty_like(features.attention).exponential_().numpy()
    runtime.seed_everything(7)
    found = task(task.model, batch, None)["loss"].item()

    kept = np.argsort(noise / features.attention.numpy(), axis=1)[:, : int(16 * (1 - 0.6))]
    x = features.tokens.double().numpy()
    target = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    runtime.seed_everything(7)
    torch.empty_like(features.attention).exponential_()  # the model's own draws come after
    predicted = task.model(batch, torch.tensor(kept)).detach().double().numpy()
    d = np.abs(predicted - target)
    assert np.where(d < 1, d * d / 2, d - 0.5).mean() == pytest.approx(found, rel=1e-6)


def test_scores_do_not_depend_on_the_batches(folder, teacher):
    results = []
    for size in (3, 8):
        task, loaders = task_of(folder, teacher, f"--data.eval_batch_size={size}")
        results.append(task.evaluate(task.model, loaders.val))
    assert results[0] == pytest.approx(results[1], rel=1e-5) and results[0]["images"] == 21


@pytest.mark.parametrize("name", ["last.pt", "best.pt"])
def test_fine_tuning_accounts_for_every_tensor_of_the_encoder(pretrained, folder, tmp_path, name, capsys):
    saved = checkpoint.read(pretrained / name)
    weights = saved.get("ema") or saved["model"]  # averaged ones are preferred
    encoder = {k.removeprefix("encoder."): v for k, v in weights.items() if k.startswith("encoder.")}
    shape = {"patch_size": 8, "embed_dim": 32, "depth": 3, "d_state": 4}
    model = timm.create_model("mambamlp_base_patch16_224", img_size=(32, 32), num_classes=3, **shape)
    report = vim.load_weights(model, pretrained / name)
    own = model.state_dict()
    for key, tensor in encoder.items():
        assert torch.equal(own[key], tensor), key
    for layer in range(3):
        mixer = f"layers.{layer}.mixer"
        assert torch.equal(own[f"{mixer}.A_c_b_log"], encoder[f"{mixer}.A_b_log"])
        assert torch.equal(own[f"{mixer}.conv1d_c.weight"], encoder[f"{mixer}.conv1d.weight"])
    assert report.missing == ["head.bias", "head.weight"] and model.pos_embed.requires_grad
    assert report.loaded == len(own) - 2
    decoder = sum(k.startswith("decoder.") for k in weights)
    assert report.dropped == [f"{decoder} tensors decoder* (of pretraining)"]

    more = ("--model.name=mambamlp_base_patch16_224", f"--model.kwargs={SHAPE % ''}", "--model.img_size=32")
    more += (f"--train.init_from={pretrained / name}", "--optim.layer_decay=0.75", "--model.head_std=2e-5")
    train.main(tinyrun.arguments(folder, tmp_path, *more, "--train.epochs=1", "--optim.lr=0"))
    assert f"{report.loaded} tensors loaded" in capsys.readouterr().out
    head = checkpoint.read(tmp_path / "last.pt")["model"]["head.weight"]
    assert 1e-5 < head.std() < 3e-5


def test_exports_hold_the_encoder_alone(pretrained, folder, tmp_path, run_main, run_eval):
    for kind, out in (("safetensors", tmp_path / "out.safetensors"), ("hf", tmp_path / "hf")):
        done = run_main(export.main, "--checkpoint", pretrained / "last.pt", "--format", kind, "--out", out)
        assert done.code == 0, done.err
    weights, meta = checkpoint.read_weights(tmp_path / "out.safetensors")
    model = timm.create_model(f"local-dir:{tmp_path / 'hf'}", pretrained=True).eval()
    assert weights.keys() == model.state_dict().keys() and meta["family"] == "mambamlp"
    task_model = factory.build_model(config.load(meta["config"], [], ""), 0).eval()
    vim.load_weights(task_model, pretrained / "last.pt")
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.forward_features(x), task_model.forward_features(x))
    for path in (pretrained / "last.pt", tmp_path / "out.safetensors"):
        done = run_eval("--checkpoint", path, "--task=classify", "--data.root", folder)
        assert done.code == 2 and "of task distill, without a head: fine-tune it" in done.err


def test_fine_tuning_from_an_export(pretrained, tmp_path):
    """An export has no decoder to tell what it is of, and a head as little."""
    export.export(pretrained / "last.pt", "safetensors", tmp_path / "out.safetensors")
    shape = {"patch_size": 8, "embed_dim": 32, "depth": 3, "d_state": 4, "img_size": (32, 32)}
    models = [timm.create_model("mambamlp_base_patch16_224", num_classes=3, **shape) for _ in range(2)]
    for model, path in zip(models, (pretrained / "last.pt", tmp_path / "out.safetensors"), strict=True):
        assert vim.load_weights(model, path).missing == ["head.bias", "head.weight"]
    states = [{k: v for k, v in model.state_dict().items() if "head" not in k} for model in models]
    tinyrun.assert_same(*states)


def test_conversion_leaves_the_decoder(pretrained, tmp_path, run_main):
    done = run_main(convert.main, pretrained / "last.pt", "--to", "mambamlp", "--out", tmp_path / "out.pth")
    assert done.code == 0 and not any("decoder" in name for name in checkpoint.read(tmp_path / "out.pth")["model"])


@pytest.mark.slow
def test_two_processes(folder, teacher, tmp_path):
    """DDP without find_unused_parameters, which fails where a parameter gets no gradient."""
    more = ("--data.batch_size=4", "--slws.rate=0.5", "--distill.loss_on=masked", f"--distill.cache={tmp_path / 'c'}")
    tinyrun.run(*arguments(folder, tmp_path / "run", teacher, *more, "--data.crops=1"), processes=2)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and rows[1]["train_loss"] < rows[0]["train_loss"] and rows[1]["images"] == 21


RANDOM = ("--slws.rate=0.8", "--model.drop_path=0.2", "--train.epochs=8", "--train.save_every_steps=2")


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_killed_runs_end_as_the_unbroken_one(folder, teacher, tmp_path, cached):
    def command(out):
        cache = ("--data.crops=3", f"--distill.cache={tmp_path / f'cache of {out}'}") if cached else ()
        return arguments(folder, tmp_path / out, teacher, *RANDOM, *cache)

    tinyrun.run(*command("unbroken"))
    rng, killed = random.Random(0), tmp_path / "killed" / "last.pt"
    for _ in range(3):
        tinyrun.kill_at_random(tinyrun.command(*command("killed")), killed, rng)
    tinyrun.run(*command("killed"))
    tinyrun.assert_same_runs(tmp_path / "unbroken", tmp_path / "killed", different=("out", "distill"))


def test_cached_features_are_those_computed(folder, teacher, tmp_path, monkeypatch):
    """The second run takes every training feature from the first one's cache and ends with the same weights."""
    cache = ("--data.crops=2", f"--distill.cache={tmp_path / 'cache'}", "--data.val_split=null")
    train.main(arguments(folder, tmp_path / "one", teacher, *cache))
    monkeypatch.setattr("vim.teachers.Teacher.forward", lambda *_: pytest.fail("a feature was not in the cache"))
    train.main(arguments(folder, tmp_path / "two", teacher, *cache))
    states = [checkpoint.read(tmp_path / name / "last.pt")["model"] for name in ("one", "two")]
    tinyrun.assert_same(*states)
    with pytest.raises(UserError, match="was made with seed 0"):
        train.main(arguments(folder, tmp_path / "three", teacher, *cache, "--seed=1"))
    oblong = STUDENT.replace("8", "[16, 4]", 1)  # as many patches in another grid
    with pytest.raises(UserError, match=r"was made with grid \[4, 4\], this run has \[2, 8\]"):
        train.main(arguments(folder, tmp_path / "three", teacher, *cache, f"--model.kwargs={oblong}"))
    state = checkpoint.read(teacher)  # another teacher in the same place
    state["model"]["pos_embed"] += 1
    torch.save(state, tmp_path / "best.pt")
    with pytest.raises(UserError, match="was made with teacher "):
        train.main(arguments(folder, tmp_path / "three", tmp_path / "best.pt", *cache))


def test_crops_come_again():
    pixels = np.random.default_rng(0).integers(0, 255, (20, 20, 3)).astype(np.uint8)
    source = [(Image.fromarray(pixels), 5)] * 4
    look = lambda image: torch.rand(1) + np.asarray(image).mean()  # noqa: E731
    made = images.Images(source, look, "RGB", 0, crops=3, rows=True)
    seen = {(epoch, index): made[epoch, 7 * epoch + index, index] for epoch in range(6) for index in range(4)}
    for (epoch, index), (value, row, _) in seen.items():
        assert row == index * 3 + epoch % 3
        assert torch.equal(value, seen[(epoch + 3) % 6, index][0])  # wherever it comes in the epoch
    assert len({value.item() for value, _, _ in seen.values()}) == 12
    assert images.Images(source, look, "RGB", 0)[0, 0, 1][1] == 5


def test_copies_at_another_resolution_are_other_images(folder, tmp_path):
    other = tinyrun.image_tree(tmp_path / "larger", size=40)
    moved = shutil.copytree(folder, tmp_path / "moved")
    prints = []
    for root in (folder, moved, other):
        source = data.images_under(root / "train")
        prints.append(images.Images(source, None, "RGB", 0).fingerprint())
    assert prints[0] == prints[1] != prints[2] and all(p.startswith("48 ") for p in prints)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_standard_deviation_of_the_head(name):
    kwargs = {"depth": 1, "embed_dim": 96, "num_heads": 3}
    for std in (0.0, 0.01):
        model = factory.build_model(Config(model=ModelConfig(name, 32, head_std=std, kwargs=kwargs)), 50)
        heads = [part for key, part in model.named_children() if key.startswith("head") and "drop" not in key]
        assert len(heads) == 1 + ("distilled" in name)
        for head in heads:
            assert head.weight.std().item() == pytest.approx(std, rel=0.05)


def test_images_without_classes_and_without_evaluation(teacher, tmp_path):
    root = tinyrun.image_tree(tmp_path / "classes", size=32)
    flat = tmp_path / "flat" / "train"
    flat.mkdir(parents=True)
    for number, path in enumerate(sorted(root.rglob("train/*/*.png"))):
        path.rename(flat / f"{number}.png")
    out = tmp_path / "run"
    train.main(arguments(flat.parent, out, teacher, "--data.val_split=null", "--train.epochs=1"))
    assert (out / "last.pt").exists() and not (out / "best.pt").exists() and not (out / "distillation.png").exists()
    assert "loss" not in json.loads((out / "metrics.jsonl").read_text())


REFUSED = {
    ("--model.name=vit_tiny_patch16_224", "--model.kwargs={}"): "one of this package's models, not 'vit_tiny",
    (f"--model.kwargs={SHAPE % ''}",): "{directions: 2, merge: sum}",
    ("--model.num_classes=3",): "model.num_classes is for task classify",
    ("--optim.layer_decay=0.7",): "optim.layer_decay is for task classify",
    ("--data.mixup=0.8",): "data.mixup mixes images of two classes",
    ("--distill.cache=c",): "set data.crops",
    ("--distill.teacher=vit_tniy_patch16_224",): "vit_tniy_patch16_224",
    ("--distill.mask_ratio=0.99",): "keeps 0 of 16 patches, too few",
    ("--distill.mask_ratio=0", "--distill.loss_on=masked"): "keeps 16 of 16 patches, too many",
    ("--distill.decoder_depth=0",): "set distill.loss_on to visible",
    ("--distill.decoder_width=20", "--distill.decoder_heads=3"): "decoder_width 20 must divide by decoder_heads",
    ("--distill.decoder_width=22",): "divisible by 4",
    ("--model.in_chans=4",): "takes 3 channels, model.in_chans is 4",
    ("--data.crops=2", "--data.repeats=3"): "copies of an image in an epoch would be equal",
    ("--data.val_split=nowhere",): "nowhere is missing",
    ("--task=classify", "--data.val_split=null"): "only task distill trains without evaluation images",
}


@pytest.mark.parametrize("more", REFUSED, ids=" ".join)
def test_refused_and_nothing_written(more, folder, teacher, tmp_path, run_train):
    done = run_train(*arguments(folder, tmp_path / "run", teacher, *more))
    assert (done.code, done.err.count("\n")) == (2, 1) and REFUSED[more] in done.err, done.err
    assert not (tmp_path / "run").exists()


def test_summary():
    task = SimpleNamespace(metric="loss", sign=-1)
    assert tasks.Task.summary(task, -0.25) == "best loss 0.2500"
    assert tasks.Task.summary(task, -float("inf")) == "not evaluated"
