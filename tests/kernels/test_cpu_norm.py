"""The `cpu` backends of permute_rows and add_norm; parity at common shapes is in test_permute_norm.py."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ssm_kernels
from ssm_kernels import backend as registry
from ssm_kernels import cpp
from ssm_kernels.testing import LENGTHS, assert_parity, poisoned_empties, run, textbook_add_norm

if not all("cpu" in ssm_kernels.available_backends(op, "cpu") for op in ("add_norm", "permute_rows")):
    pytest.skip(f"no C++ kernels here: {cpp._library()}", allow_module_level=True)

OPS = torch.ops.ssm_kernels
HALF = [torch.float16, torch.bfloat16]


def add_norm(**inputs):
    return ssm_kernels.add_norm(**inputs, backend="cpu")


def permute(index, *tensors):
    return ssm_kernels.permute_rows(index, *tensors, backend="cpu")


def norm_inputs(b=2, length=17, d=13, norm="rms", shuffled=True, first=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    inputs = {
        "x": rand(b, length, d),
        "residual": None if first else rand(b, length, d),
        "weight": rand(d),
        "bias": rand(d) if norm == "layer" else None,
        "index": torch.randperm(length, generator=g) if shuffled else None,
    }
    return inputs, [rand(b, length, d), rand(b, length, d)]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Calls(TorchDispatchMode):
    """What torch runs in its block: names of operators, and the arguments of ours."""

    def __init__(self):
        super().__init__()
        self.names, self.ours = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        if func.namespace == "ssm_kernels":
            self.ours.append(args)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("d, norm", [(1, "rms"), *((d, norm) for d in (13, 192, 576) for norm in ("rms", "layer"))])
def test_parity_of_shapes(length, d, norm):
    inputs, grads = norm_inputs(1 if length == 500 else 2, length, d, norm)
    with poisoned_empties():
        assert_parity(add_norm, textbook_add_norm, inputs, grads, norm=norm)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", [13, 48])
def test_parity_in_half_types(norm, dtype, d):
    inputs, grads = norm_inputs(norm=norm, d=d)
    for fp32 in (True, False):
        with poisoned_empties():
            assert_parity(add_norm, textbook_add_norm, inputs, grads, dtype, norm=norm, residual_in_fp32=fp32)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("first", [False, True])
def test_half_types_are_rounded_at_the_edges_only(dtype, first):
    """As under autocast, x and normed in half, the rest fp32: the numbers of an fp32 run, rounded at the end."""
    inputs, grads = norm_inputs(d=37, norm="layer", first=first)
    inputs["x"], grads[0] = inputs["x"].to(dtype), grads[0].to(dtype)
    wanted = run(add_norm, inputs | {"x": inputs["x"].float()}, [g.float() for g in grads], norm="layer")
    for name, value in run(add_norm, inputs, grads, norm="layer").items():
        assert value.dtype == (dtype if name in ("output 0", "grad x") else torch.float32), name
        assert torch.equal(value, wanted[name].to(value.dtype)), name


@pytest.mark.parametrize("dtype", HALF)
def test_the_statistics_are_those_of_the_residual_that_is_returned(dtype):
    """In a half-type residual: normalising it alone, with nothing to add, gives the same."""
    inputs, _ = norm_inputs(d=37, norm="layer", shuffled=False)
    half = {k: None if v is None else v.to(dtype) for k, v in inputs.items()}
    normed, residual = add_norm(**half, norm="layer", residual_in_fp32=False)
    assert residual.dtype == dtype and not torch.equal(residual.float(), half["x"].float() + half["residual"].float())
    assert torch.equal(normed, add_norm(**half | {"x": residual, "residual": None}, norm="layer")[0])


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_an_index_is_reading_elsewhere(norm):
    """Bit for bit what permuting the inputs first gives, and the gradients permuted back."""
    inputs, grads = norm_inputs(length=130, d=37, norm=norm)
    index = inputs["index"]
    moved = {k: v[:, index] if k in ("x", "residual") else v for k, v in inputs.items()} | {"index": None}
    found, wanted = run(add_norm, inputs, grads, norm=norm), run(add_norm, moved, grads, norm=norm)
    for name in ("grad x", "grad residual"):
        wanted[name] = wanted[name][:, ssm_kernels.inverse(index)]
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_an_index_adds_no_operator():
    seen = []
    for shuffled in (False, True):
        inputs, grads = norm_inputs(shuffled=shuffled)
        leaves = {k: v.requires_grad_() if k in ("x", "residual", "weight") else v for k, v in inputs.items()}
        with Calls() as calls:
            out = add_norm(**leaves)
            torch.autograd.backward(out, grads)
        seen.append(calls.names)
    assert seen[0] == seen[1]
    assert [name for name in seen[0] if "ssm" in name] == [
        f"ssm_kernels::cpu_add_norm_{half}" for half in ("forward", "backward")
    ]


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("used", [0, 1])
def test_an_unused_output_costs_nothing(norm, used):
    inputs, grads = norm_inputs(norm=norm)
    results = {}
    for backend in ("cpu", "reference"):
        leaves = {k: v.clone().requires_grad_() if k != "index" else v for k, v in inputs.items() if v is not None}
        with Calls() as calls, poisoned_empties():
            out = ssm_kernels.add_norm(**leaves, norm=norm, backend=backend)
            out[used].backward(grads[used])
        results[backend] = [v.grad for k, v in leaves.items() if k != "index"]
        if backend == "cpu":
            assert [x is None for x in calls.ours[1][:2]] == [bool(used), not used]
            assert not any("zeros" in name for name in calls.names)
    for found, wanted in zip(*results.values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_the_two_gradients_do_not_share_memory_in_the_end(residual_dtype):
    """x and the residual get one tensor where it can be one; gradients that the caller holds are his to change."""
    inputs, grads = norm_inputs()
    inputs["residual"] = inputs["residual"].to(residual_dtype)
    leaves = {k: v.requires_grad_() if k in ("x", "residual", "weight") else v for k, v in inputs.items()}
    torch.autograd.backward(add_norm(**leaves), grads, retain_graph=False)
    x, residual = leaves["x"], leaves["residual"]
    assert torch.equal(x.grad.to(residual_dtype), residual.grad)
    before = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, before)
    both = inputs["x"].detach().clone().requires_grad_()
    torch.autograd.backward(add_norm(**leaves | {"x": both, "residual": both}), grads)
    once = run(add_norm, inputs | {"x": both, "residual": both.detach()}, grads)
    assert torch.equal(both.grad, 2 * once["grad x"])


def test_layout_changes_nothing():
    inputs, grads = norm_inputs(d=37)
    layouts = {
        "slices of wider rows": lambda x: torch.cat([x, x], 2)[..., 37:],
        "every other row": lambda x: x.repeat_interleave(2, 1)[:, ::2],
        "channels apart": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "batch inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    }
    wanted = run(add_norm, inputs, grads)
    for name, change in layouts.items():
        changed = {k: change(v) if k in ("x", "residual") else v for k, v in inputs.items()}
        leaves = {k: v.detach().requires_grad_() for k, v in changed.items() if v is not None and k != "index"}
        out = add_norm(**leaves, index=inputs["index"].repeat_interleave(2)[::2])
        found = [*out, *torch.autograd.grad(out, list(leaves.values()), [change(g) for g in grads])]
        assert not changed["x"].is_contiguous()
        assert all(torch.equal(x, y) for x, y in zip(found, wanted.values(), strict=True)), name


def test_expanded_gradients_are_taken():
    inputs, _ = norm_inputs()
    leaves = {k: v.requires_grad_() if k in ("x", "residual", "weight") else v for k, v in inputs.items()}
    sum(out.sum() for out in add_norm(**leaves)).backward()
    wanted = run(add_norm, inputs, [torch.ones(2, 17, 13)] * 2)
    assert all(torch.equal(leaves[k].grad, wanted[f"grad {k}"]) for k in ("x", "residual", "weight"))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_bitwise_the_same_on_any_number_of_threads(norm, threads):
    inputs, grads = norm_inputs(b=3, length=300, d=100, norm=norm)
    results, moved = [], []
    for n in (1, 2, 2, 3):
        threads(n)
        with poisoned_empties():
            results.append(run(add_norm, inputs, grads, norm=norm))
            moved.append(permute(inputs["index"], inputs["x"]))
    assert all(torch.equal(r[name], results[0][name]) for r in results for name in r)
    assert all(torch.equal(m, inputs["x"][:, inputs["index"]]) for m in moved)


def test_many_rows_keep_their_digits():
    """The weight's gradient sums 40,000 rows that all have one sign."""
    inputs, _ = norm_inputs(b=80, length=500, d=3, norm="layer")
    ones = torch.ones_like(inputs["x"])
    assert_parity(add_norm, textbook_add_norm, inputs, [ones, ones], norm="layer")


def test_a_mean_far_from_zero():
    inputs, grads = norm_inputs(d=192, norm="layer")
    inputs["x"] = inputs["x"] + 1000
    assert_parity(add_norm, textbook_add_norm, inputs, grads, norm="layer")


@pytest.mark.parametrize("b, length", [(0, 7), (2, 0)])
def test_nothing_to_do(b, length):
    inputs, grads = norm_inputs(b=b, length=length, norm="layer")
    with poisoned_empties():
        found = run(add_norm, inputs, grads, norm="layer")
    for name, value in found.items():
        assert value.shape == inputs.get(name.removeprefix("grad "), grads[0]).shape
        assert not value.any()
    assert permute(inputs["index"], inputs["x"]).shape == (b, length, 13)


def test_nan_is_not_hidden():
    inputs, _ = norm_inputs()
    inputs["residual"][1, 5, 12] = float("nan")
    normed, residual = add_norm(**inputs)
    row = int(ssm_kernels.inverse(inputs["index"])[5])
    assert normed[1, row].isnan().all() and normed.isnan().sum() == 13
    assert residual[1, row, 12].isnan() and residual.isnan().sum() == 1


def test_an_fp64_residual_keeps_its_digits():
    inputs, _ = norm_inputs()
    inputs["residual"] = inputs["residual"].double() + 1e-12
    found, wanted = add_norm(**inputs), ssm_kernels.add_norm(**inputs, backend="reference")
    assert found[1].dtype == torch.float64
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("value", [-1, 5, 2**40])
def test_an_index_out_of_range_is_refused(value):
    index, x = torch.tensor([0, 1, value, 3, 4]), torch.zeros(2, 5, 3)
    message = rf"index must be a permutation of 0\.\.4, got {value} in it"
    with pytest.raises(ValueError, match=f"permute_rows: {message}"):
        permute(index, x)
    with pytest.raises(ValueError, match=f"add_norm: {message}"):
        add_norm(x=x, residual=None, weight=torch.ones(3), index=index)


@pytest.mark.parametrize("row", [(), (1,), (3,), (64,), (5, 13), (192,), (0,)])
def test_permuted_rows_of_any_size_and_type(row):
    g = torch.Generator().manual_seed(0)
    index = torch.randperm(70, generator=g)
    base = torch.randn(3, 70, *row, generator=g)
    tensors = [(20 * base).to(t) for t in (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64)]
    tensors.append(base > 0)
    with poisoned_empties():
        moved = permute(index, *tensors)
    assert all(torch.equal(m, x[:, index]) for m, x in zip(moved, tensors, strict=True))


def test_permuted_rows_are_read_where_they_are(monkeypatch):
    index = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    wide = torch.randn(9, 2, 16)
    strided = [wide.transpose(0, 1)[..., 3:8], wide[:1].expand(9, -1, -1).transpose(0, 1)]
    wanted = [x[:, index].contiguous() for x in (*strided, wide.view(9, 4, 8).permute(2, 0, 1))]
    apart = permute(index, wide.view(9, 4, 8).permute(2, 0, 1))
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: pytest.fail("copied"))
    moved = [*permute(index, *strided), apart]
    assert all(m.is_contiguous() and torch.equal(m, w) for m, w in zip(moved, wanted, strict=True))


def test_gradients_of_several_permuted_tensors():
    """Also where one is not used and one has no gradient."""
    g = torch.Generator().manual_seed(0)
    index, count = torch.randperm(9, generator=g), torch.arange(18).view(2, 9)
    a, b, c = (torch.randn(2, 9, k, generator=g).requires_grad_() for k in (4, 5, 6))
    moved = permute(index, a, b, count, c)
    assert not moved[2].requires_grad
    weigh = [torch.randn(2, 9, k, generator=g) for k in (4, 6)]
    with poisoned_empties():
        torch.autograd.backward([moved[0], moved[3]], weigh)
    for x, w in zip((a, c), weigh, strict=True):
        assert torch.equal(x.grad, w[:, ssm_kernels.inverse(index)])
    assert b.grad is None or not b.grad.any()


def test_a_second_derivative_of_a_permutation():
    """Of the cubed sum, against autograd through an indexed copy."""
    g = torch.Generator().manual_seed(0)
    x, index = torch.randn(2, 9, 4, generator=g).requires_grad_(), torch.randperm(9, generator=g)
    weigh, found = torch.linspace(-1, 1, x.numel()).view_as(x), []
    for move in (lambda x: permute(index, x), lambda x: x[:, index]):
        (first,) = torch.autograd.grad((move(x) ** 3).sum() * 0.5, x, create_graph=True)
        found.append(torch.autograd.grad((first * weigh).sum(), x)[0])
    torch.testing.assert_close(*found)


def test_a_second_derivative_is_refused():
    inputs, grads = norm_inputs()
    x = inputs.pop("x").requires_grad_()
    (g,) = torch.autograd.grad(add_norm(x=x, **inputs), x, grads, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        g.sum().backward()


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_operators_are_registered_as_torch_wants(norm):
    inputs, (dnormed, dout) = norm_inputs(norm=norm)
    args = [inputs[k] for k in ("x", "residual", "weight", "bias")]
    args = [None if x is None else x.requires_grad_() for x in args]
    check = torch.library.opcheck
    check(OPS.cpu_add_norm_forward.default, (*args, 1e-5, norm == "layer", inputs["index"], True))
    _, out, stats = OPS.cpu_add_norm_forward(*args, 1e-5, norm == "layer", inputs["index"], True)
    rest = (out.detach(), stats.detach(), inputs["weight"].detach(), inputs["index"])
    for residual in (torch.float32, torch.bfloat16):
        options = (torch.float32, residual, norm == "layer")
        check(OPS.cpu_add_norm_backward.default, (dnormed, dout, *rest, *options))
        check(OPS.cpu_add_norm_backward.default, (None, dout, *rest, *options))
    check(OPS.cpu_permute_rows.default, (inputs["index"], [dnormed, dout.bfloat16()], True))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_compiles_without_graph_breaks_when_cold(norm, monkeypatch):
    """The choice of backend is made while tracing."""
    torch._dynamo.reset()
    for op in registry.OPS.values():
        monkeypatch.setattr(op, "_chosen", {})
        monkeypatch.setattr(op, "_loaded", {})

    def block(index, **inputs):
        normed, residual = ssm_kernels.add_norm(**inputs, index=index, norm=norm)
        return ssm_kernels.permute_rows(index, normed, residual)

    inputs, grads = norm_inputs(norm=norm)
    found = run(torch.compile(block, backend="aot_eager", fullgraph=True), inputs, grads)
    wanted = run(block, inputs, grads)
    assert registry.OPS["add_norm"].resolve(inputs["x"], None, 13).__module__ == "ssm_kernels.norm.cpu"
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
