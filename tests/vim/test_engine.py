import json
import math
from pathlib import Path

import pytest
import tinyrun
import torch
from torch import nn

import train
from vim import checkpoint, engine, runtime, schema, tasks
from vim.run import build_run, build_schedule, effective_lr, updates_per_epoch
from vim.runtime import NonFinite, UserError, World

CPU = World(torch.device("cpu"))


def config_of(**groups):
    return schema.Config(
        train=schema.TrainConfig(**{"precision": "fp32", "ema_decay": None, **groups.get("train", {})}),
        optim=schema.OptimConfig(**{"lr_batch": None, "warmup_epochs": 0, **groups.get("optim", {})}),
        data=schema.DataConfig(batch_size=4),
    )


def linear_run(batches=6, **groups):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.num_classes = 2
    config = config_of(**groups)
    run = build_run(model, config, CPU, batches)
    data = [(torch.randn(4, 3), torch.randint(2, (4,)), 0) for _ in range(batches)]
    return run, config, data


def cross_entropy(model, images, targets):
    return {"loss": nn.functional.cross_entropy(model(images), targets)}


def epoch(run, config, data, loss_of=cross_entropy, on_log=lambda loss: None, on_save=lambda: None):
    engine.train_epoch(run, loss_of, data, config, on_log, on_save)


def test_optimizer_steps_are_rounded_up():
    assert updates_per_epoch(7, 3) == 3
    run, config, data = linear_run(7, train={"accumulation": 3})
    epoch(run, config, data)
    assert run.updates == 3 and run.batch == 7


def test_accumulation_equals_the_larger_batch():
    """Two batches of 4 accumulated, and a last single one, give the gradient of their mean loss."""
    run, config, data = linear_run(3, train={"accumulation": 2}, optim={"opt": "sgd", "lr": 0.1, "weight_decay": 0.0})
    other, plain, _ = linear_run(2, optim={"opt": "sgd", "lr": 0.1, "weight_decay": 0.0})
    epoch(run, config, data)
    joined = tuple(torch.cat([a, b]) for a, b in zip(data[0][:2], data[1][:2], strict=True))
    epoch(other, plain, [(*joined, 0), data[2]])
    for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_effective_lr_counts_processes_and_accumulation():
    assert effective_lr(schema.OptimConfig(lr=1e-3, lr_batch=512), 2048) == pytest.approx(4e-3)
    assert effective_lr(schema.OptimConfig(lr=1e-3, lr_batch=None), 2048) == 1e-3


def test_schedule_is_warmup_then_cosine_by_update():
    """Against the formula: linear from warmup_lr, then min + (lr - min)(1 + cos(pi t / T)) / 2."""
    optim = schema.OptimConfig(lr=2.0, min_lr=0.5, warmup_epochs=2, warmup_lr=0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = build_schedule(optimizer, optim, 2.0, epochs=10, updates=5)
    for update in range(51):
        schedule.step_update(update)
        if update < 10:
            wanted = 0.1 + (2.0 - 0.1) * update / 10
        elif update < 50:
            wanted = 0.5 + 1.5 * (1 + math.cos(math.pi * update / 50)) / 2
        else:
            wanted = 0.5
        assert optimizer.param_groups[0]["lr"] == pytest.approx(wanted), update


def test_constant_schedule():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    optim = schema.OptimConfig(lr=2.0, schedule="constant", warmup_epochs=1, warmup_lr=0.0)
    schedule = build_schedule(optimizer, optim, 2.0, epochs=10, updates=5)
    lrs = []
    for update in range(51):
        schedule.step_update(update)
        lrs.append(optimizer.param_groups[0]["lr"])
    assert lrs[:6] == pytest.approx([0.0, 0.4, 0.8, 1.2, 1.6, 2.0]) and set(lrs[6:]) == {2.0}


def test_average_follows_its_formula():
    run, config, data = linear_run(5, train={"ema_decay": 0.7})
    weights = []
    step = run.optimizer.step
    run.optimizer.step = lambda: (step(), weights.append(run.model.weight.detach().clone()))
    epoch(run, config, data)
    average = weights[0]
    for w in weights[1:]:
        average = 0.7 * average + 0.3 * w
    torch.testing.assert_close(run.ema.module.weight, average)


def test_a_loss_that_is_not_finite_is_named():
    run, config, data = linear_run(6, train={"log_every": 4})
    saved = []

    def loss_of(model, images, targets):
        loss = cross_entropy(model, images, targets)["loss"]
        return {"loss": loss / 0 if run.batch == 2 else loss}

    run.epoch = 4
    with pytest.raises(NonFinite, match="the loss is not finite at epoch 5, step 3"):
        epoch(run, config, data, loss_of, on_save=lambda: saved.append(1))
    assert run.batch == 4 and not saved


def test_a_weight_that_is_not_finite_is_never_saved():
    run, config, data = linear_run(6, train={"save_every_steps": 2})
    saved = []
    step = run.optimizer.step

    def poisoned():
        step()
        if run.updates == 3:
            with torch.no_grad():
                run.model.weight[0, 0] = float("inf")

    run.optimizer.step = poisoned
    constant = lambda model, images, targets: {"loss": model.bias.square().sum()}  # noqa: E731
    with pytest.raises(NonFinite, match="a weight is not finite at epoch 1, step 4"):
        epoch(run, config, data, constant, on_save=lambda: saved.append(run.batch))
    assert saved == [2]


def test_a_bad_run_leaves_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    images = tinyrun.image_tree(tmp_path / "images")
    out = tmp_path / "run"
    arguments = tinyrun.arguments(images, out, "--train.epochs=3")
    original = tasks.Classify.__call__
    calls = []

    def explodes(self, model, images, targets):
        calls.append(1)
        loss = original(self, model, images, targets)["loss"]
        return {"loss": loss * float("nan") if len(calls) == 8 else loss}

    monkeypatch.setattr(tasks.Classify, "__call__", explodes)
    with pytest.raises(SystemExit) as stopped, runtime.exit_codes("train.py"):
        train.main(arguments)
    assert stopped.value.code == 1
    assert capsys.readouterr().err == (
        "train.py: error: the loss is not finite at epoch 2, step 2; last checkpoint untouched\n"
    )
    assert checkpoint.read(out / "last.pt")["run"]["epoch"] == 1
    monkeypatch.undo()
    train.main(arguments)
    assert checkpoint.read(out / "last.pt")["run"]["epoch"] == 3


def test_clipping_limits_the_gradient():
    run, config, data = linear_run(1, optim={"opt": "sgd", "lr": 1.0, "clip_grad": 1e-3, "weight_decay": 0.0})
    before = [p.detach().clone() for p in run.model.parameters()]
    epoch(run, config, data)
    moved = sum((a - b).square().sum() for a, b in zip(before, run.model.parameters(), strict=True)).sqrt()
    # timm's sgd is Nesterov with momentum 0.9: the first step is 1.9 gradients
    assert 0.99e-3 < moved.item() < 1.91e-3


class Fixed(nn.Module):
    """Logits looked up by the image's first pixel."""

    def __init__(self, table):
        super().__init__()
        self.register_buffer("table", table)
        self.num_classes = table.shape[1]

    def forward(self, x):
        return self.table[x[:, 0, 0, 0].long()]


@pytest.mark.parametrize("classes", [3, 10])
def test_evaluation_against_counting_by_hand(classes):
    torch.manual_seed(0)
    table, targets = torch.randn(21, classes), torch.randint(classes, (21,))
    images = torch.arange(21.0).view(21, 1, 1, 1)
    batches = [(images[i : i + 4], targets[i : i + 4], 0) for i in range(0, 21, 4)] + [
        (torch.empty(0), torch.empty(0, dtype=torch.long), 2)
    ]
    scores = engine.evaluate(Fixed(table), batches, CPU, "fp32", confusion=True)
    ranked = table.argsort(1, descending=True)
    top1 = sum(int(ranked[i, 0] == targets[i]) for i in range(21))
    top5 = sum(int(targets[i] in ranked[i, :5]) for i in range(21))
    losses = [-math.log(math.exp(table[i, targets[i]]) / sum(map(math.exp, table[i]))) for i in range(21)]
    assert scores["images"] == 21 and scores["skipped"] == 2
    assert scores["top1"] == pytest.approx(100 * top1 / 21)
    assert scores["top5"] == pytest.approx(100 * top5 / 21)
    assert scores["loss"] == pytest.approx(sum(losses) / 21, rel=1e-6)
    assert int(scores["confusion"].diagonal().sum()) == top1 and int(scores["confusion"].sum()) == 21


def test_confusion_agrees_with_top1_where_logits_are_equal():
    """bf16 logits often are."""
    table, targets = torch.zeros(64, 40), torch.arange(64) % 40
    batches = [(torch.arange(64.0).view(64, 1, 1, 1), targets, 0)]
    scores = engine.evaluate(Fixed(table), batches, CPU, "fp32", confusion=True)
    assert scores["top1"] == 100 * int(scores["confusion"].diagonal().sum()) / 64


def test_an_empty_evaluation_is_an_error():
    with pytest.raises(UserError, match="no readable image"):
        engine.evaluate(Fixed(torch.zeros(1, 2)), [], CPU, "fp32")


@pytest.mark.parametrize(
    "more",
    [
        ("--train.ema_decay=null",),
        ("--train.precision=bf16", "--train.ema_warmup=true", "--optim.clip_grad=1.0"),
        ("--train.precision=fp16",),
        ("--model.grad_checkpointing=true", "--slws.rate=0.9", "--optim.layer_decay=0.8"),
        ("--optim.opt=lion", "--optim.schedule=constant", "--train.eval_every=2", *tinyrun.PLAIN),
        ("--model.name=resnet10t", "--model.kwargs={}", "--model.img_size=32", "--train.epochs=1"),
        ("--model.name=vit_tiny_patch16_224", "--model.kwargs={patch_size: 8, depth: 3}", "--slws.rate=0.9"),
    ],
)
def test_combinations_train(tmp_path, more, capsys):
    images = tinyrun.image_tree(tmp_path / "images", train=16, val=5)
    out = tmp_path / "run"
    train.main(tinyrun.arguments(images, out, *more))
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["images"] == 5 and math.isfinite(row["train_loss"]) and math.isfinite(row["loss"])
    assert ("fp16 overflows easily" in capsys.readouterr().out) == ("--train.precision=fp16" in more)
    assert {"config.yaml", "metrics.jsonl", "speed.jsonl", "last.pt", "best.pt"} <= {p.name for p in out.iterdir()}


def test_peak_memory_is_this_process_s(tmp_path):
    """As many bytes again as the peak so far raise it, and freeing them does not lower it."""
    cpu = torch.device("cpu")
    before = runtime.peak_memory(cpu)
    if before is None:
        assert not Path("/proc/self/status").exists()
        return
    assert before > 2**26
    torch.ones(before // 4)
    after = runtime.peak_memory(cpu)
    assert before < after < 3 * before
    images = tinyrun.image_tree(tmp_path / "images", train=16, val=5)
    train.main(tinyrun.arguments(images, tmp_path / "run", "--train.epochs=1"))
    row = json.loads((tmp_path / "run" / "speed.jsonl").read_text())
    assert row["peak_memory_gb"] >= round(after / 1e9, 3) - 0.001


def test_training_starts_from_weights(tmp_path, capsys):
    images = tinyrun.image_tree(tmp_path / "images", train=16, val=5)
    seven = tinyrun.image_tree(tmp_path / "seven", train=14, val=7, classes=7)
    train.main(tinyrun.arguments(images, tmp_path / "a", "--train.epochs=1"))
    best = tmp_path / "a" / "best.pt"
    frozen = ("--train.epochs=1", "--optim.lr=0", "--optim.min_lr=0", "--optim.warmup_lr=0", "--model.img_size=24")
    train.main(tinyrun.arguments(seven, tmp_path / "b", *frozen, f"--train.init_from={best}"))
    said = capsys.readouterr().out
    assert "adapted: pos_embed 2x2 -> 3x3" in said and "head.weight (3 classes, the model has 7)" in said
    before, after = checkpoint.read(best)["model"], checkpoint.read(tmp_path / "b" / "last.pt")["model"]
    assert torch.equal(before["layers.1.mixer.in_proj.weight"], after["layers.1.mixer.in_proj.weight"])
    assert after["head.weight"].shape[0] == 7


def test_require_kernels_refuses_the_reference(tmp_path, monkeypatch):
    images = tinyrun.image_tree(tmp_path / "images", train=8, val=3)
    monkeypatch.setenv("SSM_KERNELS_BACKEND", "reference")
    with pytest.raises(UserError, match=r"train\.require_kernels: no fast selective scan on cpu"):
        train.main(tinyrun.arguments(images, tmp_path / "run", "--train.require_kernels=true"))
    assert not (tmp_path / "run").exists()


def test_resuming_on_another_number_of_processes_is_refused():
    run, _, _ = linear_run(2)
    state = run.state_dict()
    state["run"]["processes"] = 4
    with pytest.raises(UserError, match=r"the run to resume had 4 process\(es\), this one has 1"):
        run.load_state_dict(state)


def test_an_average_slower_than_the_run_is_said(tmp_path, capsys):
    images = tinyrun.image_tree(tmp_path / "images", train=16, val=5)
    for decay, more, said in ((0.999, (), True), (0.999, ("--train.ema_warmup=true",), False), (0.5, (), False)):
        train.main(tinyrun.arguments(images, tmp_path / f"{decay}{said}", f"--train.ema_decay={decay}", *more))
        assert ("train.ema_decay 0.999 averages over 1000 updates" in capsys.readouterr().out) == said
