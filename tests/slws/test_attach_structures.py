"""Which inputs and outputs of a layer move: containers, masks, positions, grids, and what is refused."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import slws
from slws.attached import Attached

L, B, D = 7, 3, 5


@pytest.fixture
def seen(monkeypatch):
    """What reaches the layers' own code: (args, kwargs) per call."""
    calls, inner = [], Attached.inner
    monkeypatch.setattr(Attached, "inner", lambda self, *a, **k: calls.append((a, k)) or inner(self, *a, **k))
    torch.manual_seed(0)
    return calls


def attached(forward, **options):
    """A layer with that forward, sure to shuffle."""
    kind = type("Block", (nn.Module,), {"forward": forward})
    model = nn.ModuleList([kind(), kind()])
    slws.attach_slws(model, 1.0, schedule="constant", layers="", **options)
    return model[0]


def order(moved, x, dim=1):
    """The permutation that took x to moved."""
    a, b = moved.movedim(dim, 0).flatten(1), x.movedim(dim, 0).flatten(1)
    index = (a[:, None] == b[None]).all(-1).float().argmax(1)
    assert sorted(index.tolist()) == list(range(len(index))) and index.tolist() != list(range(len(index)))
    return index


@dataclass
class State:
    hidden: torch.Tensor
    residual: torch.Tensor | None
    step: int = 3
    total: int = field(init=False, default=0)


Pair = namedtuple("Pair", "hidden residual")


class Output(OrderedDict):
    pass


@pytest.mark.parametrize(
    "pack",
    [
        lambda h, r: (h, r),
        lambda h, r: [h, {"r": r, "n": None}],
        Pair,
        State,
        lambda h, r: {"hidden": h, "more": (r, 4)},
        lambda h, r: Output(hidden=h, residual=r),
    ],
    ids=["tuple", "list", "namedtuple", "dataclass", "dict", "OrderedDict"],
)
def test_containers_go_in_and_come_out(pack, seen):
    """Both tensors move alike, the container's type and its other contents stay, and all is back in order."""
    hidden, residual = torch.randn(B, L, D), torch.randn(B, L, 2)
    given = pack(hidden, residual)
    out = attached(lambda self, state: state)(given)
    (inside,), _ = seen[0]
    assert type(out) is type(inside) is type(given)
    plain = lambda t: vars(t) if isinstance(t, State) else dict(t) if isinstance(t, Output) else t  # noqa: E731
    flat = lambda t: torch.utils._pytree.tree_leaves(plain(t))  # noqa: E731
    tensors = lambda t: [x for x in flat(t) if isinstance(x, torch.Tensor)]  # noqa: E731
    index = order(tensors(inside)[0], hidden)
    assert torch.equal(tensors(inside)[1], residual[:, index])
    assert torch.equal(tensors(out)[0], hidden) and torch.equal(tensors(out)[1], residual)
    assert torch.equal(tensors(given)[0], hidden)  # what the caller holds is not changed
    rest = lambda t: [x for x in flat(t) if not isinstance(x, torch.Tensor)]  # noqa: E731
    assert rest(out) == rest(given)


def test_hugging_face_model_output():
    outputs = pytest.importorskip("transformers.modeling_outputs", reason="transformers is not installed")
    x = torch.randn(B, L, D)
    layer = attached(lambda self, x: outputs.BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x,)))
    out = layer(x)
    assert type(out) is outputs.BaseModelOutput and torch.equal(out.last_hidden_state, x * 2)
    assert torch.equal(out["hidden_states"][0], x) and out.attentions is None


def test_keywords_masks_and_positions_move_along(seen):
    x, scale = torch.randn(B, L, D), torch.randn(D)
    also = {
        "mask": torch.rand(B, L) > 0.5,
        "positions": torch.arange(L)[None],
        "ids": torch.arange(L),
        "rotary": (torch.randn(1, L, 4), torch.randn(L, 4)),
        "complex": torch.randn(B, L, dtype=torch.complex64),
    }
    layer = attached(lambda self, x, scale, **more: x * scale)
    assert torch.equal(layer(x=x, scale=scale, **also), x * scale)
    _, moved = seen[0]
    index = order(moved["x"], x)
    assert moved["scale"] is scale
    assert torch.equal(moved["mask"], also["mask"][:, index]) and torch.equal(moved["positions"][0], index)
    assert torch.equal(moved["ids"], index) and torch.equal(moved["complex"], also["complex"][:, index])
    assert torch.equal(moved["rotary"][0], also["rotary"][0][:, index])
    assert torch.equal(moved["rotary"][1], also["rotary"][1][index])


@pytest.mark.parametrize(
    ("x", "other"),
    [
        ((B, L, D), (B, 1, L, L)),  # an attention mask, to be moved twice
        ((B, L, D), (B, 2, L, 4)),  # heads
        ((B, L, D), (L, L)),
        ((B, L, L), (B, L)),  # features as many as tokens
        ((B, L, L), (L,)),
        ((L, L, D), (L, 2)),  # samples as many as tokens
        ((B, L, D), (D, L)),
    ],
    ids=str,
)
def test_ambiguous_inputs_are_refused_until_named(x, other, seen):
    x, other = torch.randn(x), torch.randn(other)
    forward = lambda self, x, other: x  # noqa: E731
    with pytest.raises(
        ValueError, match=r"0: arg 'other' of shape .* may or may not follow .* sequence_args=\{'other'"
    ):
        attached(forward)(x, other)
    assert attached(forward, sequence_args={"other": None})(x, other) is not None
    assert seen[-1][0][1] is other
    dims = tuple(d for d, size in enumerate(other.shape) if size == L)
    attached(forward, sequence_args={"other": dims})(x, other)
    index = order(seen[-1][0][0], x)
    for dim in dims:
        other = other.index_select(dim, index)
    assert torch.equal(seen[-1][0][1], other)


def test_an_ambiguity_is_refused_at_the_first_call_also_where_the_coin_says_no():
    model = nn.ModuleList([attached(lambda self, x, mask: x)])
    model[0].__dict__["forward"].rate = 1e-9
    with pytest.raises(ValueError, match="may or may not follow"):
        model[0](torch.randn(B, L, D), torch.randn(B, 1, L, L))


def test_outputs_that_are_ambiguous_are_refused_until_named():
    x = torch.randn(B, L, D)
    scores = lambda self, x: (x, x @ x.mT)  # noqa: E731
    with pytest.raises(ValueError, match=r"output '1' of shape \(3, 7, 7\) may or may not follow.*sequence_outputs"):
        attached(scores)(x)
    out, matrix = attached(scores, sequence_outputs={1: (1, 2)})(x)
    torch.testing.assert_close(matrix, x @ x.mT)
    assert torch.equal(out, x)
    keyed = attached(lambda self, x: {"x": x, "more": [x @ x.mT]}, sequence_outputs={"more": (1, 2)})(x)
    torch.testing.assert_close(keyed["more"][0], x @ x.mT)


def test_outputs_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"0: no output keeps the sequence \(length 7\).*\[\(3, 4, 5\)\]"):
        attached(lambda self, x: x[:, ::2])(torch.randn(B, L, D))


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match=r"sequence_args names \['maks'\], but 0 takes \['x', 'mask'\]"):
        attached(lambda self, x, mask=None: x, sequence_args=["maks"])
    with pytest.raises(ValueError, match="named as following the sequence at dimension 1, but has not its size 7"):
        attached(lambda self, x, mask: x, sequence_args=["mask"])(torch.randn(B, L, D), torch.randn(B, 4))
    with pytest.raises(ValueError, match=r"sequence_args\['x'\] must be a dimension"):
        attached(lambda self, x: x, sequence_args={"x": -1})
    with pytest.raises(ValueError, match="no input holds a sequence at dimension 1"):
        attached(lambda self, x: x)(torch.randn(B))


def test_the_leading_tensor_is_the_first_in_the_signature_that_can_hold_the_sequence(seen):
    x, mask = torch.randn(B, L, D), torch.zeros(B, L)
    layer = attached(lambda self, t, x, mask=None: x)
    layer(mask=mask, x=x, t=torch.rand(B))
    order(seen[0][1]["x"], x)
    condition = torch.randn(B, 4)
    layer = attached(lambda self, condition, x: x, sequence_args={"condition": None})
    layer(condition, x)
    assert seen[1][0][0] is condition
    order(seen[1][0][1], x)


@pytest.mark.parametrize(
    ("shape", "seq_dim", "mask"),
    [
        ((B, 4, 6, D), (1, 2), (B, 4, 6)),
        ((B, D, 4, 6), (2, 3), (B, 1, 4, 6)),
        ((B, 24, D), 1, (1, 24)),
        ((B, D, 24), 2, (B, 24)),
        ((24, B, D), 0, (B, 24)),
        ((B, 4, 6, D), (1, 2), (B, 24)),
        ((B, 4, 1, D), (1, 2), (B, 4, 1)),
    ],
    ids=str,
)
def test_where_the_sequence_lies(shape, seq_dim, mask, seen):
    """Grids move as wholes of their positions; a mask of the grid or of its flat positions moves along."""
    x, mask = torch.randn(shape), torch.rand(mask)
    layer = attached(lambda self, x, mask: (x * 2, mask), seq_dim=seq_dim)
    out, mask_out = layer(x, mask)
    assert torch.equal(out, x * 2) and torch.equal(mask_out, mask)
    (moved, mask_moved), _ = seen[0]
    flat = (lambda t: t.flatten(*seq_dim)) if isinstance(seq_dim, tuple) else (lambda t: t)
    dim = seq_dim[0] if isinstance(seq_dim, tuple) else seq_dim
    index = order(flat(moved), flat(x), dim)
    assert moved.shape == x.shape and mask_moved.shape == mask.shape
    tokens = mask.reshape(mask.shape[0], -1)
    assert torch.equal(mask_moved.reshape(mask.shape[0], -1), tokens[:, index])


def test_a_sequence_of_one_is_left_alone(seen):
    layer, x = attached(lambda self, x, y: x), torch.randn(B, 1, D)
    assert layer(x, torch.randn(1, 1)) is x


@pytest.mark.parametrize("name", ["cache", "past_key_values", "inference_params"])
def test_training_with_a_cache_raises_and_decoding_is_inactive(name, seen):
    layer, x = attached(lambda self, x, **caches: x), torch.randn(B, L, D)
    with pytest.raises(ValueError, match=f"0: {name} is a recurrent cache.*use_cache=False"):
        layer(x, **{name: object()})
    layer(x, **{name: None})
    order(seen.pop()[0][0], x)
    with torch.no_grad():
        assert layer(x, **{name: object()}) is x
    assert layer.eval()(x, **{name: object()}) is x


def test_a_cache_is_known_by_its_class_too():
    DynamicCache = type("DynamicCache", (), {})
    with pytest.raises(ValueError, match="memory is a recurrent cache"):
        attached(lambda self, x, memory: x)(torch.randn(B, L, D), DynamicCache())


def test_packed_sequences_are_refused():
    with pytest.raises(ValueError, match="seq_idx packs several sequences"):
        attached(lambda self, x, seq_idx=None: x)(torch.randn(B, L, D), seq_idx=torch.zeros(B, L, dtype=torch.int32))


def test_nested_tensors_are_refused():
    jagged = torch.nested.nested_tensor([torch.randn(3, D), torch.randn(4, D)], layout=torch.jagged)
    with pytest.raises(ValueError, match="nested tensor"):
        attached(lambda self, x, other: x)(torch.randn(B, L, D), jagged)


def test_hugging_face_refuses_a_cache_in_training_and_decodes_untouched():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the `hf` extra)")
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=2)
    model, ids = transformers.MambaForCausalLM(config).eval(), torch.randint(32, (1, 5))
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
    slws.attach_slws(model, 1.0, schedule="constant")
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)
    with pytest.raises(ValueError, match=r"backbone.layers.0: cache is a recurrent cache"):
        model.train()(ids, use_cache=True)
