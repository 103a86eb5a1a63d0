"""python -m vim.doctor: what runs here, on which kernels, why not on faster ones, and the command that gets them."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

import timm
import torch

from ssm_kernels import OPS

from .zoo import VARIANTS

PACKAGES = ("torch", "timm", "triton", "mamba-ssm", "causal-conv1d", "einops", "jsonargparse", "safetensors")
OPTIONAL = {"matplotlib": "plot", "tensorboard": "plot", "scikit-learn": "demo", "onnx": "export", "transformers": "hf"}
REMEDY = {
    "mamba_ssm": "MAMBA_KEEP_CUDA_BUILD=TRUE pip install --no-build-isolation mamba-ssm causal-conv1d",
    "triton": "pip install triton",
    "cpu": "install a C++ compiler, e.g. apt-get install g++",
}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[tuple[str, torch.device]]:
    """(description, device) of the CPU and of every kind of accelerator torch sees."""
    cpu = f"cpu, {platform.machine()}, {torch.get_num_threads()} threads"
    cpu += f", {torch.backends.cpu.get_cpu_capability()}"
    found = [(cpu, torch.device("cpu"))]
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        found.append((f"cuda, {torch.cuda.device_count()} x {', '.join(sorted(names))}", torch.device("cuda")))
    if torch.backends.mps.is_available():
        found.append(("mps", torch.device("mps")))
    return found


def rows() -> list[tuple[str, str, str]]:
    """The table: (what, state, note)."""
    table = [("python", platform.python_version(), "")]
    table += [(name, _version(name), "") for name in PACKAGES]
    for name, extra in OPTIONAL.items():
        version = _version(name)
        table.append((name, version, f"pip install 'slws-vim[{extra}]'" if version == "not installed" else ""))
    for description, device in _devices():
        table.append(("device", description, ""))
        for op in OPS.values():
            backends = op.explain(device)
            chosen = next((name for name, reason in backends if reason is None), None)
            table.append((f"  {op.name}", chosen or "none", ""))
            for name, reason in backends:
                if name == chosen:
                    break
                if "runs on" not in (reason or ""):
                    table.append((f"    not {name}", reason or "", REMEDY.get(name, "")))
    if not torch.cuda.is_available():
        table.append(("cuda", "torch sees no CUDA device", ""))
    table.append(("timm models", f"{len(timm.list_models())}", f"{len(VARIANTS)} from this package:"))
    table += [("", name, "") for name in VARIANTS]
    return table


def main() -> None:
    table = rows()
    widths = [min(max(len(row[i]) for row in table), 72) for i in range(2)]
    for what, state, note in table:
        sys.stdout.write(f"{what:<{widths[0]}}  {state:<{widths[1]}}  {note}".rstrip() + "\n")


if __name__ == "__main__":
    main()
