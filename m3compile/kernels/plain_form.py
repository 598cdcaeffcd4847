"""The passes as plain PyTorch; see `m3compile.kernels.Kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3compile.geometry import locate_rows, rotary_tables, rotate
from m3compile.kernels import Linear, Located
from m3compile.kernels.base import BaseForm
from m3compile.kernels.fp8 import Fp8Rows, Rows, quantise_rows, to_fp8


class PlainForm(BaseForm):
    def locate(self, segments: Tensor, num_rows: int, inverse_frequency: Tensor) -> Located:
        geometry = locate_rows(segments, num_rows)
        tables = rotary_tables(geometry.positions, inverse_frequency)
        return Located(geometry.cu_seqlens, geometry.segment_of_row, *tables)

    def enter(self, x: Tensor, norm: nn.LayerNorm, located: Located) -> tuple[Tensor, Tensor]:
        normed: Tensor = norm(x)
        is_real = _is_real(x, located.cu_seqlens)
        # Squares: a row whose variance overflows may be normalised to zero, as if it were right.
        is_finite = x.to(torch.float32).square().sum(1).isfinite()
        slots = torch.arange(located.cu_seqlens.shape[0] - 1, device=x.device)
        is_bad = (is_real & ~is_finite)[:, None] & (located.segment_of_row[:, None] == slots)
        return normed.masked_fill(~(is_real & is_finite)[:, None], 0), is_bad.any(0)

    def residual_offsets(self, linears: Sequence[Linear]) -> list[Tensor] | None:
        return None

    def add_product(self, x: Tensor, y: Rows, linear: Linear) -> Tensor:
        total: Tensor = x + linear(y)
        return total

    def norm(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        norm: nn.LayerNorm,
        offset: Tensor | None,
        fp8: bool = False,
    ) -> Rows:
        assert offset is None
        normed: Tensor = norm(x.masked_fill(~_is_real(x, cu_seqlens)[:, None], 0))
        return quantise_rows(normed) if fp8 else normed

    def add_offset(self, x: Tensor, offset: Tensor | None) -> Tensor:
        assert offset is None
        return x

    def rotate_heads(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(1, (3, num_heads, -1)).unbind(1)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def rotate_heads_fp8(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, scales: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The rotated numbers are not rounded on the way: one rounding, as in the kernel.
        q, k, v = self.rotate_heads(qkv.to(torch.float32), cos, sin, num_heads)
        return to_fp8(q, scales[0]), to_fp8(k, scales[1]), to_fp8(v, scales[2])

    def gelu(self, x: Tensor, cu_seqlens: Tensor, fp8: bool = False) -> Rows:
        activated = functional.gelu(x)
        return quantise_rows(activated) if fp8 else activated

    def quantise(self, x: Tensor) -> Fp8Rows:
        return quantise_rows(x)


def _is_real(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(P,) bool, false for rows past the last segment."""
    rows = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
    return rows < cu_seqlens[-1]


FORM = PlainForm()
