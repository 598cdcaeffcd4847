"""What the hardware allows at best: work counted from the tower's sizes, over measured ceilings.

Knows no torch. Only matrix products and attention are counted as work; the passes between them
could all hide behind those.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from m3compile.config import TowerConfig


class Work(msgspec.Struct, frozen=True):
    """One forward's least work.

    Attributes:
        flops: floating-point operations of the matrix products and of attention.
        num_bytes: every weight, every pixel and every embedding moved once.
    """

    flops: int
    num_bytes: int


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """The time below which this hardware cannot do the work.

    Attributes:
        flops, num_bytes: as `Work`.
        ms: the longer one of the two.
        bound: which one that is, `matrix rate` or `bandwidth`.
    """

    flops: int
    num_bytes: int
    ms: float
    bound: str


def count_parameters(config: TowerConfig) -> int:
    """Weights and biases of the tower, the projector and the patch merge."""
    hidden, inner = config.hidden_size, config.intermediate_size
    wide, output = config.projector_hidden_size, config.output_size
    norm = 2 * hidden
    layer = (
        2 * norm
        + _linear(hidden, 3 * hidden)
        + _linear(hidden, hidden)
        + _linear(hidden, inner)
        + _linear(inner, hidden)
    )
    return (
        config.patch_dim * hidden
        + norm
        + config.num_hidden_layers * layer
        + _linear(hidden, wide)
        + _linear(wide, output)
        + _linear(config.merged_size, wide)
        + _linear(wide, output)
    )


def _linear(in_size: int, out_size: int) -> int:
    return in_size * out_size + out_size


def count_work(config: TowerConfig, segment_patches: Sequence[int], itemsize: int) -> Work:
    """The work of one forward without padding.

    Args:
        segment_patches: patch rows of every segment; attention stays within one.
        itemsize: bytes of a weight, a pixel and an embedding's element.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    wide, output = config.projector_hidden_size, config.output_size
    patches = sum(segment_patches)
    tokens = patches // config.patches_per_token
    per_patch = (
        config.patch_dim * hidden
        + config.num_hidden_layers * (4 * hidden * hidden + 2 * hidden * inner)
        + hidden * wide
        + wide * output
    )
    per_token = config.merged_size * wide + wide * output
    # Scores and their product with the values: two products of len x len x hidden.
    attention = config.num_hidden_layers * 2 * hidden * sum(count**2 for count in segment_patches)
    elements = count_parameters(config) + patches * config.patch_dim + tokens * config.output_size
    return Work(
        flops=2 * (patches * per_patch + tokens * per_token + attention),
        num_bytes=elements * itemsize,
    )


def floor_of(work: Work, flops_per_s: float, bytes_per_s: float) -> Floor:
    """The floor of some work on hardware with these ceilings."""
    matrix_ms = 1000 * work.flops / flops_per_s
    bandwidth_ms = 1000 * work.num_bytes / bytes_per_s
    return Floor(
        flops=work.flops,
        num_bytes=work.num_bytes,
        ms=max(matrix_ms, bandwidth_ms),
        bound="matrix rate" if matrix_ms >= bandwidth_ms else "bandwidth",
    )
