"""The Triton kernel of attention for few rows. Imported as `triton_kernels` is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tiles_kernel(bounds_ptr, tiles_ptr, num_segments, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """One tile a program: its first row, and where its segment starts and ends; else zeros."""
    tile = tl.program_id(0)
    slots = tl.arange(0, SLOTS)
    starts = tl.load(bounds_ptr + slots, mask=slots < num_segments, other=0)
    ends = tl.load(bounds_ptr + slots + 1, mask=slots < num_segments, other=0)
    tiles = (ends - starts + TILE - 1) // TILE
    slot = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    is_mine = slots == slot
    start = tl.sum(tl.where(is_mine, starts, 0), 0)
    first = tl.sum(tl.where(slots < slot, tiles, 0), 0)
    # Past the last tile no slot is mine.
    is_tile = tile < tl.sum(tiles, 0)
    tl.store(tiles_ptr + 3 * tile, tl.where(is_tile, start + (tile - first) * TILE, 0))
    tl.store(tiles_ptr + 3 * tile + 1, start)
    tl.store(tiles_ptr + 3 * tile + 2, tl.sum(tl.where(is_mine, ends, 0), 0))


@triton.jit
def short_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tiles_ptr,
    qk_stride,
    v_stride,
    out_stride,
    HEAD_DIM: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M queries of one segment and one head a program.

    Tiles start at the segment's start, so a segment's bits do not depend on where it lies. A head
    of, say, 80 dims is 64 and 16 wide: no product is wider than it must be. Heads come first, so
    that the programs without a tile are the last.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1)
    first_row = tl.load(tiles_ptr + 3 * tile)
    start = tl.load(tiles_ptr + 3 * tile + 1)
    end = tl.load(tiles_ptr + 3 * tile + 2)
    if start < end:
        rows = first_row + tl.arange(0, BLOCK_M)
        low = tl.arange(0, LOW)
        high = LOW + tl.arange(0, HIGH)
        has_row = rows[:, None] < end
        q_rows = q_ptr + rows[:, None] * qk_stride + head * HEAD_DIM
        q_low = tl.load(q_rows + low[None, :], mask=has_row, other=0.0)
        q_high = tl.load(
            q_rows + high[None, :], mask=has_row & (high[None, :] < HEAD_DIM), other=0.0
        )
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        out_low = tl.zeros((BLOCK_M, LOW), tl.float32)
        out_high = tl.zeros((BLOCK_M, HIGH), tl.float32)
        for at in range(start, end, BLOCK_N):
            keys = at + tl.arange(0, BLOCK_N)
            has_key = keys < end
            k_rows = k_ptr + keys[None, :] * qk_stride + head * HEAD_DIM
            k_low = tl.load(k_rows + low[:, None], mask=has_key[None, :], other=0.0)
            k_high = tl.load(
                k_rows + high[:, None],
                mask=has_key[None, :] & (high[:, None] < HEAD_DIM),
                other=0.0,
            )
            scores = tl.dot(q_low, k_low)
            scores = tl.dot(q_high, k_high, scores) * SCALE_LOG2
            scores = tl.where(has_key[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - new_top)
            weights = tl.exp2(scores - new_top[:, None])
            total = total * shrink + tl.sum(weights, 1)
            v_rows = v_ptr + keys[:, None] * v_stride + head * HEAD_DIM
            v_low = tl.load(v_rows + low[None, :], mask=has_key[:, None], other=0.0)
            v_high = tl.load(
                v_rows + high[None, :],
                mask=has_key[:, None] & (high[None, :] < HEAD_DIM),
                other=0.0,
            )
            weights = weights.to(v_low.dtype)
            out_low = tl.dot(weights, v_low, out_low * shrink[:, None])
            out_high = tl.dot(weights, v_high, out_high * shrink[:, None])
            top = new_top
        out_rows = out_ptr + rows[:, None] * out_stride + head * HEAD_DIM
        element = out_ptr.dtype.element_ty
        tl.store(out_rows + low[None, :], (out_low / total[:, None]).to(element), mask=has_row)
        tl.store(
            out_rows + high[None, :],
            (out_high / total[:, None]).to(element),
            mask=has_row & (high[None, :] < HEAD_DIM),
        )
