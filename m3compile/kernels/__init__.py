"""The passes around the matrix products, in three forms with one meaning.

`plain` is PyTorch code that any compiler fuses as it likes: the CPU's form, and the reference.
`triton` are hand-written kernels for CUDA that run at the card's bandwidth, where the generated
ones reach a third of it. `few_rows` is the same for runs of at most a few hundred rows, which are
bound by latency. A traced program carries the compiled kernels; a loader needs no Triton.

A pass whose result goes into an `Fp8Linear` is asked for `fp8`, and returns `Fp8Rows`.

Shape legend: P patch rows of a run (padding included), S slots of the segment table, H hidden
size, D head_dim, R rotary pairs of a head.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor, nn

from m3compile.kernels.fp8 import Fp8Linear, Fp8Rows, Rows

KERNELS = ("plain", "triton", "few_rows")

Linear: TypeAlias = nn.Linear | Fp8Linear


class Located(NamedTuple):
    """What a run's rows are, once per forward.

    Attributes:
        cu_seqlens: (S + 1,) int32, cumulative patch rows of the segments, from 0.
        segment_of_row: (P,) integers, the slot a row belongs to; the last slot for padding.
        cos, sin: (P, R) float32.
        tiles: (T, 3) int32, of every tile of queries its first row and its segment's first and
            last + 1; zeros behind them. None where attention finds its own.
    """

    cu_seqlens: Tensor
    segment_of_row: Tensor
    cos: Tensor
    sin: Tensor
    tiles: Tensor | None = None


class Kernels(Protocol):
    """What every form offers. `cu_seqlens` (S + 1,) int32 ends with the number of real rows."""

    def locate(self, segments: Tensor, num_rows: int, inverse_frequency: Tensor) -> Located:
        """Bounds, slots and rotary tables of a run: see `m3compile.geometry`."""
        ...

    def enter(self, x: Tensor, norm: nn.LayerNorm, located: Located) -> tuple[Tensor, Tensor]:
        """`norm(x)` (P, H) with padding and non-finite rows zeroed, and the slots that had one.

        The slots are (S,) bool. Zeroed before attention, where rows would meet.
        """
        ...

    def residual_offsets(self, linears: Sequence[Linear]) -> list[Tensor] | None:
        """What the residual lacks before the first and after each addition: (H,) float32 each.

        `add_product` may leave the biases (H,) out; their sums so far are added where the residual
        is read. None where it adds them itself.
        """
        ...

    def add_product(self, x: Tensor, y: Rows, linear: Linear) -> Tensor:
        """`x + linear(y)`, (P, H), perhaps without the bias and perhaps in the memory of `x`.

        Padding rows may hold anything before and after.
        """
        ...

    def norm(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        norm: nn.LayerNorm,
        offset: Tensor | None,
        fp8: bool = False,
    ) -> Rows:
        """`norm(x + offset)`, (P, H), float32 inside; padding rows of `x` are read as zero.

        So padding stays finite where it matters, whatever attention left unwritten: kernels
        over-read keys and values.
        """
        ...

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
        """`add_product`, and `norm` of the result."""
        ...

    def add_offset(self, x: Tensor, offset: Tensor | None) -> Tensor:
        """`x + offset`, (P, H)."""
        ...

    def rotate_heads(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q and k rotated in float32, and v: (P, heads, D) each, out of the fused (P, 3 H)."""
        ...

    def rotate_heads_fp8(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, scales: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `rotate_heads`, in e4m3: q, k and v over their (3, 1) float32 `scales`."""
        ...

    def attend(
        self,
        qkv: Tensor,
        located: Located,
        num_heads: int,
        backend: str,
        schedule: Tensor | None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Rotary attention over the fused (P, 3 H), to (P, H); padding rows may stay unwritten.

        In fp8 where there are `scales`, as `rotate_heads_fp8`.
        """
        ...

    def gelu(self, x: Tensor, cu_seqlens: Tensor, fp8: bool = False) -> Rows:
        """The exact (erf) GELU of (P, width), row-wise; padding rows may stay unwritten."""
        ...

    def quantise(self, x: Tensor) -> Fp8Rows:
        """(P, width) to fp8: see `m3compile.kernels.fp8.quantise_rows`."""
        ...


def kernels(name: str) -> Kernels:
    """One of `KERNELS`; `triton` is imported when it is first asked for."""
    assert name in KERNELS, name
    form: Kernels = importlib.import_module(f"m3compile.kernels.{name}_form").FORM
    return form
