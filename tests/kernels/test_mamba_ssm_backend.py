"""The adapters to mamba-ssm and causal-conv1d, run on the CPU through those packages' own Python code."""

import importlib.util
import re
import sys

import pytest
import torch
from foreign_packages import causal_conv1d_cuda, language_model_names, selective_scan_cuda, source
from test_conv1d import conv_inputs
from test_scan import scan_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

import ssm_kernels
from ssm_kernels import OPS, Unavailable, probe
from ssm_kernels.conv1d import mamba_ssm as conv_backend
from ssm_kernels.scan import mamba_ssm as scan_backend
from ssm_kernels.testing import LENGTHS, assert_parity, run, textbook_conv, textbook_scan

CPU = torch.device("cpu")


def forget(*packages):
    """Drop what was imported of these packages, so that the next import reads the path again."""
    for name in [n for n in sys.modules if n.partition(".")[0] in packages]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def sources():
    pytest.importorskip("triton", reason="mamba-ssm's own Python code imports triton, which this platform lacks")
    return {v: source("mamba-ssm", v) for v in ("2.2.6.post3", "2.3.2.post1")} | {
        "conv": source("causal-conv1d", "1.7.0")
    }


@pytest.fixture(scope="module", params=["2.2.6.post3", "2.3.2.post1"])
def installed(request, sources):
    """One version of mamba-ssm beside causal-conv1d 1.7.0, their compiled modules stood in for, open to the CPU."""
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


# Why a package that is there does not run: the reason, and the command that cures it.

SCAN_BUILD = "MAMBA_KEEP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE pip install .*--no-deps --force-reinstall mamba-ssm`"


def fake(patch, tmp_path, code, extension=""):
    """mamba_ssm as a package whose scan's module holds `code`; the extension as a module of `extension`, or none."""
    ops = tmp_path / "mamba_ssm" / "ops"
    ops.mkdir(parents=True)
    for folder in (ops, ops.parent):
        (folder / "__init__.py").touch()
    (ops / "selective_scan_interface.py").write_text(code)
    if extension:
        (tmp_path / "selective_scan_cuda.py").write_text(extension)
    patch.syspath_prepend(tmp_path)


@pytest.fixture
def clean(monkeypatch):
    forget("mamba_ssm", "selective_scan_cuda", "causal_conv1d", "causal_conv1d_cuda")
    yield monkeypatch
    forget("mamba_ssm", "selective_scan_cuda", "causal_conv1d", "causal_conv1d_cuda")


def reason(backend):
    with pytest.raises(Unavailable) as caught:
        backend.load(CPU)
    return str(caught.value)


RAISES = "def selective_scan_fn(**kw):\n    raise {}\n"
REASONS = {
    "the import works, the call raises": (
        "try:\n    import selective_scan_cuda\nexcept ImportError:\n    selective_scan_cuda = None\n"
        "def selective_scan_fn(**kw):\n    selective_scan_cuda.fwd\n",
        "",
        r"mamba-ssm( \S+)? came without its compiled part selective_scan_cuda; build it with `" + SCAN_BUILD,
    ),
    "the import wants the extension": (
        "import selective_scan_cuda\n",
        "",
        r"mamba-ssm( \S+)? came without its compiled part selective_scan_cuda; build it with `" + SCAN_BUILD,
    ),
    "another torch's extension": (
        "import selective_scan_cuda\n",
        "raise ImportError('selective_scan_cuda.so: undefined symbol: _ZN3c10')\n",
        r"selective_scan_cuda does not load, most likely built for another torch than .*"
        r"\(ImportError: selective_scan_cuda.so: undefined symbol: _ZN3c10\); build it again with `" + SCAN_BUILD,
    ),
    "another GPU's extension": (
        RAISES.format("RuntimeError('CUDA error: no kernel image is available for execution on the device\\nmore')"),
        "pass\n",
        r"not built for this GPU \(RuntimeError: CUDA error: no kernel image is available for execution on the device\)"
        r"; build it again with `" + SCAN_BUILD,
    ),
    "a broken neighbour": (
        "from itertools import no_such_name\n",
        "pass\n",
        r"cannot be imported \(ImportError: cannot import name 'no_such_name'.*\); try `MAMBA_KEEP_CUDA_BUILD=TRUE "
        r"pip install --no-build-isolation mamba-ssm --upgrade`",
    ),
    "a fork with another signature": (
        "def selective_scan_fn(u, delta, A, B, C):\n    return u\n",
        "pass\n",
        r"fails its check \(TypeError: selective_scan_fn\(\) got an unexpected keyword argument 'D'\); try `"
        + SCAN_BUILD,
    ),
    "wrong numbers": (
        "import torch\ndef selective_scan_fn(u, z, delta_softplus, **rest):\n"
        "    return u * z + 0 * sum(map(torch.sum, rest.values()))\n",
        "pass\n",
        r"fails its check \(RuntimeError: wrong numbers: output 0 is off by",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_why_the_scan_cannot_run(clean, tmp_path, case):
    code, extension, wanted = REASONS[case]
    fake(clean, tmp_path, code, extension)
    assert re.search(wanted, found := reason(scan_backend)), found


def test_not_installed(clean, tmp_path):
    clean.setattr(importlib.util, "find_spec", lambda name: None)
    for backend, wanted in (
        (scan_backend, "mamba-ssm is not installed; get it with `MAMBA_KEEP_CUDA_BUILD=TRUE pip install "),
        (conv_backend, "causal-conv1d is not installed; get it with `pip install "),
    ):
        clean.setitem(sys.modules, backend.PACKAGE.module, None)  # makes its import an ImportError
        assert reason(backend) == f"{wanted}--no-build-isolation {backend.PACKAGE.distribution}`"
