"""The passes as Triton kernels; see `m3compile.kernels.Kernels`.

Registered as `triton_op`, whose kernels AOTInductor compiles into the package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

from m3compile.kernels.base import BaseForm
from m3compile.kernels.product import add_product_
from m3compile.kernels.triton_kernels import (
    count_marks_kernel,
    gelu_kernel,
    norm_kernel,
    rotate_kernel,
)

# Chosen by graph-replay timing on an H200 at 256 to 16,384 rows; see docs/performance.md.
NORM_WARPS = 2
_ROTATE_BLOCK = 512
_ROTATE_WARPS = 2
_GELU_BLOCK = 2048
_GELU_WARPS = 4
_MARK_BLOCK = 1024


@triton_op("m3compile::count_marks", mutates_args=())
def _count_marks(is_marked: Tensor, segment_of_row: Tensor, num_slots: int) -> Tensor:
    counts = torch.zeros(num_slots, dtype=torch.int32, device=is_marked.device)
    num_rows = is_marked.shape[0]
    blocks = (num_rows + _MARK_BLOCK - 1) // _MARK_BLOCK
    wrap_triton(count_marks_kernel)[(blocks,)](
        is_marked, segment_of_row, counts, num_rows, BLOCK=_MARK_BLOCK, num_warps=4
    )
    return counts


@triton_op("m3compile::norm", mutates_args=())
def _norm(
    x: Tensor, offset: Tensor, cu_seqlens: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    normed = torch.empty_like(x)
    size = x.shape[1]
    wrap_triton(norm_kernel)[(x.shape[0],)](
        x,
        offset,
        cu_seqlens,
        weight,
        bias,
        normed,
        cu_seqlens.shape[0] - 1,
        EPS=eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=NORM_WARPS,
    )
    return normed


@triton_op("m3compile::rotate_heads", mutates_args=())
def _rotate_heads(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> Tensor:
    size = qkv.shape[1] // 3
    rotated = qkv.new_empty(qkv.shape[0], 2 * size)
    blocks = triton.cdiv(2 * size, _ROTATE_BLOCK)
    wrap_triton(rotate_kernel)[(qkv.shape[0], blocks)](
        qkv,
        cos,
        sin,
        rotated,
        SIZE=size,
        HEAD_DIM=size // num_heads,
        HALF=cos.shape[1],
        BLOCK=_ROTATE_BLOCK,
        num_warps=_ROTATE_WARPS,
    )
    return rotated


@triton_op("m3compile::gelu", mutates_args=())
def _gelu(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    out = torch.empty_like(x)
    count = x.numel()
    wrap_triton(gelu_kernel)[((count + _GELU_BLOCK - 1) // _GELU_BLOCK,)](
        x,
        cu_seqlens,
        out,
        cu_seqlens.shape[0] - 1,
        count,
        WIDTH=x.shape[1],
        BLOCK=_GELU_BLOCK,
        num_warps=_GELU_WARPS,
    )
    return out


class TritonForm(BaseForm):
    def segments_with(self, is_marked: Tensor, segment_of_row: Tensor, num_slots: int) -> Tensor:
        return _count_marks(is_marked, segment_of_row, num_slots) > 0

    def residual_offsets(self, biases: Sequence[Tensor]) -> list[Tensor] | None:
        sums = torch.stack(list(biases)).to(torch.float32).cumsum(0)
        return [torch.zeros_like(sums[0]), *sums.unbind()]

    def add_product(self, x: Tensor, y: Tensor, linear: nn.Linear) -> Tensor:
        add_product_(x, y, linear.weight)
        return x

    def norm(
        self, x: Tensor, cu_seqlens: Tensor, norm: nn.LayerNorm, offset: Tensor | None
    ) -> Tensor:
        return _norm(x, offset, cu_seqlens, norm.weight, norm.bias, norm.eps)

    def rotate_heads(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rotated = _rotate_heads(qkv, cos, sin, num_heads).unflatten(1, (2, num_heads, -1))
        v = qkv.unflatten(1, (3, num_heads, -1))[:, 2]
        return rotated[:, 0], rotated[:, 1], v

    def gelu(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return _gelu(x, cu_seqlens)


FORM = TritonForm()
