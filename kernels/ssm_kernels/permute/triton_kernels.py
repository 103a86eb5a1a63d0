"""The kernel that copies whole rows of up to four tensors, and the torch op around it.

One kernel serves both directions: gather reads row index[i] and writes row i, scatter reads row i and writes row
index[i]. As the index is a permutation, each is the other's inverse and its gradient, no row is written twice, and the
backward needs no inverse index.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_support import current

SLOTS = 4  # tensors per launch
TILE = 2048  # elements per program
UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # a copy needs no dtype but a size


@triton.jit
def _copy_tile(x, y, batch_stride, row_stride, width, sample, source, target, inside, length, COLS: tl.constexpr):
    x += sample * batch_stride + source * row_stride
    y += (sample * length + target) * width
    for start in range(0, width, COLS):
        col = start + tl.arange(0, COLS)
        mask = inside[:, None] & (col < width)[None, :]
        tl.store(y[:, None] + col[None, :], tl.load(x[:, None] + col[None, :], mask=mask), mask=mask)


@triton.jit
def copy_rows(
    index,
    x0,
    x1,
    x2,
    x3,
    y0,
    y1,
    y2,
    y3,
    batch_stride0,
    batch_stride1,
    batch_stride2,
    batch_stride3,
    row_stride0,
    row_stride1,
    row_stride2,
    row_stride3,
    width0,
    width1,
    width2,
    width3,
    rows,
    length,
    SCATTER: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Program (i, k) copies ROWS rows of tensor k. Offsets are in 64 bits: row numbers are, and all grows from them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.program_id(1)
    inside = row < rows
    sample = row // length
    here = row - sample * length
    there = tl.load(index + here, mask=inside, other=0).to(tl.int64)
    if SCATTER:
        source, target = here, there
    else:
        source, target = there, here
    if slot == 0:
        _copy_tile(x0, y0, batch_stride0, row_stride0, width0, sample, source, target, inside, length, COLS)
    elif slot == 1:
        _copy_tile(x1, y1, batch_stride1, row_stride1, width1, sample, source, target, inside, length, COLS)
    elif slot == 2:
        _copy_tile(x2, y2, batch_stride2, row_stride2, width2, sample, source, target, inside, length, COLS)
    else:
        _copy_tile(x3, y3, batch_stride3, row_stride3, width3, sample, source, target, inside, length, COLS)


def tile(widest: int) -> tuple[int, int]:
    """(rows, columns) of a program's tile for rows of at most `widest` elements."""
    cols = min(triton.next_power_of_2(widest), TILE)
    return TILE // cols, cols


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.ndim == 2 or x[0, 0].is_contiguous() else x.contiguous()


def _launch(index: Tensor, tensors: Sequence[Tensor], outs: Sequence[Tensor], scatter: bool) -> None:
    b, length = tensors[0].shape[:2]
    sources = [_rows_contiguous(x).view(UNITS[x.element_size()]) for x in tensors]
    targets = [y.view(UNITS[y.element_size()]) for y in outs]
    widths = [x[0, 0].numel() for x in sources]
    rows, cols = tile(max(widths))
    spare = SLOTS - len(sources)
    columns = (
        sources,
        targets,
        [x.stride(0) for x in sources],
        [x.stride(1) for x in sources],
        widths,
    )
    arguments = [a for column in columns for a in (*column, *[column[0]] * spare)]
    with current(index):
        copy_rows[(triton.cdiv(b * length, rows), len(sources))](
            index, *arguments, b * length, length, SCATTER=scatter, ROWS=rows, COLS=cols, num_warps=4
        )


@torch.library.custom_op(
    "ssm_kernels::permute_rows", mutates_args=(), schema="(Tensor index, Tensor[] tensors, bool scatter) -> Tensor[]"
)
def permute_rows(index: Tensor, tensors: Sequence[Tensor], scatter: bool) -> list[Tensor]:
    """out[b, i] = x[b, index[i]], or out[b, index[i]] = x[b, i] where `scatter`, for each x (b, l, ...)."""
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
    index = index.contiguous()
    groups: dict[int, list[int]] = {}  # tensors of one batch size share launches
    for i, x in enumerate(tensors):
        if x.numel():
            groups.setdefault(x.shape[0], []).append(i)
    for members in groups.values():
        for start in range(0, len(members), SLOTS):
            some = members[start : start + SLOTS]
            _launch(index, [tensors[i] for i in some], [outs[i] for i in some], scatter)
    return outs


@permute_rows.register_fake
def _(index, tensors, scatter):
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


def _setup_context(ctx, inputs, output):
    index, tensors, ctx.scatter = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(index)
    ctx.set_materialize_grads(False)


def _backward(ctx, grads):
    given = [i for i, g in enumerate(grads) if g is not None]
    moved = permute_rows(*ctx.saved_tensors, [grads[i] for i in given], not ctx.scatter) if given else []
    found = dict(zip(given, moved, strict=True))
    return None, [found.get(i) for i in range(ctx.count)], None


permute_rows.register_autograd(_backward, setup_context=_setup_context)


def permute(index: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What the op's public function calls. Raises ValueError for an element size of none of 1, 2, 4, 8 bytes."""
    for x in tensors:
        if x.element_size() not in UNITS:
            raise ValueError(f"permute_rows: the triton backend moves elements of up to 8 bytes, got {x.dtype}")
    return tuple(permute_rows(index, list(tensors), False))
