"""The passes for runs of few rows; see `m3compile.kernels.Kernels`.

A product over the wide hidden layer leaves most of the chip idle when it has a few hundred rows:
it is cut along its sum, and the next norm's pass adds the parts. Attention uses a kernel with
less set-up than FlashAttention's: which rows a tile has is looked up, and found once a forward.
"""

from __future__ import annotations

import triton
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

from m3compile.kernels import Linear, Located
from m3compile.kernels.attention_kernels import short_attention_kernel, tiles_kernel
from m3compile.kernels.fp8 import Rows, is_fp8
from m3compile.kernels.product import split_product
from m3compile.kernels.triton_form import TritonForm, exact_gelu

# Chosen by graph-replay timing on an H200 at 256 to 512 rows; see docs/performance.md.
_SPLITS = 4
_ATTENTION_BLOCK = 64
_ATTENTION_WARPS = 4
_ATTENTION_STAGES = 3
_GELU_BLOCK = 1024
_LOG2_E = 1.4426950408889634


@triton_op("m3compile::attention_tiles", mutates_args=())
def _attention_tiles(cu_seqlens: Tensor, num_rows: int) -> Tensor:
    num_segments = cu_seqlens.shape[0] - 1
    # Every segment has at least four rows, and may end in a partial tile.
    count = (num_rows + _ATTENTION_BLOCK - 1) // _ATTENTION_BLOCK + num_rows // 4
    tiles = cu_seqlens.new_empty(count, 3)
    wrap_triton(tiles_kernel)[(count,)](
        cu_seqlens,
        tiles,
        num_segments,
        SLOTS=triton.next_power_of_2(num_segments),
        TILE=_ATTENTION_BLOCK,
        num_warps=1,
    )
    return tiles


@triton_op("m3compile::short_attention", mutates_args=())
def _short_attention(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor) -> Tensor:
    out = q.new_empty(q.shape)
    num_heads, head_dim = q.shape[1:]
    low = 1 << (head_dim.bit_length() - 1)
    wrap_triton(short_attention_kernel)[(num_heads, tiles.shape[0])](
        q,
        k,
        v,
        out,
        tiles,
        q.stride(0),
        v.stride(0),
        num_heads * head_dim,
        HEAD_DIM=head_dim,
        LOW=low,
        HIGH=max(16, triton.next_power_of_2(head_dim - low)),
        SCALE_LOG2=head_dim**-0.5 * _LOG2_E,
        BLOCK_M=_ATTENTION_BLOCK,
        BLOCK_N=_ATTENTION_BLOCK,
        num_warps=_ATTENTION_WARPS,
        num_stages=_ATTENTION_STAGES,
    )
    return out


class FewRowsForm(TritonForm):
    def locate(self, segments: Tensor, num_rows: int, inverse_frequency: Tensor) -> Located:
        located = super().locate(segments, num_rows, inverse_frequency)
        return located._replace(tiles=_attention_tiles(located.cu_seqlens, num_rows))

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
        splits = min(_SPLITS, linear.in_features // linear.out_features)
        if is_fp8(linear) or splits < 2 or linear.in_features % splits:
            return super().add_product_norm(x, y, linear, cu_seqlens, norm, offset, fp8)
        parts = split_product(y, linear.weight, splits)
        return self.add_parts(x, parts, (None, None), cu_seqlens, norm, offset, fp8)

    def attend(
        self,
        qkv: Tensor,
        located: Located,
        num_heads: int,
        backend: str,
        schedule: Tensor | None,
        scales: Tensor | None = None,
    ) -> Tensor:
        # Never in fp8: attention is too small a part of such a run.
        q, k, v = self.rotate_heads(qkv, located.cos, located.sin, num_heads)
        assert located.tiles is not None
        return _short_attention(q, k, v, located.tiles).flatten(1)

    def gelu(self, x: Tensor, cu_seqlens: Tensor, fp8: bool = False) -> Rows:
        return super().gelu(x, cu_seqlens, fp8) if fp8 else exact_gelu(x, cu_seqlens, _GELU_BLOCK)


FORM = FewRowsForm()
