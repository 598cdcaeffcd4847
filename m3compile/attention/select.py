"""Choosing a backend at build time: the fastest installed one that proves right."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from m3compile.attention.backends import LARGE_ROWS, implementation, run_on_cuda
from m3compile.attention.fp8 import fp8_attention
from m3compile.attention.reference import attend_segments
from m3compile.config.backends import BackendFacts, candidates
from m3compile.config.scales import FP8_MAX
from m3compile.errors import DependencyError, OperationError

# FlashAttention in bf16 lands near 3e-3 of fp32; an error of boundaries or scale is of order 1.
_SELF_CHECK_ERROR = 2e-2
# e4m3 has three bits behind the point, and no backend keeps the softmax's weights in more.
_FP8_SELF_CHECK_ERROR = 0.12
# Scales for numbers of a normal distribution.
_FP8_SCALE = 6 / FP8_MAX

# A run on either side of where an implementation may change its kernel.
_CHECKED_ROWS = (2048, LARGE_ROWS + 256)
# Segment lengths in rows that candidates are timed on: a photo, a page, thumbnails, a document.
_TIMED = ((1024,), (4096,), (256,) * 16, (LARGE_ROWS,))
# Slots of the default segment table: some backends pay for unused ones.
_SLOTS = 128
_CALLS = 10


class Choice(NamedTuple):
    """A backend that was chosen.

    Attributes:
        name: of the implementation.
        reason: a sentence saying why.
        microseconds: of a call at each of the sizes it was timed on; empty on a CPU.
    """

    name: str
    reason: str
    microseconds: tuple[float, ...]

    def is_faster_than(self, other: Choice) -> bool:
        """By the geometric mean: a backend is as good as it is at every size."""
        return math.prod(self.microseconds) < math.prod(other.microseconds)


def choose_backend(
    name: str, device: str, dtype: str, *, captured: bool, num_heads: int, head_dim: int
) -> Choice:
    """Resolve a backend's name to one implementation.

    On a GPU every installed candidate is checked against plain fp32 attention, and the fastest of
    those that pass is taken.

    Args:
        name: what the user asked for, `auto` included.
        device, dtype: where and in what it will run; `fp8` for e4m3 with static scales.
        captured: whether CUDA graphs will be captured.
        num_heads, head_dim: of the tower.

    Raises:
        ConfigError: no implementation of that name can serve; with the reason.
        OperationError: those that could are not installed, or none proved right.
    """
    found = candidates(name, device, dtype, captured=captured)
    if device == "cpu":
        return Choice(found[0].name, "the one that runs on cpu", ())
    times: dict[str, list[float]] = {}
    reasons: list[str] = []
    for facts in found:
        try:
            times[facts.name] = _check_and_time(facts, dtype, captured, num_heads, head_dim)
        except (DependencyError, OperationError, RuntimeError) as error:
            reasons.append(f"{facts.name}: {str(error).splitlines()[0]}")
    if not times:
        raise OperationError(f"no attention backend for {name} works here: " + "; ".join(reasons))
    # As `Choice.is_faster_than`.
    best = min(times, key=lambda key: math.prod(times[key]))
    shown = ", ".join(
        f"{key} {' / '.join(f'{value:.0f}' for value in values)} us"
        for key, values in times.items()
    )
    rejected = f"; not usable: {'; '.join(reasons)}" if reasons else ""
    reason = f"fastest that passed its self-check ({shown}{rejected})"
    return Choice(best, reason, tuple(times[best]))


def _check_and_time(
    facts: BackendFacts, dtype: str, captured: bool, num_heads: int, head_dim: int
) -> list[float]:
    """Microseconds of a call at each of `_TIMED`; OperationError where the result is wrong."""
    implementation(facts.name)
    allowed = _FP8_SELF_CHECK_ERROR if dtype == "fp8" else _SELF_CHECK_ERROR
    # What is quantised is made in bfloat16, as a product makes it.
    source = torch.bfloat16 if dtype == "fp8" else getattr(torch, dtype)
    for rows in _CHECKED_ROWS:
        q, k, v, cu_seqlens = self_check_inputs(rows, num_heads, head_dim, source)
        got = _call(facts.name, dtype, q, k, v, cu_seqlens, True)()
        expected = attend_segments(q.float(), k.float(), v.float(), cu_seqlens)
        real = int(cu_seqlens[-1]) if dtype == "fp8" else rows
        error = float((got.float() - expected)[:real].norm() / expected.norm())
        if not error <= allowed:
            raise OperationError(
                f"differs from plain attention by {error:.1e}; allowed: {allowed:.0e}"
            )
    return [
        _time(facts.name, dtype, source, lengths, captured, num_heads, head_dim)
        for lengths in _TIMED
    ]


def _call(
    backend: str,
    dtype: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    zero_padding: bool,
) -> Callable[[], Tensor]:
    """A call of the op in a dtype; fp8 has no choice about padding, which it leaves as it is."""
    if dtype != "fp8":
        return lambda: run_on_cuda(q, k, v, cu_seqlens, backend, zero_padding)
    scales = torch.full((3, 1), _FP8_SCALE, device=q.device)
    q, k, v = (
        (part / _FP8_SCALE).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn) for part in (q, k, v)
    )
    return lambda: fp8_attention(q, k, v, scales, cu_seqlens, backend)


def _time(
    backend: str,
    dtype: str,
    source: torch.dtype,
    lengths: tuple[int, ...],
    captured: bool,
    num_heads: int,
    head_dim: int,
) -> float:
    """Median microseconds of one call; captured, since launching from Python would drown it."""
    num_rows = sum(lengths)
    q, k, v = torch.randn(3, num_rows, num_heads, head_dim, device="cuda", dtype=source).unbind(0)
    ends = torch.full((_SLOTS + 1,), num_rows, dtype=torch.int32)
    ends[: len(lengths) + 1] = torch.tensor([0, *itertools.accumulate(lengths)])
    call = _call(backend, dtype, q, k, v, ends.cuda(), False)

    def calls() -> None:
        for _ in range(_CALLS):
            call()

    stream = torch.cuda.Stream()
    run = calls
    with torch.cuda.stream(stream):
        calls()
        stream.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                calls()
            run = graph.replay
        samples = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            samples.append(1000 * start.elapsed_time(end) / _CALLS)
    return statistics.median(samples)


def self_check_inputs(
    num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v and uneven segments: empty ones, and padding of NaN behind the last."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (3, num_rows, num_heads, head_dim)
    q, k, v = torch.randn(shape, generator=generator, device="cuda").to(dtype).unbind(0)
    bounds = [0, 4, 4, 260, 324, num_rows // 2, num_rows - 100, num_rows - 100]
    # Only q: kernels over-read keys and values past a segment's end, so callers keep those finite.
    q[bounds[-1] :] = float("nan")
    return q, k, v, torch.tensor(bounds, dtype=torch.int32, device="cuda")
