"""What a plan is made of."""

from __future__ import annotations

import msgspec


class Piece(msgspec.Struct, frozen=True):
    """Consecutive segments of one item that go through one run.

    Attributes:
        item: index in the call.
        first_segment, num_segments: which of the item's segments.
        tokens: of those segments.
        attention: their predicted attention in milliseconds; 0.0 without measured times.
    """

    item: int
    first_segment: int
    num_segments: int
    tokens: int
    attention: float = 0.0


class Run(msgspec.Struct, frozen=True):
    """One replay, or one uncaptured call.

    Attributes:
        budget: the bucket in tokens, or None for the exact shape, uncaptured.
        tokens: real tokens; `budget - tokens` is padding.
        pieces: in input order.
    """

    budget: int | None
    tokens: int
    pieces: tuple[Piece, ...]
