import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ssm_kernels
from ssm_kernels import OPS, Unavailable, triton_support
from ssm_kernels.norm import triton as norm_backend
from ssm_kernels.permute import triton as permute_backend

HERE = Path(__file__).parent
BACKENDS = pytest.mark.parametrize("backend", [permute_backend, norm_backend])


def run_here(*arguments, **environment):
    """Python in a process of its own, importing what this one imports."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=HERE.parents[1], capture_output=True, text=True
    )


def run_cases(*files, mark="not slow", **environment):
    done = run_here("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", mark, *map(str, files), **environment)
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0 and " passed" in last and "skipped" not in last, done.stdout[-6000:] + done.stderr


@pytest.fixture
def triton():
    return pytest.importorskip("triton", reason="Triton has no build for this platform")


@pytest.mark.slow
def test_interpreted_on_the_cpu(triton):
    """Every check of triton_cases.py, and the common ones over the triton backends, in Triton's interpreter."""
    files = HERE / "triton_cases.py", HERE / "test_permute_norm.py"
    run_cases(*files, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.slow
def test_interpreted_on_the_cpu_through_inductor(triton):
    run_cases(HERE / "triton_cases.py", mark="slow", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled kernels run on a GPU only, and none is here")
def test_compiled_on_this_gpu(triton):
    run_cases(HERE / "triton_cases.py", mark="slow or not slow", TRITON_INTERPRET="0")


@BACKENDS
def test_the_cpu_is_for_the_interpreter_alone(backend):
    if triton_support.INTERPRETED:
        assert "cpu" in backend.DEVICES
    else:
        assert backend.DEVICES == ("cuda",)
        assert ("triton", "runs on cuda, not on cpu") in OPS["permute_rows"].explain(torch.device("cpu"))


def test_the_guard_is_of_the_tensors_device():
    far = SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))
    assert isinstance(triton_support.current(far), torch.cuda.device) and triton_support.current(far).idx == 1
    with triton_support.current(torch.zeros(1)):
        pass


@BACKENDS
def test_without_triton_there_is_a_reason_and_a_command(backend, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(Unavailable, match=r"Triton cannot be imported \(.*\); get it with `pip install triton`"):
        backend.load(torch.device("cpu"))
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(Unavailable, match="`pip install triton-windows`"):
        backend.load(torch.device("cpu"))


def test_without_triton_everything_else_works():
    code = (
        "import sys, torch; sys.modules['triton'] = None\n"
        "import ssm_kernels, ssm_kernels.norm.triton, ssm_kernels.permute.triton\n"
        "ssm_kernels.add_norm(torch.ones(1, 2, 3), None, torch.ones(3), index=torch.arange(2))\n"
        "print(ssm_kernels.available_backends('add_norm', 'cuda'))\n"
    )
    done = run_here("-c", code, TRITON_INTERPRET="0")
    assert done.returncode == 0 and done.stdout.strip() == "['reference']", done.stderr


@BACKENDS
@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (
            "Failed to find C compiler. Please specify via CC environment variable.",
            r"; install one \(`apt install gcc`\)",
        ),
        ("no kernel image is available for execution on the device\nmore", r"device\)$"),
    ],
)
def test_a_failing_first_launch_is_the_reason(triton, backend, monkeypatch, error, wanted):
    def broken(*args, **kw):
        raise RuntimeError(error)

    monkeypatch.setattr(triton_support.probe, "compare", broken)
    with pytest.raises(Unavailable, match=r"Triton .* fails its check \(RuntimeError: .*" + wanted):
        backend.load(torch.device("cpu"))


def test_wrong_numbers_are_noticed():
    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"wrong numbers: output 0 is off by 0\.5"):
        ssm_kernels.probe.compare(lambda x: x * 1.5, lambda x: x * 1, {"x": x})
    with pytest.raises(RuntimeError, match="wrong numbers: output 0 is off by nan"):
        ssm_kernels.probe.compare(lambda x: x * float("nan"), lambda x: x * 1, {"x": x})
    with pytest.raises(RuntimeError, match="wrong numbers: grad x"):
        ssm_kernels.probe.compare(lambda x: x.detach() + 0 * x, lambda x: x * 1, {"x": x})
