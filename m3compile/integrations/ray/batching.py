"""Requests of several clients as one call of `Encoder.encode`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from ray import serve
from torch import Tensor

from m3compile.batch import Batch, check_batch
from m3compile.config import TowerConfig
from m3compile.errors import InputError, M3CompileError, OperationError
from m3compile.grids import Grid
from m3compile.runtime import Encoder

# Normalised pixels are of order 1; the encoder itself overflows far beyond this.
_LARGEST_PIXEL = 1e4


class Job(NamedTuple):
    """A request that was checked by itself: it cannot break a batch that it joins.

    Attributes:
        rows: (t*h*w, patch_dim) of every item, on the host.
        grids: of every item.
        tokens: output tokens of every item.
    """

    rows: Sequence[Tensor]
    grids: Sequence[Grid]
    tokens: Sequence[int]


# (tokens, width) of all items end to end.
Outcome: TypeAlias = Tensor | M3CompileError


def make_job(pixel_values: Any, grid_thw: Any, config: TowerConfig) -> Job:
    """Arguments and errors as `Encoder.encode`."""
    batch = check_batch(pixel_values, grid_thw, config)
    return Job(_item_rows(batch), batch.grids, [sum(tokens) for tokens in batch.segment_tokens])


def _item_rows(batch: Batch) -> Sequence[Tensor]:
    if isinstance(batch.rows, list):
        return batch.rows
    sizes = [end - start for start, end in zip(batch.starts, batch.starts[1:], strict=False)]
    return batch.rows.split(sizes) if sizes else []


def encode_jobs(encoder: Encoder, jobs: Sequence[Job]) -> list[Outcome]:
    """Encode jobs together; one by one, should that fail, so that no job fails for another.

    Returns:
        For every job its items' (tokens, width) end to end on the host, or why it has none: items
        with a non-finite pixel are an error here, since they would be NaN.
    """
    try:
        return _encode_together(encoder, jobs)
    except (M3CompileError, RuntimeError) as error:
        if len(jobs) == 1:
            return [error if isinstance(error, M3CompileError) else OperationError(str(error))]
    return [outcome for job in jobs for outcome in encode_jobs(encoder, [job])]


def _encode_together(encoder: Encoder, jobs: Sequence[Job]) -> list[Outcome]:
    results = encoder.encode(
        [rows for job in jobs for rows in job.rows], [grid for job in jobs for grid in job.grids]
    )
    if not results:
        width = encoder.manifest.tower.output_size
        return [torch.zeros((0, width), dtype=encoder.dtype) for _ in jobs]
    # One copy from the device, and one look for NaN: an item that has any has it in whole rows.
    joined = _on_host(torch.cat(results))
    parts = joined.split([sum(job.tokens) for job in jobs])
    if not joined[:, 0].isnan().any():
        return list(parts)
    return [_check_finite(job, part) for job, part in zip(jobs, parts, strict=True)]


def _on_host(rows: Tensor) -> Tensor:
    if not rows.is_cuda:
        return rows
    # torch keeps pinned memory for the next batch, once nothing refers to it; fresh pageable memory
    # costs a fault a page.
    copy = torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)
    # Not the whole stream: another batch may be on it by now.
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(rows.device))
    copied.synchronize()
    return copy


def _check_finite(job: Job, embeddings: Tensor) -> Outcome:
    found_items = embeddings.split(list(job.tokens))
    for index, (given, found) in enumerate(zip(job.rows, found_items, strict=True)):
        # torch does not look for NaN in every kind of 8 bits.
        rows = given.float() if given.itemsize == 1 else given
        if not rows.isfinite().all():
            return InputError(
                f"item {index}: pixel_values has a value that is not finite; expected numbers"
            )
        if found[:, 0].isnan().any():
            largest = float(rows.abs().max())
            if largest > _LARGEST_PIXEL:
                return InputError(
                    f"item {index}: pixel_values reaches {largest:.3g}, too large for the encoder; "
                    "expected normalised pixels"
                )
            return OperationError(f"item {index}: its embeddings are NaN, its pixels are not")
    return embeddings


class Batcher:
    """Joins the jobs that wait for the encoder, by tokens, with `ray.serve.batch`.

    That forms a batch as soon as one job is there, or a fixed time later, whether the encoder is
    free or not. Here jobs are held back while it is busy, so what arrives meanwhile becomes one
    batch, and a job that finds it free waits for nobody, unless others are being received.

    Args:
        run: encodes a batch.
        max_tokens: of a batch; a job with more runs alone.
        wait_s: how long a batch waits where `others` says that more are being received.
        others: whether other requests are on their way to this batcher.
        concurrent: batches that may be under way at once; the encoder is busy from there on.
    """

    def __init__(
        self,
        run: Callable[[list[Job]], Awaitable[list[Outcome]]],
        max_tokens: int,
        wait_s: float,
        others: Callable[[], bool],
        concurrent: int = 1,
    ) -> None:
        self._wait_s = wait_s
        self._others = others
        self._num_running = 0
        self._free = asyncio.Event()
        self._free.set()
        _silence_size_warning()

        async def run_held(jobs: list[Job]) -> list[Outcome]:
            self._num_running += 1
            if self._num_running >= concurrent:
                self._free.clear()
            try:
                return await run(jobs)
            finally:
                self._num_running -= 1
                self._free.set()

        def size(jobs: list[Job]) -> int:
            # Serve refuses a job above the limit; at the limit it lets nothing join it.
            return min(sum(max(1, sum(job.tokens)) for job in jobs), self._limit(jobs))

        self._max_tokens = max_tokens
        self._submit = serve.batch(
            max_batch_size=max_tokens,
            batch_wait_timeout_s=0.0,
            max_concurrent_batches=concurrent,
            batch_size_fn=size,
        )(run_held)

    def _limit(self, jobs: list[Job]) -> int:
        return self._max_tokens + (len(jobs) > 1)

    async def encode(self, job: Job) -> Tensor:
        """Raises: InputError, OperationError: as `encode_jobs` reports for the job."""
        await self._free.wait()
        self._submit.set_batch_wait_timeout_s(self._wait_s if self._others() else 0.0)
        outcome: Outcome = await self._submit(job)
        if isinstance(outcome, M3CompileError):
            raise outcome
        return outcome


def _silence_size_warning() -> None:
    """Serve takes `max_batch_size` for a number of requests and warns that they are too many."""
    logging.getLogger("ray.serve").addFilter(
        lambda record: "`max_batch_size` (" not in record.getMessage()
    )
