"""A model as one graph of standard operations, for formats that know none of our kernels: torch.export and ONNX.

The scan becomes torch's `scan` operator, one loop in the graph however long the sequence is (`Scan` in ONNX), and needs
nothing of this package to run. Everything else is traced from the model itself.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import config as fx_config

from ssm_kernels import use_backend

from . import mix
from .models import VisionMamba
from .runtime import UserError, first_line

ABOUT = "slws-vim.json"  # the metadata inside a pt2 file
OPSET = 18
TOLERANCE = 1e-4
LARGEST = 512  # patches along one side of an image, where its size is left open


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: None,
    delta_bias: Tensor,
    delta_softplus: bool = True,
    reverse: bool = False,
) -> Tensor:
    """`ssm_kernels.selective_scan` as the mixer calls it, in fp32: shapes u, delta (b, d, l), B, C (b, n, l)."""
    from torch._higher_order_ops.scan import scan

    assert z is None and delta_softplus
    delta = F.softplus(delta.float() + delta_bias[:, None])
    sequences = [x.float().permute(2, 0, 1) for x in (delta, delta * u, B, C)]
    if reverse:
        sequences = [x.flip(0) for x in sequences]

    def step(h: Tensor, at: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        delta_t, du_t, B_t, C_t = at
        h = torch.exp(delta_t.unsqueeze(2) * A) * h + du_t.unsqueeze(2) * B_t.unsqueeze(1)
        return h, (h * C_t.unsqueeze(1)).sum(2)

    start = u.new_zeros(u.shape[0], *A.shape, dtype=torch.float32)
    y = scan(step, start, tuple(x.contiguous() for x in sequences))[1]
    return ((y.flip(0) if reverse else y).permute(1, 2, 0) + D[:, None] * u).to(u.dtype)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, reverse: bool = False
) -> Tensor:
    """`ssm_kernels.causal_conv1d` as one convolution: x (b, d, l), weight (d, w), bias (d,)."""
    edge = weight.shape[1] - 1
    if reverse:
        weight = weight.flip(1)
    y = F.conv1d(F.pad(x, (0, edge) if reverse else (edge, 0)), weight.unsqueeze(1), bias, groups=weight.shape[0])
    return y if activation is None else F.silu(y)


def _cubic(x: Tensor) -> Tensor:
    """The bicubic kernel of antialiased resizing (a = -0.5), which is 0 from distance 2 on."""
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def resize_weights(new: int, old: int) -> Tensor:
    """(new, old): the matrix that resizes a line of `old` points to `new`, bicubic with antialiasing.

    What F.interpolate computes, of sizes that may be symbols: a graph can hold it, and ONNX has no such resize.
    """
    scale = torch.ones(1) * new / old
    centre = (torch.arange(new) + 0.5) / scale
    weights = _cubic((torch.arange(old) + 0.5 - centre[:, None]) * scale.clamp(max=1))
    return weights / weights.sum(1, keepdim=True)


class _Portable(VisionMamba):
    """The same network with positions that a graph can hold."""

    def _positions(self, grid, old=None) -> Tensor:
        if not self.dynamic_img_size:
            return self.pos_embed
        prefix, size = self.num_prefix_tokens, self.patch_embed.grid_size
        rows = self.pos_embed[0, prefix:].unflatten(0, size)
        rows = torch.einsum("hi,wj,ijd->hwd", *(resize_weights(*pair) for pair in zip(grid, size, strict=True)), rows)
        return torch.cat([self.pos_embed[:, :prefix], rows.flatten(0, 1)[None]], 1)


@contextlib.contextmanager
def _no_origins() -> Iterator[None]:
    """No account of where in our source each node came from: finding it takes much of a trace, and no file holds it."""
    kept = getattr(fx_config, "do_not_emit_stack_traces", False)  # older versions of torch ignore it
    fx_config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        fx_config.do_not_emit_stack_traces = kept


@contextlib.contextmanager
def _portable_kernels() -> Iterator[None]:
    """The mixer's two kernels replaced by those above, the others by their plain PyTorch reference."""
    kept = {name: getattr(mix, name) for name in ("selective_scan", "causal_conv1d")}
    try:
        mix.selective_scan, mix.causal_conv1d = selective_scan, causal_conv1d
        with use_backend("reference"):
            yield
    finally:
        for name, function in kept.items():
            setattr(mix, name, function)


def trace(model: nn.Module, size: tuple[int, int], channels: int, dynamic_size: bool = False) -> ExportedProgram:
    """`model` in eval mode as a torch.export program, images (b, channels, H, W) -> logits (b, classes), any b.

    H and W are `size`, or any that patches cover exactly with two or more each way, with `dynamic_size`.
    Raises UserError where torch cannot trace the model, and where `dynamic_size` is asked of a model of others.
    """
    model = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    shapes: dict[int, Any] = {0: Dim("batch")}
    if isinstance(model, VisionMamba):
        model.__class__ = _Portable
        model.grad_checkpointing, model.dynamic_img_size = False, dynamic_size
        if dynamic_size:
            size, sides = _open_sides(model)
            shapes |= {2: sides[0], 3: sides[1]}
    elif dynamic_size:
        raise UserError("an image size that stays open is for this package's own models")
    images = torch.zeros(3, channels, *size)
    try:
        with torch.no_grad(), _portable_kernels(), _no_origins():
            program = torch.export.export(model, (images,), dynamic_shapes=(shapes,), strict=True)
    except Exception as error:  # torch has many kinds, with long accounts
        raise UserError(f"torch {torch.__version__} cannot trace this model: {first_line(error)}") from error
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # lines and paths of this machine, of no use in a file
    return program


def _open_sides(model: VisionMamba) -> tuple[tuple[int, int], list]:
    """An image size that is none of the special cases, and H and W as functions of the patches along them."""
    embed, sizes, sides = model.patch_embed, [], []
    for axis, name in enumerate(("rows", "columns")):
        stride, patch = embed.stride[axis], embed.patch_size[axis]
        patches = embed.grid_size[axis] + 3 + 2 * axis
        steps = Dim(f"_{name}", min=2 - (patch > stride), max=LARGEST)  # a graph takes 1 for a constant
        sides.append(stride * steps + (patch - stride) if patch > stride else stride * steps)
        sizes.append(stride * (patches - 1) + patch)
    return tuple(sizes), sides


def write_pt2(program: ExportedProgram, out: str | Path, about: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Write a torch.export file, `about` inside as JSON; returns what is in the file, read again, as a function."""
    torch.export.save(program, str(out), extra_files={ABOUT: json.dumps(about)})
    return torch.export.load(str(out)).module()


def write_onnx(program: ExportedProgram, out: str | Path, about: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Write an ONNX file with `about` as its metadata, JSON where it is no text; returns it, run by onnxruntime.

    Weights lie in the file itself, or beside it where a file of more than 2 GB would be needed.
    """
    try:
        import onnxruntime
        from onnxscript import optimizer
    except ImportError as error:
        raise UserError(f"--format onnx needs {error.name}: pip install 'slws-vim[export]'") from error
    try:
        with _no_origins():
            made = torch.onnx.export(
                program,
                dynamo=True,
                input_names=["images"],
                output_names=["logits"],
                opset_version=OPSET,
                verbose=False,
                optimize=False,  # its rewriting grows with the square of the depth; the two passes below do enough
            )
        optimizer.fold_constants(made.model, onnx_shape_inference=True)
        optimizer.remove_unused_nodes(made.model)
    except Exception as error:
        raise UserError(f"torch {torch.__version__} cannot write ONNX: {first_line(error)}") from error
    for graph in (made.model.graph, *made.model.functions.values()):
        for node in graph.all_nodes():  # where each came from in our source: larger than a small model
            node.metadata_props.clear()
    made.model.producer_name = "slws-vim"
    made.model.metadata_props.update({k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()})
    made.save(str(out))
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@torch.no_grad()
def largest_difference(model: nn.Module, written: Callable[[Tensor], Tensor], shapes: list[tuple[int, ...]]) -> float:
    """The largest difference between the logits of `model` (eval mode) and of what was written, over random images."""
    draw = torch.Generator().manual_seed(0)
    images = [torch.randn(shape, generator=draw) for shape in shapes]
    return max((model(x) - written(x)).abs().max().item() for x in images)
