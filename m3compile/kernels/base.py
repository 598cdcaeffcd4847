"""What forms share: the parts that need no kernel of their own."""

from __future__ import annotations

from torch import Tensor, nn

from m3compile.attention import varlen_attention
from m3compile.kernels import Kernels, Located


class BaseForm(Kernels):
    """Attention through the op, and a norm that follows a product as two steps."""

    def add_product_norm(
        self,
        x: Tensor,
        y: Tensor,
        linear: nn.Linear,
        cu_seqlens: Tensor,
        norm: nn.LayerNorm,
        offset: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        total = self.add_product(x, y, linear)
        return total, self.norm(total, cu_seqlens, norm, offset)

    def attend(
        self, qkv: Tensor, located: Located, num_heads: int, backend: str, schedule: Tensor | None
    ) -> Tensor:
        q, k, v = self.rotate_heads(qkv, located.cos, located.sin, num_heads)
        return varlen_attention(q, k, v, located.cu_seqlens, backend, False, schedule).flatten(1)
