"""What a backend with compiled parts must show before it is believed: one tiny run that equals the reference.

Installed is not the same as working: extensions are missing, were built for another torch or lack this GPU's code.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .backend import Unavailable
from .testing import run

TOLERANCE = 1e-3  # of the largest entry, in fp32: far above rounding and approximate exponentials, far below a fault
REACH = 2**30  # elements per call: kernels with 32-bit offsets stay right even on views of twice the memory


def waves(device: torch.device, *shape: int) -> Tensor:
    """Plain numbers in [-1, 1] that differ everywhere: the global random state must not notice a probe."""
    count = int(torch.Size(shape).numel())
    return torch.sin(torch.arange(count, dtype=torch.float32, device=device) * 0.7 + count).view(shape)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Autocast, inference mode, tensors that only pretend (FakeTensorMode) and the like are off inside this block.

    A first call under any of them must not decide whether a backend works.
    """
    with (
        _disable_current_modes(),
        torch.inference_mode(False),  # which turns gradients on, too
        torch.autocast(device.type, enabled=False),
    ):
        yield


def compare(
    fn: Callable, reference: Callable, inputs: dict[str, Tensor | None], outputs: int = 1, **options: object
) -> None:
    """Raise RuntimeError unless fn equals reference forward and backward; whatever fn raises passes through.

    The first of `inputs` has the shape of the `outputs` outputs.
    """
    first = next(iter(inputs.values()))
    grads = [waves(first.device, *first.shape)] * outputs
    wanted, found = run(reference, inputs, grads, **options), run(fn, inputs, grads, **options)
    for name, exact in wanted.items():
        error = (found[name].double() - exact.double()).abs().max() / exact.abs().max().clamp_min(1e-30)
        if not error <= TOLERANCE:  # NaN fails too
            raise RuntimeError(f"wrong numbers: {name} is off by {float(error):.2g} of its largest entry")


def text(error: BaseException) -> str:
    """The kind and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


@dataclass(frozen=True)
class Package:
    """A package of other authors with a compiled extension beside its Python code."""

    distribution: str  # as pip names it
    module: str  # where the public function lives
    function: str
    extension: str  # top-level module of the compiled part
    keep: str  # setting under which an installation has the extension, "" where it always does
    force: str  # setting that compiles it here instead of fetching somebody's build

    @property
    def install(self) -> str:
        return f"{self.keep} pip install --no-build-isolation {self.distribution}".strip()

    @property
    def rebuild(self) -> str:
        options = "--no-build-isolation --no-cache-dir --no-deps --force-reinstall"
        return f"{self.keep} {self.force} pip install {options} {self.distribution}".strip()

    def load(self, check: Callable[[Callable], Callable]) -> Callable:
        """check(function), where the package is whole and check raises nothing; else Unavailable: reason and cure."""
        try:
            return check(getattr(importlib.import_module(self.module), self.function))
        except Exception as error:
            raise Unavailable(self._reason(error)) from error

    def _reason(self, error: Exception) -> str:
        root = self.module.partition(".")[0]
        if importlib.util.find_spec(root) is None:
            return f"{self.distribution} is not installed; get it with `{self.install}`"
        try:
            here = f"{self.distribution} {importlib.metadata.version(self.distribution)}"
        except importlib.metadata.PackageNotFoundError:
            here = self.distribution
        try:
            importlib.import_module(self.extension)
        except ModuleNotFoundError:
            return f"{here} came without its compiled part {self.extension}; build it with `{self.rebuild}`"
        except ImportError as broken:
            return (
                f"{here}: {self.extension} does not load, most likely built for another torch than {torch.__version__} "
                f"({text(broken)}); build it again with `{self.rebuild}`"
            )
        if "no kernel image" in str(error):
            return f"{here} was not built for this GPU ({text(error)}); build it again with `{self.rebuild}`"
        if isinstance(error, ImportError):
            return f"{here} cannot be imported ({text(error)}); try `{self.install} --upgrade`"
        return f"{here} fails its check ({text(error)}); try `{self.rebuild}`"


def aligned_rows(x: Tensor) -> Tensor:
    """x (b, d, l) with each row contiguous, copied only where it must be.

    Kernels load 16 bytes at a time where the length is a multiple of that, without asking where a row begins.
    """
    size = x.element_size()
    places = (x.storage_offset(), *x.stride()[:-1])
    if x.stride(-1) == 1 and (x.shape[-1] * size % 16 or all(place * size % 16 == 0 for place in places)):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() keeps odd strides of dimensions of size 1


def samples_per_call(elements: int) -> int:
    """How many samples of at most `elements` elements each one call may hold; one at least."""
    return max(1, REACH // max(1, elements))
