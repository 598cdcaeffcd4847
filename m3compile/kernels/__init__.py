"""The passes around the matrix products, in three forms with one meaning.

`plain` is PyTorch code that any compiler fuses as it likes: the CPU's form, and the reference.
`triton` are hand-written kernels for CUDA that run at the card's bandwidth, where the generated
ones reach a third of it. `few_rows` is the same for runs of at most a few hundred rows, which are
bound by latency. A traced program carries the compiled kernels; a loader needs no Triton.

Shape legend: P patch rows of a run (padding included), S slots of the segment table, H hidden
size, D head_dim, R rotary pairs of a head.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

KERNELS = ("plain", "triton", "few_rows")


class Kernels(Protocol):
    """What every form offers. `cu_seqlens` (S + 1,) int32 ends with the number of real rows."""

    def segments_with(self, is_marked: Tensor, segment_of_row: Tensor, num_slots: int) -> Tensor:
        """(S,) bool: the slots that a marked row (P,) bool belongs to."""
        ...

    def residual_offsets(self, biases: Sequence[Tensor]) -> list[Tensor] | None:
        """What the residual lacks before the first and after each addition: (H,) float32 each.

        `add_product` may leave the biases (H,) out; their sums so far are added where the residual
        is read. None where it adds them itself.
        """
        ...

    def add_product(self, x: Tensor, y: Tensor, linear: nn.Linear) -> Tensor:
        """`x + linear(y)`, (P, H), perhaps without the bias and perhaps in the memory of `x`.

        Padding rows may hold anything before and after.
        """
        ...

    def norm(
        self, x: Tensor, cu_seqlens: Tensor, norm: nn.LayerNorm, offset: Tensor | None
    ) -> Tensor:
        """`norm(x + offset)`, (P, H), float32 inside; padding rows of `x` are read as zero.

        So padding stays finite where it matters, whatever attention left unwritten: kernels
        over-read keys and values.
        """
        ...

    def add_product_norm(
        self,
        x: Tensor,
        y: Tensor,
        linear: nn.Linear,
        cu_seqlens: Tensor,
        norm: nn.LayerNorm,
        offset: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`add_product`, and `norm` of the result."""
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        backend: str,
        schedule: Tensor | None,
    ) -> Tensor:
        """`varlen_attention`, (P, heads, D); padding rows may stay unwritten."""
        ...

    def rotate_heads(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q and k rotated in float32, and v: (P, heads, D) each, out of the fused (P, 3 H)."""
        ...

    def gelu(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """The exact (erf) GELU of (P, width), row-wise; padding rows may stay unwritten."""
        ...


def kernels(name: str) -> Kernels:
    """One of `KERNELS`; `triton` is imported when it is first asked for."""
    assert name in KERNELS, name
    form: Kernels = importlib.import_module(f"m3compile.kernels.{name}_form").FORM
    return form
