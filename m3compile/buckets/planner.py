"""The plan of one call: which runs serve its items.

Without measured times a replay in bucket b costs `80 + b` tokens; see `times`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from m3compile.buckets.packing import pack
from m3compile.buckets.runs import Piece, Run
from m3compile.buckets.times import CostModel, RouteTimes
from m3compile.config.build import MAX_PATCHES, MAX_TOKENS
from m3compile.errors import ConfigError, InputError

# How many sizes of run are tried for an item that has to be cut.
_MAX_CUT_CAPS = 6


class Planner:
    """Plans calls for one ladder. Holds no state of a call: any thread may use it.

    Attributes:
        ladder: budgets in tokens, increasing.
        max_segments: most segments that share one run.
    """

    def __init__(
        self, ladder: Sequence[int], max_segments: int, times: RouteTimes | None = None
    ) -> None:
        """
        Args:
            ladder: budgets in tokens, increasing.
            max_segments: most segments that share one run.
            times: what was measured; None to count tokens instead.

        Raises:
            ConfigError: the ladder is empty, not positive or not increasing, or goes over the
                tokens of one run; or `max_segments` is not positive.
        """
        if (
            not ladder
            or not 1 <= ladder[0] <= ladder[-1] <= MAX_TOKENS
            or any(low >= high for low, high in pairwise(ladder))
        ):
            raise ConfigError(
                f"budgets is {list(ladder)}; allowed: increasing, from 1 to {MAX_TOKENS} tokens"
            )
        if max_segments < 1:
            raise ConfigError(f"max_items is {max_segments}; allowed: at least 1")
        self.ladder = tuple(ladder)
        self._model = CostModel(ladder, times)
        self._largest = ladder[-1]
        self.max_segments = max_segments

    def plan(self, items: Sequence[int | Sequence[int]]) -> list[Run]:
        """The runs that serve `items`, in the order to run them.

        Args:
            items: per item the tokens of its segments, each at least 1; a bare int is an item of
                one segment.

        Every segment of every item is in exactly one piece, and an item's pieces come in order.

        Raises:
            InputError: a segment is over the tokens of one run; names the item.
        """
        model, largest, max_segments = self._model, self._largest, self.max_segments
        runs: list[Run] = []
        pieces: list[Piece] = []
        for item, segments in enumerate(items):
            if isinstance(segments, int):
                segments = (segments,)
            count, tokens = len(segments), sum(segments)
            if tokens > largest or count > max_segments:
                cut, open_piece = self._cut(item, segments)
                runs += cut
                pieces += open_piece
            else:
                attention = sum(map(model.attention, segments)) if model.measured else 0.0
                pieces.append(Piece(item, 0, count, tokens, attention))
        if pieces:
            # The other pieces of an item that was cut have to come before its open one.
            runs += self._packed(pieces)
        return runs

    def cost(self, run: Run) -> float:
        """Predicted cost of a run: milliseconds with measured times, else in tokens."""
        attention = sum(piece.attention for piece in run.pieces)
        return self._model.cost(run.budget, run.tokens, attention)

    def _packed(self, pieces: list[Piece]) -> list[Run]:
        """Runs for pieces that each fit the largest bucket, ordered by their first item."""
        model = self._model
        tokens = sum(piece.tokens for piece in pieces)
        if tokens <= self._largest and (
            len(pieces) == 1
            or (
                tokens >= model.whole_from[bisect_left(model.ladder, tokens)]
                and sum(piece.num_segments for piece in pieces) <= self.max_segments
            )
        ):
            return [self._run(pieces)]
        groups = pack(pieces, model, self.max_segments)
        for group in groups:
            group.sort(key=_input_order)
        groups.sort(key=lambda group: group[0].item)
        return [self._run(group) for group in groups]

    def _run(self, pieces: Sequence[Piece]) -> Run:
        tokens = sum(piece.tokens for piece in pieces)
        _, budget = self._model.price(tokens, sum(piece.attention for piece in pieces))
        return Run(budget, tokens, tuple(pieces))

    def _cut(self, item: int, segments: Sequence[int]) -> tuple[list[Run], list[Piece]]:
        """Runs for an item that no bucket holds, and its last piece if others may join it."""
        worst = max(segments)
        if worst > MAX_TOKENS:
            raise InputError(
                f"item {item}: a segment has {worst} tokens ({4 * worst} patches); one run takes "
                f"at most {MAX_TOKENS} ({MAX_PATCHES}): use a smaller image, or smaller frames"
            )
        candidates = [
            self._pieces(item, segments, cap) for cap in self._model.ladder[-_MAX_CUT_CAPS:]
        ]
        pieces = min(
            reversed(candidates),
            key=lambda pieces: sum(
                self._model.price(piece.tokens, piece.attention)[0] for piece in pieces
            ),
        )
        open_piece = [pieces.pop()] if pieces[-1].tokens <= self._largest else []
        return [self._run([piece]) for piece in pieces], open_piece

    def _pieces(self, item: int, segments: Sequence[int], cap: int) -> list[Piece]:
        """Cut greedily into pieces of at most `cap` tokens; a segment over it stays alone."""
        pieces: list[Piece] = []
        first, tokens, attention = 0, 0, 0.0
        for index, segment in enumerate(segments):
            if index > first and (tokens + segment > cap or index - first == self.max_segments):
                pieces.append(Piece(item, first, index - first, tokens, attention))
                first, tokens, attention = index, 0, 0.0
            tokens += segment
            attention += self._model.attention(segment)
        pieces.append(Piece(item, first, len(segments) - first, tokens, attention))
        return pieces


def _input_order(piece: Piece) -> int:
    return piece.item
