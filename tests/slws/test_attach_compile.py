"""Attached models under torch.compile, torch.export and CUDA graphs."""

import itertools

import pytest
import torch
from attach_models import GridStages, Stack
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import slws
from slws.draw import new_index


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(0)


def gradients(model, run, x, seed=1):
    torch.manual_seed(seed)
    model.zero_grad()
    out = run(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def close(found, wanted):
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_static_eager_equals_dynamic():
    """Gathering by the identity changes nothing: the same seeds give the same numbers, bit for bit."""
    model, x = Stack(), torch.randn(2, 11, 8)
    with slws.attach_slws(model, 0.6):
        wanted = [gradients(model, model, x, seed) for seed in range(5)]
    with slws.attach_slws(model, 0.6, static=True):
        found = [gradients(model, model, x, seed) for seed in range(5)]
    assert all(torch.equal(a, b) for f, w in zip(found, wanted, strict=True) for a, b in zip(f, w, strict=True))


def test_static_compiles_whole_and_once():
    """fullgraph, no recompilation from call to call, shuffles at the right rate, correct gradients."""
    model, x = Stack(), torch.randn(2, 11, 8)
    handle = slws.attach_slws(model, 1.0, static=True)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(200):
        with torch.no_grad():
            compiled(x)
    assert counter.frame_count == 1
    measured = [s["measured"] for s in handle.stats().values()]
    assert measured[0] == 0 and measured[3] == 1
    assert abs(measured[1] - 1 / 3) < 0.14 and abs(measured[2] - 2 / 3) < 0.14
    assert [s["calls"] for s in handle.stats().values()][1:] == [200] * 3


def test_static_is_the_identity_where_the_coin_says_no():
    model, x = Stack(), torch.randn(2, 11, 8)
    plain = model(x)
    handle = slws.attach_slws(model, 0.5, layers=["layers.2"], schedule="constant", static=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        same = sum(torch.equal(compiled(x), plain) for _ in range(100))
    (stats,) = handle.stats().values()
    assert stats["calls"] - stats["shuffled"] == same and 25 < same < 75


def test_static_compiled_gradients_are_the_eager_ones(monkeypatch):
    """With one known permutation on both sides; through AOTAutograd, which differentiates the gathers."""
    index = torch.randperm(11)
    monkeypatch.setattr("slws.attached.new_index", lambda *a, **k: index)
    for build, shape, options in (
        (Stack, (2, 11, 8), {}),
        (GridStages, (2, 1, 11, 6), {"layers": "stages.0.blocks", "seq_dim": (1, 2)}),
    ):
        model, x = build(), torch.randn(shape)
        with slws.attach_slws(model, 1.0, schedule="constant", **options):
            wanted = gradients(model, model, x)
        slws.attach_slws(model, 1.0, schedule="constant", static=True, **options)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        close(gradients(model, compiled, x), wanted)


@pytest.mark.parametrize("options", [{"per_sample": True}, {"keep_first": 2, "window": 3}], ids=str)
def test_static_options_compile_whole(options):
    model, x = Stack(), torch.randn(2, 11, 8)
    slws.attach_slws(model, 1.0, static=True, **options)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(g.isfinite().all() for g in gradients(model, compiled, x))


def test_static_layers_compiled_one_by_one_share_their_code():
    """As one compiles large models by region: 12 layers of different rates must not compile 12 times."""
    model, x = Stack(depth=12), torch.randn(2, 11, 8)
    slws.attach_slws(model, 0.5, static=True)
    counter = CompileCounter()
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    for _ in range(3):
        gradients(model, model, x)
    assert counter.frame_count <= 3  # the layer that never shuffles, the others, and one with another requires_grad


def test_static_warmup_does_not_compile_again():
    model, x = Stack(depth=2), torch.randn(2, 11, 8)
    handle = slws.attach_slws(model, 1.0, static=True, warmup_epochs=2)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    shuffled = []
    for epoch in range(3):
        handle.set_epoch(epoch)
        for _ in range(40):
            with torch.no_grad():
                compiled(x)
        shuffled.append(list(handle.stats().values())[1]["shuffled"] - sum(shuffled))
    assert counter.frame_count == 1
    assert shuffled[0] == 0 and 5 < shuffled[1] < 35 and shuffled[2] == 40


def test_dynamic_compiles_with_graph_breaks():
    """The draw breaks the graph; values and gradients are the eager ones for the same seed, with no compiling anew."""
    model, x = Stack(), torch.randn(2, 11, 8)
    handle = slws.attach_slws(model, 0.6)
    wanted = [gradients(model, model, x, seed) for seed in range(8)]
    before = [s["shuffled"] for s in handle.stats().values()]
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(8):
        close(gradients(model, compiled, x, seed), wanted[seed])
    after = [s["shuffled"] for s in handle.stats().values()]
    assert [2 * n for n in before] == after and sum(after) > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(8):
            close(gradients(model, compiled, x, seed), wanted[seed])


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_compiled_with_checkpoints(static):
    """Checkpointed layers in a compiled model: gradients equal those without checkpoints."""

    class Saving(Stack):
        saving = True

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.saving else layer(x)
            return x

    model, x = Saving(), torch.randn(2, 11, 8, requires_grad=True)
    slws.attach_slws(model, 0.8, static=static)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=static)
    found = [gradients(model, compiled, x, seed) for seed in range(4)]
    model.saving = False
    plain = torch.compile(model, backend="aot_eager") if static else model
    for seed in range(4):
        close(found[seed], gradients(model, plain, x, seed))


@pytest.mark.slow
def test_static_through_inductor():
    """Each output and gradient is that of one of the 3! permutations, and several occur."""
    model, x = Stack(depth=2), torch.randn(2, 3, 8)
    options = {"layers": ["layers.1"], "schedule": "constant"}
    possible = []
    for index in itertools.permutations(range(3)):
        with pytest.MonkeyPatch.context() as patch, slws.attach_slws(model, 1.0, **options):
            patch.setattr("slws.attached.new_index", lambda *a, index=index, **k: torch.tensor(index))
            possible.append(gradients(model, model, x))
    slws.attach_slws(model, 1.0, static=True, **options)
    compiled = torch.compile(model, fullgraph=True)
    met = set()
    for seed in range(20):
        found = gradients(model, compiled, x, seed)
        nearest = min(range(6), key=lambda i: (possible[i][0] - found[0]).abs().max())
        close(found, possible[nearest])
        met.add(nearest)
    assert len(met) > 3


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_eval_compiles_whole_and_exports(static):
    model, x = Stack().eval(), torch.randn(2, 11, 8)
    wanted = model(x)
    slws.attach_slws(model, 1.0, schedule="constant", static=static)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), wanted)
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), wanted)
    assert list(program.state_dict) == list(Stack().state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_static_captures_in_a_cuda_graph():
    model, x = Stack().cuda(), torch.randn(2, 11, 8, device="cuda")
    handle = slws.attach_slws(model, 1.0, static=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(model, model, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = handle.stats()
    with torch.cuda.graph(graph):
        out = model(x)
        out.square().mean().backward()
    seen = set()
    for _ in range(100):
        graph.replay()
        seen.add(out.sum().item())
    rates = [(s["shuffled"] - before[n]["shuffled"]) / 100 for n, s in handle.stats().items()]
    assert rates[0] == 0 and rates[3] == 1 and abs(rates[1] - 1 / 3) < 0.2 and abs(rates[2] - 2 / 3) < 0.2
    assert len(seen) > 50


def test_device_draws_are_uniform_permutations():
    """The draw that goes into a graph: 4 positions, 24 permutations, chi-square over 4800 draws (0.1% quantile)."""
    counts = {}
    for _ in range(4800):
        index = tuple(new_index(4, torch.device("cpu"), None).tolist())
        counts[index] = counts.get(index, 0) + 1
    assert len(counts) == 24
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 49.7


def test_model_compiled_before_attaching():
    """compile is lazy: attaching afterwards works too, also to what OptimizedModule wraps."""
    model, x = Stack(), torch.randn(2, 11, 8)
    compiled = torch.compile(model, backend="eager")
    plain = compiled(x)
    handle = slws.attach_slws(compiled, 1.0, schedule="constant")
    assert not torch.equal(compiled(x), plain)
    handle.remove()
    assert torch.equal(compiled(x), plain) and isinstance(model, nn.Module)
