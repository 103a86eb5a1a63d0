"""Kernel benchmarks: python -m ssm_kernels.bench [OP] [--json FILE] [--device cpu|cuda] [--quick]

Every op on each of its backends, beside plain PyTorch through autograd and a copy of the bytes that the op must at
least move; a bidirectional mixer beside two blocks of mambapy and two slow-path mixers of transformers; whole models
beside timm's DeiT of the same width. Whatever of these is not installed is left out, and said so.

The contenders of a case run in turns and the medians are compared, so that a machine's moods hit all alike. Ours are
timed only where they agree with plain PyTorch first (ops) or with the reference backend (mixer, models); if one does
not, its row says so and the exit code is 1.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from .bench_cases import CASES, Case


def _timed(step: Callable, device: torch.device) -> float:
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    sync()
    begun = time.perf_counter()
    step()
    sync()
    return time.perf_counter() - begun


def peak_bytes(step: Callable, device: torch.device) -> int | None:
    """Memory that one run needs beyond what is there before it; None where the system does not tell (not Linux)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with suppress(OSError, AttributeError, StopIteration):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc still holds would hide what the run takes
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from now
        before = _status("VmRSS")
        step()
        return max(0, _status("VmHWM") - before)
    return None


def _status(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


def measure(case: Case, device: torch.device, seconds: float, rounds: int) -> list[dict]:
    """One record per step: median seconds, ratio to the base, peak memory. A step stops after `seconds` of its own."""
    steps = {name: step for name, step in case.steps.items() if name not in case.wrong}
    peaks = {name: peak_bytes(step, device) for name, step in steps.items()}  # warms up, too
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            if not times[name] or sum(times[name]) < seconds:
                times[name].append(_timed(step, device))
    median = {name: statistics.median(x) for name, x in times.items()}
    records = [
        {
            "case": case.name, "step": name, "seconds": median[name], "runs": len(times[name]), "base": case.base,
            "ratio": median[name] / median[case.base] if case.base in median else None, "peak_bytes": peaks[name],
        }
        for name in steps
    ]  # fmt: skip
    records += [{"case": case.name, "step": name, "wrong": why} for name, why in case.wrong.items()]
    return records + [{"case": case.name, "step": name, "left_out": why} for name, why in case.left_out.items()]


def _line(record: dict) -> str:
    if "wrong" in record or "left_out" in record:
        kind = "PARITY FAILED" if "wrong" in record else "left out"
        return f"  {record['step']:34} {kind}: {record.get('wrong') or record.get('left_out')}"
    ratio = "" if record["ratio"] is None else f"{record['ratio']:9.3f} x {record['base']}"
    peak = "" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 2**20:9.1f} MiB"
    return f"  {record['step']:34} {1e3 * record['seconds']:10.2f} ms {peak}  {ratio}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ssm_kernels.bench", description=__doc__.split("\n\n")[1])
    parser.add_argument("op", nargs="?", choices=CASES, help="only this one (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each contender of a case")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each contender at most")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, says nothing of speed")
    options = parser.parse_args(argv)
    device, records = torch.device(options.device), []
    torch.manual_seed(0)
    for name in [options.op] if options.op else CASES:
        made = CASES[name](device, options.quick)
        for case in made if isinstance(made, list) else [made]:
            sys.stdout.write(f"{case.name}\n")
            found = measure(case, device, options.seconds, options.rounds)
            sys.stdout.write("".join(f"{_line(record)}\n" for record in found))
            sys.stdout.flush()
            records += found
    if options.json:
        where = {"torch": torch.__version__, "device": str(device), "machine": platform.machine()}
        where |= {"threads": torch.get_num_threads(), "quick": options.quick}
        options.json.write_text(json.dumps({"where": where, "records": records}, indent=1) + "\n")
    return int(any("wrong" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
