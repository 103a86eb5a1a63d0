"""What attach_slws promises for every ecosystem."""

import copy
import math
import pickle

import pytest
import torch
from attach_models import CASES, Layer, Stack, loss_of

import slws
from slws.attached import Attached
from slws.find import find_layers


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    return CASES[request.param]


def attach(model, case, rate=0.5, **more):
    return slws.attach_slws(model, rate, **({"layers": case.stack} | case.options | more))


def one_layer(model, case, rate=1.0):
    """The last layer of the stack, alone, with its handle."""
    name, layer = list(find_layers(model, case.stack).items())[-1 if len(case.options) == 0 else 0]
    return layer, attach(model, case, rate, layers=[name], schedule="constant")


def test_eval_outputs_and_state_dict_are_untouched(case):
    model, inputs = case.build().eval(), case.inputs()
    before, keys = model(**inputs), list(model.state_dict())
    parameters = [(n, id(p)) for n, p in model.named_parameters()]
    attach(model, case, 1.0, schedule="constant")
    torch.testing.assert_close(model(**inputs), before, rtol=0, atol=0)
    assert list(model.state_dict()) == keys
    assert [(n, id(p)) for n, p in model.named_parameters()] == parameters
    assert model.load_state_dict(case.build().state_dict()) is not None


def test_trains_with_finite_losses_and_other_outputs(case):
    model, inputs = case.build().train(), case.inputs()
    plain = loss_of(model(**inputs)).item()
    attach(model, case, 1.0, schedule="constant")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(6):
        loss = loss_of(model(**inputs))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    if case is not CASES["timm_vit"]:  # attention does not care about the order of its tokens
        assert losses[0] != plain


def test_measured_rates_are_linear(case, monkeypatch):
    """400 calls per layer: four standard deviations around l / (depth - 1), exactly none and all at the ends.

    Counted apart from stats() by what reaches the layer's own code, which is left out to save time.
    """
    model = case.build().train()
    handle = attach(model, case, 1.0)
    x, moved = case.layer(), []

    def stand_in(self, *inputs, **keywords):
        moved.append(not torch.equal(inputs[0], x[0]))
        return inputs if len(inputs) > 1 else inputs[0]

    monkeypatch.setattr(Attached, "inner", stand_in)
    layers = find_layers(model, case.stack)
    wanted = slws.linear_rates(len(layers), 1.0)
    for (name, layer), p in zip(layers.items(), wanted, strict=True):
        moved.clear()
        for _ in range(400):
            layer(*x, **case.keywords)
        assert abs(sum(moved) / 400 - p) <= 4 * math.sqrt(p * (1 - p) / 400)
        measured = handle.stats()[name]
        assert measured == {"calls": 400, "shuffled": sum(moved), "measured": sum(moved) / 400, "rate": p}


def test_equals_permuting_by_hand(case, monkeypatch):
    """Values and gradients, of inputs and weights. The permutation is read off what reaches the layer's own code."""
    model, inputs = case.build().train(), case.layer()
    dims = case.options.get("seq_dim", 1)
    dims = (dims,) if isinstance(dims, int) else dims
    flat = lambda x: x.flatten(dims[0], dims[-1])  # noqa: E731
    layer, handle = one_layer(model, case)
    seen = []
    inner = Attached.inner
    monkeypatch.setattr(Attached, "inner", lambda self, *a, **k: seen.append((a, k)) or inner(self, *a, **k))

    def run(call):
        leaves = [x.clone().requires_grad_() for x in inputs]
        layer.zero_grad()
        out = call(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        sum((o * torch.linspace(1, 2, o.numel()).view_as(o)).sum() for o in out).backward()
        return [*out, *(x.grad for x in leaves), *(p.grad for p in layer.parameters() if p.grad is not None)]

    found = run(lambda *x: layer(*x, **case.keywords))
    (args, keywords), length = seen[0], flat(inputs[0]).shape[1]
    index = (flat(args[0])[0][:, None] == flat(inputs[0])[0][None]).all(-1).float().argmax(1)
    assert sorted(index.tolist()) == list(range(length)) and index.tolist() != list(range(length))
    handle.remove()

    def by_hand(*x):
        out = layer(*(flat(t)[:, index].view(t.shape) for t in x), **keywords)
        back = index.argsort()
        out = out if isinstance(out, tuple) else (out,)
        return tuple(flat(o)[:, back].view(o.shape) for o in out)

    for one, two in zip(found, run(by_hand), strict=True):
        assert torch.equal(one, two)


def test_masks_move_along(monkeypatch):
    """A padding mask reaches Hugging Face's layer in the order of the tokens."""
    case = CASES["hf_mamba"]
    model, x = case.build().train(), torch.randn(2, 11, 16)
    mask = torch.ones(2, 11)
    mask[1, :4] = 0
    layer, _ = one_layer(model, case)
    seen, inner = [], Attached.inner
    monkeypatch.setattr(Attached, "inner", lambda self, *a, **k: seen.append((a, k)) or inner(self, *a, **k))
    layer(x, attention_mask=mask)
    (moved,), keywords = seen[0]
    index = (moved[0][:, None] == x[0][None]).all(-1).float().argmax(1)
    assert torch.equal(keywords["attention_mask"], mask[:, index]) and not torch.equal(mask[:, index], mask)


def test_remove_leaves_no_trace(case):
    model, inputs = case.build().train(), case.inputs()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    torch.manual_seed(1)
    plain = loss_of(model(**inputs)).item()
    handle = attach(model, case, 1.0, schedule="constant")
    loss_of(model(**inputs))
    handle.remove()
    handle.remove()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    torch.manual_seed(1)
    assert loss_of(model(**inputs)).item() == plain
    with attach(model, case):
        assert any("forward" in vars(m) for m in model.modules())
    assert not any("forward" in vars(m) for m in model.modules())


def test_copies_and_pickles_carry_their_own(case):
    model, inputs = case.build().eval(), case.inputs()
    handle = attach(model, case, 1.0, schedule="constant")
    copies = [copy.deepcopy(model)]
    if case is not CASES["mamba_ssm"]:  # its source is not importable by name here
        copies.append(pickle.loads(pickle.dumps(model)))
    handle.remove()
    for twin in copies:
        torch.testing.assert_close(twin(**inputs), model(**inputs), rtol=0, atol=0)
        layers = find_layers(twin, case.stack).values()
        assert all(vars(layer)["forward"].layer is layer for layer in layers)
        twin.train()(**inputs)
        assert all(vars(layer)["forward"].draws.shuffled == 1 for layer in layers)


def test_a_static_copy_counts_for_itself():
    model, x = Stack().train(), torch.randn(2, 11, 8)
    handle = slws.attach_slws(model, 1.0, static=True, warmup_epochs=2)
    handle.set_epoch(1)
    model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        handle.set_epoch(2)
        attached = vars(twin.layers[3])["forward"]
        assert attached.current_rate == float(attached.threshold) == 0.5 and not attached.draws.past
        calls, _ = attached.counts()
        twin(x)
        assert attached.counts()[0] == calls + 1
        handle.set_epoch(1)


def test_an_ema_copy_is_unaffected():
    from timm.utils import ModelEmaV3

    model, x = Stack().train(), torch.randn(2, 11, 8)
    slws.attach_slws(model, 1.0, schedule="constant")
    ema = ModelEmaV3(model)
    assert not torch.equal(model(x), model(x))
    plain = Stack()
    plain.load_state_dict(ema.module.state_dict())
    ema.update(model)
    assert torch.equal(ema.module(x), plain.eval()(x))


def test_other_hooks_see_the_layer_unshuffled():
    model, x = Stack(depth=2).train(), torch.randn(2, 11, 8)
    seen = []
    layer = model.layers[1]
    layer.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    slws.attach_slws(model, 1.0)
    layer.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    out = layer(x)
    assert seen[0] is x and seen[1] is x and not torch.equal(out, Layer.forward(layer, x))


def test_an_exception_leaves_nothing_behind():
    model, x = Stack(depth=2).train(), torch.randn(2, 11, 8)
    slws.attach_slws(model, 1.0)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 11, 9))
    assert model(x).shape == x.shape


def test_a_forward_that_was_patched_before_is_kept():
    model, x = Stack(depth=2).train(), torch.randn(2, 11, 8)
    mine = lambda x: x.cumsum(1)  # noqa: E731
    model.layers[1].forward = mine
    handle = slws.attach_slws(model, 1.0)
    assert not torch.equal(model.layers[1](x), x.cumsum(1))
    handle.remove()
    assert model.layers[1].forward is mine


def test_a_forward_patched_later_survives_removal():
    model, x = Stack(depth=2).train(), torch.randn(2, 11, 8)
    handle = slws.attach_slws(model, 1.0)
    attached = model.layers[1].forward
    outer = lambda x: attached(x)  # noqa: E731
    model.layers[1].forward = outer
    handle.remove()
    assert model.layers[1].forward is outer
    assert torch.equal(model.layers[1](x), Layer.forward(model.layers[1], x))


def test_describe_prints_the_table(capsys):
    model = Stack(depth=3).train()
    assert slws.describe(model) == "SLWS: nothing attached"
    slws.attach_slws(model, 0.5)
    model(torch.randn(2, 11, 8))
    text = slws.describe(model)
    assert text in capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert [row[:4] for row in rows[1:]] == [
        [f"layers.{i}", "Layer", f"{p:.3f}", f"{p:.3f}"] for i, p in enumerate((0, 0.25, 0.5))
    ]
    assert rows[1][4] == "0/1"
