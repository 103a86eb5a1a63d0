"""The real Python sources of mamba-ssm and causal-conv1d, and stand-ins for their compiled modules.

The stand-ins demand what the C++ entry points of these versions demand (dtypes, shapes, strides, widths) and compute
with the textbook functions, so that everything between our public function and the extension's boundary is exercised.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ssm_kernels.testing import textbook_conv, textbook_scan

SOURCES = {  # sha256 of each source distribution
    ("mamba-ssm", "2.2.6.post3"): "826a3cdb651959f191dac64502f8a29627d9116fe6bb7c57e4f562da1aea7bf3",
    ("mamba-ssm", "2.3.2.post1"): "104cc47e9101e5401a675fa2b784f2952b9b037f3b1dd83b5ac544394e95d028",
    ("causal-conv1d", "1.7.0"): "3202758494eaa7b597ce1c282dfa188889506bfcb92cad3c407d26736bfcd32b",
}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slws-vim" / "sources"


def source(name: str, version: str) -> str:
    """Folder to import the package from; fetched with pip once, checked against its hash every time."""
    archive = CACHE / f"{name.replace('-', '_')}-{version}.tar.gz"
    if not archive.exists():
        fetch(name, version, archive)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert found == SOURCES[name, version], f"{archive} is not the published one: sha256 {found}"
    folder = archive.with_name(archive.name.removesuffix(".tar.gz"))
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch, tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
            os.replace(Path(scratch) / folder.name, folder)
    return str(folder)


def fetch(name: str, version: str, archive: Path) -> None:
    """pip runs the package's setup.py to learn its metadata: that wants torch here and must not look for nvcc."""
    CACHE.mkdir(parents=True, exist_ok=True)
    command = f"-m pip download -q --no-deps --no-binary :all: --no-build-isolation --retries 1 {name}=={version}"
    environment = {**os.environ, "MAMBA_SKIP_CUDA_BUILD": "TRUE", "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE"}
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        done = subprocess.run(
            [sys.executable, *command.split(), "-d", scratch], env=environment, capture_output=True, text=True
        )
        if "from versions: none" in done.stderr:
            pytest.skip(f"no package registry can be reached from here to fetch {name} {version}")
        assert done.returncode == 0, done.stderr
        os.replace(Path(scratch) / archive.name, archive)


def forget(*packages):
    """Drop what was imported of these packages, so that the next import reads the path again."""
    for name in [n for n in sys.modules if n.partition(".")[0] in packages]:
        del sys.modules[name]


def module(name: str, **members) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    made.__dict__.update(members)
    return made


class _Names(ModuleType):
    """A module that has every name asked of it: the language models beside the scan want transformers."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def language_model_names() -> dict[str, ModuleType]:
    names = ("transformers", "transformers.generation", "transformers.utils", "transformers.utils.hub")
    return {name: _Names(name) for name in names}


def _check_scan(u, delta, A, B, C, D, z, delta_bias, dout=None):
    (b, d, length), n = u.shape, A.shape[1]
    assert u.dtype in (torch.float16, torch.bfloat16, torch.float32) and A.dtype == torch.float32 and n <= 256
    for x, shape in ((u, (b, d, length)), (delta, (b, d, length)), (B, (b, 1, n, length)), (C, (b, 1, n, length))):
        assert x.dtype == u.dtype and x.shape == shape and (x.stride(-1) == 1 or length == 1)
    for x in (z, dout):
        assert x is None or (x.dtype == u.dtype and x.shape == u.shape and (x.stride(-1) == 1 or length == 1))
    for x in (D, delta_bias):
        assert x is None or (x.dtype == torch.float32 and x.shape == (d,) and (x.stride(-1) == 1 or d == 1))
    assert A.shape == (d, n)
    if length * u.element_size() % 16 == 0:
        for x in (u, delta, B, C) if z is None else (u, delta, B, C, z):
            assert all(p * x.element_size() % 16 == 0 for p in (x.storage_offset(), *x.stride()[:-1]))


def selective_scan_cuda() -> ModuleType:
    """`fwd` and `bwd` as csrc/selective_scan/selective_scan.cpp has them; `calls` counts."""

    def compute(u, delta, A, B, C, D, z, delta_bias, softplus):
        u, delta, B, C, z = (None if x is None else x.float() for x in (u, delta, B, C, z))
        return textbook_scan(u, delta, A, B[:, 0], C[:, 0], D, z, delta_bias, softplus)

    def fwd(u, delta, A, B, C, D, z, delta_bias, delta_softplus):
        made.calls += 1
        _check_scan(u, delta, A, B, C, D, z, delta_bias)
        out = compute(u, delta, A, B, C, D, None, delta_bias, delta_softplus).to(u.dtype)
        x = torch.zeros(*u.shape[:2], -(-u.shape[2] // 2048), 2 * A.shape[1])
        if z is None:
            return [out, x]
        return [out, x, compute(u, delta, A, B, C, D, z, delta_bias, delta_softplus).to(u.dtype)]

    def bwd(u, delta, A, B, C, D, z, delta_bias, dout, x, out, dz, delta_softplus, recompute_out_z):
        _check_scan(u, delta, A, B, C, D, z, delta_bias, dout)
        assert x.shape == (*u.shape[:2], -(-u.shape[2] // 2048), 2 * A.shape[1]) and x.dtype == A.dtype
        assert (out is None) == (z is None) and dz is None and recompute_out_z is False
        given = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "delta_bias": delta_bias, "z": z}
        with torch.enable_grad():
            leaves = {k: None if v is None else v.detach().float().requires_grad_() for k, v in given.items()}
            y = compute(**leaves, softplus=delta_softplus)
        wanted = {k: v for k, v in leaves.items() if v is not None}
        grads = dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dout.float()), strict=True))
        order = ("u", "delta", "A", "B", "C", "D", "delta_bias") + (("z",) if z is not None else ())
        return [grads[k].to(given[k].dtype) if k in grads else None for k in order]

    made = module("selective_scan_cuda", fwd=fwd, bwd=bwd, calls=0)
    return made


def _check_conv(x, weight, bias):
    (_, d, length), width = x.shape, weight.shape[1]
    assert {x.dtype, weight.dtype} <= {torch.float16, torch.bfloat16, torch.float32}
    assert weight.shape == (d, width) and 2 <= width <= 4
    assert x.stride(2) == 1 or x.stride(1) == 1
    channel_last = x.stride(1) == 1 and x.stride(2) > 1
    _check_eights(x, channel_last)
    assert bias is None or (bias.dtype == weight.dtype and bias.stride(-1) == 1 and bias.shape == (d,))
    if not channel_last and length * x.element_size() % 16 == 0:
        assert all(p * x.element_size() % 16 == 0 for p in (x.storage_offset(), *x.stride()[:-1]))
    return channel_last


def _check_eights(x, channel_last):
    assert not channel_last or (x.shape[1] % 8 == 0 and x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0)


def causal_conv1d_cuda() -> ModuleType:
    """`causal_conv1d_fwd` and `causal_conv1d_bwd` as csrc/causal_conv1d.cpp of 1.7.0 has them; `calls` counts."""

    def compute(x, weight, bias, silu):
        return textbook_conv(x.float(), weight.float(), None if bias is None else bias.float(), silu or None)

    def causal_conv1d_fwd(x, weight, bias, seq_idx, initial_states, out, final_states_out, silu_activation):
        made.calls += 1
        _check_conv(x, weight, bias)
        assert seq_idx is None and initial_states is None and final_states_out is None
        out.copy_(compute(x, weight, bias, silu_activation))

    def causal_conv1d_bwd(
        x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, dweight, dbias, dinitial_states, silu
    ):
        channel_last = _check_conv(x, weight, bias)
        made.channel_last += channel_last
        if channel_last and dout.stride(1) != 1:
            dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
        elif not channel_last and dout.stride(2) != 1:
            dout = dout.contiguous()
        _check_eights(dout, channel_last)
        assert dx.dtype == x.dtype and dx.shape == x.shape and dx.stride(1 if channel_last else 2) == 1
        assert (bias is None) == (dbias is None) and seq_idx is None and initial_states is None
        assert dfinal_states is None and dinitial_states is None

        def gradients():
            leaves = [v.detach().float().requires_grad_() for v in (x, weight, bias) if v is not None]
            return torch.autograd.grad(compute(*leaves, *[None] * (bias is None), silu), leaves, dout.float())

        with ThreadPoolExecutor(1) as elsewhere:  # this thread is inside a torch.library op, where autograd is off
            for to, grad in zip((dx, dweight, dbias), elsewhere.submit(gradients).result(), strict=False):
                to.copy_(grad)

    made = module(
        "causal_conv1d_cuda",
        causal_conv1d_fwd=causal_conv1d_fwd,
        causal_conv1d_bwd=causal_conv1d_bwd,
        calls=0,
        channel_last=0,
    )
    return made
