"""The Triton kernels of the passes that end in fp8. Imported as `triton_kernels` is.

Shape legend: P patch rows of a run (padding included), H hidden size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3compile.kernels.triton_kernels import add_parts_row, exact_gelu, norm_row


@triton.jit
def _magnitude(x):
    """|x|, and infinity for NaN, which a maximum would drop."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _scale_of(largest):
    """The scale of a row by its largest magnitude, NaN where one is not finite.

    At least 2**-126, as `m3compile.kernels.fp8` has it: zeros are divided by it too.
    """
    scale = tl.maximum(largest / 448.0, 1.1754943508222875e-38)
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def _store_row(x, inside, row, values_ptr, scales_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One float32 row in e4m3, with its scale; `x` is zero outside."""
    scale = _scale_of(tl.max(_magnitude(x), 0))
    at = row.to(tl.int64) * SIZE + tl.arange(0, BLOCK)
    # One division a row: the numbers are multiplied with the inverse.
    values = x * (1.0 / scale)
    tl.store(values_ptr + at, values.to(values_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + row, scale)


@triton.jit
def norm_fp8_kernel(
    x_ptr,
    offset_ptr,
    bounds_ptr,
    weight_ptr,
    bias_ptr,
    values_ptr,
    scales_ptr,
    num_segments,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of `layer_norm(x + offset)` a program; rows past the last segment read as zero."""
    row = tl.program_id(0)
    num_real = tl.load(bounds_ptr + num_segments)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    offsets = row.to(tl.int64) * SIZE + columns
    x = tl.load(x_ptr + offsets, mask=inside & (row < num_real), other=0.0).to(tl.float32)
    normed = norm_row(x, offset_ptr, weight_ptr, bias_ptr, EPS, SIZE, BLOCK)
    _store_row(normed, inside, row, values_ptr, scales_ptr, SIZE, BLOCK)


@triton.jit
def add_parts_norm_fp8_kernel(
    x_ptr,
    parts_ptr,
    row_scales_ptr,
    column_scales_ptr,
    offset_ptr,
    bounds_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    values_ptr,
    scales_ptr,
    num_rows,
    num_segments,
    EPS: tl.constexpr,
    PARTS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of `total = x + sum of parts` and `layer_norm(total + offset)` a program."""
    row = tl.program_id(0)
    is_real = row < tl.load(bounds_ptr + num_segments)
    x = add_parts_row(
        x_ptr,
        parts_ptr,
        row_scales_ptr,
        column_scales_ptr,
        total_ptr,
        row,
        is_real,
        num_rows,
        PARTS,
        IS_SCALED,
        SIZE,
        BLOCK,
    )
    normed = norm_row(x, offset_ptr, weight_ptr, bias_ptr, EPS, SIZE, BLOCK)
    _store_row(normed, tl.arange(0, BLOCK) < SIZE, row, values_ptr, scales_ptr, SIZE, BLOCK)


@triton.jit
def gelu_fp8_kernel(
    x_ptr,
    bounds_ptr,
    values_ptr,
    scales_ptr,
    num_segments,
    SIZE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """One row of the exact GELU a program; rows past the last segment are left unwritten.

    A row of, say, 5,120 is 4,096 and 1,024 wide: no lane is left over.
    """
    row = tl.program_id(0)
    if row < tl.load(bounds_ptr + num_segments):
        start = row.to(tl.int64) * SIZE
        low = tl.arange(0, LOW)
        high = LOW + tl.arange(0, HIGH)
        inside = high < SIZE
        first = exact_gelu(tl.load(x_ptr + start + low).to(tl.float32))
        second = exact_gelu(tl.load(x_ptr + start + high, mask=inside, other=0.0).to(tl.float32))
        largest = tl.maximum(tl.max(_magnitude(first), 0), tl.max(_magnitude(second), 0))
        scale = _scale_of(largest)
        inverse = 1.0 / scale
        element = values_ptr.dtype.element_ty
        tl.store(values_ptr + start + low, (first * inverse).to(element))
        tl.store(values_ptr + start + high, (second * inverse).to(element), mask=inside)
        tl.store(scales_ptr + row, scale)


@triton.jit
def quantise_kernel(x_ptr, values_ptr, scales_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program, in blocks: its largest magnitude first, then its numbers."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, SIZE, BLOCK):
        at = first + columns
        x = tl.load(x_ptr + start + at, mask=at < SIZE, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _magnitude(x))
    scale = _scale_of(tl.max(largest, 0))
    tl.store(scales_ptr + row, scale)
    inverse = 1.0 / scale
    for first in tl.range(0, SIZE, BLOCK):
        at = first + columns
        x = tl.load(x_ptr + start + at, mask=at < SIZE, other=0.0).to(tl.float32)
        values = (x * inverse).to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + start + at, values, mask=at < SIZE)


@triton.jit
def rotate_fp8_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    scales_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A block of ROWS rows of q, k or v a program, out of the fused (P, 3 H): q and k are rotated.

    All three are in e4m3 then. Several rows, as in `rotate_kernel`.
    """
    part = tl.program_id(1) // BLOCKS
    columns = tl.program_id(1) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    dim = columns % HEAD_DIM
    is_first = dim < HALF
    rotates = inside & (dim < 2 * HALF)
    pair = tl.where(is_first, dim, dim - HALF)
    partner = tl.where(is_first, columns + HALF, columns - HALF)
    inverse = 1.0 / tl.load(scales_ptr + part)
    for step in tl.static_range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + step
        source = qkv_ptr + (row * 3 + part) * SIZE
        x = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        if part < 2:
            other = tl.load(source + partner, mask=rotates, other=0.0).to(tl.float32)
            cos = tl.load(cos_ptr + row * HALF + pair, mask=rotates, other=1.0)
            sin = tl.load(sin_ptr + row * HALF + pair, mask=rotates, other=0.0)
            x = x * cos + tl.where(is_first, -other, other) * sin
        scaled = x * inverse
        # NaN stays NaN: the bounds apply to numbers only.
        bounded = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        bounded = tl.where(scaled == scaled, bounded, scaled)
        target = out_ptr + (row * 3 + part) * SIZE
        tl.store(target + columns, bounded.to(out_ptr.dtype.element_ty), mask=inside)
