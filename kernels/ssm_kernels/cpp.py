"""The C++ kernels of the `cpu` backends: compiled once by the machine's own compiler, cached, loaded with ctypes.

One compiler command builds every source into one shared library, in half a minute at most on two cores. It needs a C++
compiler and the headers that come with torch, neither ninja nor Python's headers: the library knows addresses and
strides only. It is kept in $SSM_KERNELS_CACHE, else in ~/.cache/ssm_kernels, under a name made of everything that it
depends on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from .backend import Unavailable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the position is the code that vector.h knows it by
CACHE_ENV = "SSM_KERNELS_CACHE"
COMPILE_LIMIT = 300.0  # seconds; also how long to wait for another process that compiles

_here = Path(__file__).parent
_torch = Path(torch.__file__).parent
_sources = tuple(
    _here / name for name in ("scan/scan.cpp", "conv1d/conv1d.cpp", "permute/permute.cpp", "norm/norm.cpp")
)
_headers = (_here / "vector.h",)


def library() -> ctypes.CDLL:
    """The loaded kernels, compiled first where needed. Raises Unavailable with the reason, the same on every call."""
    found = _library()
    if isinstance(found, Unavailable):
        raise found
    return found


@functools.cache
def _library() -> ctypes.CDLL | Unavailable:
    try:
        target = _cache_folder() / f"kernels-{_key()}.so"
        if target.exists():
            with contextlib.suppress(OSError):  # built by another system with the same home, or cut off: build again
                return ctypes.CDLL(str(target))
        _build(target)
        return ctypes.CDLL(str(target))
    except Unavailable as reason:
        return reason
    except OSError as error:
        return Unavailable(f"the compiled kernels do not load: {error}")


def _cache_folder() -> Path:
    named = os.environ.get(CACHE_ENV)
    if named:
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssm_kernels"
    except RuntimeError:
        raise Unavailable(f"there is no home folder to keep the compiled kernels in; set {CACHE_ENV}") from None


def _flags() -> list[str]:
    """Compiler flags: this machine's instructions, no more of them than torch itself uses (ATEN_CPU_CAPABILITY)."""
    flags = ["-std=c++20", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-fvisibility=hidden", "-w"]
    if platform.machine().lower() in ("aarch64", "arm64"):
        flags.append("-mcpu=native")
    else:
        less = {"AVX512": [], "AVX2": ["-mno-avx512f"]}
        flags += ["-march=native", *less.get(torch.backends.cpu.get_cpu_capability(), ["-mno-avx2", "-mno-avx512f"])]
    flags.append(f"-I{_torch / 'include'}")
    if sys.platform.startswith("linux"):
        # torch's own OpenMP, so that both share one pool of threads. Elsewhere: one thread.
        runtimes = [*_torch.glob("lib/libgomp*.so*"), *_torch.parent.glob("torch.libs/libgomp*.so*")]
        flags += ["-fopenmp", "-Wl,--as-needed", *map(str, runtimes)]
    return flags


def _key() -> str:
    parts = [torch.__version__, platform.machine(), _cpu_features(), *_flags()]
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in (*_sources, *_headers):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _cpu_features() -> str:
    """What -march=native depends on: nodes of a cluster with one home folder may differ."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as info:
        for line in info:
            if line.lower().startswith(("flags", "features")):
                return line
    return platform.processor()


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    if named:
        command = shlex.split(named)
        if shutil.which(command[0]) is None:
            raise Unavailable(f"the C++ compiler CXX={named} was not found")
        return command
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise Unavailable("no C++ compiler was found: install g++ or set CXX")


def _build(target: Path) -> None:
    """Compile into `target`. It appears whole or not at all, whoever is killed and whoever else builds it too."""
    if os.name == "nt":
        raise Unavailable("the C++ kernels are not built on Windows")
    compiler = _compiler()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        before = _stamp(target)
        with _lock(target.with_suffix(".lock")):
            if _stamp(target) != before:
                return  # another process built it while this one waited
            for stale in target.parent.glob(f"{target.stem}.*.tmp"):
                stale.unlink(missing_ok=True)
            handle, name = tempfile.mkstemp(prefix=f"{target.stem}.", suffix=".tmp", dir=target.parent)
            os.close(handle)
            try:
                _compile(compiler, name, target.parent)
                os.chmod(name, 0o755)
                os.replace(name, target)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(name)
    except OSError as error:
        why = error.strerror or error
        raise Unavailable(
            f"the folder for compiled kernels, {target.parent}, cannot be written ({why}); set {CACHE_ENV}"
        ) from error


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _compile(compiler: list[str], output: str, folder: Path) -> None:
    sys.stderr.write(f"ssm_kernels: compiling the CPU kernels (some seconds, once; kept in {folder})\n")
    sys.stderr.flush()
    command = [*compiler, *map(str, _sources), *_flags(), "-o", output]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="replace", timeout=COMPILE_LIMIT,
        )  # fmt: skip
    except OSError as error:
        raise Unavailable(f"the C++ compiler {compiler[0]} does not start: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise Unavailable(f"the C++ compiler {compiler[0]} took more than {COMPILE_LIMIT:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
        raise Unavailable(f"the C++ compiler {compiler[0]} failed with exit code {done.returncode}: {said[:300]}")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One builder at a time where the file system can lock. The kernel drops the lock of a process that dies.

    Not worth waiting for without end: whoever waits longer than a compile may take builds as well, which is safe.
    """
    try:
        import fcntl

        file = open(path, "w")  # noqa: SIM115
    except ImportError:
        yield
        return
    with file:
        deadline = time.monotonic() + COMPILE_LIMIT
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break  # a file system without locks
        yield


def lanes() -> int:
    """Channels per vector."""
    return library().lanes()


class Rows(ctypes.Structure):
    """vector.h's Rows: a (b, l, channels) tensor whose channels lie side by side."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


def rows(x: Tensor | None) -> Rows:
    """Rows of a (b, channels, l) tensor that `channel_last` has returned."""
    return Rows() if x is None else Rows(x.data_ptr(), x.stride(0), x.stride(2), DTYPES.index(x.dtype))


def channel_last(x: Tensor | None) -> Tensor | None:
    """A (b, channels, l) tensor in a dtype and memory layout the kernels take; a copy only where x is in neither."""
    if x is None:
        return None
    x = x if x.dtype in DTYPES else x.float()
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.transpose(1, 2).contiguous().transpose(1, 2)


def new_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised (b, channels, l) tensor of x's shape in channel-last memory."""
    b, d, length = x.shape
    return torch.empty(b, length, d, dtype=dtype or x.dtype, device=x.device).transpose(1, 2)


def table(x: Tensor | None) -> Tensor | None:
    """A small parameter as contiguous fp32."""
    return None if x is None else x.float().contiguous()


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@functools.lru_cache(256)
def split(batch: int, blocks: int, work: int, threads: int) -> tuple[int, int]:
    """(parts, threads): into how many parts the channel blocks of a sample go, so that all threads have work.

    Few parts are better, as each sums over its channels on its own. The result depends on the arguments only, so that
    the order of every sum does too. `work` is a count of elementary steps.
    """
    if threads == 1 or work < 2**15:
        return 1, 1

    def cost(parts: int) -> float:
        return -(-batch * parts // threads) * (-(-blocks // parts) + 0.5)

    return min(range(1, max(2, min(blocks, threads) + 1)), key=cost), threads


def threads(work: int) -> int:
    """How many threads for `work` numbers to move."""
    return 1 if work < 2**15 else torch.get_num_threads()


def positions(index: Tensor) -> Tensor:
    """`index` as the kernels take it."""
    return index if index.dtype == torch.int64 and index.is_contiguous() else index.long().contiguous()


def wrong_index(op: str, index: Tensor, position: int) -> ValueError:
    """The error for an index that leaves its range: following it would reach foreign memory."""
    return ValueError(f"{op}: index must be a permutation of 0..{len(index) - 1}, got {int(index[position])} in it")


def _gives_nothing(*arguments) -> None:
    """The shapes that an operator gives which only writes into its arguments."""


def implement(lib: torch.library.Library, name: str, real: Callable, fake: Callable = _gives_nothing) -> None:
    """An operator that `lib` has defined: what it does, and the shapes it gives where tensors have no values."""
    lib.impl(name, real, "CPU")
    torch.library.register_fake(f"ssm_kernels::{name}", fake, lib=lib)
