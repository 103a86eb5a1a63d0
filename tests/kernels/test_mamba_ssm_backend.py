"""The adapters to mamba-ssm and causal-conv1d, run on the CPU through those packages' own Python code."""

import importlib.util
import sys

import pytest
import torch
from foreign_packages import causal_conv1d_cuda, forget, language_model_names, selective_scan_cuda, source
from test_conv1d import conv_inputs
from test_scan import scan_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

import ssm_kernels
from ssm_kernels import OPS, probe
from ssm_kernels.conv1d import mamba_ssm as conv_backend
from ssm_kernels.scan import mamba_ssm as scan_backend
from ssm_kernels.testing import LENGTHS, assert_parity, run, textbook_conv, textbook_scan

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sources():
    pytest.importorskip("triton", reason="mamba-ssm's own Python code imports triton, which this platform lacks")
    return {v: source("mamba-ssm", v) for v in ("2.2.6.post3", "2.3.2.post1")} | {
        "conv": source("causal-conv1d", "1.7.0")
    }


@pytest.fixture(scope="module", params=["2.2.6.post3", "2.3.2.post1"])
def installed(request, sources):
    """One version of mamba-ssm beside causal-conv1d 1.7.0, their compiled modules stood in for, open to the CPU."""
    import triton
    import triton_targets

    if request.param.startswith("2.3") and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 5):
        pytest.skip(f"mamba-ssm {request.param} requires Triton 3.5, here is {triton.__version__}")
    packages = ("mamba_ssm", "causal_conv1d")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(sources["conv"])
        patch.syspath_prepend(sources[request.param])
        for name, stand_in in language_model_names().items():
            patch.setitem(sys.modules, name, stand_in)
        patch.setitem(sys.modules, "selective_scan_cuda", selective_scan_cuda())
        patch.setitem(sys.modules, "causal_conv1d_cuda", causal_conv1d_cuda())
        for backend, op in ((scan_backend, "selective_scan"), (conv_backend, "causal_conv1d")):
            patch.setattr(backend, "DEVICES", ("cuda", "cpu"))
            patch.setattr(OPS[op], "_loaded", {})
            patch.setattr(OPS[op], "_chosen", {})
        forget(*packages)
        with triton_targets.target("sm_80"):  # older Tritons look for a GPU when an autotuned kernel is defined
            importlib.import_module(scan_backend.PACKAGE.module)
        yield request.param
        forget(*packages)


def scan(**kw):
    return ssm_kernels.selective_scan(**kw, backend="mamba_ssm")


def conv(**kw):
    return ssm_kernels.causal_conv1d(**kw, backend="mamba_ssm")


def test_the_real_packages_are_what_runs(installed):
    inputs, grads = scan_inputs(length=7)
    calls = sys.modules["selective_scan_cuda"].calls
    run(scan, inputs, grads)
    run(conv, *conv_inputs(length=7))
    assert sys.modules["mamba_ssm"].__version__ == installed
    assert sys.modules["causal_conv1d"].__version__ == "1.7.0"
    assert sys.modules["selective_scan_cuda"].calls > calls and sys.modules["causal_conv1d_cuda"].calls > 0
    assert ssm_kernels.available_backends("selective_scan", "cpu")[0] == "mamba_ssm"
    assert ssm_kernels.available_backends("causal_conv1d", "cpu")[0] == "mamba_ssm"


@pytest.mark.parametrize("length", LENGTHS[:-1])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_parity(installed, length, reverse):
    inputs, grads = scan_inputs(length=length)
    assert_parity(scan, textbook_scan, inputs, grads, delta_softplus=True, reverse=reverse)


@pytest.mark.parametrize("missing", [("D",), ("z",), ("delta_bias",), ("D", "z", "delta_bias")])
@pytest.mark.parametrize("softplus", [False, True])
def test_scan_parity_of_every_option(installed, missing, softplus):
    inputs, grads = scan_inputs(d=5, length=8, n=3)
    inputs["delta"], inputs["delta_bias"] = inputs["delta"].abs() * 0.1, inputs["delta_bias"].abs() * 0.1
    inputs = {k: None if k in missing else v for k, v in inputs.items()}
    assert_parity(scan, textbook_scan, inputs, grads, delta_softplus=softplus, reverse=True)


def test_scan_parity_in_bfloat16(installed):
    """A, D and delta_bias in bf16 too, which the kernel does not take."""
    inputs, grads = scan_inputs()
    assert_parity(scan, textbook_scan, inputs, grads, torch.bfloat16, delta_softplus=True, reverse=True)


def test_scan_of_mixed_dtypes_loses_no_digits(installed):
    """As under autocast: bf16 sequences, but delta from an fp32 projection, and an fp64 weight."""
    inputs, grads = scan_inputs()
    inputs |= {k: inputs[k].bfloat16() for k in ("u", "B", "C", "z")} | {"D": inputs["D"].double()}
    found = run(scan, inputs, grads, delta_softplus=True)
    wanted = run(lambda **kw: ssm_kernels.selective_scan(**kw, backend="reference"), inputs, grads, delta_softplus=True)
    for name, exact in wanted.items():
        assert found[name].dtype == exact.dtype, name
        torch.testing.assert_close(found[name], exact, rtol=1e-2, atol=1e-2 if exact.dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("layout", ["channel-last", "slice of a wider row", "shifted by one"])
@pytest.mark.parametrize("reverse", [False, True])
def test_any_strides(installed, layout, reverse):
    """Each layout meets the alignment and stride demands of the kernels, and changes no number."""

    def lay(x):
        if layout == "channel-last":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        wide = torch.cat([x, x], 2 if layout == "shifted by one" else 1)
        return wide[:, :, 1 : 1 + x.shape[2]] if layout == "shifted by one" else wide[:, : x.shape[1]]

    for op, (inputs, grads), names, options in (
        (scan, scan_inputs(d=16, length=64), ("u", "delta", "B", "C", "z"), {"delta_softplus": True}),
        (conv, conv_inputs(d=16, length=64), ("x",), {}),
    ):
        inputs |= {k: lay(inputs[k]) for k in names}
        leaves = {k: v.detach().requires_grad_() for k, v in inputs.items()}
        dense = {k: v.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for k, v in inputs.items()}
        out, wanted = op(**leaves, reverse=reverse, **options), op(**dense, reverse=reverse, **options)
        torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)
        grad = lay(grads[0])
        out.backward(grad)
        wanted.backward(grad.contiguous())
        for name, leaf in leaves.items():
            torch.testing.assert_close(leaf.grad, dense[name].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS[:-1])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_conv_parity(installed, length, reverse, activation):
    """13 channels in channel-last memory, which the kernel does not take; at length 1 even contiguous() keeps it."""
    inputs, grads = conv_inputs(length=length)
    assert_parity(conv, textbook_conv, inputs, grads, activation=activation, reverse=reverse)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_conv_parity_in_bfloat16(installed, width, bias):
    inputs, grads = conv_inputs(width=width, bias=bias)
    assert_parity(conv, textbook_conv, inputs, grads, torch.bfloat16, activation="swish")


def test_conv_of_mixed_dtypes_loses_no_digits(installed):
    """bf16 activations, a bf16 weight and an fp32 bias: the weight goes up, the bias does not go down."""
    inputs, grads = conv_inputs()
    inputs |= {"x": inputs["x"].bfloat16(), "weight": inputs["weight"].bfloat16()}
    inputs["bias"] = torch.full_like(inputs["bias"], 1 + 2**-12)
    inputs["x"] = torch.zeros_like(inputs["x"])
    found = run(conv, inputs, grads)
    assert {k: v.dtype for k, v in found.items()} == {
        "output 0": torch.bfloat16,
        "grad x": torch.bfloat16,
        "grad weight": torch.bfloat16,
        "grad bias": torch.float32,
    }
    torch.testing.assert_close(found["grad bias"], grads[0].bfloat16().float().sum((0, 2)), rtol=1e-5, atol=1e-5)


def test_channel_last_memory_is_passed_on_where_the_kernel_takes_it(installed):
    inputs, grads = conv_inputs(d=16, length=8)
    before = sys.modules["causal_conv1d_cuda"].channel_last
    run(conv, inputs, grads, activation="silu")
    assert sys.modules["causal_conv1d_cuda"].channel_last == before + 1


def test_conv_gradient_may_come_in_any_layout(installed):
    """Channel-last with an odd stride, as a slice of a wider gradient has it, which the kernel would refuse."""
    inputs, grads = conv_inputs(d=16, length=8)
    odd = torch.cat([grads[0], grads[0][:, :1]], 1).transpose(1, 2).contiguous().transpose(1, 2)[:, :16]
    x = inputs["x"].detach().requires_grad_()
    for grad in (odd, grads[0]):
        conv(x=x, weight=inputs["weight"]).backward(grad)
    torch.testing.assert_close(x.grad, 2 * torch.autograd.grad(conv(x=x, weight=inputs["weight"]), x, grads[0])[0])


def test_other_window_widths_and_state_sizes_are_left_to_other_backends(installed):
    with pytest.raises(RuntimeError, match="takes sizes 2 to 4, not 5"):
        conv(x=torch.zeros(1, 3, 9), weight=torch.zeros(3, 5))
    ssm_kernels.causal_conv1d(torch.zeros(1, 3, 9), torch.zeros(3, 5))
    state = torch.zeros(1, 257, 2)
    with pytest.raises(RuntimeError, match="takes sizes 1 to 256, not 257"):
        scan(u=state[:, :3], delta=state[:, :3], A=torch.zeros(3, 257), B=state, C=state)


def test_beyond_32_bit_offsets_the_batch_is_split(installed, monkeypatch):
    monkeypatch.setattr(probe, "REACH", 13 * 17 * 2)
    for op, textbook, (inputs, grads), extension in (
        (scan, textbook_scan, scan_inputs(b=5, length=17, n=2), "selective_scan_cuda"),
        (conv, textbook_conv, conv_inputs(b=5, length=17), "causal_conv1d_cuda"),
    ):
        before = sys.modules[extension].calls
        run(op, inputs, grads)
        assert sys.modules[extension].calls == before + 3
        assert_parity(op, textbook, inputs, grads)


def test_nothing_in_nothing_out(installed):
    assert conv(x=torch.zeros(0, 3, 9), weight=torch.zeros(3, 4)).shape == (0, 3, 9)
    empty = torch.zeros(0, 3, 9)
    assert scan(u=empty, delta=empty, A=torch.zeros(3, 3), B=empty, C=empty).shape == (0, 3, 9)


def test_the_first_call_may_come_at_any_time(installed):
    """The probe must not pass or fail because of the caller's modes, nor draw from the caller's random numbers."""
    before = torch.get_rng_state()
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), FakeTensorMode()):
        with mode:
            scan_backend.load(CPU)
            conv_backend.load(CPU)
    assert torch.equal(torch.get_rng_state(), before)
