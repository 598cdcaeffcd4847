"""What replays cost where no artifact was measured: a cost model, or times from a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from m3compile.buckets import RouteTimes
from m3compile.config.build import MAX_TOKENS
from m3compile.config.shown import shown
from m3compile.errors import InputError, InputNotFoundError

# Milliseconds on an H200 in bf16, for N patches: 1.0 + 0.0031 N + 3.3e-7 sum(len^2) over the
# segments. A token is four patches.
BASE_MS = 1.0
LINEAR_MS = 4 * 0.0031
ATTENTION_MS = 4 * 4 * 3.3e-7
# The same host launches the kernels of an uncaptured run in no less than this.
LAUNCH_MS = 9.07
# Uncaptured over captured at the exact size: 1.057, 1.083 and 0.994 at 576, 1,296 and 4,096 tokens.
EXACT_OVER_REPLAY = 1.045

# The model is linear, so that interpolation between any points gives it back.
_POINTS = (1, 64, 256, 576, 1296, 4096, MAX_TOKENS)


def h200_times() -> RouteTimes:
    """The cost model of the full-size encoder on an H200."""
    return _with_model(_POINTS, [_full(tokens) for tokens in _POINTS])


def read_times(path: str | Path) -> RouteTimes:
    """Times from a JSON file.

    `{"64": 2.2, "256": 4.4}` gives milliseconds of a replay in a bucket of that many tokens, filled
    by one image. The part of it that is attention, and what the same size takes uncaptured, are
    taken from the cost model. A file with the keys of `RouteTimes`, as in an artifact's manifest
    under `times`, says all of it.

    Raises:
        InputNotFoundError: there is no such file.
        InputError: it cannot be read or says something else.
    """
    try:
        document = msgspec.json.decode(Path(path).read_bytes())
    except FileNotFoundError:
        raise InputNotFoundError(f"times file {path} does not exist") from None
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"times file {path} cannot be read: {reason}") from None
    if not isinstance(document, dict) or not document:
        raise InputError(
            f"times file {path} holds {shown(document)}; expected {{tokens: milliseconds}}"
        )
    if document.keys() & set(RouteTimes.__struct_fields__):
        try:
            return msgspec.convert(document, RouteTimes)
        except msgspec.ValidationError as error:
            raise InputError(f"times file {path}: {error}") from None
    pairs = sorted(_pair(path, key, value) for key, value in document.items())
    tokens = [pair[0] for pair in pairs]
    if len(set(tokens)) < len(tokens):
        raise InputError(f"times file {path} gives a number of tokens twice")
    return _with_model(tokens, [pair[1] for pair in pairs])


def _pair(path: str | Path, key: str, value: object) -> tuple[int, float]:
    is_tokens = key.isdecimal() and len(key) < 9 and 1 <= int(key) <= MAX_TOKENS
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_tokens or not is_number or not 0 < float(str(value)) < math.inf:
        raise InputError(
            f"times file {path} has {shown(key)}: {shown(value)}; expected tokens from 1 to "
            f"{MAX_TOKENS}, and milliseconds above 0"
        )
    return int(key), float(str(value))


def _full(tokens: int) -> float:
    return BASE_MS + LINEAR_MS * tokens + ATTENTION_MS * tokens**2


def _with_model(tokens: Sequence[int], full_ms: Sequence[float]) -> RouteTimes:
    """Times of filled buckets, split as the cost model splits its own at that size."""
    linear = [
        ms * (1 - ATTENTION_MS * budget**2 / _full(budget))
        for budget, ms in zip(tokens, full_ms, strict=True)
    ]
    return RouteTimes(
        budgets=tuple(tokens),
        linear_ms=tuple(linear),
        full_ms=tuple(full_ms),
        exact_ms=tuple(max(LAUNCH_MS, EXACT_OVER_REPLAY * ms) for ms in full_ms),
    )
