"""Configuration files and overrides: what is read, what is refused, and how the refusal reads."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest

from vim import config
from vim.runtime import UserError
from vim.schema import Config, DataConfig, ModelConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def refusal(argv) -> str:
    with pytest.raises(UserError) as caught:
        config.parse([str(a) for a in argv])
    assert "\n" not in str(caught.value)
    return str(caught.value)


COMMAND_LINES = {
    ("--bogus", "1"): "unknown key bogus",
    ("--epochs", "3"): "unknown key epochs; did you mean train.epochs?",
    ("--model.nmae", "x"): "unknown key model.nmae; did you mean model.name?",
    ("--data.batchsize=3",): "unknown key data.batchsize; did you mean data.batch_size?",
    ("--optim.lr_bacth", "3"): "did you mean optim.lr_batch?",
    ("--train.lr", "3"): "unknown key train.lr; did you mean optim.lr?",
    ("--model.n", "x"): "unknown key model.n",
    ("--train.epochs", "three"): "train.epochs must be a whole number, got three",
    ("--train.epochs", "3.5"): "train.epochs must be a whole number, got 3.5",
    ("--train.epochs", "null"): "train.epochs must be a whole number, got None",
    ("--optim.lr", "fast"): "optim.lr must be a number, got fast",
    ("--train.precision", "fp8"): "train.precision must be one of bf16, fp16, fp32, got fp8",
    ("--task", "classfy"): "task must be one of classify, distill, got classfy",
    ("--data.skip_corrupt", "maybe"): "data.skip_corrupt must be true or false, got maybe",
    ("--data.mean", "red"): "data.mean must be a list of numbers or null, got red",
    ("--model.img_size", "[1,x]"): "model.img_size must be a whole number or a list of whole numbers or null",
    ("--model.kwargs", "3"): "model.kwargs must be a mapping, got 3",
    ("--model", "3"): "model",
    ("--train.epochs",): "--train.epochs: expected one argument",
    ("what",): "what",
    ("--slws.rate", "1.5"): "slws.rate must lie in [0, 1], got 1.5",
    ("--slws.rate", ".nan"): "slws.rate must lie in [0, 1], got nan",
    ("--train.epochs", "0"): "train.epochs must be at least 1, got 0",
    ("--optim.lr", ".inf"): "optim.lr must be finite, got inf",
    ("--optim.lr", ".nan"): "optim.lr must be finite, got nan",
    ("--optim.lr", "-1"): "optim.lr must be at least 0, got -1.0",
    ("--optim.clip_grad", "0"): "optim.clip_grad must be above 0, or null for no clipping, got 0.0",
    ("--optim.layer_decay", "1.1"): "optim.layer_decay must lie in [0, 1], got 1.1",
    ("--optim.betas", "[0.9]"): "optim.betas must be two numbers in [0, 1), got [0.9]",
    ("--data.batch_size", "-4"): "data.batch_size must be at least 1, got -4",
    ("--data.batch_size", "5"): "data.batch_size must be even with Mixup or CutMix, got 5",
    ("--data.crop_pct", "0"): "data.crop_pct must be above 0 and at most 1, got 0.0",
    ("--data.std", "[0.0]"): "data.std must be above 0, got [0.0]",
    ("--data.mean", "[0.5, 0.5]"): "data.mean must have 1, 3 or model.in_chans (3) numbers",
    ("--data.scale", "[1.0, 0.5]"): "data.scale must be [low, high]",
    ("--model.in_chans", "2"): "model.in_chans must be 1, 3 or 4, got 2",
    ("--model.in_chans", "4"): "data.auto_augment 'rand-m9-mstd0.5-inc1' cannot treat 4 channels",
    ("--model.num_classes", "0"): "model.num_classes must be at least 1, got 0",
    ("--model.img_size", "[1, 2, 3]"): "model.img_size must be at least 1, a number or [height, width], got [1, 2, 3]",
    ("--model.img_size", "[16, 0]"): "model.img_size must be at least 1, a number or [height, width], got [16, 0]",
    ("--train.device", "gpu 7"): "train.device must be auto, cpu",
    ("--seed", "-1"): "seed must lie in [0, ",
    ("--seed", "9" * 25): "seed must lie in [0, ",
}


@pytest.mark.parametrize("argv", COMMAND_LINES, ids=" ".join)
def test_command_line_is_refused(argv):
    assert COMMAND_LINES[argv] in refusal(argv)


FILES = {
    "slws:\n  rat: 0.3\n": "unknown key slws.rat; did you mean slws.rate?",
    "slsw:\n  rate: 0.3\n": "unknown key slsw; did you mean slws?",
    "train.epoch: 3\n": "unknown key train.epoch; did you mean train.epochs?",
    "lr: 3\n": "unknown key lr; did you mean optim.lr?",
    "1: 3\n": "unknown key 1",
    "train: {epochs: [1]}\n": "train.epochs must be a whole number, got [1]",
    "train: {epochs: true}\n": "train.epochs must be a whole number, got True",
    "train: {epochs: null}\n": "train.epochs must be a whole number, got null",
    "model: 3\n": "model is a group of keys, not 3",
    "train: null\n": "train is a group of keys, not None",
    "- a\n- b\n": "holds a list at its top level",
    "hello\n": "holds a str at its top level",
    "": "holds nothing at its top level",
    "model:\n\tname: x\n": "line 2: found character '\\t' that cannot start any token (indent with spaces, not tabs)",
    "data: {workers: 1}\nseed: 1\ndata: {repeats: 2}\n": "line 3: data is given twice",
    "train:\n  epochs: 3\n  epochs: 4\n": "line 3: epochs is given twice",
    "model: {name: x\n": "line 2: expected ',' or '}'",
    "? [a]\n: 3\n": "line 1: found unhashable key",
    "model: !!python/object/apply:os.getpid []\n": "line 1: could not determine a constructor for the tag",
    "seed: \x07\n": "no YAML (",
}


@pytest.mark.parametrize("text", FILES, ids=repr)
def test_file_is_refused_by_name(text, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    message = refusal(["--config", path])
    assert FILES[text] in message
    if "must be" not in message:
        assert str(path) in message


def test_files_that_cannot_be_read(tmp_path):
    assert refusal(["--config", tmp_path / "no.yaml"]) == f"--config {tmp_path}/no.yaml: No such file or directory"
    assert refusal([f"--config={tmp_path}"]).endswith("Is a directory")
    (tmp_path / "weights.pt").write_bytes(b"\x80\x81\xff")
    assert "is no text file" in refusal(["--config", tmp_path / "weights.pt"])
    assert "expected one argument" in refusal(["--config"])


def test_later_files_and_the_command_line_win(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 1\noptim: {lr: 1e-3, eps: 1e-6}\nmodel: {kwargs: {depth: 2, expand: 1}}\n")
    (tmp_path / "b.yaml").write_text("seed: 2\noptim: {lr: 2e-3}\n")
    files = ["--config", f"{tmp_path}/a.yaml", "--config", f"{tmp_path}/b.yaml"]
    found = config.parse([*files, "--train.epochs", "7", "--model.kwargs.depth", "3"])
    assert (found.seed, found.optim.lr, found.optim.eps, found.train.epochs) == (2, 2e-3, 1e-6, 7)
    assert found.model.kwargs == {"depth": 3, "expand": 1}


def test_dump_is_complete_and_reads_back(tmp_path):
    made = Config(
        out="some where",
        model=ModelConfig(name="arm_base_patch16_224", img_size=[16, 32], in_chans=1, kwargs={"init": "published"}),
        data=DataConfig(root="3", auto_augment=None, mean=[0.5], scale=[1e-8, 1.0], skip_corrupt=True),
    )
    made.optim.lr, made.optim.lr_batch = 1e-20, None
    path = tmp_path / "config.yaml"
    path.write_text(config.dump(made))
    assert config.parse(["--config", str(path)]) == made
    assert all(f"{key.rsplit('.', 1)[-1]}:" in path.read_text() for key in config.TYPES)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_configs_of_the_project_are_valid(path):
    assert config.parse(["--config", str(path)]).out


def test_saved_configuration_with_overrides():
    saved = asdict(Config(seed=5, data=DataConfig(root="here", workers=3)))
    found = config.load(saved, ["--data.root", "there"], "eval.py")
    assert (found.seed, found.data.root, found.data.workers) == (5, "there", 3)
    del saved["train"]["log_every"]  # as an older version has written it
    assert config.load(saved, [], "eval.py").train.log_every == 50
    with pytest.raises(UserError, match=r"configuration in the checkpoint: unknown key data\.new"):
        config.load({"data": {"new": 1}}, [], "eval.py")
    with pytest.raises(UserError, match=r"unknown key data\.rot; did you mean data\.root\?"):
        config.load(saved, ["--data.rot", "x"], "eval.py")


def test_resume_with_another_configuration():
    saved = asdict(Config())
    same = Config(out="elsewhere", data=DataConfig(root="moved", workers=0))
    same.train.device, same.train.log_every = "cpu", 1
    config.check_resumable(same, saved, "run")
    with pytest.raises(UserError, match=r"run holds .*\(seed 0 -> 3, data\.mixup 0\.8 -> 0\.5\); choose another --out"):
        config.check_resumable(Config(seed=3, data=DataConfig(mixup=0.5)), saved, "run")
    for dataset, free in (("hfds/x", True), ("wds/x", False)):
        saved = asdict(Config(data=DataConfig(dataset=dataset)))
        with nullcontext() if free else pytest.raises(UserError, match=r"\(data\.workers 8 -> 0\)"):
            config.check_resumable(Config(data=DataConfig(dataset=dataset, workers=0)), saved, "run")
