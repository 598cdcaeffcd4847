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
from m3compile.kernels.triton_form import NORM_WARPS, TritonForm, exact_gelu
from m3compile.kernels.triton_kernels import add_parts_norm_kernel, short_attention_kernel

# Chosen by graph-replay timing on an H200 at 256 to 512 rows; see docs/performance.md.
_SPLITS = 4
_ATTENTION_BLOCK = 64
_ATTENTION_WARPS = 4
_ATTENTION_STAGES = 3
_GELU_BLOCK = 1024
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
def _short_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    out = q.new_empty(q.shape)
    num_rows, num_heads, head_dim = q.shape
    num_segments = cu_seqlens.shape[0] - 1
    low = 1 << (head_dim.bit_length() - 1)
    # Every segment has at least four rows, and may end in a partial tile.
    tiles = (num_rows + _ATTENTION_BLOCK - 1) // _ATTENTION_BLOCK + num_rows // 4
    wrap_triton(short_attention_kernel)[(tiles, num_heads)](
        q,
        k,
        v,
        out,
        cu_seqlens,
        num_segments,
        q.stride(0),
        v.stride(0),
        num_heads * head_dim,
        HEAD_DIM=head_dim,
        LOW=low,
        HIGH=max(16, triton.next_power_of_2(head_dim - low)),
        SCALE_LOG2=head_dim**-0.5 * _LOG2_E,
        SLOTS=triton.next_power_of_2(num_segments),
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
        q, k, v = self.rotate_heads(qkv, located.cos, located.sin, num_heads)
        return _short_attention(q, k, v, located.cu_seqlens).flatten(1)

    def gelu(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return exact_gelu(x, cu_seqlens, _GELU_BLOCK)


FORM = FewRowsForm()
