"""The passes as Triton kernels; see `m3compile.kernels.Kernels`.

Registered as `triton_op`, whose kernels AOTInductor compiles into the package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

from m3compile.kernels import Linear, Located
from m3compile.kernels.base import BaseForm
from m3compile.kernels.fp8 import Fp8Rows, Rows, is_fp8
from m3compile.kernels.fp8_passes import (
    ROTATE_ROWS,
    add_parts_norm_fp8,
    gelu_fp8,
    norm_fp8,
    quantise,
    rotate_heads_fp8,
)
from m3compile.kernels.product import add_product_
from m3compile.kernels.triton_kernels import (
    add_offset_kernel,
    add_parts_norm_kernel,
    enter_kernel,
    gelu_kernel,
    locate_kernel,
    norm_kernel,
    rotate_kernel,
)

# Chosen by graph-replay timing on an H200 at 256 to 16,384 rows; see docs/performance.md.
_NORM_WARPS = 2
_ROTATE_BLOCK = 512
_ROTATE_WARPS = 4
_GELU_BLOCK = 2048
_GELU_WARPS = 4
_LOCATE_BLOCK = 4
_LOCATE_WARPS = 4


@triton_op("m3compile::locate", mutates_args=())
def _locate(
    segments: Tensor, num_rows: int, inverse_frequency: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device, slots = segments.device, segments.shape[0]
    half = 3 * inverse_frequency.shape[0]
    cu_seqlens = torch.empty(slots + 1, dtype=torch.int32, device=device)
    segment_of_row = torch.empty(num_rows, dtype=torch.int32, device=device)
    cos = torch.empty(num_rows, half, dtype=torch.float32, device=device)
    sin = torch.empty(num_rows, half, dtype=torch.float32, device=device)
    wrap_triton(locate_kernel)[((num_rows + _LOCATE_BLOCK - 1) // _LOCATE_BLOCK,)](
        segments,
        inverse_frequency,
        cu_seqlens,
        segment_of_row,
        cos,
        sin,
        num_rows,
        SLOTS=slots,
        SLOT_BLOCK=triton.next_power_of_2(slots),
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        BLOCK=_LOCATE_BLOCK,
        num_warps=_LOCATE_WARPS,
    )
    return cu_seqlens, segment_of_row, cos, sin


@triton_op("m3compile::enter", mutates_args=())
def _enter(
    x: Tensor, cu_seqlens: Tensor, segment_of_row: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    size, slots = x.shape[1], cu_seqlens.shape[0] - 1
    out = torch.empty_like(x)
    flags = torch.zeros(slots, dtype=torch.bool, device=x.device)
    wrap_triton(enter_kernel)[(x.shape[0],)](
        x,
        cu_seqlens,
        segment_of_row,
        weight,
        bias,
        out,
        flags,
        slots,
        EPS=eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=_NORM_WARPS,
    )
    return out, flags


@triton_op("m3compile::add_offset", mutates_args=())
def _add_offset(x: Tensor, offset: Tensor) -> Tensor:
    out = torch.empty_like(x)
    size = x.shape[1]
    wrap_triton(add_offset_kernel)[(x.shape[0],)](
        x, offset, out, SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=_NORM_WARPS
    )
    return out


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
        num_warps=_NORM_WARPS,
    )
    return normed


@triton_op("m3compile::add_parts_norm", mutates_args=())
def add_parts_norm(
    x: Tensor,
    parts: Tensor,
    row_scales: Tensor | None,
    column_scales: Tensor | None,
    offset: Tensor,
    cu_seqlens: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(x)
    normed = torch.empty_like(x)
    size = x.shape[1]
    wrap_triton(add_parts_norm_kernel)[(x.shape[0],)](
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
        normed,
        x.shape[0],
        cu_seqlens.shape[0] - 1,
        EPS=eps,
        PARTS=parts.shape[0],
        IS_SCALED=row_scales is not None,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=_NORM_WARPS,
    )
    return total, normed


@triton_op("m3compile::rotate_heads", mutates_args=())
def _rotate_heads(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> Tensor:
    size = qkv.shape[1] // 3
    rotated = qkv.new_empty(qkv.shape[0], 2 * size)
    blocks = triton.cdiv(2 * size, _ROTATE_BLOCK)
    wrap_triton(rotate_kernel)[(qkv.shape[0] // ROTATE_ROWS, blocks)](
        qkv,
        cos,
        sin,
        rotated,
        SIZE=size,
        HEAD_DIM=size // num_heads,
        HALF=cos.shape[1],
        BLOCK=_ROTATE_BLOCK,
        ROWS=ROTATE_ROWS,
        num_warps=_ROTATE_WARPS,
    )
    return rotated


@triton_op("m3compile::gelu", mutates_args=())
def exact_gelu(x: Tensor, cu_seqlens: Tensor, block: int) -> Tensor:
    """The exact GELU in blocks of `block` elements; see `Kernels.gelu`."""
    out = torch.empty_like(x)
    count = x.numel()
    wrap_triton(gelu_kernel)[((count + block - 1) // block,)](
        x,
        cu_seqlens,
        out,
        cu_seqlens.shape[0] - 1,
        count,
        WIDTH=x.shape[1],
        BLOCK=block,
        num_warps=_GELU_WARPS,
    )
    return out


class TritonForm(BaseForm):
    def locate(self, segments: Tensor, num_rows: int, inverse_frequency: Tensor) -> Located:
        return Located(*_locate(segments, num_rows, inverse_frequency))

    def enter(self, x: Tensor, norm: nn.LayerNorm, located: Located) -> tuple[Tensor, Tensor]:
        places = (located.cu_seqlens, located.segment_of_row)
        return _enter(x, *places, norm.weight, norm.bias, norm.eps)

    def residual_offsets(self, linears: Sequence[Linear]) -> list[Tensor] | None:
        sums = torch.stack([linear.bias for linear in linears]).to(torch.float32).cumsum(0)
        return [torch.zeros_like(sums[0]), *sums.unbind()]

    def add_product(self, x: Tensor, y: Rows, linear: Linear) -> Tensor:
        if is_fp8(linear):
            product = linear.sums(y).to(torch.float32) * y.scales * linear.weight_scale
            return (x + product).to(x.dtype)
        add_product_(x, y, linear.weight)
        return x

    def norm(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        norm: nn.LayerNorm,
        offset: Tensor | None,
        fp8: bool = False,
    ) -> Rows:
        arguments = (x, offset, cu_seqlens, norm.weight, norm.bias, norm.eps)
        return Fp8Rows(*norm_fp8(*arguments)) if fp8 else _norm(*arguments)

    def add_product_norm(
        self,
        x: Tensor,
        y: Rows,
        linear: Linear,
        cu_seqlens: Tensor,
        norm: nn.LayerNorm,
        offset: Tensor | None,
        fp8: bool = False,
    ) -> tuple[Tensor, Rows]:
        if is_fp8(linear):
            # Such a product cannot add to the residual where it lies.
            parts, scales = linear.sums(y)[None], (y.scales, linear.weight_scale)
            return self.add_parts(x, parts, scales, cu_seqlens, norm, offset, fp8)
        return super().add_product_norm(x, y, linear, cu_seqlens, norm, offset, fp8)

    def add_parts(
        self,
        x: Tensor,
        parts: Tensor,
        scales: tuple[Tensor, Tensor] | tuple[None, None],
        cu_seqlens: Tensor,
        norm: nn.LayerNorm,
        offset: Tensor | None,
        fp8: bool,
    ) -> tuple[Tensor, Rows]:
        """`x` plus the sum of `parts` (N, P, H), and `norm` of it with `offset`.

        The sum times its `scales` (P, 1) and (H,), where there are any.
        """
        arguments = (x, parts, *scales, offset, cu_seqlens, norm.weight, norm.bias, norm.eps)
        if not fp8:
            return add_parts_norm(*arguments)
        total, *rows = add_parts_norm_fp8(*arguments)
        return total, Fp8Rows(*rows)

    def add_offset(self, x: Tensor, offset: Tensor | None) -> Tensor:
        return _add_offset(x, offset)

    def rotate_heads(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rotated = _rotate_heads(qkv, cos, sin, num_heads)
        rotated = rotated.unflatten(1, (2, num_heads, -1))
        v = qkv.unflatten(1, (3, num_heads, -1))[:, 2]
        return rotated[:, 0], rotated[:, 1], v

    def rotate_heads_fp8(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, scales: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rotated = rotate_heads_fp8(qkv, cos, sin, num_heads, scales)
        q, k, v = rotated.unflatten(1, (3, num_heads, -1)).unbind(1)
        return q, k, v

    def gelu(self, x: Tensor, cu_seqlens: Tensor, fp8: bool = False) -> Rows:
        return Fp8Rows(*gelu_fp8(x, cu_seqlens)) if fp8 else exact_gelu(x, cu_seqlens, _GELU_BLOCK)

    def quantise(self, x: Tensor) -> Fp8Rows:
        return Fp8Rows(*quantise(x))


FORM = TritonForm()
