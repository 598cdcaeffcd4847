"""The passes for runs of few rows; see `m3compile.kernels.Kernels`.

A product over the wide hidden layer leaves most of the chip idle when it has a few hundred rows:
it is cut along its sum, and the next norm's pass adds the parts. Attention uses a kernel with
less set-up than FlashAttention's.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

from m3compile.kernels import Located
from m3compile.kernels.product import split_product
from m3compile.kernels.triton_form import NORM_WARPS, TritonForm
from m3compile.kernels.triton_kernels import add_parts_norm_kernel, short_attention_kernel

# Chosen by graph-replay timing on an H200 at 256 to 512 rows; see docs/performance.md.
_SPLITS = 4
_ATTENTION_BLOCK = 64
_ATTENTION_WARPS = 4
_ATTENTION_STAGES = 3
_SPARE_PROGRAMS = 4
_LOG2_E = 1.4426950408889634


@triton_op("m3compile::add_parts_norm", mutates_args=())
def _add_parts_norm(
    x: Tensor,
    parts: Tensor,
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
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=NORM_WARPS,
    )
    return total, normed


@triton_op("m3compile::short_attention", mutates_args=())
def _short_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, num_heads: int
) -> Tensor:
    num_rows, size = qkv.shape[0], qkv.shape[1] // 3
    out = qkv.new_empty(num_rows, size)
    head_dim = size // num_heads
    num_segments = cu_seqlens.shape[0] - 1
    low = 1 << (head_dim.bit_length() - 1)
    # One program for every tile of a single segment; with more segments than that, programs take
    # several tiles each.
    programs = (num_rows + _ATTENTION_BLOCK - 1) // _ATTENTION_BLOCK + _SPARE_PROGRAMS
    wrap_triton(short_attention_kernel)[(programs, num_heads)](
        qkv,
        cos,
        sin,
        out,
        cu_seqlens,
        num_segments,
        SIZE=size,
        HEAD_DIM=head_dim,
        HALF=cos.shape[1],
        LOW=low,
        HIGH=max(16, triton.next_power_of_2(head_dim - low)),
        SLOTS=triton.next_power_of_2(num_segments),
        SCALE_LOG2=head_dim**-0.5 * _LOG2_E,
        BLOCK_M=_ATTENTION_BLOCK,
        BLOCK_N=_ATTENTION_BLOCK,
        num_warps=_ATTENTION_WARPS,
        num_stages=_ATTENTION_STAGES,
    )
    return out


class FewRowsForm(TritonForm):
    def add_product_norm(
        self,
        x: Tensor,
        y: Tensor,
        linear: nn.Linear,
        cu_seqlens: Tensor,
        norm: nn.LayerNorm,
        offset: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        splits = min(_SPLITS, linear.in_features // linear.out_features)
        if splits < 2 or linear.in_features % splits:
            return super().add_product_norm(x, y, linear, cu_seqlens, norm, offset)
        parts = split_product(y, linear.weight, splits)
        return _add_parts_norm(x, parts, offset, cu_seqlens, norm.weight, norm.bias, norm.eps)

    def attend(
        self, qkv: Tensor, located: Located, num_heads: int, backend: str, schedule: Tensor | None
    ) -> Tensor:
        return _short_attention(qkv, located.cos, located.sin, located.cu_seqlens, num_heads)


FORM = FewRowsForm()
