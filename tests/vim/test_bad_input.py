"""Bad input to train.py: exit code 2, one line on stderr that names the thing, nothing written and nothing lost."""

import gzip
import os
import shutil
import struct

import pytest
import torch
import yaml
from PIL import Image

from vim import checkpoint, prepare


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(done, *words):
    assert done.code == 2, (done.code, done.err)
    assert done.err.startswith("train.py: error: ") and done.err.count("\n") == 1, done.err
    for word in words:
        assert str(word) in done.err, done.err
    return True


CASES = {
    ("--optim.lrr", "1"): "unknown key optim.lrr; did you mean optim.lr?",
    ("--train.epochs", "many"): "train.epochs must be a whole number, got many",
    ("--slws.rate", "2"): "slws.rate must lie in [0, 1], got 2.0",
    ("--config", "nowhere.yaml"): "nowhere.yaml: No such file",
    ("--data.root", "nowhere"): "data.root: no such folder: nowhere",
    ("--data.val_split", "test"): "tree/test is missing",
    ("--data.dataset", "torch/nope"): "Unknown torchvision dataset nope",
    ("--model.name", "vim_tniy_patch16_224"): "timm knows no 'vim_tniy_patch16_224'; near it: vim_tiny_patch16_224",
    ("--model.img_size", "20"): "image height 20 is not covered by patches of 8 at stride 8",
    ("--model.num_classes", "3"): "model.num_classes is 3, the training data has 7 classes",
    ("--model.kwargs.patch_sise", "4"): "unexpected keyword argument 'patch_sise'",
    ("--model.kwargs.num_classes", "3"): "model.kwargs.num_classes: set model.num_classes instead",
    ("--model.kwargs.norm", "batch"): "norm must be one of 'rms', 'layer', got 'batch'",
    (
        "--model.name",
        "arm_base_patch16_224",
        "--model.kwargs.pretrained",
        "true",
    ): "no public weights of arm_base_patch",
    ("--data.auto_augment", "zzz"): "data.auto_augment: timm knows no policy 'zzz'",
    ("--data.batch_size", "30"): "data.batch_size 30 x 1 processes is more than the 28 training images",
    ("--optim.opt", "adamv"): "optim.opt 'adamv'",
    ("--train.init_from", "nowhere.pt"): "nowhere.pt: no such file",
}


@pytest.mark.parametrize("argv", CASES, ids=" ".join)
def test_refused_and_nothing_written(argv, run_train, tiny_args, tmp_path):
    out = tmp_path / "run"
    assert refused(run_train(*tiny_args, "--out", out, *argv), CASES[argv])
    assert not out.exists()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_corrupt_image_is_named(workers, make_tree, tmp_path, run_train, run_process, tiny_args):
    root = make_tree(tmp_path / "images", dict.fromkeys("ab", 4), dict.fromkeys("ab", 2))
    (root / "train/b/2.png").write_bytes(b"no image")
    arguments = (*tiny_args, "--data.root", root, "--out", tmp_path / "run", "--data.workers", workers)
    done = run_process("train.py", *arguments) if workers else run_train(*arguments)
    assert refused(done, f"{root}/train/b/2.png: cannot be read", "data.skip_corrupt skips and counts")
    assert not (tmp_path / "run" / "last.pt").exists()


def test_which_process_says_what(make_tree, tmp_path, run_train, tiny_args, monkeypatch):
    """A bad configuration is said once on each machine; a corrupt image by the one process that met it."""
    root = make_tree(tmp_path / "images", dict.fromkeys("ab", 4), dict.fromkeys("ab", 2))
    (root / "train/b/2.png").write_bytes(b"no image")
    arguments = (*tiny_args, "--data.root", root, "--out", tmp_path / "run")
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert refused(run_train(*arguments), f"{root}/train/b/2.png: cannot be read")
    done = run_train(*arguments, "--slws.rate", "2")
    assert (done.code, done.err) == (2, "")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert refused(run_train(*arguments, "--data.root", tmp_path / "none"), "no such folder")


def test_corrupt_images_are_skipped_and_counted(make_tree, tmp_path, run_train, tiny_args):
    root = make_tree(tmp_path / "images", dict.fromkeys("ab", 4), dict.fromkeys("ab", 3))
    for name in ("train/a/1", "train/b/2", "val/a/0"):
        (root / f"{name}.png").write_bytes(b"no image")
    arguments = (*tiny_args, "--data.root", root, "--out", tmp_path / "run", "--data.skip_corrupt", "true")
    assert run_train(*arguments).code == 0
    row = yaml.safe_load((tmp_path / "run" / "metrics.jsonl").read_text())
    assert (row["train_skipped"], row["skipped"], row["images"]) == (2, 1, 5)


def test_bad_folders(make_tree, tmp_path, run_train, tiny_args):
    missing = make_tree(tmp_path / "missing", {"a": 2, "b": 2}, {})
    empty = make_tree(tmp_path / "empty", {"a": 2, "b": 0}, {"a": 1})
    more = make_tree(tmp_path / "more", {"a": 2}, {"a": 1, "zebra": 1})
    for root, word in (
        (missing, f"{missing}/val is missing"),
        (empty, "empty/train/b holds no images"),
        (more, "zebra"),
    ):
        assert refused(run_train(*tiny_args, "--data.root", root, "--out", tmp_path / "run"), word)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argv", "classes"), [([], 7), (["--model.num_classes", "9"], 9)], ids=["as the data", "as asked for"]
)
def test_the_head_follows_the_data(argv, classes, run_train, tiny_args, tmp_path, run_eval):
    assert run_train(*tiny_args, "--out", tmp_path / "run", *argv).code == 0
    found = checkpoint.read(tmp_path / "run" / "last.pt")
    assert found["model"]["head.weight"].shape == (classes, 16)
    assert found["meta"]["classes"][:7] == list("abcdefg") and len(found["meta"]["classes"]) == classes
    done = run_eval("--checkpoint", tmp_path / "run" / "last.pt", "--per_class", tmp_path / "table.csv")
    assert done.code == 0 and len((tmp_path / "table.csv").read_text().splitlines()) == classes + 1


@pytest.mark.parametrize(("channels", "size"), [(1, "[16, 32]"), (4, "16")])
def test_other_channels_and_shapes(channels, size, run_train, tiny_args, tmp_path, run_eval):
    arguments = (*tiny_args, "--out", tmp_path / "run", "--model.in_chans", channels, "--model.img_size", size)
    assert run_train(*arguments).code == 0
    found = checkpoint.read(tmp_path / "run" / "last.pt")
    assert found["model"]["patch_embed.proj.weight"].shape[1] == channels
    assert found["meta"]["grid"] == ([2, 4] if channels == 1 else [2, 2])
    assert run_eval("--checkpoint", tmp_path / "run" / "best.pt").code == 0


def test_the_written_configuration_runs_again(finished, tmp_path, run_train):
    again = tmp_path / "again"
    assert run_train("--config", finished / "config.yaml", "--out", again).code == 0
    assert (again / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    one, two = ((d / "config.yaml").read_text() for d in (finished, again))
    assert two == one.replace(f"out: {finished}", f"out: {again}")
    weights, others = (checkpoint.read_weights(d / "last.pt", use_ema=False)[0] for d in (finished, again))
    assert all(torch.equal(weights[k], others[k]) for k in weights)


def test_a_finished_run_says_so_and_is_left_alone(finished, tiny_args, run_train):
    before = contents(finished)
    done = run_train(*tiny_args, "--out", finished)
    assert (done.code, done.err) == (0, "") and f"{finished} is finished: best top-1" in done.out
    assert contents(finished) == before


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


def test_a_run_does_not_resume_as_another(copy, tiny_args, run_train):
    before = contents(copy)
    done = run_train(*tiny_args, "--out", copy, "--train.epochs", 2, "--data.repeats", 3)
    assert refused(done, copy, "data.repeats 1 -> 3, train.epochs 1 -> 2", "choose another --out")
    assert contents(copy) == before


@pytest.mark.parametrize("damage", ["half", "empty", "text"])
def test_a_damaged_checkpoint_is_not_overwritten(damage, copy, tiny_args, run_train):
    whole = (copy / "last.pt").read_bytes()
    (copy / "last.pt").write_bytes({"half": whole[: len(whole) // 2], "empty": b"", "text": b"hello"}[damage])
    before = contents(copy)
    assert refused(run_train(*tiny_args, "--out", copy), f"{copy}/last.pt: is damaged or no torch file")
    assert contents(copy) == before


def test_start_from_weights(finished, tiny_args, run_train, tmp_path):
    still = ("--optim.lr", 0, "--optim.min_lr", 0)
    done = run_train(*tiny_args, "--out", tmp_path / "a", "--train.init_from", finished / "best.pt", *still)
    assert done.code == 0 and "41 tensors loaded" in done.out
    start, _ = checkpoint.read_weights(finished / "best.pt")
    end, _ = checkpoint.read_weights(tmp_path / "a" / "last.pt", use_ema=False)
    assert all(torch.equal(start[k], end[k]) for k in start)
    torch.save({"w": torch.ones(1)}, tmp_path / "foreign.pt")
    for argv, words in (
        (["--train.init_from", tmp_path / "foreign.pt"], "name the family"),
        (["--train.init_from", tmp_path / "foreign.pt", "--train.init_family", "vim"], "no tensor matches"),
        (["--train.init_from", tmp_path / "foreign.pt", "--train.init_family", "vmi"], "unknown family 'vmi'"),
        (["--train.init_from", finished / "best.pt", "--model.kwargs.embed_dim", "24"], "the model's is ("),
    ):
        assert refused(run_train(*tiny_args, "--out", tmp_path / "b", *argv), words)
        assert not (tmp_path / "b").exists()


def test_prepare_names_damaged_files(tmp_path, run_main):
    source, out = tmp_path / "idx", tmp_path / "out"
    source.mkdir()
    images, labels = b"\0\0\x08\3" + struct.pack(">3i", 2, 2, 2) + bytes(range(8)), b"\0\0\x08\1\0\0\0\2\5\7"
    for split in ("train", "t10k"):
        (source / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (source / f"{split}-labels-idx1-ubyte").write_bytes(labels)
    argv = ("idx", out, "--source", source)
    for content, word in (
        (gzip.compress(images)[:-9], "train-images-idx3-ubyte.gz is damaged"),
        (gzip.compress(images[:-1]), "train-images-idx3-ubyte.gz is damaged"),
        (gzip.compress(b"PNG and more"), "train-images-idx3-ubyte.gz is no IDX file of bytes"),
    ):
        (source / "train-images-idx3-ubyte.gz").write_bytes(content)
        done = run_main(prepare.main, *argv)
        assert done.code == 2 and word in done.err and done.err.count("\n") == 1
        assert not out.exists()
    (source / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    assert run_main(prepare.main, *argv).out == f"{out}: 4 images written\n"
    with Image.open(out / "val" / "7" / "00001.png") as image:
        assert image.tobytes() == bytes(range(4, 8))
    assert "left alone" in run_main(prepare.main, *argv).out


@pytest.mark.slow
def test_as_a_process(tmp_path, run_process, tiny_args):
    """The whole of stderr, warnings of libraries included, and no file beside it."""
    (tmp_path / "bad.yaml").write_text("train:\n  epoch: 3\n")
    done = run_process("train.py", *tiny_args, "--config", tmp_path / "bad.yaml", "--out", tmp_path / "run")
    wanted = f"train.py: error: {tmp_path}/bad.yaml: unknown key train.epoch; did you mean train.epochs?\n"
    assert (done.code, done.out, done.err) == (2, "", wanted)
    assert os.listdir(tmp_path) == ["bad.yaml"]


def test_an_interrupted_run_says_that_it_resumes(run_train, tiny_args, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("vim.engine.train_epoch", interrupt)
    done = run_train(*tiny_args, "--out", tmp_path / "run")
    assert done.code == 130 and done.err == "\ntrain.py: interrupted; a training run resumes by the same command\n"


def test_modules_that_are_commands_start_without_a_warning(run_process):
    for name in ("convert", "export", "doctor", "prepare", "figures"):
        done = run_process("-W", "error", "-m", f"vim.{name}", "--help")
        assert (done.code, done.err) == (0, ""), name
