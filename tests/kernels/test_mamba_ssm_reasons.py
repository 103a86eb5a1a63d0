"""Why an installed mamba-ssm or causal-conv1d does not run: the reason, and the command that cures it."""

import importlib.util
import re
import sys

import pytest
import torch
from foreign_packages import forget

from ssm_kernels import Unavailable
from ssm_kernels.conv1d import mamba_ssm as conv_backend
from ssm_kernels.scan import mamba_ssm as scan_backend

CPU = torch.device("cpu")
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
