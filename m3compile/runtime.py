"""`Encoder`: whatever images arrive, packed into buckets and run.

A process that serves imports this and never the tower or the builder.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from m3compile.artifact import Manifest
from m3compile.batch import Batch, PlannedRun, check_batch, plan_run, run_sources
from m3compile.buckets import Piece, Planner, Run
from m3compile.config.build import MAX_TOKENS
from m3compile.errors import EncoderClosedError, InputError
from m3compile.grids import Grid
from m3compile.plan.served import LadderGauge, ServedRuns
from m3compile.program import Program
from m3compile.runner import DeviceRunner
from m3compile.traffic import TrafficRecorder

_COUNTS = ("calls", "items", "replays", "exact_runs", "real_tokens", "padded_tokens")
# Plans that are kept, of calls with at most so many segments.
_REMEMBERED_PLANS, _REMEMBERED_SEGMENTS = 1024, 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Encoder:
    """A loaded artifact, ready: every budget of its ladder is captured.

    Made by `m3compile.load`. One lock serialises calls, so any number of threads may share an
    encoder; on CUDA they may do so from any streams.

    Args:
        manifest: of the artifact.
        program: the compiled program, bound to `weights`.
        weights: the one device copy, released by `close()`.
        device: where it runs.
        ladder: budgets, if not the manifest's.
        max_items: most segments in one run, if fewer than the segment table has slots.
        capture: `load`, `lazy` or `never`; None for the manifest's.
        on_bucket: told the number of buckets ready and in all, while they are captured.
        recorder: told the sizes of every call of `encode`; closed with the encoder.
    """

    def __init__(
        self,
        manifest: Manifest,
        program: Program,
        weights: Mapping[str, Tensor],
        device: torch.device,
        *,
        ladder: tuple[int, ...] | None = None,
        max_items: int | None = None,
        capture: str | None = None,
        on_bucket: Any = None,
        recorder: TrafficRecorder | None = None,
    ) -> None:
        self.manifest = manifest
        self.device = device
        self.dtype = _DTYPES[manifest.dtype]
        self.ladder = ladder or manifest.ladder
        self.capture = "never"
        if device.type == "cuda":
            self.capture = capture or manifest.build.capture
        self._config = manifest.tower
        self._lock = threading.Lock()
        self._closed = False
        self._release = weakref.finalize(self, _release_weights, list(weights.values()))
        # Times measured for the manifest's own ladder say nothing about another one.
        times = manifest.times if ladder is None and self.capture != "never" else None
        # The table has two slots at least, also where a run is to hold one item.
        self.max_segments = min(max_items or manifest.build.max_items, manifest.max_segments)
        self._planner = Planner(self.ladder, self.max_segments, times)
        self._plans: dict[tuple[Grid, ...], list[PlannedRun]] = {}
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._by_budget = dict.fromkeys(self.ladder, 0)
        self._served = ServedRuns()
        self._gauge = LadderGauge(self.ladder, times)
        self._recorder = recorder
        if recorder is not None:
            # Also where a process ends without `close()`.
            weakref.finalize(self, recorder.close)
        self._runner = DeviceRunner(
            program,
            device,
            self.dtype,
            self.ladder,
            patch_dim=self._config.patch_dim,
            max_segments=manifest.max_segments,
            capture=self.capture,
            on_bucket=on_bucket,
        )

    def encode(self, pixel_values: Tensor | list[Tensor], grid_thw: Any) -> list[Tensor]:
        """Encode a batch of images and clips.

        On CUDA the work is ordered on the caller's current stream; the call returns without
        waiting for it, unless `grid_thw` is on the device.

        Args:
            pixel_values: (N, patch_dim) rows of all items end to end, or a list of one tensor an
                item; any float dtype, on the host or the device.
            grid_thw: (num_items, 3) ints: a tensor or nested lists; patches along time, height and
                width of every item.

        Returns:
            One (t*h*w / 4, width) tensor an item, in input order, on the encoder's device and in
            its dtype. They are the caller's: no later call changes them. A segment that had a
            non-finite pixel is NaN throughout.

        Raises:
            InputError: the batch breaks a rule; names the item. Nothing has run.
            EncoderClosedError: after `close()`.
        """
        batch = check_batch(pixel_values, grid_thw, self._config)
        with self._lock:
            self._check_open()
            planned = self._plan(batch)
            self._count_call(batch)
            try:
                return self._encode(batch, planned)
            finally:
                # Once the runs are under way, so that it costs them nothing; failed ones count too.
                self._served.add([each.run for each in planned])
                if self._recorder is not None:
                    self._recorder.add(batch.grids)

    def _plan(self, batch: Batch) -> list[PlannedRun]:
        """The runs of a batch; those of earlier calls of the same sizes are remembered."""
        key = tuple(batch.grids)
        planned = self._plans.get(key)
        if planned is None:
            runs = self._planner.plan(batch.segment_tokens)
            planned = [plan_run(batch, run) for run in runs]
            if sum(map(len, batch.segments)) <= _REMEMBERED_SEGMENTS:
                if len(self._plans) == _REMEMBERED_PLANS:
                    self._plans.clear()
                self._plans[key] = planned
        return planned

    def encode_at(
        self, pixel_values: Tensor | list[Tensor], grid_thw: Any, budget: int | None
    ) -> list[Tensor]:
        """Encode a batch as one run of a given bucket, or uncaptured at its exact shape (None).

        For judges, who must see every bucket. Arguments, result and errors as `encode`.

        Raises:
            InputError: also where the batch does not fit, or the ladder has no such bucket.
        """
        batch = check_batch(pixel_values, grid_thw, self._config)
        pieces = tuple(
            Piece(item, 0, len(tokens), sum(tokens))
            for item, tokens in enumerate(batch.segment_tokens)
        )
        run = Run(budget, sum(piece.tokens for piece in pieces), pieces)
        num_segments = sum(piece.num_segments for piece in pieces)
        if budget is not None and budget not in self.ladder:
            raise InputError(f"there is no bucket of {budget} tokens; the ladder is {self.ladder}")
        if run.tokens > (budget or MAX_TOKENS) or num_segments > self.max_segments:
            raise InputError(
                f"a batch of {run.tokens} tokens in {num_segments} segments does not fit into one "
                f"run of {budget or MAX_TOKENS} tokens and {self.max_segments} segments"
            )
        with self._lock:
            self._check_open()
            self._count_call(batch)
            return self._encode(batch, [plan_run(batch, run)] if pieces else [])

    def _check_open(self) -> None:
        if self._closed:
            raise EncoderClosedError("the encoder is closed")

    def _count_call(self, batch: Batch) -> None:
        self._counts["calls"] += 1
        self._counts["items"] += len(batch.grids)

    def _encode(self, batch: Batch, runs: list[PlannedRun]) -> list[Tensor]:
        parts: list[list[tuple[int, Tensor]]] = [[] for _ in batch.grids]
        for planned in runs:
            run = planned.run
            # Fresh memory (tokens, O).
            embeddings = self._runner.run(
                run.budget,
                planned.segments,
                run_sources(batch, planned),
                run.tokens,
                planned.items,
                self._counts["calls"],
            )
            self._count(run)
            offset = 0
            for piece in run.pieces:
                rows = embeddings[offset : offset + piece.tokens]
                parts[piece.item].append((piece.first_segment, rows))
                offset += piece.tokens
        return [found[0][1] if len(found) == 1 else _joined(found) for found in parts]

    def _count(self, run: Run) -> None:
        self._counts["real_tokens"] += run.tokens
        if run.budget is None:
            self._counts["exact_runs"] += 1
        else:
            self._counts["replays"] += 1
            self._counts["padded_tokens"] += run.budget - run.tokens
            self._by_budget[run.budget] += 1

    def stats(self) -> dict[str, Any]:
        """What was served since the load. On CUDA it waits for the runs under way.

        Returns:
            calls, items, replays, exact_runs, real_tokens, padded_tokens (tokens of padding that
            were computed beside the real ones), nonfinite_items, and by_budget (replays of every
            budget of the ladder); ladder, how far that is from the best one for what `encode` was
            given (see `LadderGauge.report`); and, if traffic is recorded, traffic (see
            `TrafficRecorder.state`).
        """
        with self._lock:
            stats: dict[str, Any] = self._totals(wait=True)
            stats["by_budget"] = dict(self._by_budget)
            if self._recorder is not None:
                self._recorder.flush()
                stats["traffic"] = self._recorder.state()
            served = self._served.counts()
        return {**stats, "ladder": self._gauge.report(served)}

    def counts(self, wait: bool = True) -> dict[str, int]:
        """The counters of `stats`, calls to nonfinite_items, at little cost.

        Args:
            wait: for the runs under way; else non-finite items of those come with a later count.
        """
        with self._lock:
            return self._totals(wait)

    def _totals(self, wait: bool) -> dict[str, int]:
        """See `counts`; under the lock."""
        return {**self._counts, "nonfinite_items": self._runner.nonfinite_items(wait)}

    def prepare_run(
        self,
        budget: int | None,
        segments: Sequence[tuple[int, int, int]],
        pixel_values: Tensor,
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """A run alone, without a copy in or out, to be repeated on the current stream; for judges.

        The result is not the caller's to keep, and what is returned is of no use after the next
        `encode`.

        Args:
            budget: the bucket, or None for the uncaptured program at P rows.
            segments: (t, h, w) of every segment, that together have at most P rows.
            pixel_values: (P, patch_dim), at most the rows of the bucket.

        Raises:
            EncoderClosedError: after `close()`.
        """
        with self._lock:
            self._check_open()
            return self._runner.prepare_run(budget, segments, pixel_values)

    @property
    def capture_ms(self) -> float:
        """Wall-clock milliseconds that warming up and capturing took during the load."""
        return self._runner.capture_ms

    @property
    def num_graphs(self) -> int:
        """CUDA graphs held."""
        return self._runner.num_graphs

    def close(self) -> None:
        """Wait for the runs under way and release graphs, buffers and weights; may be repeated.

        Results that were handed out stay valid.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._recorder is not None:
                self._recorder.close()
            self._runner.close()
            self._release()
            if self.device.type == "cuda":
                # Else the allocator keeps it from other users of the device.
                torch.cuda.empty_cache()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _joined(parts: list[tuple[int, Tensor]]) -> Tensor:
    """An item of several runs, from its rows by first segment."""
    # The caller may write to it outside of its mode, as to an item of one run.
    with torch.inference_mode(False):
        return torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0])])


def _release_weights(weights: list[Tensor]) -> None:
    """Give the device memory back: the compiled package never drops its references."""
    for tensor in weights:
        if tensor.device.type == "cuda":
            tensor.untyped_storage().resize_(0)
