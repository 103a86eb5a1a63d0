import pytest
import torch

import ssm_kernels
from ssm_kernels.testing import assert_parity, poisoned_empties, textbook_add_norm

PERMUTE = ssm_kernels.available_backends("permute_rows", "cpu")
NORM = ssm_kernels.available_backends("add_norm", "cpu")


@pytest.mark.parametrize("backend", PERMUTE)
def test_permute_rows_equals_the_papers_gather(backend):
    """arXiv 2408.17081's code: torch.gather on the index expanded to (b, l, d); values and gradients."""
    torch.manual_seed(0)
    x = torch.randn(3, 17, 5, requires_grad=True)
    index, weigh = torch.randperm(17), torch.randn(3, 17, 5)
    gathered = torch.gather(x, 1, index[None, :, None].expand(3, -1, 5))
    (wanted,) = torch.autograd.grad((gathered * weigh).sum(), x)
    moved = ssm_kernels.permute_rows(index, x, backend=backend)
    (found,) = torch.autograd.grad((moved * weigh).sum(), x)
    assert torch.equal(moved, gathered) and torch.equal(found, wanted)
    assert not torch.equal(moved, x)


@pytest.mark.parametrize("backend", PERMUTE)
def test_permute_rows_moves_several_tensors_and_comes_back(backend):
    torch.manual_seed(0)
    tensors = (torch.randn(2, 9, 4), torch.randn(2, 9, 3, 2).bfloat16(), torch.arange(18).view(2, 9))
    index = torch.randperm(9)
    moved = ssm_kernels.permute_rows(index, *tensors, backend=backend)
    assert all(torch.equal(m, x[:, index]) for m, x in zip(moved, tensors, strict=True))
    back = ssm_kernels.permute_rows(ssm_kernels.inverse(index), *moved, backend=backend)
    assert all(torch.equal(m, x) for m, x in zip(back, tensors, strict=True))


def test_permute_rows_names_a_wrong_shape():
    with pytest.raises(ValueError, match=r"got \(2, 5, 3\) and \(4,\)"):
        ssm_kernels.permute_rows(torch.arange(4), torch.zeros(2, 5, 3))


@pytest.mark.parametrize("backend", NORM)
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_add_norm_parity(backend, norm, shuffled, first):
    torch.manual_seed(0)
    inputs = {
        "x": torch.randn(2, 17, 13),
        "residual": None if first else torch.randn(2, 17, 13),
        "weight": torch.randn(13),
        "bias": torch.randn(13) if norm == "layer" else None,
        "index": torch.randperm(17) if shuffled else None,
    }
    grads = [torch.randn(2, 17, 13), torch.randn(2, 17, 13)]
    run = lambda **kw: ssm_kernels.add_norm(**kw, backend=backend)  # noqa: E731
    with poisoned_empties():
        assert_parity(run, textbook_add_norm, inputs, grads, norm=norm)


@pytest.mark.parametrize("backend", NORM)
def test_residual_is_kept_in_fp32(backend):
    x = torch.ones(1, 3, 8, dtype=torch.bfloat16)
    normed, residual = ssm_kernels.add_norm(x, torch.full((1, 3, 8), 1e-3), torch.ones(8), backend=backend)
    assert normed.dtype == torch.bfloat16 and residual.dtype == torch.float32
    torch.testing.assert_close(residual, torch.full((1, 3, 8), 1.001))
    _, residual = ssm_kernels.add_norm(x, x, torch.ones(8), residual_in_fp32=False, backend=backend)
    assert residual.dtype == torch.bfloat16


def test_the_first_residual_is_a_copy():
    """A caller may change the residual in place without touching x."""
    x = torch.randn(1, 3, 8)
    _, residual = ssm_kernels.add_norm(x, None, torch.ones(8))
    assert residual.data_ptr() != x.data_ptr()


def test_add_norm_names_wrong_arguments():
    x = torch.zeros(2, 5, 3)
    with pytest.raises(ValueError, match="norm must be 'rms' or 'layer', got 'batch'"):
        ssm_kernels.add_norm(x, None, torch.ones(3), norm="batch")
    with pytest.raises(ValueError, match=r"index must be \(5,\)"):
        ssm_kernels.add_norm(x, None, torch.ones(3), index=torch.arange(4))
