"""The Triton passes that end in fp8, as ops; see `m3compile.kernels.triton_form`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from m3compile.kernels.fp8 import FP8
from m3compile.kernels.fp8_kernels import (
    add_parts_norm_fp8_kernel,
    gelu_fp8_kernel,
    norm_fp8_kernel,
    quantise_kernel,
    rotate_fp8_kernel,
)

# Chosen by graph-replay timing on an H200 at 256 to 16,384 rows; see docs/performance.md.
_NORM_WARPS = 1
_GELU_WARPS = 4
_QUANTISE_BLOCK = 4096
_QUANTISE_WARPS = 8
# Of rows that a few warps hold whole.
_SMALL_QUANTISE_BLOCK = 1024
_SMALL_QUANTISE_WARPS = 1
_ROTATE_BLOCK = 256
_ROTATE_WARPS = 1
# A divisor of every run's rows, which are whole tokens.
ROTATE_ROWS = 4


@triton_op("m3compile::norm_fp8", mutates_args=())
def norm_fp8(
    x: Tensor, offset: Tensor, cu_seqlens: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`Kernels.norm` to the values and scales of `Fp8Rows`."""
    values, scales = _empty_rows(x)
    size = x.shape[1]
    wrap_triton(norm_fp8_kernel)[(x.shape[0],)](
        x,
        offset,
        cu_seqlens,
        weight,
        bias,
        values,
        scales,
        cu_seqlens.shape[0] - 1,
        EPS=eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=_NORM_WARPS,
    )
    return values, scales


@triton_op("m3compile::add_parts_norm_fp8", mutates_args=())
def add_parts_norm_fp8(
    x: Tensor,
    parts: Tensor,
    row_scales: Tensor | None,
    column_scales: Tensor | None,
    offset: Tensor,
    cu_seqlens: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`TritonForm.add_parts` to the total, and the values and scales of `Fp8Rows`."""
    total = torch.empty_like(x)
    values, scales = _empty_rows(x)
    size = x.shape[1]
    wrap_triton(add_parts_norm_fp8_kernel)[(x.shape[0],)](
        x,
        parts,
        # Any tensor where there are none: they are not read.
        x if row_scales is None else row_scales,
        x if column_scales is None else column_scales,
        offset,
        cu_seqlens,
        weight,
        bias,
        total,
        values,
        scales,
        x.shape[0],
        cu_seqlens.shape[0] - 1,
        EPS=eps,
        PARTS=parts.shape[0],
        IS_SCALED=row_scales is not None,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=_NORM_WARPS,
    )
    return total, values, scales


@triton_op("m3compile::gelu_fp8", mutates_args=())
def gelu_fp8(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """`Kernels.gelu` to the values and scales of `Fp8Rows`."""
    values, scales = _empty_rows(x)
    size = x.shape[1]
    low = 1 << ((size - 1).bit_length() - 1)
    wrap_triton(gelu_fp8_kernel)[(x.shape[0],)](
        x,
        cu_seqlens,
        values,
        scales,
        cu_seqlens.shape[0] - 1,
        SIZE=size,
        LOW=low,
        HIGH=triton.next_power_of_2(size - low),
        num_warps=_GELU_WARPS,
    )
    return values, scales


@triton_op("m3compile::quantise", mutates_args=())
def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """`Kernels.quantise` to the values and scales of `Fp8Rows`."""
    values, scales = _empty_rows(x)
    size = x.shape[1]
    is_small = size < _QUANTISE_BLOCK
    wrap_triton(quantise_kernel)[(x.shape[0],)](
        x,
        values,
        scales,
        SIZE=size,
        BLOCK=_SMALL_QUANTISE_BLOCK if is_small else _QUANTISE_BLOCK,
        num_warps=_SMALL_QUANTISE_WARPS if is_small else _QUANTISE_WARPS,
    )
    return values, scales


@triton_op("m3compile::rotate_heads_fp8", mutates_args=())
def rotate_heads_fp8(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, scales: Tensor
) -> Tensor:
    """`Kernels.rotate_heads_fp8` as the fused (P, 3 H)."""
    size = qkv.shape[1] // 3
    out = torch.empty_like(qkv, dtype=FP8)
    blocks = triton.cdiv(size, _ROTATE_BLOCK)
    wrap_triton(rotate_fp8_kernel)[(qkv.shape[0] // ROTATE_ROWS, 3 * blocks)](
        qkv,
        cos,
        sin,
        scales,
        out,
        SIZE=size,
        HEAD_DIM=size // num_heads,
        HALF=cos.shape[1],
        BLOCKS=blocks,
        BLOCK=_ROTATE_BLOCK,
        ROWS=ROTATE_ROWS,
        num_warps=_ROTATE_WARPS,
    )
    return out


def _empty_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=FP8), x.new_empty(x.shape[0], 1, dtype=torch.float32)
