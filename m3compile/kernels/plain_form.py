"""The passes as plain PyTorch; see `m3compile.kernels.Kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3compile.geometry import rotate
from m3compile.kernels.base import BaseForm


class PlainForm(BaseForm):
    def segments_with(self, is_marked: Tensor, segment_of_row: Tensor, num_slots: int) -> Tensor:
        slots = torch.arange(num_slots, device=is_marked.device)
        return ((segment_of_row[:, None] == slots) & is_marked[:, None]).any(0)

    def residual_offsets(self, biases: Sequence[Tensor]) -> list[Tensor] | None:
        return None

    def add_product(self, x: Tensor, y: Tensor, linear: nn.Linear) -> Tensor:
        total: Tensor = x + linear(y)
        return total

    def norm(
        self, x: Tensor, cu_seqlens: Tensor, norm: nn.LayerNorm, offset: Tensor | None
    ) -> Tensor:
        assert offset is None
        rows = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
        is_padding = rows >= cu_seqlens[-1]
        normed: Tensor = norm(x.masked_fill(is_padding[:, None], 0))
        return normed

    def rotate_heads(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(1, (3, num_heads, -1)).unbind(1)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def gelu(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return functional.gelu(x)


FORM = PlainForm()
