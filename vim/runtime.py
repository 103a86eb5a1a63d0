"""Processes, devices, randomness and the log: everything a run needs before it has a model."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from timm.utils.distributed import init_distributed_device_so
from torch import Tensor, nn

log = logging.getLogger("vim")

PATH_ERRORS = (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)  # of a path the user named


class UserError(ValueError):
    """Something the user can set right; the message is one line that names it. The command ends with exit code 2."""

    everywhere = True  # all processes raise it, so one line of a machine says it


class NonFinite(RuntimeError):
    """Training left the numbers: a loss or a weight is NaN or infinite. All ranks raise it together."""


def at_least(low: float, config: object, group: str, *names: str) -> None:
    """UserError for a value of a group's configuration below `low` or infinite; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value < math.inf:
            wanted = f"at least {low}" if value < low else "finite"
            raise UserError(f"{group}.{name} must be {wanted}, got {value!r}")


def within(low: float, high: float, config: object, group: str, *names: str) -> None:
    """UserError for a value of a group's configuration ("": of the whole) outside [low, high]; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            key = f"{group}.{name}" if group else name
            raise UserError(f"{key} must lie in [{low}, {high}], got {value!r}")


def first_line(error: BaseException) -> str:
    """What another package's error says at its start, or its kind: those of torch and of the hub's client are long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def exit_codes(prog: str) -> Iterator[None]:
    """One line on stderr instead of a traceback; exit code 1 for NonFinite, 2 for a user's mistake.

    It comes from the first process of each machine, whose disk may lack what the others' have, or from whichever met
    an error that the others do not (UserError.everywhere).
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{prog}: interrupted; a training run resumes by the same command\n")
        raise SystemExit(130) from None
    except (UserError, NonFinite, *PATH_ERRORS) as error:
        rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
        if rank == 0 or not getattr(error, "everywhere", True):
            sys.stderr.write(f"{prog}: error: {' '.join(str(error).split())}\n")
        raise SystemExit(1 if isinstance(error, NonFinite) else 2) from error
    else:
        if dist.is_initialized():
            dist.destroy_process_group()  # not after an error of one process: it could wait for the others
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # the interpreter's own end aborts now and then, on a thread of gloo's that outlives its group


@dataclass(frozen=True)
class World:
    """Where this process runs: its device, its rank among `size` processes."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def wide(self) -> torch.dtype:
        """The widest float the device has."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def min(self, x: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MIN)
        return x

    def agree(self, fact: bool) -> bool:
        """Whether it is the same on all processes."""
        return int(self.sum(torch.tensor(int(fact), device=self.device))) in (0, self.size)

    def share_buffers(self, model: nn.Module) -> None:
        """Rank 0's buffers, the ones that are saved, for all: batch statistics differ after a process's last step."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)


def start(device: str = "auto", threads: int | None = None) -> World:
    """Join the other processes that torchrun or SLURM started, if any, and choose the device.

    `device` "auto" takes CUDA where there is one. Raises UserError for a device this machine lacks.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"train.device: {device!r} was asked for, but torch sees no CUDA device here")
    if threads:
        torch.set_num_threads(threads)
    try:
        torch.device(device)
    except RuntimeError as error:
        raise UserError(f"train.device: torch knows no device {device!r}") from error
    found = init_distributed_device_so(device)
    world = World(torch.device(found["device"]), found["global_rank"], found["world_size"])
    if world.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    return world


def peak_memory(device: torch.device) -> int | None:
    """Bytes that this process has had at most: on CUDA of the device's memory, else of the machine's (Linux only)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):  # and not getrusage, whose figure may be the parent process's
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024
    return None


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from a few integers (seed, epoch, position, ...): any two tuples give unrelated streams."""
    digest = blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators (all devices, without waiting for any)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def setup_log(main: bool) -> None:
    """Plain lines on stdout from rank 0; warnings only from the others."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("vim", "ssm_kernels"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if main else logging.ERROR)
