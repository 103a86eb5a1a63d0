"""The kernels of add_norm, forward and backward, and the torch ops around them.

Forward reads row index[i], adds, stores the new residual and the normed row at i. Backward recomputes the normal row
from the stored residual and two numbers per row, and writes the gradient back to row index[i]: no pass of its own for
the permutation, in either direction. Gradients of weight and bias are summed per program, then over programs by torch:
no atomics, the same numbers every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_support import current


@triton.jit
def forward(
    x,
    residual,
    weight,
    bias,
    index,
    normed,
    out,
    stats,
    x_batch_stride,
    x_row_stride,
    residual_batch_stride,
    residual_row_stride,
    rows,
    length,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """ROWS rows per program, each whole. `stats` holds 1 / deviation of every row, then, where CENTRED, every mean."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # 64 bits, and so all offsets
    inside = row < rows
    sample = row // length
    source = row - sample * length
    if HAS_INDEX:
        source = tl.load(index + source, mask=inside, other=0).to(tl.int64)
    col = tl.arange(0, COLS)
    used = col < width
    mask = inside[:, None] & used[None, :]
    at = (sample * x_batch_stride + source * x_row_stride)[:, None] + col[None, :]
    total = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = (sample * residual_batch_stride + source * residual_row_stride)[:, None] + col[None, :]
        total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    at = row[:, None] * width + col[None, :]
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=mask)
    total = rounded.to(tl.float32)  # statistics of what is stored, which is what backward sees
    if CENTRED:
        mean = tl.sum(total, 1) / width
        tl.store(stats + rows + row, mean, mask=inside)
        total = tl.where(mask, total - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(total * total, 1) / width + eps)
    tl.store(stats + row, scale, mask=inside)
    total = total * scale[:, None] * tl.load(weight + col, mask=used, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + col, mask=used, other=0.0).to(tl.float32)[None, :]
    tl.store(normed + at, total.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    dnormed,
    dout,
    out,
    stats,
    weight,
    index,
    dx,
    dresidual,
    partial,
    rows,
    length,
    width,
    HAS_DOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    CENTRED: tl.constexpr,
    TWO_DTYPES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Every program takes each n-th tile of ROWS rows, n programs in all; its sums go to its row of `partial`."""
    col = tl.arange(0, COLS)
    used = col < width
    w = tl.load(weight + col, mask=used, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((ROWS, COLS), tl.float32)
    dbias = tl.zeros((ROWS, COLS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.arange(0, ROWS).to(tl.int64) + tile * ROWS
        inside = row < rows
        mask = inside[:, None] & used[None, :]
        at = row[:, None] * width + col[None, :]
        normal = tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(stats + row, mask=inside, other=0.0)[:, None]
        if CENTRED:
            normal -= tl.load(stats + rows + row, mask=inside, other=0.0)[:, None]
        normal *= scale
        g = tl.load(dnormed + at, mask=mask, other=0.0).to(tl.float32)  # 0 off the rows, so `normal` may be anything
        dweight += g * normal
        if HAS_BIAS:
            dbias += g
        g *= w
        d = g - normal * (tl.sum(g * normal, 1) / width)[:, None]
        if CENTRED:
            d -= (tl.sum(g, 1) / width)[:, None]
        d *= scale
        if HAS_DOUT:
            d += tl.load(dout + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_INDEX:
            sample = row // length
            target = tl.load(index + (row - sample * length), mask=inside, other=0).to(tl.int64)
            at = (sample * length + target)[:, None] * width + col[None, :]
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
        if TWO_DTYPES:
            tl.store(dresidual + at, d.to(dresidual.dtype.element_ty), mask=mask)
    program = tl.program_id(0).to(tl.int64)
    count = 2 if HAS_BIAS else 1
    tl.store(partial + program * count * width + col, tl.sum(dweight, 0), mask=used)
    if HAS_BIAS:
        tl.store(partial + (program * count + 1) * width + col, tl.sum(dbias, 0), mask=used)


def shape(width: int) -> dict[str, int]:
    """Tile and warps for rows of `width`: about 8 elements per thread."""
    cols = triton.next_power_of_2(width)
    rows = max(1, 1024 // cols)
    return {"ROWS": rows, "COLS": cols, "num_warps": min(16, max(4, rows * cols // 256))}


def _programs(x: Tensor, tiles: int) -> int:
    """Backward's programs: two per multiprocessor keep it busy and the partial sums few. Three where interpreted."""
    most = 2 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3
    return max(1, min(most, tiles))


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


@torch.library.custom_op(
    "ssm_kernels::add_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool centred, Tensor? index, "
    "bool residual_in_fp32) -> (Tensor, Tensor, Tensor)",
)
def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    index: Tensor | None,
    residual_in_fp32: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, new residual, statistics of the rows), rows in the index's order."""
    normed, out, stats = _results(x, centred, residual_in_fp32)
    if x.numel():
        (b, length, width), x = x.shape, _rows_contiguous(x)
        residual = None if residual is None else _rows_contiguous(residual)
        options = shape(width)
        like = x if residual is None else residual
        with current(x):
            forward[(triton.cdiv(b * length, options["ROWS"]),)](
                x,
                like,
                weight.contiguous(),
                weight if bias is None else bias.contiguous(),
                x if index is None else index.contiguous(),
                normed,
                out,
                stats,
                x.stride(0),
                x.stride(1),
                like.stride(0),
                like.stride(1),
                b * length,
                length,
                width,
                eps,
                HAS_RESIDUAL=residual is not None,
                HAS_BIAS=bias is not None,
                HAS_INDEX=index is not None,
                CENTRED=centred,
                **options,
            )
    return normed, out, stats


def _results(x: Tensor, centred: bool, residual_in_fp32: bool) -> tuple[Tensor, Tensor, Tensor]:
    b, length, _ = x.shape
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=torch.float32 if residual_in_fp32 else x.dtype, device=x.device)
    return normed, out, torch.empty(2 if centred else 1, b * length, dtype=torch.float32, device=x.device)


@add_norm.register_fake
def _(x, residual, weight, bias, eps, centred, index, residual_in_fp32):
    return _results(x, centred, residual_in_fp32)


@torch.library.custom_op(
    "ssm_kernels::add_norm_backward",
    mutates_args=(),
    schema="(Tensor dnormed, Tensor? dout, Tensor out, Tensor stats, Tensor weight, bool has_bias, Tensor? index, "
    "ScalarType x_dtype, ScalarType residual_dtype) -> (Tensor, Tensor, Tensor)",
)
def add_norm_backward(
    dnormed: Tensor,
    dout: Tensor | None,
    out: Tensor,
    stats: Tensor,
    weight: Tensor,
    has_bias: bool,
    index: Tensor | None,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dresidual, fp32 gradients of weight and bias); dresidual is empty where it would equal dx."""
    dx, dresidual, parameters = _gradients(out, has_bias, x_dtype, residual_dtype)
    if not out.numel():
        return dx, dresidual, parameters.zero_()
    (b, length, width), options = out.shape, shape(out.shape[2])
    programs = _programs(out, triton.cdiv(b * length, options["ROWS"]))
    partial = torch.empty(programs, *parameters.shape, dtype=torch.float32, device=out.device)
    with current(out):
        backward[(programs,)](
            dnormed.contiguous(),
            dnormed if dout is None else dout.contiguous(),
            out,
            stats,
            weight.contiguous(),
            out if index is None else index.contiguous(),
            dx,
            dresidual,
            partial,
            b * length,
            length,
            width,
            HAS_DOUT=dout is not None,
            HAS_BIAS=has_bias,
            HAS_INDEX=index is not None,
            CENTRED=len(stats) == 2,
            TWO_DTYPES=x_dtype != residual_dtype,
            **options,
        )
    return dx, dresidual, torch.sum(partial, 0, out=parameters)


def _gradients(out, has_bias, x_dtype, residual_dtype):
    dx = torch.empty(out.shape, dtype=x_dtype, device=out.device)
    dresidual = torch.empty(out.shape if x_dtype != residual_dtype else 0, dtype=residual_dtype, device=out.device)
    return dx, dresidual, torch.empty(2 if has_bias else 1, out.shape[2], dtype=torch.float32, device=out.device)


@add_norm_backward.register_fake
def _(dnormed, dout, out, stats, weight, has_bias, index, x_dtype, residual_dtype):
    return _gradients(out, has_bias, x_dtype, residual_dtype)


def _setup_context(ctx, inputs, output):
    x, residual, weight, bias, _eps, _centred, index, _fp32 = inputs
    _, out, stats = output
    ctx.save_for_backward(out, stats, weight, index)
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype, None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx, dnormed, dout, _dstats):
    out, stats, weight, index = ctx.saved_tensors
    x_dtype, residual_dtype, bias_dtype = ctx.dtypes
    if dnormed is None:  # only the residual was used
        dnormed = torch.zeros(out.shape, dtype=x_dtype, device=out.device)
    dx, dresidual, parameters = add_norm_backward(
        dnormed, dout, out, stats, weight, bias_dtype is not None, index, x_dtype, residual_dtype or x_dtype
    )
    if residual_dtype is None:
        dresidual = None
    elif residual_dtype == x_dtype:
        dresidual = dx
    dbias = None if bias_dtype is None else parameters[1].to(bias_dtype)
    return dx, dresidual, parameters[0].to(weight.dtype), dbias, None, None, None, None


add_norm.register_autograd(_backward, setup_context=_setup_context)


def fused_add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    norm: str,
    index: Tensor | None,
    residual_in_fp32: bool,
) -> tuple[Tensor, Tensor]:
    """What the op's public function calls. Raises ValueError for an fp64 residual, which fp32 sums would round."""
    if residual is not None and residual.dtype == torch.float64:
        raise ValueError(f"add_norm: the triton backend adds in fp32, got a residual in {residual.dtype}")
    normed, out, _ = add_norm(x, residual, weight, bias, eps, norm == "layer", index, residual_in_fp32)
    return normed, out
