"""Finding the stack of layers, and refusing what cannot be attached."""

import pytest
from attach_models import Layer, Stack
from torch import nn

import slws

D = 5


def test_stages_of_any_depth_share_one_schedule():
    model = nn.ModuleDict({"a": Stack(2), "b": Stack(3)})
    handle = slws.attach_slws(model, 0.8, layers=["a.layers", "b.layers"])
    assert list(handle.rates) == ["a.layers.0", "a.layers.1", "b.layers.0", "b.layers.1", "b.layers.2"]
    assert list(handle.rates.values()) == slws.linear_rates(5, 0.8)
    handle.remove()
    assert list(slws.attach_slws(model, 0.8, layers="*.layers").rates.values()) == slws.linear_rates(5, 0.8)


def test_the_stack_is_found_or_the_candidates_are_named():
    assert list(slws.attach_slws(Stack(), 0.5).rates) == [f"layers.{i}" for i in range(4)]
    assert list(slws.attach_slws(nn.Sequential(Layer(), Layer()), 0.5).rates) == ["0", "1"]
    plain = nn.ModuleDict({"stack": nn.ModuleList(nn.Linear(D, D) for _ in range(3))})
    assert list(slws.attach_slws(plain, 0.5).rates) == ["stack.0", "stack.1", "stack.2"]
    two = nn.ModuleDict({"encoder": Stack(2), "decoder": Stack(3)})
    with pytest.raises(ValueError, match=r"several stacks.*encoder.layers \(2 x Layer\), decoder.layers \(3 x Layer\)"):
        slws.attach_slws(two, 0.5)
    stages = nn.ModuleDict({"stages": nn.ModuleList([Stack(2), Stack(3)])})
    with pytest.raises(ValueError, match=r"stages \(2 x Stack\), stages.\*.layers \(2 \+ 3 x Layer\)"):
        slws.attach_slws(stages, 0.5)
    with pytest.raises(ValueError, match="Linear has no stack of layers; candidates: none"):
        slws.attach_slws(nn.Linear(3, 3), 0.5)
    with pytest.raises(ValueError, match=r"layers='blocks' is no module of Stack.*candidates: layers \(4 x Layer\)"):
        slws.attach_slws(Stack(), 0.5, layers="blocks")
    shared = Layer()
    with pytest.raises(ValueError, match="0 and 1 are the same module"):
        slws.attach_slws(nn.ModuleList([shared, shared]), 0.5, layers="")


def test_attaching_twice_is_refused():
    model = Stack()
    handle = slws.attach_slws(model, 0.5)
    with pytest.raises(ValueError, match=r"layers\.0 is attached already"):
        slws.attach_slws(model, 0.5)
    handle.remove()
    slws.attach_slws(model, 0.5)
    own = Stack()
    own.slws = slws.SLWS(0.3)
    with pytest.raises(ValueError, match=r"already shuffles by itself \(slws is SLWS\(rate=0.3\)\)"):
        slws.attach_slws(own, 0.5)
    own.slws.rate = 0.0
    own.layers[2].slws_refused = "its scan needs the grid"
    with pytest.raises(ValueError, match=r"layers.2 refuses SLWS: its scan needs the grid"):
        slws.attach_slws(own, 0.5)
    assert not any("forward" in vars(m) for m in own.modules())
