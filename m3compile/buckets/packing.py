"""The search for the cheapest runs: pieces go whole into runs of bounded tokens and segments.

Bin packing with bins of many sizes. A lower bound says how far from the best a candidate can be
at most; the search stops at the first one that is near enough.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate

from m3compile.buckets.runs import Piece
from m3compile.buckets.times import CostModel

# A plan whose cost is within this factor of the lower bound is not improved any further.
_NEAR_ENOUGH = 1.01
# Up to this many pieces every partition is tried, and up to that many the slower heuristics.
_MAX_PIECES_EXACT = 7
_MAX_PIECES_SEARCHED = 40
# Bounds of the fast heuristic: smaller sizes of run that are tried, pieces placed over all of
# them, and open runs looked at for one piece.
_MAX_CAPS = 5
_MAX_PLACEMENTS = 5_000
_MAX_LOOKS = 16

Groups = list[list[Piece]]


def pack(pieces: Sequence[Piece], model: CostModel, max_segments: int) -> Groups:
    """The pieces of each run; the cheapest split found. Every piece fits the largest bucket."""
    tokens = sum(piece.tokens for piece in pieces)
    segments = sum(piece.num_segments for piece in pieces)
    attention = sum(piece.attention for piece in pieces)
    num_runs = max(-(-tokens // model.ladder[-1]), -(-segments // max_segments))
    enough = (model.floor(tokens, num_runs) + attention) * _NEAR_ENOUGH
    best: Groups = []
    best_cost = float("inf")
    for groups in _candidates(pieces, tokens, segments, model, max_segments):
        cost = sum(_price(group, model) for group in groups)
        # A tie keeps the earlier candidate, which has the fuller runs.
        if cost < best_cost:
            best, best_cost = groups, cost
        if best_cost <= enough:
            break
    return best


def _candidates(
    pieces: Sequence[Piece], tokens: int, segments: int, model: CostModel, max_segments: int
) -> Iterator[Groups]:
    ladder = model.ladder
    if tokens <= ladder[-1] and segments <= max_segments:
        yield [list(pieces)]
    descending = sorted(pieces, key=_tokens, reverse=True)
    top = min(bisect_left(ladder, tokens), len(ladder) - 1)
    yield _best_fit(descending, ladder[top], max_segments)
    if len(pieces) <= _MAX_PIECES_EXACT:
        yield _best_partition(descending, model, max_segments)
        return
    if len(pieces) <= _MAX_PIECES_SEARCHED:
        yield _best_fill(descending, model, max_segments)
        yield _best_cuts(descending, model, max_segments)
    num_caps = min(_MAX_CAPS, _MAX_PLACEMENTS // len(pieces))
    for cap in reversed(ladder[max(0, top - num_caps) : top]):
        yield _best_fit(descending, cap, max_segments)
    yield [[piece] for piece in pieces]


def _tokens(piece: Piece) -> int:
    return piece.tokens


def _price(group: Sequence[Piece], model: CostModel) -> float:
    return model.price(
        sum(piece.tokens for piece in group), sum(piece.attention for piece in group)
    )[0]


def _best_fit(descending: Sequence[Piece], cap: int, max_segments: int) -> Groups:
    """Each piece, largest first, into the fullest open run that holds it; runs end at `cap`."""
    groups: Groups = []
    slots: list[int] = []
    room: list[tuple[int, int]] = []  # tokens left and index of every open run, ascending
    smallest = descending[-1].tokens
    fewest = min(piece.num_segments for piece in descending)
    for piece in descending:
        at = bisect_left(room, (piece.tokens,))
        for look in range(at, min(at + _MAX_LOOKS, len(room))):
            left, run = room[look]
            if slots[run] >= piece.num_segments:
                del room[look]
                break
        else:
            # A piece over the cap has a run to itself.
            left, run = cap, len(groups)
            groups.append([])
            slots.append(max_segments)
        groups[run].append(piece)
        slots[run] -= piece.num_segments
        left -= piece.tokens
        if left >= smallest and slots[run] >= fewest:
            insort(room, (left, run))
    return groups


def _best_fill(descending: Sequence[Piece], model: CostModel, max_segments: int) -> Groups:
    """Run by run: the budget and the pieces that fill it best, seen with what stays behind.

    Each run takes the largest piece left. Bit n of a sum set says that some of the others have
    n tokens together.
    """
    groups: Groups = []
    left = list(descending)
    tokens_left = sum(piece.tokens for piece in left)
    keep = (2 << model.ladder[-1]) - 1
    while left:
        first = left[0].tokens
        sums = [1]
        for piece in left[1:]:
            sums.append((sums[-1] | sums[-1] << piece.tokens) & keep)
        best_cost, target = float("inf"), 0
        for budget, replay in zip(model.ladder, model.replays, strict=True):
            if budget < first:
                continue
            added = (sums[-1] & ((2 << (budget - first)) - 1)).bit_length() - 1
            cost = replay + model.cover(tokens_left - first - added)
            if cost < best_cost:
                best_cost, target = cost, added
        group, rest = [left[0]], []
        slots = max_segments - left[0].num_segments
        for index in range(len(left) - 1, 0, -1):
            piece = left[index]
            # Small pieces stay behind where larger ones make the same sum.
            needed = not sums[index - 1] >> target & 1
            if needed and piece.tokens <= target and piece.num_segments <= slots:
                group.append(piece)
                target -= piece.tokens
                slots -= piece.num_segments
            else:
                rest.append(piece)
        groups.append(group)
        tokens_left -= sum(piece.tokens for piece in group)
        left = rest[::-1]
    return groups


def _best_cuts(descending: Sequence[Piece], model: CostModel, max_segments: int) -> Groups:
    """The cheapest way to cut the sorted pieces into consecutive groups."""
    tokens = [0, *accumulate(piece.tokens for piece in descending)]
    segments = [0, *accumulate(piece.num_segments for piece in descending)]
    attention = [0.0, *accumulate(piece.attention for piece in descending)]
    costs = [0.0]
    starts = [0]
    for end in range(1, len(descending) + 1):
        best_cost, best_start = float("inf"), end - 1
        for start in range(end - 1, -1, -1):
            inside = tokens[end] - tokens[start]
            if inside > model.ladder[-1] or segments[end] - segments[start] > max_segments:
                break
            cost = costs[start] + model.price(inside, attention[end] - attention[start])[0]
            if cost < best_cost:
                best_cost, best_start = cost, start
        costs.append(best_cost)
        starts.append(best_start)
    groups: Groups = []
    end = len(descending)
    while end:
        groups.append(list(descending[starts[end] : end]))
        end = starts[end]
    return groups


def _best_partition(pieces: Sequence[Piece], model: CostModel, max_segments: int) -> Groups:
    """The cheapest partition, over all of them: one run per subset, by dynamic programming."""
    count = len(pieces)
    prices = [float("inf")] * (1 << count)
    sums = [(0, 0, 0.0)]
    for members in range(1, 1 << count):
        highest = members.bit_length() - 1
        piece = pieces[highest]
        tokens, segments, attention = sums[members ^ (1 << highest)]
        tokens += piece.tokens
        segments += piece.num_segments
        attention += piece.attention
        sums.append((tokens, segments, attention))
        if tokens <= model.ladder[-1] and segments <= max_segments:
            prices[members] = model.price(tokens, attention)[0]
    costs = [0.0] * (1 << count)
    chosen = [0] * (1 << count)
    for members in range(1, 1 << count):
        # The run that holds the highest piece, fullest first, and then the best of what is left.
        highest = 1 << (members.bit_length() - 1)
        rest = members ^ highest
        others = rest
        best_cost, best_run = float("inf"), members
        while True:
            cost = prices[others | highest] + costs[rest ^ others]
            if cost < best_cost:
                best_cost, best_run = cost, others | highest
            if not others:
                break
            others = (others - 1) & rest
        costs[members] = best_cost
        chosen[members] = best_run
    groups: Groups = []
    members = (1 << count) - 1
    while members:
        run = chosen[members]
        groups.append([pieces[index] for index in range(count) if run >> index & 1])
        members ^= run
    return groups
