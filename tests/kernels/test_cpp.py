"""The loader of the C++ kernels: what is wrong is said in one line, and nobody waits for the dead."""

import ctypes
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time

import pytest
import torch

from ssm_kernels import Unavailable, cpp

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the fake compilers are shell scripts")


def attempt():
    """What a fresh process would find."""
    return cpp._library.__wrapped__()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv(cpp.CACHE_ENV, str(folder))
    return folder


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Sets a shell script as the compiler; its output file is in $out."""

    def install(script):
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\nfor out; do :; done\n{script}\n")  # -o comes last
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(path))

    install.runs = lambda: (tmp_path / "runs").read_text().count("run")
    return install


@pytest.fixture
def works(tmp_path):
    """A shell line that acts as a compiler of a valid library."""
    found = cpp._library()
    if isinstance(found, Unavailable):
        pytest.skip(f"no C++ kernels here: {found}")
    return f"cp {found._name} $out"


def reason():
    found = attempt()
    assert isinstance(found, Unavailable)
    assert "\n" not in str(found)
    return str(found)


def test_compiles_once_with_one_line_and_loads(cache, compiler, works, capfd):
    compiler(works)
    assert isinstance(attempt(), ctypes.CDLL)
    assert capfd.readouterr().err == f"ssm_kernels: compiling the CPU kernels (some seconds, once; kept in {cache})\n"
    assert isinstance(attempt(), ctypes.CDLL)
    assert compiler.runs() == 1 and capfd.readouterr().err == ""
    assert sorted(p.suffix for p in cache.iterdir()) == [".lock", ".so"]


@pytest.mark.slow
def test_the_real_compiler(cache, works):
    assert attempt().lanes() == cpp.lanes()


def test_no_compiler(cache, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reason() == "no C++ compiler was found: install g++ or set CXX"
    monkeypatch.setenv("CXX", "/nonexistent -O1")
    assert reason() == "the C++ compiler CXX=/nonexistent -O1 was not found"
    assert not cache.exists()


def test_a_compiler_that_fails(cache, compiler):
    compiler('echo "In file included from x:" >&2; echo "vector.h:7: fatal error: no vec.h" >&2; exit 3')
    said = reason()
    assert said.endswith("compiler failed with exit code 3: vector.h:7: fatal error: no vec.h")
    assert [p.suffix for p in cache.iterdir()] == [".lock"]
    compiler("exit 1")
    assert reason().endswith("failed with exit code 1: ")


def test_a_compiler_that_does_not_end(cache, compiler, monkeypatch):
    monkeypatch.setattr(cpp, "COMPILE_LIMIT", 0.3)
    compiler("exec sleep 30")
    assert reason().endswith("took more than 0 s")


def test_a_compiler_killed_half_way(cache, compiler, works):
    compiler("echo half > $out; kill -9 $$")
    assert "failed with exit code -9" in reason()
    assert [p.suffix for p in cache.iterdir()] == [".lock"]
    compiler(works)
    assert isinstance(attempt(), ctypes.CDLL)


def test_a_library_that_does_not_load(cache, compiler):
    compiler("echo nonsense > $out")
    assert "the compiled kernels do not load" in reason()


def test_a_broken_file_in_the_cache_is_built_again(cache, compiler, works):
    compiler(works)
    target = cache / f"kernels-{cpp._key()}.so"
    cache.mkdir()
    target.write_text("cut off")
    assert isinstance(attempt(), ctypes.CDLL)
    assert compiler.runs() == 1


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, works):
    (tmp_path / "file").touch()
    monkeypatch.setenv(cpp.CACHE_ENV, str(tmp_path / "file" / "cache"))
    said = reason()
    assert "cannot be written (Not a directory)" in said and cpp.CACHE_ENV in said


def test_a_read_only_cache_that_is_filled_serves(cache, compiler, works, monkeypatch):
    compiler(works)
    attempt()

    def forbidden(target):
        raise AssertionError("wrote into the cache")

    monkeypatch.setattr(cpp, "_build", forbidden)
    monkeypatch.setenv("CXX", "/nonexistent")
    assert isinstance(attempt(), ctypes.CDLL)


def test_no_home(monkeypatch):
    def homeless():
        raise RuntimeError

    for name in (cpp.CACHE_ENV, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpp.Path, "home", homeless)
    assert reason().startswith("there is no home folder")


def _try_in_child(results):
    results.put(type(attempt()).__name__)


def test_processes_that_start_at_once_compile_once(cache, compiler, works):
    compiler(f"sleep 1; {works}")
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    children = [fork.Process(target=_try_in_child, args=(results,)) for _ in range(4)]
    for child in children:
        child.start()
    assert [results.get(timeout=20) for _ in children] == ["CDLL"] * 4
    for child in children:
        child.join()
    assert compiler.runs() == 1


def test_the_lock_of_a_killed_process_holds_nobody_up(cache, compiler, works):
    compiler("exec sleep 3")
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=attempt)
    child.start()
    while not list(cache.glob("*.tmp")):  # it compiles, holding the lock
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    compiler(works)
    begun = time.monotonic()
    assert isinstance(attempt(), ctypes.CDLL)
    assert time.monotonic() - begun < 2
    assert not list(cache.glob("*.tmp"))  # the dead one's half file is gone too


def test_the_name_depends_on_all_that_matters(monkeypatch, tmp_path):
    keys = [cpp._key()]
    assert cpp._key() == keys[0]
    with monkeypatch.context() as patch:
        patch.setattr(cpp, "_cpu_features", lambda: "flags: another processor")
        keys.append(cpp._key())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99")
        keys.append(cpp._key())
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        keys.append(cpp._key())
    with monkeypatch.context() as patch:
        for name in ("_sources", "_headers"):
            for i, path in enumerate(getattr(cpp, name)):
                changed = tmp_path / path.name
                changed.write_bytes(path.read_bytes() + b"\n")
                paths = list(getattr(cpp, name))
                paths[i] = changed
                with monkeypatch.context() as inner:
                    inner.setattr(cpp, name, tuple(paths))
                    keys.append(cpp._key())
    assert len(set(keys)) == len(keys) == 9


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_other_instruction_sets(capability, works):
    """The kernels for lesser processors, as far as this one can run them."""
    program = """
import torch
from ssm_kernels import causal_conv1d, cpp, selective_scan
from ssm_kernels.testing import run, textbook_conv, textbook_scan
torch.manual_seed(0)
rand = lambda *shape: torch.randn(*shape, dtype=torch.float64)
inputs = dict(u=rand(2, 37, 70), delta=rand(2, 37, 70) - 1, A=-rand(37, 9).exp(), B=rand(2, 9, 70), C=rand(2, 9, 70),
              D=rand(37), z=rand(2, 37, 70), delta_bias=rand(37))
def same(fn, textbook, inputs, grads, **options):
    wanted = run(textbook, inputs, grads, **options)
    for dtype, close in ((torch.float32, 2e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        low = {k: v.to(dtype) for k, v in inputs.items()}
        for name, x in run(lambda **kw: fn(**kw, backend="cpu"), low, grads, **options).items():
            error = (x.double() - wanted[name]).abs().max() / wanted[name].abs().max()
            assert error < close, (name, dtype, error)
same(selective_scan, textbook_scan, inputs, [rand(2, 37, 70)], delta_softplus=True)
same(causal_conv1d, textbook_conv, dict(x=rand(2, 37, 70), weight=rand(37, 4), bias=rand(37)), [rand(2, 37, 70)],
     activation="silu")
print(cpp.lanes())
"""
    env = os.environ | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 8
