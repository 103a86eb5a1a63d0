"""Images and their order: exact, the same on any number of processes, and with errors that name the file."""

import json
import re
import struct
import tarfile
import traceback

import numpy as np
import pytest
import torch
from PIL import Image

from vim import config, data
from vim.images import EvalBatches, TrainBatches
from vim.runtime import UserError, World

CFG = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "crop_pct": 1.0}
CPU = torch.device("cpu")
STRONG = ["--data.erase", "0.5", "--data.repeats", "3"]  # with RandAugment, which is the default


def settings(*argv):
    return config.parse([*map(str, argv)])


def loaders(cfg, world=None, classes=None, evaluation=False):
    classes = classes or data.check_sources(cfg, evaluation)
    return data.build(cfg, world or World(CPU), (16, 16), CFG, classes, evaluation)


def epoch(cfg, number=0, start=0, world=None):
    """[(images, classes)] of one epoch's batches."""
    return read(loaders(cfg, world), number, start)


def read(made, number=0, start=0):
    return [(images, targets) for images, targets, _ in made.start_epoch(number, start)]


def equal(batches, others):
    return len(batches) == len(others) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(batches, others, strict=True)
    )


def error_of(loader) -> str:
    """What reading all of it ends with. Frees the loader processes now: a garbage collection waits 5 s for each."""
    try:
        list(loader)
    except UserError as error:
        traceback.clear_frames(error.__traceback__)
        return str(error)
    return "no error"


def test_missing_and_empty_folders_are_named(make_tree, tmp_path):
    with pytest.raises(UserError, match=r"data\.root: no such folder: .*nowhere"):
        data.check_sources(settings("--data.root", tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"data\.root: name a folder"):
        data.check_sources(settings())
    root = make_tree(tmp_path / "a", {"x": 2, "y": 2}, {})
    with pytest.raises(UserError, match=r"a/val is missing \(an ImageFolder tree has train/ and val/"):
        data.check_sources(settings("--data.root", root))
    (root / "val").mkdir()
    with pytest.raises(UserError, match="a/val holds no class folders"):
        data.check_sources(settings("--data.root", root))
    (root / "val" / "x").mkdir()
    (root / "val" / "x" / "notes.txt").write_text("no image")
    with pytest.raises(UserError, match=r"class folder .*a/val/x holds no images"):
        data.check_sources(settings("--data.root", root))
    root = make_tree(tmp_path / "b", {"x": 1, "y": 1}, {"x": 1, "z": 1})
    with pytest.raises(UserError, match="b/val has 1 classes that training has not: z"):
        data.check_sources(settings("--data.root", root))


def test_fewer_classes_in_val_keep_the_labels_of_train(make_tree, tmp_path):
    root = make_tree(tmp_path / "a", {"x": 2, "y": 2, "z": 2}, {"z": 3, "y": 1})
    made = loaders(settings("--data.root", root, "--data.workers", 0, "--data.batch_size", 2))
    assert made.classes == ["x", "y", "z"]
    assert torch.cat([targets for _, targets, _ in made.val]).tolist() == [1, 2, 2, 2]
    alone = loaders(settings("--data.root", root, "--data.workers", 0), classes=["x", "y", "z"], evaluation=True)
    assert torch.cat([targets for _, targets, _ in alone.val]).tolist() == [1, 2, 2, 2]


def test_evaluation_pixels_are_the_files_normalised(tree):
    made = loaders(settings("--data.root", tree, "--data.workers", 0, "--data.batch_size", 4))
    images = torch.cat([images for images, _, _ in made.val])
    paths = sorted((tree / "val").rglob("*.png"))
    assert len(images) == len(paths) == 21
    for image, path in zip(images, paths, strict=True):
        pixels = np.asarray(Image.open(path)).astype(np.float32) / 255
        wanted = (pixels - np.float32(CFG["mean"])) / np.float32(CFG["std"])
        np.testing.assert_allclose(image.permute(1, 2, 0).numpy(), wanted, atol=1e-5)


def test_results_do_not_depend_on_loader_processes(tree):
    cfg = [settings("--data.root", tree, "--data.batch_size", 4, "--data.workers", n, *STRONG) for n in (0, 1, 3)]
    wanted = epoch(cfg[0], 2)
    assert len(wanted) == 7
    assert equal(epoch(cfg[1], 2), wanted) and equal(epoch(cfg[2], 2), wanted)
    assert not equal(epoch(cfg[0], 3), wanted)
    torch.manual_seed(99)  # nor on the state of the global generators
    assert equal(epoch(cfg[0], 2), wanted)


def test_two_processes_see_what_one_sees(tree):
    whole = epoch(settings("--data.root", tree, "--data.batch_size", 8, "--data.workers", 0, *STRONG), 1)
    half = settings("--data.root", tree, "--data.batch_size", 4, "--data.workers", 0, *STRONG)
    ranks = [epoch(half, 1, world=World(CPU, rank, 2)) for rank in range(2)]
    woven = [
        tuple(torch.stack(pair, 1).flatten(0, 1) for pair in zip(*two, strict=True)) for two in zip(*ranks, strict=True)
    ]
    assert len(whole) == 3 and equal(woven, whole)


def test_an_epoch_may_start_at_any_batch(tree):
    cfg = settings("--data.root", tree, "--data.batch_size", 4, "--data.workers", 2, *STRONG)
    made = loaders(cfg)
    whole = read(made, 1)
    assert len(made.train) == len(whole) == 7  # the length stays the epoch's
    rest = read(made, 1, 5)
    assert equal(rest, whole[5:])
    assert equal(read(made, 1), whole)


def test_order_of_training_images():
    batches = TrainBatches(11, 2, World(CPU), 0)
    seen = [i for batch in batches for *_, i in batch]
    assert len(batches) == 5 and len(set(seen)) == 10 and seen != sorted(seen)
    repeated = [i for batch in TrainBatches(12, 4, World(CPU), 0, repeats=3) for *_, i in batch]
    assert all(len(set(repeated[k : k + 3])) == 1 for k in range(0, 12, 3)) and len(set(repeated)) == 4


def test_repeats_are_augmented_each_anew(tree):
    cfg = settings("--data.root", tree, "--data.batch_size", 6, "--data.workers", 0, *STRONG)
    images, targets = epoch(cfg)[0]
    assert targets[0] == targets[1] == targets[2] and targets[3] == targets[5]
    assert not torch.equal(images[0], images[1]) and not torch.equal(images[1], images[2])


@pytest.mark.parametrize(("images", "batch", "size"), [(21, 4, 1), (21, 4, 2), (5, 8, 3), (1, 2, 4)])
def test_evaluation_takes_every_image_once(images, batch, size):
    ranks = [EvalBatches(images, batch, World(CPU, rank, size)) for rank in range(size)]
    assert all(len(list(batches)) == len(batches) for batches in ranks)
    assert sorted(i for batches in ranks for part in batches for *_, i in part) == list(range(images))


@pytest.fixture
def broken(make_tree, tmp_path):
    """Two unreadable files in train/, one in val/."""
    root = make_tree(tmp_path / "broken", {"x": 4, "y": 4}, {"x": 3, "y": 3})
    good = (root / "train/x/0.png").read_bytes()
    (root / "train/x/1.png").write_bytes(good[: len(good) // 2])
    (root / "train/y/2.png").write_bytes(b"")
    (root / "val/y/0.png").write_text("no image")
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_images_are_named_or_skipped_and_counted(broken, workers):
    arguments = ["--data.root", broken, "--data.batch_size", 4, "--data.workers", workers]
    made = loaders(settings(*arguments))
    message = error_of(made.start_epoch(0))
    assert re.fullmatch(r"\S*broken/train/(x/1|y/2)\.png: cannot be read \(.*\); data\.skip_corrupt skips .*", message)
    message = error_of(made.val)
    assert re.fullmatch(r"\S*broken/val/y/0\.png: cannot be read \(.*\); data\.skip_corrupt skips .*", message)

    made = loaders(settings(*arguments, "--data.skip_corrupt", "true"))
    batches = list(made.start_epoch(0))
    assert [len(images) for images, *_ in batches] == [4, 4] and sum(skipped for *_, skipped in batches) == 2
    batches = list(made.val)
    assert [len(images) for images, *_ in batches] == [3, 2]
    assert sum(skipped for *_, skipped in batches) == 1
    assert torch.cat([targets for _, targets, _ in batches]).tolist() == [0, 0, 0, 1, 1]


def test_nothing_but_corrupt_images(broken):
    for path in broken.rglob("*.png"):
        path.write_bytes(b"")
    made = loaders(
        settings("--data.root", broken, "--data.workers", 0, "--data.skip_corrupt", "true", "--data.batch_size", 4)
    )
    with pytest.raises(UserError, match="none of the training images can be read"):
        list(made.start_epoch(0))
    assert [(len(images), skipped) for images, _, skipped in made.val] == [(0, 4), (0, 2)]


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "3a"])
@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_policies_on_gray_and_colour_images(policy, channels, mode):
    cfg = settings("--model.in_chans", channels, "--data.auto_augment", policy, "--data.color_jitter", 0.3)
    train, _, how = data.transforms(cfg, (16, 16), channels, CFG)
    noise = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    image = Image.fromarray(noise).convert(mode)
    torch.manual_seed(0)
    made = [train(image) for _ in range(200)]  # every operation of the policy at least once
    assert all(m.shape == (channels, 16, 16) and m.isfinite().all() for m in made)
    assert how["mean"] == (CFG["mean"] if channels == 3 else (pytest.approx(0.4),))


def test_four_channels_and_unknown_policies(make_tree, tmp_path):
    root = make_tree(tmp_path / "a", {"x": 2}, {"x": 1})
    arguments = ["--data.root", root, "--data.workers", 0, "--data.batch_size", 2, "--model.in_chans", 4]
    made = loaders(settings(*arguments, "--data.auto_augment", "null", "--data.color_jitter", 0.3))
    assert made.preprocess["mean"] == (0.5, 0.4, 0.3, pytest.approx(0.4))
    assert next(iter(made.start_epoch(0)))[0].shape == (2, 4, 16, 16)
    for policy in ("rand-q9", "zzz"):
        with pytest.raises(UserError, match=rf"data\.auto_augment: timm knows no policy '{policy}'"):
            loaders(settings("--data.root", root, "--data.auto_augment", policy))


def test_more_batch_than_images(tree):
    with pytest.raises(UserError, match=r"data\.batch_size 16 x 2 processes is more than the 28 training images"):
        loaders(settings("--data.root", tree, "--data.batch_size", 16), World(CPU, 0, 2))


def named(spec, root, *argv):
    workers = [] if "--data.workers" in argv else ["--data.workers", 0]
    return settings("--data.dataset", spec, "--data.root", root, "--data.batch_size", 4, *workers, *argv)


def test_torchvision_folder_by_name(tree, broken):
    cfg = named("torch/image_folder", tree)
    assert data.check_sources(cfg) is None and data.count_classes(cfg) == 7
    made = loaders(cfg, classes=list("abcdefg"))
    assert equal(epoch(settings("--data.root", tree, "--data.batch_size", 4, "--data.workers", 0)), read(made))
    made = loaders(named("torch/image_folder", broken), classes=["x", "y"])
    with pytest.raises(UserError, match=r"broken/train/(x/1|y/2)\.png: cannot be read"):
        list(made.start_epoch(0))


def test_torchvision_folder_whose_classes_shift(make_tree, tmp_path):
    root = make_tree(tmp_path / "a", {"x": 4, "y": 4}, {"y": 2})
    with pytest.raises(UserError, match="torch/image_folder: val numbers its classes unlike train"):
        loaders(named("torch/image_folder", root), classes=["x", "y"])


def test_torchvision_set_by_name(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
    for split in ("train", "t10k"):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, *pixels.shape) + pixels.tobytes())
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, 12) + bytes(range(10)) + b"\3\3")
    cfg = named("torch/fashion_mnist", tmp_path, "--model.in_chans", 1)
    assert data.count_classes(cfg) == 10
    made = data.build(cfg, World(CPU), (28, 28), CFG, [str(i) for i in range(10)])
    images, targets, _ = next(iter(made.val))
    assert targets.tolist() == [0, 1, 2, 3]
    mean, std = np.mean(CFG["mean"]), np.mean(CFG["std"])
    np.testing.assert_allclose(images[:, 0].numpy(), (pixels[:4] / 255 - mean) / std, atol=1e-5)
    assert len(read(made)) == 3


def test_data_sets_that_are_not_there(tmp_path):
    for spec, message in (
        ("torch/nope", "'torch/nope', split 'train': Unknown torchvision dataset nope"),
        ("torch/fashion_mnist", "'torch/fashion_mnist', split 'train': Dataset not found"),
        ("imagenet", "must begin with torch/, hfds/, hfids/, tfds/, wds/, got 'imagenet'"),
    ):
        with pytest.raises(UserError, match=message):
            data.count_classes(named(spec, tmp_path))


@pytest.fixture
def shards(tree, tmp_path):
    """`tree` as a webdataset: 4 shards of 7 images to train on, 2 to evaluate on."""
    info = {"splits": {}}
    for split, count in (("train", 4), ("val", 2)):
        paths = sorted((tree / split).rglob("*.png"))
        names = [f"{split}-{i}.tar" for i in range(count)]
        for shard, name in enumerate(names):
            with tarfile.open(tmp_path / name, "w") as tar:
                for number, path in enumerate(paths[shard::count]):
                    label = tmp_path / "label.cls"
                    label.write_text(str("abcdefg".index(path.parent.name)))
                    tar.add(path, f"{number:03d}.png")
                    tar.add(label, f"{number:03d}.cls")
        lengths = [len(paths[i::count]) for i in range(count)]
        info["splits"][split] = {"name": split, "num_samples": len(paths), "filenames": names, "shard_lengths": lengths}
    (tmp_path / "_info.json").write_text(json.dumps(info))
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_streams(shards, workers):
    pytest.importorskip("webdataset", reason="webdataset is not installed; pip install webdataset to test streams")
    cfg = named("wds/x", shards, "--data.workers", workers, *STRONG)
    with pytest.raises(UserError, match=r"does not tell its number of classes: set model\.num_classes"):
        data.count_classes(cfg)
    with pytest.raises(UserError, match=r"data\.crops: wds/x streams its images"):
        loaders(named("wds/x", shards, "--data.crops", "2"), classes=list("abcdefg"))
    made = loaders(cfg, classes=list("abcdefg"))
    assert sorted(torch.cat([t for _, t, _ in made.val]).tolist()) == sorted(list(range(7)) * 3)
    whole = read(made, 1)
    assert len(whole) == len(made.train) and all(len(images) == 4 for images, _ in whole)
    assert not equal(read(made, 2), whole)
    torch.manual_seed(99)
    fresh = loaders(cfg, classes=list("abcdefg"))
    assert equal(read(fresh, 1), whole)
    assert equal(read(fresh, 1, 3), whole[3:])


@pytest.mark.parametrize(("size", "workers"), [(2, 1), (2, 2), (3, 1)])
def test_streams_evaluate_every_image_once_on_several_processes(shards, monkeypatch, size, workers):
    """Also where the shards, 2 here, do not suffice for all loader processes."""
    pytest.importorskip("webdataset", reason="webdataset is not installed; pip install webdataset to test streams")
    cfg = named("wds/x", shards, "--data.workers", workers)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: size)
    seen = []
    for rank in range(size):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        made = loaders(cfg, World(CPU, rank, size), list("abcdefg"), evaluation=True)
        seen += [image for images, _, _ in made.val for image in images]
    assert len(seen) == 21 and len({image.numpy().tobytes() for image in seen}) == 21


def test_a_stream_that_ends_early_is_an_error(shards):
    """Five loader processes, four shards: one has nothing to give."""
    pytest.importorskip("webdataset", reason="webdataset is not installed; pip install webdataset to test streams")
    made = loaders(named("wds/x", shards, "--data.workers", 5), classes=list("abcdefg"))
    assert re.fullmatch(r"data\.dataset: a process got 8 of 10 batches; .* \(now 5\) .*", error_of(made.start_epoch(0)))
