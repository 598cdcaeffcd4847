"""How the captured peer packs items and lays out its sequences, over plain ints.

As vLLM's encoder runner does: smallest items first, greedily, up to its largest budget; padding
becomes one more sequence behind the items' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from m3compile.buckets import budget_for

# Powers of two, and most items in one replay: that runner's own.
PEER_BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)
PEER_MAX_ITEMS = 16


class PeerBatch(NamedTuple):
    """Items, by index and smallest first, that share a replay; budget None for an eager run."""

    items: tuple[int, ...]
    tokens: int
    budget: int | None


def pack_ascending(
    item_tokens: Sequence[int],
    item_segments: Sequence[int],
    budgets: Sequence[int] = PEER_BUDGETS,
    max_items: int = PEER_MAX_ITEMS,
    max_segments: int = 128,
) -> list[PeerBatch]:
    """Pack items in ascending order of their tokens.

    Args:
        item_tokens, item_segments: of every item.
        budgets: increasing.
        max_items, max_segments: most of them in one replay.

    Returns:
        Batches that hold every item once. An item that fits no budget is a batch of its own.
    """
    batches: list[PeerBatch] = []
    current: list[int] = []
    tokens = segments = 0
    for item in sorted(range(len(item_tokens)), key=item_tokens.__getitem__):
        fits = (
            len(current) < max_items
            and tokens + item_tokens[item] <= budgets[-1]
            and segments + item_segments[item] <= max_segments
        )
        if current and not fits:
            batches.append(_batch(current, tokens, segments, budgets, max_segments))
            current, tokens, segments = [], 0, 0
        current.append(item)
        tokens += item_tokens[item]
        segments += item_segments[item]
    if current:
        batches.append(_batch(current, tokens, segments, budgets, max_segments))
    return batches


def _batch(
    items: list[int], tokens: int, segments: int, budgets: Sequence[int], max_segments: int
) -> PeerBatch:
    budget = budget_for(tokens, budgets) if segments <= max_segments else None
    return PeerBatch(tuple(items), tokens, budget)


def sequence_ends(lengths: Sequence[int], num_rows: int, num_sequences: int) -> list[int]:
    """Cumulative lengths `(num_sequences + 2,)` from 0: sequences, padding, then empty ones.

    Args:
        lengths: rows of the real sequences, at most `num_sequences`.
        num_rows: rows of the bucket; those behind the last real sequence are one more sequence.
        num_sequences: slots of real sequences.
    """
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    assert len(lengths) <= num_sequences, "more sequences than slots"
    assert ends[-1] <= num_rows, "more rows than the bucket has"
    return ends + [num_rows] * (num_sequences + 2 - len(ends))
