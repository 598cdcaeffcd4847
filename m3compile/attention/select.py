"""Choosing a backend at build time: the fastest installed one that proves right."""

from __future__ import annotations

import itertools
import math
import statistics

import torch
from torch import Tensor

from m3compile.attention.backends import LARGE_ROWS, implementation, run_on_cuda
from m3compile.attention.reference import attend_segments
from m3compile.config.backends import BackendFacts, candidates
from m3compile.errors import DependencyError, OperationError

# FlashAttention in bf16 lands near 3e-3 of fp32; an error of boundaries or scale is of order 1.
_SELF_CHECK_ERROR = 2e-2

# A run on either side of where an implementation may change its kernel.
_CHECKED_ROWS = (2048, LARGE_ROWS + 256)
# Segment lengths in rows that candidates are timed on: a photo, a page, thumbnails, a document.
_TIMED = ((1024,), (4096,), (256,) * 16, (LARGE_ROWS,))
# Slots of the default segment table: some backends pay for unused ones.
_SLOTS = 128
_CALLS = 10


def choose_backend(
    name: str, device: str, dtype: str, *, captured: bool, num_heads: int, head_dim: int
) -> tuple[str, str]:
    """Resolve a backend's name to one implementation.

    On a GPU every installed candidate is checked against plain fp32 attention, and the fastest of
    those that pass is taken.

    Args:
        name: what the user asked for, `auto` included.
        device, dtype: where and in what it will run.
        captured: whether CUDA graphs will be captured.
        num_heads, head_dim: of the tower.

    Returns:
        The implementation's name, and a sentence saying why it was chosen.

    Raises:
        ConfigError: no implementation of that name can serve; with the reason.
        OperationError: those that could are not installed, or none proved right.
    """
    found = candidates(name, device, dtype, captured=captured)
    if device == "cpu":
        return found[0].name, "the one that runs on cpu"
    times: dict[str, list[float]] = {}
    reasons: list[str] = []
    for facts in found:
        try:
            times[facts.name] = _check_and_time(facts, dtype, captured, num_heads, head_dim)
        except (DependencyError, OperationError, RuntimeError) as error:
            reasons.append(f"{facts.name}: {str(error).splitlines()[0]}")
    if not times:
        raise OperationError(f"no attention backend for {name} works here: " + "; ".join(reasons))
    # The geometric mean: a backend is as good as it is at every size, not at the slowest.
    best = min(times, key=lambda key: math.prod(times[key]))
    shown = ", ".join(
        f"{key} {' / '.join(f'{value:.0f}' for value in values)} us"
        for key, values in times.items()
    )
    rejected = f"; not usable: {'; '.join(reasons)}" if reasons else ""
    return best, f"fastest that passed its self-check ({shown}{rejected})"


def _check_and_time(
    facts: BackendFacts, dtype: str, captured: bool, num_heads: int, head_dim: int
) -> list[float]:
    """Microseconds of a call at each of `_TIMED`; OperationError where the result is wrong."""
    implementation(facts.name)
    for rows in _CHECKED_ROWS:
        q, k, v, cu_seqlens = self_check_inputs(rows, num_heads, head_dim, getattr(torch, dtype))
        got = run_on_cuda(q, k, v, cu_seqlens, facts.name)
        expected = attend_segments(q.float(), k.float(), v.float(), cu_seqlens)
        error = float((got.float() - expected).norm() / expected.norm())
        if not error <= _SELF_CHECK_ERROR:
            raise OperationError(
                f"differs from plain attention by {error:.1e}; allowed: {_SELF_CHECK_ERROR:.0e}"
            )
    return [
        _time(facts.name, lengths, captured, num_heads, head_dim, getattr(torch, dtype))
        for lengths in _TIMED
    ]


def _time(
    backend: str,
    lengths: tuple[int, ...],
    captured: bool,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> float:
    """Median microseconds of one call; captured, since launching from Python would drown it."""
    num_rows = sum(lengths)
    q, k, v = torch.randn(3, num_rows, num_heads, head_dim, device="cuda", dtype=dtype).unbind(0)
    ends = torch.full((_SLOTS + 1,), num_rows, dtype=torch.int32)
    ends[: len(lengths) + 1] = torch.tensor([0, *itertools.accumulate(lengths)])
    cu_seqlens = ends.cuda()

    def calls() -> None:
        for _ in range(_CALLS):
            run_on_cuda(q, k, v, cu_seqlens, backend, False)

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
