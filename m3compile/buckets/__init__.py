"""Token budgets: the ladder of buckets, and the plan of which runs serve a call.

Plain ints only. Units: a token is one output row, four patch rows; a segment is what attention
stays within; an item is one image or clip, of one or more segments.
"""

from m3compile.buckets.ladder import budget_for, default_ladder, segments_of
from m3compile.buckets.planner import Planner
from m3compile.buckets.runs import Piece, Run
from m3compile.buckets.times import RouteTimes

__all__ = [
    "Piece",
    "Planner",
    "RouteTimes",
    "Run",
    "budget_for",
    "default_ladder",
    "segments_of",
]
