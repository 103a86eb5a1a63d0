"""Checks of the Triton backends. test_triton_backend.py runs this file in a process of its own, because Triton decides
when a kernel is defined whether it is interpreted (TRITON_INTERPRET=1, then on the CPU) or compiled (on this GPU).
"""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import ssm_kernels
from ssm_kernels import triton_support
from ssm_kernels.norm import triton_kernels as norm_kernels
from ssm_kernels.permute import triton_kernels as permute_kernels
from ssm_kernels.testing import LENGTHS, assert_parity, poisoned_empties, run, textbook_add_norm

DEVICE = "cpu" if triton_support.INTERPRETED else "cuda"
HALF = torch.float16 if triton_support.INTERPRETED else torch.bfloat16  # the interpreter truncates to bf16, GPUs round


@pytest.fixture(autouse=True)
def on_the_device():
    """Seeded, on the device, and past the probes, which launch kernels too."""
    assert all("triton" in ssm_kernels.available_backends(op, DEVICE) for op in ("permute_rows", "add_norm"))
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


def permute(index, *tensors):
    return ssm_kernels.permute_rows(index, *tensors, backend="triton")


def add_norm(**kw):
    return ssm_kernels.add_norm(**kw, backend="triton")


def test_triton_is_first_where_it_runs():
    for op in ("permute_rows", "add_norm"):
        assert ssm_kernels.available_backends(op, DEVICE)[0] == "triton"


# permute_rows


@pytest.mark.parametrize("length", LENGTHS)
def test_permute_moves_rows_of_every_dtype_bit_for_bit(length):
    index = torch.randperm(length)
    floats = [torch.randn(2, length, 5).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    floats[0][0, 0, 0] = float("nan")
    others = [
        torch.randn(2, length, 3, 2, dtype=torch.float64),
        torch.randint(99, (2, length)),
        torch.rand(2, length, 1) < 0.5,
        torch.randint(99, (2, length, 7), dtype=torch.uint8),
    ]
    for x, y in zip(floats + others, permute(index, *floats, *others), strict=True):
        assert x.dtype == y.dtype and torch.equal(x[:, index].nan_to_num(7.0), y.nan_to_num(7.0))


def test_permute_gradient_is_the_inverse_row_copy():
    index = torch.randperm(17)
    x, whole = torch.randn(3, 17, 5, requires_grad=True), torch.arange(51).view(3, 17)
    unused = torch.randn(3, 17, 2, requires_grad=True)
    with poisoned_empties():
        moved, _, _ = permute(index, x, whole, unused)
        weigh = torch.randn(3, 17, 5).transpose(0, 1).contiguous().transpose(0, 1)
        found = torch.autograd.grad((moved * weigh).sum(), (x, unused), allow_unused=True)
    assert torch.equal(found[0][:, index], weigh) and found[1] is None
    assert torch.equal(permute(ssm_kernels.inverse(index), moved), x)


def test_permute_can_be_differentiated_twice():
    index, x = torch.randperm(5), torch.randn(2, 5, 3, requires_grad=True)
    (g,) = torch.autograd.grad((permute(index, x) ** 3).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], 6 * x)


@pytest.mark.parametrize("width", [1, 192, 2500])
def test_permute_any_strides_and_widths(width):
    index = torch.stack([torch.randperm(9), torch.arange(9)], 1)[:, 0]
    dense = torch.randn(2, 9, width)
    wide = torch.randn(2, 18, width)
    turned = torch.randn(2, width, 9).transpose(1, 2)
    inputs = (dense[:0], dense[:1], dense, wide[:, ::2], turned, dense[:1].expand(2, -1, -1))
    with poisoned_empties():
        moved = permute(index, *inputs)
    for x, y in zip(inputs, moved, strict=True):
        assert torch.equal(x[:, index], y) and y.is_contiguous()
    assert torch.equal(permute(index.int(), dense), dense[:, index])


class Counting:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


def test_permute_is_one_launch_for_up_to_four_tensors(monkeypatch):
    kernel = Counting(permute_kernels.copy_rows)
    monkeypatch.setattr(permute_kernels, "copy_rows", kernel)
    index, tensors = torch.randperm(9), [torch.randn(2, 9, 4).to(t) for t in (torch.float32, torch.bfloat16) * 3]
    for count, launches in ((1, 1), (4, 1), (6, 2)):
        kernel.launches = 0
        permute(index, *tensors[:count])
        assert kernel.launches == launches


def test_every_launch_is_inside_the_device_guard(monkeypatch):
    guarded = []

    @contextmanager
    def guard(x):
        guarded.append(x.device)
        yield
        guarded.pop()

    class Guarded(Counting):
        def __getitem__(self, grid):
            assert guarded == [torch.zeros(0).device]
            return super().__getitem__(grid)

    kernels = []
    for module, names in ((permute_kernels, ["copy_rows"]), (norm_kernels, ["forward", "backward"])):
        monkeypatch.setattr(module, "current", guard)
        for name in names:
            kernels.append(Guarded(getattr(module, name)))
            monkeypatch.setattr(module, name, kernels[-1])
    inputs, grads = norm_inputs()
    run(add_norm, inputs, grads)
    permute(inputs["index"], inputs["x"])
    assert all(kernel.launches for kernel in kernels)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_rows_beyond_32_bit_offsets(dtype):
    """Memory that nobody touches but for three rows, the last at element 2^31, where 32-bit offsets would wrap."""
    x = torch.empty(2**31 + 64, dtype=dtype).as_strided((1, 3, 8), (0, 2**30, 1))
    x.copy_(torch.arange(24).view(1, 3, 8))
    index = torch.tensor([2, 0, 1])
    assert torch.equal(permute(index, x), x[:, index])
    assert torch.equal(permute_kernels.permute_rows(index, [x], True)[0][:, index], x)
    if dtype.is_floating_point:
        for i in (index, None):
            _, out = add_norm(x=x, residual=x, weight=torch.ones(8), index=i)
            assert torch.equal(out, 2 * (x if i is None else x[:, i]).float())


def test_permute_refuses_what_it_cannot_move():
    with pytest.raises(ValueError, match=r"elements of up to 8 bytes, got torch\.complex128"):
        permute(torch.arange(2), torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.complex128))


# add_norm


def norm_inputs(b=2, length=17, width=13, first=False, shuffled=True, bias=True):
    return {
        "x": torch.randn(b, length, width),
        "residual": None if first else torch.randn(b, length, width),
        "weight": torch.randn(width),
        "bias": torch.randn(width) if bias else None,
        "index": torch.randperm(length) if shuffled else None,
    }, [torch.randn(b, length, width), torch.randn(b, length, width)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_add_norm_parity_at_awkward_lengths(length, norm, shuffled):
    inputs, grads = norm_inputs(length=length, shuffled=shuffled)
    with poisoned_empties():
        assert_parity(add_norm, textbook_add_norm, inputs, grads, norm=norm)


@pytest.mark.parametrize("width", [5, 192, 257, 1536])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_add_norm_parity_of_widths_and_options(width, norm, bias, first):
    inputs, grads = norm_inputs(length=7, width=width, bias=bias, first=first)
    with poisoned_empties():
        assert_parity(add_norm, textbook_add_norm, inputs, grads, norm=norm)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_add_norm_parity_in_half(norm, dtype):
    inputs, grads = norm_inputs()
    with poisoned_empties():
        assert_parity(add_norm, textbook_add_norm, inputs, grads, dtype, norm=norm, residual_in_fp32=False)


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("residual", [torch.float32, HALF, None])
def test_add_norm_of_mixed_dtypes(fp32, residual):
    """As under autocast: half hidden, fp32 stream and weights. Dtypes and numbers as the reference has them."""
    inputs, grads = norm_inputs(first=residual is None)
    inputs["x"] = inputs["x"].to(HALF)
    inputs["residual"] = None if residual is None else inputs["residual"].to(residual)
    found = run(add_norm, inputs, grads, residual_in_fp32=fp32)
    reference = lambda **kw: ssm_kernels.add_norm(**kw, backend="reference")  # noqa: E731
    near = 4 * torch.finfo(HALF).eps
    for name, exact in run(reference, inputs, grads, residual_in_fp32=fp32).items():
        assert found[name].dtype == exact.dtype, name
        torch.testing.assert_close(found[name], exact, rtol=near, atol=near)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_add_norm_takes_statistics_of_what_it_stores(norm):
    """As rounded for the next layer, so that backward, which reads it, differentiates what forward computed."""
    inputs, _ = norm_inputs()
    inputs |= {"x": inputs["x"].to(HALF), "residual": inputs["residual"].to(HALF)}
    normed, out = add_norm(**inputs, norm=norm, residual_in_fp32=False)
    double = {"weight": inputs["weight"].double(), "bias": inputs["bias"].double()}
    exact, _ = textbook_add_norm(out.double(), None, **double, norm=norm)
    torch.testing.assert_close(normed.double(), exact, rtol=0.52 * torch.finfo(HALF).eps, atol=1e-6)


def test_add_norm_with_only_the_normed_rows_used():
    inputs, grads = norm_inputs()
    assert_parity(lambda **kw: add_norm(**kw)[0], lambda **kw: textbook_add_norm(**kw)[0], inputs, grads[:1])


def test_add_norm_with_only_the_residual_used():
    inputs, grads = norm_inputs()
    with poisoned_empties():
        found = run(lambda **kw: add_norm(**kw)[1], inputs, grads[:1])
    for name in ("x", "residual"):
        assert torch.equal(found[f"grad {name}"][:, inputs["index"]], grads[0])
    assert found["grad weight"].abs().max() == 0 and found["grad bias"].abs().max() == 0


def test_add_norm_any_strides():
    inputs, grads = norm_inputs()
    wanted = run(add_norm, inputs, grads)
    x, residual = inputs["x"], inputs["residual"]
    inputs["x"] = x.transpose(1, 2).contiguous().transpose(1, 2)
    inputs["residual"] = torch.cat([residual, residual], 2)[:, :, : residual.shape[2]]
    inputs["weight"] = torch.stack([inputs["weight"]] * 2, 1)[:, 0]
    leaves = {k: v.detach().requires_grad_(v.is_floating_point()) for k, v in inputs.items()}
    out = add_norm(**leaves)
    torch.autograd.backward(out, [g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads])
    for i in (0, 1):
        assert torch.equal(out[i], wanted[f"output {i}"])
    for name in ("x", "residual", "weight", "bias"):
        assert torch.equal(leaves[name].grad, wanted[f"grad {name}"]), name


def test_add_norm_repeats_bit_for_bit():
    inputs, grads = norm_inputs(b=8, length=63, width=192)
    first, second = run(add_norm, inputs, grads), run(add_norm, inputs, grads)
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_add_norm_of_nothing():
    inputs, grads = norm_inputs(b=0)
    found = run(add_norm, inputs, grads)
    assert found["output 0"].shape == (0, 17, 13) and found["grad weight"].abs().sum() == 0


def test_add_norm_refuses_what_it_cannot_add():
    with pytest.raises(RuntimeError, match=r"does not take torch\.float64"):
        add_norm(x=torch.zeros(1, 2, 3, dtype=torch.float64), residual=None, weight=torch.ones(3))
    with pytest.raises(RuntimeError, match="takes sizes 1 to 8192, not 8193"):
        add_norm(x=torch.zeros(1, 1, 8193), residual=None, weight=torch.ones(8193))
    x = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match=r"adds in fp32, got a residual in torch\.float64"):
        add_norm(x=x, residual=x.double(), weight=torch.ones(3))


# torch.library, torch.compile


@pytest.mark.parametrize("scatter", [False, True])
def test_opcheck_of_permute_rows(scatter):
    x, half = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 5).half().requires_grad_()
    tensors = [x, half, torch.arange(10).view(2, 5)] if scatter else [x]
    torch.library.opcheck(permute_kernels.permute_rows, (torch.randperm(5), tensors, scatter))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_opcheck_of_add_norm(centred, first):
    inputs, _ = norm_inputs(first=first, bias=centred, shuffled=not first)
    leaves = [None if v is None else v.requires_grad_(v.is_floating_point()) for v in inputs.values()]
    x, residual, weight, bias, index = leaves
    torch.library.opcheck(norm_kernels.add_norm, (x, residual, weight, bias, 1e-5, centred, index, True))
    x, residual = x.detach().bfloat16(), None if first else residual.detach()
    normed, out, stats = norm_kernels.add_norm(x, residual, weight.detach(), bias, 1e-5, centred, index, True)
    dtypes = (x.dtype, x.dtype if first else residual.dtype)
    dout = None if first else out.detach()
    arguments = (normed.detach(), dout, out.detach(), stats.detach(), weight.detach(), bias is not None, index, *dtypes)
    torch.library.opcheck(norm_kernels.add_norm_backward, arguments)


class Block(nn.Module):
    """The entrance of a block, a mixer's stand-in, and a restore of two tensors at once."""

    def __init__(self, width=8):
        super().__init__()
        self.weight, self.mixer = nn.Parameter(torch.rand(width)), nn.Linear(width, width)

    def forward(self, x, residual, index, back):
        normed, residual = ssm_kernels.add_norm(x, residual, self.weight, index=index)
        return ssm_kernels.permute_rows(back, self.mixer(normed), residual)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_block_compiles_into_one_graph(compiler):
    torch._dynamo.reset()
    block, x, residual = Block(), torch.randn(2, 9, 8, requires_grad=True), torch.randn(2, 9, 8, requires_grad=True)
    index = torch.randperm(9)
    leaves = [x, residual, *block.parameters()]

    def outcome(block):
        out = block(x, residual, index, ssm_kernels.inverse(index))
        return [*out, *torch.autograd.grad(out[0].square().sum() + out[1].sum(), leaves)]

    wanted = outcome(block)
    for found, exact in zip(outcome(torch.compile(block, fullgraph=True, backend=compiler)), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
