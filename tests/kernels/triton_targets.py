"""Compiling what our Triton ops launch for GPUs that are not here.

The ops run as they are, on CPU tensors; Triton is told that another GPU is current, compiles each launch with the very
specialisations that a real launch would have, and stops short of launching it.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class _Driver:
    """Just enough of a driver for JITFunction.run(warmup=True)."""

    def __init__(self, name: str):
        self.name = name

    def get_current_target(self):
        return TARGETS[self.name]

    def get_current_device(self):
        return 1000 + list(TARGETS).index(self.name)  # compiled kernels are kept per device

    def get_current_stream(self, device):
        return 0

    def get_benchmarker(self):
        return None


@contextmanager
def target(name: str) -> Iterator[list]:
    """Inside this block every launch is compiled for the target, not run; the list fills with the compiled kernels."""
    compiled, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    before = dict(vars(driver))  # reset_active() would look for a GPU
    driver.set_active(_Driver(name))
    try:
        with mock.patch.object(JITFunction, "run", compile_only):
            yield compiled
    finally:
        vars(driver).clear()
        vars(driver).update(before)


def resources(kernel, name: str) -> dict[str, int]:
    """Registers per thread and spilled bytes, as ptxas reports them for the kernel's PTX."""
    arch = TARGETS[name].arch
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = folder / ("ptxas-blackwell" if arch >= 100 and (folder / "ptxas-blackwell").exists() else "ptxas")
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        command = [str(ptxas), "-v", f"--gpu-name=sm_{arch}{suffix}", str(source), "-o", os.devnull]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = re.search(r"Used (\d+) registers", report)
    return {"registers": int(registers[1]), "spilled": int(found[1]) + int(found[2])}
