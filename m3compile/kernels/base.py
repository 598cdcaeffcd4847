"""What forms share: the parts that need no kernel of their own."""

from __future__ import annotations

from torch import Tensor, nn

from m3compile.attention import fp8_attention, varlen_attention
from m3compile.kernels import Kernels, Linear, Located
from m3compile.kernels.fp8 import Rows


class BaseForm(Kernels):
    """Attention through the ops, and a norm that follows a product as two steps."""

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
        total = self.add_product(x, y, linear)
        return total, self.norm(total, cu_seqlens, norm, offset, fp8)

    def attend(
        self,
        qkv: Tensor,
        located: Located,
        num_heads: int,
        backend: str,
        schedule: Tensor | None,
        scales: Tensor | None = None,
    ) -> Tensor:
        bounds, tables = located.cu_seqlens, (located.cos, located.sin)
        if scales is not None:
            q, k, v = self.rotate_heads_fp8(qkv, *tables, num_heads, scales)
            attended = fp8_attention(q, k, v, scales, bounds, backend, schedule)
            return attended.flatten(1).to(qkv.dtype)
        q, k, v = self.rotate_heads(qkv, *tables, num_heads)
        return varlen_attention(q, k, v, bounds, backend, False, schedule).flatten(1)
