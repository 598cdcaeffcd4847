"""The passes as plain PyTorch; see `m3compile.kernels.Kernels`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from m3compile.geometry import rotate


class _Plain:
    def add_norm(
        self, x: Tensor, delta: Tensor, cu_seqlens: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
        is_padding = rows >= cu_seqlens[-1]
        total = x + delta.masked_fill(is_padding[:, None], 0)
        return total, functional.layer_norm(total, (x.shape[1],), weight, bias, eps)

    def rotate_heads(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(1, (3, num_heads, -1)).unbind(1)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def gelu(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return functional.gelu(x)


FORM = _Plain()
