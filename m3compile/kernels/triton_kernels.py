"""The Triton kernels. Imported only where a program for CUDA is traced or tested.

Shape legend: P patch rows of a run (padding included), H hidden size, D head_dim,
R rotary pairs of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate_kernel(
    segments_ptr,
    frequency_ptr,
    bounds_ptr,
    slot_ptr,
    cos_ptr,
    sin_ptr,
    num_rows,
    SLOTS: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK rows a program: their slot, and the cosines and sines of their angles.

    The same rules as `m3compile.geometry`, in one pass. The first program also writes the bounds.
    """
    slots = tl.arange(0, SLOT_BLOCK)
    used = slots < SLOTS
    frames = tl.load(segments_ptr + slots * 3, mask=used, other=0)
    heights = tl.load(segments_ptr + slots * 3 + 1, mask=used, other=0)
    widths = tl.load(segments_ptr + slots * 3 + 2, mask=used, other=0)
    lengths = frames * heights * widths
    ends = tl.cumsum(lengths, 0)
    if tl.program_id(0) == 0:
        tl.store(bounds_ptr, 0)
        tl.store(bounds_ptr + 1 + slots, ends, mask=used)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    slot = tl.sum((rows[:, None] >= ends[None, :]).to(tl.int32), 1)
    slot = tl.minimum(slot, SLOTS - 1)
    tl.store(slot_ptr + rows, slot, mask=inside)

    mine = slots[None, :] == slot[:, None]
    row = rows - tl.sum(tl.where(mine, ends - lengths, 0), 1)
    height = tl.sum(tl.where(mine, heights, 0), 1)
    width = tl.sum(tl.where(mine, widths, 0), 1)
    # Padding may lie in a slot without rows; the clamps only keep it from dividing by zero.
    frame_rows = tl.maximum(height * width, 1)
    block_columns = tl.maximum(width // 2, 1)
    block = (row % frame_rows) // 4
    inner = row % 4
    time = row // frame_rows
    y = 2 * (block // block_columns) + inner // 2
    x = 2 * (block % block_columns) + inner % 2

    pairs = tl.arange(0, HALF_BLOCK)
    axis = pairs // (HALF // 3)
    frequency = tl.load(frequency_ptr + pairs % (HALF // 3), mask=pairs < HALF, other=0.0)
    place = tl.where(
        axis[None, :] == 0, time[:, None], tl.where(axis[None, :] == 1, y[:, None], x[:, None])
    )
    angles = place.to(tl.float32) * frequency[None, :]
    at = rows[:, None] * HALF + pairs[None, :]
    writes = inside[:, None] & (pairs[None, :] < HALF)
    tl.store(cos_ptr + at, tl.cos(angles), mask=writes)
    tl.store(sin_ptr + at, tl.sin(angles), mask=writes)


@triton.jit
def enter_kernel(
    x_ptr,
    bounds_ptr,
    slot_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    flags_ptr,
    num_segments,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of layer_norm a program; zero for padding and for a non-finite row.

    A non-finite row also sets its slot's flag, which others may set to the same value meanwhile.
    """
    row = tl.program_id(0)
    is_real = row < tl.load(bounds_ptr + num_segments)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    offsets = row.to(tl.int64) * SIZE + columns
    x = tl.load(x_ptr + offsets, mask=inside & is_real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = _normalise(x, inside, weight, bias, EPS, SIZE)
    # Squares: a row whose variance overflows may be normalised to zero, as if it were right.
    is_finite = tl.sum(x * x, 0) < float("inf")
    out = tl.where(is_real & is_finite, normed, 0.0)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(flags_ptr + tl.load(slot_ptr + row), True, mask=is_real & (is_finite == 0))


@triton.jit
def add_offset_kernel(x_ptr, offset_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One row of `x + offset` a program."""
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + columns
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(offset_ptr + columns, mask=inside, other=0.0)
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _normalise(x, inside, weight, bias, EPS: tl.constexpr, SIZE: tl.constexpr):
    """layer_norm of one row; `x` is zero outside."""
    mean = tl.sum(x, 0) / SIZE
    centred = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + EPS)
    return centred * scale * weight + bias


@triton.jit
def norm_row(
    x,
    offset_ptr,
    weight_ptr,
    bias_ptr,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """layer_norm of one row of `x + offset`; `x` is zero outside."""
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    x += tl.load(offset_ptr + columns, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    return _normalise(x, inside, weight, bias, EPS, SIZE)


@triton.jit
def add_parts_row(
    x_ptr,
    parts_ptr,
    row_scales_ptr,
    column_scales_ptr,
    total_ptr,
    row,
    is_real,
    num_rows,
    PARTS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of `x + sum of parts` in float32, also stored as the total; zero where not real.

    The sum is multiplied with its row's and its columns' scales if it has any.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    offsets = row.to(tl.int64) * SIZE + columns
    x = tl.load(x_ptr + offsets, mask=inside & is_real, other=0.0).to(tl.float32)
    added = tl.load(parts_ptr + offsets, mask=inside & is_real, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        at = parts_ptr + part * num_rows * SIZE
        added += tl.load(at + offsets, mask=inside & is_real, other=0.0).to(tl.float32)
    if IS_SCALED:
        added *= tl.load(row_scales_ptr + row, mask=is_real, other=0.0)
        added *= tl.load(column_scales_ptr + columns, mask=inside, other=0.0)
    x += added
    tl.store(total_ptr + offsets, x.to(total_ptr.dtype.element_ty), mask=inside)
    return x


@triton.jit
def norm_kernel(
    x_ptr,
    offset_ptr,
    bounds_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
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
    tl.store(out_ptr + offsets, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_parts_norm_kernel(
    x_ptr,
    parts_ptr,
    row_scales_ptr,
    column_scales_ptr,
    offset_ptr,
    bounds_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    out_ptr,
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
    columns = tl.arange(0, BLOCK)
    offsets = row.to(tl.int64) * SIZE + columns
    tl.store(out_ptr + offsets, normed.to(out_ptr.dtype.element_ty), mask=columns < SIZE)


@triton.jit
def rotate_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A block of ROWS rows of q and k a program: rotates (P, 2 H) out of the fused (P, 3 H).

    Several rows, since the places in a row, once found, are the same in each.
    """
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < 2 * SIZE
    dim = columns % HEAD_DIM
    is_first = dim < HALF
    rotates = inside & (dim < 2 * HALF)
    pair = tl.where(is_first, dim, dim - HALF)
    partner = tl.where(is_first, columns + HALF, columns - HALF)
    for step in tl.static_range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + step
        source = qkv_ptr + row * 3 * SIZE
        x = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(source + partner, mask=rotates, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + row * HALF + pair, mask=rotates, other=1.0)
        sin = tl.load(sin_ptr + row * HALF + pair, mask=rotates, other=0.0)
        rotated = x * cos + tl.where(is_first, -other, other) * sin
        target = out_ptr + row * 2 * SIZE
        tl.store(target + columns, rotated.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def exact_gelu(x):
    """GELU with erf, of float32: `max(x, 0) - |x| Q(|x|)`, Q being the tail of the normal.

    log2 of Q on [0, 9] is a polynomial, fitted for the least error of the whole, 1e-7 at most; for
    x above -3 it is 1e-5 of the result. Without a division it takes fewer instructions than the
    usual approximations of erf. What is not finite stays so.
    """
    size = tl.abs(x)
    near = tl.minimum(size, 9.0)
    power = 3.3092899684561417e-05 * near - 0.0007692204089835286
    power = power * near + 0.008080719038844109
    power = power * near - 0.05341210588812828
    power = power * near - 0.4587709605693817
    power = power * near - 1.1512017250061035
    power = power * near - 0.999993085861206
    return tl.maximum(x, 0.0) - size * tl.exp2(power)


@triton.jit
def gelu_kernel(
    x_ptr, bounds_ptr, out_ptr, num_segments, num_elements, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Exact GELU of (P, WIDTH), by blocks; blocks past the last segment are left unwritten."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    num_real = tl.load(bounds_ptr + num_segments).to(tl.int64) * WIDTH
    if tl.program_id(0).to(tl.int64) * BLOCK < num_real:
        inside = offsets < num_elements
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        out = exact_gelu(x)
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)
