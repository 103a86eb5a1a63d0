"""What is specific to the `cpu` backend; parity at common shapes is in test_scan.py and test_conv1d.py."""

import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ssm_kernels
from ssm_kernels import backend as registry
from ssm_kernels import cpp
from ssm_kernels.testing import assert_parity, poisoned_empties, run, textbook_conv, textbook_scan

if "cpu" not in ssm_kernels.available_backends("selective_scan", "cpu"):
    pytest.skip(f"no C++ kernels here: {cpp._library()}", allow_module_level=True)


def scan(**inputs):
    return ssm_kernels.selective_scan(**inputs, backend="cpu")


def conv(**inputs):
    return ssm_kernels.causal_conv1d(**inputs, backend="cpu")


def channel_last(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def scan_inputs(b=2, d=37, length=70, n=16, seed=0):
    """As the mixer has them: channel-last memory, u and z slices of one projection, B and C of another."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    xz, bc = rand(b, length, 2 * d), rand(b, length, 5 + 2 * n)
    inputs = {
        "u": xz[..., :d].transpose(1, 2),
        "delta": (0.5 * rand(b, length, d) - 1).transpose(1, 2),
        "A": -torch.exp(0.5 * rand(d, n)),
        "B": bc[..., 5 : 5 + n].transpose(1, 2),
        "C": bc[..., 5 + n :].transpose(1, 2),
        "D": rand(d),
        "z": xz[..., d:].transpose(1, 2),
        "delta_bias": rand(d) - 1,
    }
    return inputs, [rand(b, length, d).transpose(1, 2)]


def conv_inputs(b=2, d=37, length=70, width=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    x = rand(b, length, 2 * d)[..., :d].transpose(1, 2)
    return {"x": x, "weight": rand(d, width), "bias": rand(d)}, [rand(b, length, d).transpose(1, 2)]


CASES = {
    "scan": (scan, scan_inputs, {"delta_softplus": True}),
    "conv": (conv, conv_inputs, {"activation": "silu"}),
}


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("d", [3, 15, 16, 17])
@pytest.mark.parametrize("length", [31, 32, 33, 65])
def test_parity_around_vector_and_chunk_borders(d, length):
    inputs, grads = scan_inputs(b=1, d=d, length=length, n=9)
    with poisoned_empties():
        assert_parity(scan, textbook_scan, inputs, grads, delta_softplus=True, reverse=True)
    inputs, grads = conv_inputs(b=1, d=d, length=length)
    with poisoned_empties():
        assert_parity(conv, textbook_conv, inputs, grads, activation="silu", reverse=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("channel", [0, 20, 36])
def test_a_channel_alone_is_the_same_as_among_others(case, channel):
    """Bit for bit, though it sits in another lane. (The gradients of B and C sum over channels.)"""
    fn, make, options = CASES[case]
    inputs, grads = make()
    wanted = run(fn, inputs, grads, **options)
    one = slice(channel, channel + 1)
    cut = lambda name, x: x if name in "BC" else x[one] if x.ndim < 3 else x[:, one]  # noqa: E731
    found = run(fn, {k: cut(k, v) for k, v in inputs.items()}, [g[:, one] for g in grads], **options)
    for name in found.keys() - {"grad B", "grad C"}:
        assert torch.equal(found[name], cut(name, wanted[name])), name


@pytest.mark.parametrize("n", [3, 8, 17, 33])
def test_parity_of_other_state_sizes(n):
    inputs, grads = scan_inputs(n=n)
    with poisoned_empties():
        assert_parity(scan, textbook_scan, inputs, grads, delta_softplus=True)


@pytest.mark.parametrize("width", [1, 7, 40])
@pytest.mark.parametrize("length", [5, 33])
def test_parity_of_other_windows(width, length):
    """Also windows longer than the sequence and than a chunk."""
    inputs, grads = conv_inputs(width=width, length=length)
    with poisoned_empties():
        assert_parity(conv, textbook_conv, inputs, grads, activation="silu")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_at_the_edges_only(case, dtype):
    """Everything between loading and storing is fp32: the same numbers in fp32, rounded at the end, bit for bit."""
    fn, make, options = CASES[case]
    inputs, grads = make()
    half = {k: v.to(dtype) if v.ndim == 3 else v for k, v in inputs.items()}  # parameters stay fp32, as under autocast
    grads = [g.to(dtype) for g in grads]
    wanted = run(fn, {k: v.float() for k, v in half.items()}, [g.float() for g in grads], **options)
    found = run(fn, half, grads, **options)
    for name, value in found.items():
        like = half.get(name.removeprefix("grad "), grads[0])
        assert value.dtype == like.dtype
        assert torch.equal(value, wanted[name].to(like.dtype)), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parity_in_half_types(case, dtype):
    fn, make, options = CASES[case]
    inputs, grads = make()
    textbook = {"scan": textbook_scan, "conv": textbook_conv}[case]
    assert_parity(fn, textbook, inputs, grads, dtype, **options)


def test_long_sequences_with_long_memory():
    """6,084 tokens, a decay of 1e-3 per step: errors of exp would add up over a thousand steps."""
    inputs, grads = scan_inputs(b=1, d=3, length=6084, n=2)
    inputs |= {"A": torch.full((3, 2), -1e-3), "delta": channel_last(0.5 + torch.rand(1, 3, 6084))}
    inputs |= {"delta_bias": None, "z": None}
    assert_parity(scan, textbook_scan, inputs, grads)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("b", [1, 3])
def test_bitwise_reproducible(case, b, two_threads):
    """For one batch item the threads share its channels, so that sums over channels are split too."""
    fn, make, options = CASES[case]
    inputs, grads = make(b=b, d=100, length=300)
    first, second = (run(fn, inputs, grads, **options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_thread_counts_agree(two_threads):
    inputs, grads = scan_inputs(b=1, d=100, length=300)
    many = run(scan, inputs, grads, delta_softplus=True)
    torch.set_num_threads(1)
    one = run(scan, inputs, grads, delta_softplus=True)
    for name in many:
        torch.testing.assert_close(many[name], one[name], rtol=1e-5, atol=1e-5)
    assert not torch.equal(many["grad B"], one["grad B"])  # else the two threads had no part each


def test_work_is_split_evenly():
    assert cpp.split(16, 24, 10**7, threads=2) == (1, 2)  # whole samples: fewest sums
    assert cpp.split(1, 24, 10**7, threads=2) == (2, 2)
    assert cpp.split(3, 24, 10**7, threads=2) == (2, 2)
    assert cpp.split(1, 1, 10**7, threads=8) == (1, 8)
    assert cpp.split(1, 24, 100, threads=8) == (1, 1)  # too little for threads
    assert cpp.split(0, 0, 10**7, threads=8)[0] == 1


@pytest.mark.parametrize("case", CASES)
def test_layout_changes_nothing(case):
    """Copies of another layout run through the same kernel; what comes out is channel-last whatever went in."""
    fn, make, options = CASES[case]
    inputs, grads = make()
    layouts = {
        "channel-last": lambda x: x,
        "contiguous": lambda x: x.contiguous(),
        "every other position": lambda x: x.repeat_interleave(2, 2)[..., ::2],
    }
    results = {}
    for name, change in layouts.items():
        changed = {k: change(v) if v.ndim == 3 else v for k, v in inputs.items()}
        leaves = {k: v.detach().requires_grad_() for k, v in changed.items()}
        out = fn(**leaves, **options)
        found = torch.autograd.grad(out, list(leaves.values()), change(grads[0]))
        results[name] = [out.detach(), *found]
        for x in results[name]:
            assert x.ndim < 3 or x.transpose(1, 2).is_contiguous()
    for name, result in results.items():
        assert all(torch.equal(x, y) for x, y in zip(result, results["channel-last"], strict=True)), name


def test_expanded_gradients_are_taken():
    inputs, _ = scan_inputs()
    leaves = {k: v.detach().requires_grad_() for k, v in inputs.items()}
    scan(**leaves, delta_softplus=True).sum().backward()
    wanted = run(scan, inputs, [torch.ones_like(inputs["u"])], delta_softplus=True)
    assert all(torch.equal(leaf.grad, wanted[f"grad {k}"]) for k, leaf in leaves.items())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("b, length", [(0, 7), (2, 0)])
def test_nothing_to_do(case, b, length):
    fn, make, options = CASES[case]
    inputs, grads = make(b=b, length=length)
    found = run(fn, inputs, grads, **options)
    for name, value in found.items():
        like = inputs.get(name.removeprefix("grad "), grads[0])
        assert value.shape == like.shape
        assert not value.any()  # of a parameter the gradient is zero


@pytest.mark.parametrize("case", CASES)
def test_nan_is_not_hidden(case):
    """A finiteness check downstream must see it, in its own channel and from its own position on."""
    fn, make, options = CASES[case]
    inputs, _ = make(b=1, length=40)
    for name in ("delta", "u", "z") if case == "scan" else ("x",):
        bad = inputs | {name: inputs[name].clone()}
        bad[name][0, 20, 30] = float("nan")
        found = fn(**bad, **options).isnan()
        last = {"scan": 40, "conv": 34}[case] if name != "z" else 31
        assert found[0, 20, 30:last].all()
        assert found.sum() == last - 30


def test_extreme_values_stay_finite():
    inputs, grads = scan_inputs(b=1, d=17, length=40)
    inputs["delta"][:, ::3] = 90.0
    inputs["delta"][:, 1::3] = -200.0
    inputs["z"][:, ::2] = 120.0
    inputs["z"][:, 1::2] = -120.0
    assert all(x.isfinite().all() for x in run(scan, inputs, grads, delta_softplus=True).values())
    assert_parity(scan, textbook_scan, inputs, grads, delta_softplus=True)


@pytest.mark.parametrize("case", CASES)
def test_the_mixers_layout_is_not_copied(case):
    inputs, _ = CASES[case][1]()
    assert all(cpp.channel_last(x) is x for x in inputs.values() if x.ndim == 3)


class Calls(TorchDispatchMode):
    """The operators of this package that run in its block, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ssm_kernels":
            self.seen.append((func.name().removeprefix("ssm_kernels::"), args))
        return func(*args, **kwargs or {})


def test_states_are_kept_for_a_gradient_only():
    inputs, _ = scan_inputs(d=3)
    with Calls() as calls:
        scan(**inputs)
        inputs["A"].requires_grad_()
        scan(**inputs)
        with torch.no_grad():
            scan(**inputs)
    assert [(name, args[-1]) for name, args in calls.seen] == [("cpu_scan_forward", keep) for keep in (0, 1, 0)]


def test_states_are_kept_per_chunk():
    inputs, _ = scan_inputs(b=1, d=16, length=3200)
    args = [inputs[k] for k in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    _, states = torch.ops.ssm_kernels.cpu_scan_forward(*args, True, False, False)
    assert states.numel() == 0
    _, states = torch.ops.ssm_kernels.cpu_scan_forward(*args, True, False, True)
    assert 0 < states.numel() <= inputs["u"].numel()  # all states would be 16 times u


def test_a_second_derivative_is_refused():
    inputs, _ = scan_inputs(b=1, d=3, length=5)
    u = inputs.pop("u").detach().requires_grad_()
    (g,) = torch.autograd.grad(scan(u=u, **inputs).sum(), u, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        g.sum().backward()


def test_operators_are_registered_as_torch_wants():
    inputs, (dy,) = scan_inputs()
    args = [inputs[k] for k in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    check = torch.library.opcheck
    ops = torch.ops.ssm_kernels
    check(ops.cpu_scan_forward.default, (*args, True, False, True))
    _, states = ops.cpu_scan_forward(*args, True, False, True)
    check(ops.cpu_scan_backward.default, (dy, states, *args, True, False))
    check(ops.cpu_scan_backward.default, (dy, states, *args[:5], None, None, None, True, False))
    inputs, (dy,) = conv_inputs()
    check(ops.cpu_conv1d_forward.default, (*inputs.values(), True, False))
    check(ops.cpu_conv1d_backward.default, (dy, *inputs.values(), True, False))


@pytest.mark.parametrize("case", CASES)
def test_compiles_without_graph_breaks(case):
    fn, make, options = CASES[case]
    inputs, grads = make()
    wanted = run(fn, inputs, grads, **options)  # also makes the choice of backend, which cannot be traced
    compiled = torch.compile(lambda **kw: fn(**kw, **options), backend="aot_eager", fullgraph=True)
    found = run(compiled, inputs, grads)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_reference_takes_over_with_the_reason_in_the_log(monkeypatch, caplog):
    def unavailable():
        raise registry.Unavailable("no C++ compiler was found")

    monkeypatch.setattr(cpp, "library", unavailable)
    monkeypatch.setattr(registry, "_said", set())
    caplog.set_level(logging.INFO, "ssm_kernels")
    for name, package in (("selective_scan", "ssm_kernels.scan"), ("causal_conv1d", "ssm_kernels.conv1d")):
        found = registry.Op(name, package).resolve(torch.zeros(1), None)
        assert found.__module__ == f"{package}.reference"
    wanted = "{} on cpu runs on reference (cpu: no C++ compiler was found)"
    assert [r.getMessage() for r in caplog.records] == [wanted.format(n) for n in ("selective_scan", "causal_conv1d")]
