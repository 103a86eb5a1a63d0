"""Every kernel that our Triton ops launch, compiled for GPUs that are not here; for NVIDIA's, ptxas must not spill."""

import pytest
import torch

from ssm_kernels import triton_support

triton = pytest.importorskip("triton", reason="Triton has no build for this platform")
if triton_support.INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled in this process", allow_module_level=True)

from triton_targets import resources, target  # noqa: E402

from ssm_kernels.norm import triton_kernels as norm_kernels  # noqa: E402
from ssm_kernels.permute import triton_kernels as permute_kernels  # noqa: E402

WIDTHS = (192, 384, 576, 768, 1024, 1536)  # of the models in the zoo
VERSION = tuple(int(n) for n in triton.__version__.split(".")[:2])
SINCE = {
    "sm_80": (3, 1),
    "sm_90": (3, 1),
    "sm_100": (3, 3),
    "gfx942": (3, 6),
}  # older ones lack the target or its linker


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def launch_norm(width, x_dtype, norm, first=False, shuffled=True):
    x, weight = torch.zeros(2, 5, width, dtype=x_dtype), torch.ones(width)
    residual, index = None if first else torch.zeros(2, 5, width), torch.arange(5) if shuffled else None
    centred = norm == "layer"
    bias = weight if centred else None
    normed, out, stats = norm_kernels.add_norm(x, residual, weight, bias, 1e-5, centred, index, True)
    dtypes = (x_dtype, x_dtype if first else torch.float32)
    norm_kernels.add_norm_backward(normed, out, out, stats, weight, centred, index, *dtypes)


def check(kernels, name, count):
    assert len(kernels) == count
    for kernel in kernels:
        if name.startswith("sm_"):
            assert resources(kernel, name)["spilled"] == 0, kernel.metadata.name
        else:
            assert kernel.asm["hsaco"]


@pytest.fixture(params=SINCE)
def name(request):
    if SINCE[request.param] > VERSION:
        pytest.skip(f"Triton {triton.__version__} cannot compile for {request.param} on its own")
    return request.param


@pytest.mark.parametrize("width", WIDTHS)
def test_training_under_bf16_autocast(name, width):
    """bf16 hidden, fp32 stream, read through an index; RMS and LayerNorm; both directions; and the row copy of both."""
    with target(name) as kernels:
        launch_norm(width, torch.bfloat16, "rms")
        launch_norm(width, torch.bfloat16, "layer")
        hidden, stream = torch.zeros(2, 5, width, dtype=torch.bfloat16), torch.zeros(2, 5, width)
        permute_kernels.permute_rows(torch.arange(5), [hidden, stream], False)
    check(kernels, name, 5)


@pytest.mark.parametrize("width", [13, 8192])
def test_the_narrowest_and_widest_tiles(name, width):
    with target(name) as kernels:
        launch_norm(width, torch.float32, "layer", first=True, shuffled=False)
        permute_kernels.permute_rows(torch.arange(5), [torch.zeros(2, 5, width)] * 4, True)
    check(kernels, name, 3)


def test_the_spill_check_sees_spills():
    """The same kernel squeezed into one warp, where 4096 columns cannot stay in registers."""
    with target("sm_80") as kernels, pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_kernels, "shape", lambda width: {"ROWS": 1, "COLS": 4096, "num_warps": 1})
        launch_norm(4096, torch.float32, "layer")
    assert resources(kernels[-1], "sm_80")["spilled"] > 0
