"""The bounds of `verify`, once for the whole project.

The error of an item is `||a - b|| / ||b||` over all of its tokens, `b` being eager fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one dtype must hold.

    Attributes:
        relative_error: largest error of an item, or None where only the eager ratio binds.
        eager_ratio: largest error of an item over the error of eager in the same dtype and run.
        cosine: smallest cosine of any token with eager fp32, or None.
    """

    relative_error: float | None = None
    eager_ratio: float | None = None
    cosine: float | None = None


def tightest(first: Bounds, second: Bounds) -> Bounds:
    """What holds both."""
    return Bounds(
        relative_error=_pick(min, first.relative_error, second.relative_error),
        eager_ratio=_pick(min, first.eager_ratio, second.eager_ratio),
        cosine=_pick(max, first.cosine, second.cosine),
    )


def _pick(choose: Callable[..., float], *values: float | None) -> float | None:
    return choose((value for value in values if value is not None), default=None)


BOUNDS: dict[str, Bounds] = {
    "float32": Bounds(relative_error=1e-5),
    "bfloat16": Bounds(eager_ratio=1.25, cosine=0.999),
}

# Of an artifact in fp8, unless its build says otherwise.
FP8_MAX_ERROR = 0.12
FP8_MIN_COSINE = 0.99
