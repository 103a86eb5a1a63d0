"""A recomputed layer shuffles as it did in the forward pass."""

from functools import partial

import pytest
import torch
from attach_models import Layer, Stack
from torch import nn
from torch.utils.checkpoint import checkpoint

import slws


class Dropping(Layer):
    """Draws random numbers of its own, which a recomputation must repeat too."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


class Inside(Layer):
    """Checkpoints its own body, so the shuffle happens outside the checkpoint."""

    saving = None

    def forward(self, x):
        return self.saving(super().forward, x) if self.saving else super().forward(x)


class Regions(Stack):
    """Runs its layers under `saving`, in one of several cuts."""

    saving, cut = None, None

    def _run(self, layers, x):
        for layer in layers:
            # An operation before the layer, so that its input is not what the checkpoint saved.
            x = layer(x * 1.5)
        return x

    def _each_saved(self, layers, x):
        for layer in layers:
            x = self.saving(partial(self._run, [layer]), x)
        return x

    def forward(self, x):
        if self.saving is None or self.cut == "inside":
            return self._run(self.layers, x)
        step = {"layer": 1, "pair": 2, "all": len(self.layers), "nested": len(self.layers)}[self.cut]
        for i in range(0, len(self.layers), step):
            part = self.layers[i : i + step]
            run = partial(self._run, part)
            if self.cut == "nested":
                run = partial(self._each_saved, part)
            x = self.saving(run, x)
        return x


def gradients(model, order):
    """Seeded forwards and backwards in the given order: "f" is a forward, a digit the backward of that forward,
    "s" one backward of all losses at once."""
    model.zero_grad()
    losses = []
    for step in order:
        if step == "f":
            # A recomputation without replay moves the generator on, so each forward is seeded.
            torch.manual_seed(len(losses))
            x = torch.randn(2, 13, 8, generator=torch.Generator().manual_seed(len(losses)), requires_grad=True)
            losses.append(model(x.sin()).square().mean())
        elif step == "s":
            sum(losses).backward()
        else:
            losses[int(step)].backward()
    return [p.grad.clone() for p in model.parameters()]


ORDERS = ["f0", "ffs", "ff01", "ff10", "f0f1f2", "ffff2031"]


def build(layer, cut):
    torch.manual_seed(0)
    model = Regions(layer=layer).train()
    model.cut = cut
    return model, slws.attach_slws(model, 0.6, schedule="constant")


def compare(model, saving, orders=ORDERS):
    for order in orders:
        model.saving = None
        for layer in model.layers:
            layer.saving = None
        wanted = gradients(model, order)
        model.saving = saving
        for layer in model.layers:
            layer.saving = saving if model.cut == "inside" else None
        for found, want in zip(gradients(model, order), wanted, strict=True):
            torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("cut", ["layer", "pair", "all", "inside"])
@pytest.mark.parametrize("preserve", [True, False], ids=["replayed", "rng-not-replayed"])
def test_recomputation_repeats_the_permutation(reentrant, cut, preserve):
    model, handle = build(Inside if cut == "inside" else Layer, cut)
    compare(model, partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=preserve))
    forwards = 2 * sum(order.count("f") for order in ORDERS)
    assert all(s["calls"] == forwards for s in handle.stats().values())
    assert 0 < sum(s["shuffled"] for s in handle.stats().values()) < 4 * forwards


# A reentrant checkpoint runs what is inside without gradients, inner checkpoints too.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("cut", ["layer", "pair", "all", "nested"])
def test_dropout_stays_in_step(reentrant, cut):
    model, _ = build(Dropping, cut)
    compare(model, partial(checkpoint, use_reentrant=reentrant))


def test_nested_non_reentrant_without_replay():
    model, _ = build(Layer, "nested")
    compare(model, partial(checkpoint, use_reentrant=False, preserve_rng_state=False))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_cannot_be_told_apart_raises():
    """Nested reentrant checkpoints that do not replay the generator."""
    model, _ = build(Layer, "nested")
    model.saving = partial(checkpoint, use_reentrant=True, preserve_rng_state=False)
    with pytest.raises(RuntimeError, match="preserve_rng_state=True"):
        gradients(model, "f0")


def test_no_grad_forwards_in_between_do_not_confuse():
    for reentrant in (True, False):
        model, _ = build(Layer, "layer")
        x = torch.randn(2, 13, 8)

        def between(saved, x=x, model=model):
            torch.manual_seed(3)
            model.zero_grad()
            model.saving = saved
            loss = model(x.clone().requires_grad_().sin()).square().mean()
            model.saving = None
            with torch.no_grad():
                model(x)
            loss.backward()
            return [p.grad.clone() for p in model.parameters()]

        saving = partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=False)
        for found, want in zip(between(saving), between(None), strict=True):
            torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_more_forwards_than_are_remembered_raise(monkeypatch):
    """The first of too many cannot be found again: an error, not another permutation."""
    for reentrant in (True, False):
        monkeypatch.setattr("slws.draw.MEMORY", 4)
        model, _ = build(Layer, "layer")
        model.saving = partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=False)
        with pytest.raises(RuntimeError, match="cannot tell which forward"):
            gradients(model, "ffffff0")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # older releases lack the new name
def test_hugging_face_checkpointing():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the `hf` extra)")
    config = transformers.MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=3)
    model = transformers.MambaModel(config).train()
    slws.attach_slws(model, 0.6, schedule="constant")
    ids = torch.randint(32, (2, 7))

    def run():
        torch.manual_seed(1)
        model.zero_grad()
        sum(model(ids).last_hidden_state.square().mean() for _ in range(2)).backward()
        return [p.grad.clone() for p in model.parameters()]

    wanted = run()
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant, "preserve_rng_state": False})
        for found, want in zip(run(), wanted, strict=True):
            torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_timm_checkpointing():
    timm = pytest.importorskip("timm")
    small = {"img_size": 32, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 5, "proj_drop_rate": 0.1}
    model = timm.create_model("vit_tiny_patch16_224", **small).train()
    slws.attach_slws(model, 0.6, schedule="constant")
    x = torch.randn(2, 3, 32, 32)

    def run():
        torch.manual_seed(1)
        model.zero_grad()
        sum(model(x).square().mean() for _ in range(2)).backward()
        return [p.grad.clone() for p in model.parameters()]

    wanted = run()
    model.set_grad_checkpointing()
    for found, want in zip(run(), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0)
