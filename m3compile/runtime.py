"""`Encoder`: whatever images arrive, packed into buckets and run.

A process that serves imports this and never the tower or the builder.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from m3compile.artifact import Manifest
from m3compile.batch import Batch, check_batch, run_items, run_segments, run_sources
from m3compile.buckets import Piece, Planner, Run
from m3compile.config.build import MAX_TOKENS
from m3compile.errors import EncoderClosedError, InputError, OperationError
from m3compile.graph import Bucket, CalledBucket
from m3compile.program import Program
from m3compile.staging import InputStage, RunRing

_COUNTS = ("calls", "items", "replays", "exact_runs", "real_tokens", "padded_tokens")
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
    ) -> None:
        self.manifest = manifest
        self.device = device
        self._is_cuda = device.type == "cuda"
        self.dtype = _DTYPES[manifest.dtype]
        self.ladder = ladder or manifest.ladder
        self.capture = (capture or manifest.build.capture) if self._is_cuda else "never"
        self._config = manifest.tower
        self._program = program
        self._lock = threading.Lock()
        self._closed = False
        self._release = weakref.finalize(self, _release_weights, list(weights.values()))
        # Times measured for the manifest's own ladder say nothing about another one.
        times = manifest.times if ladder is None and self.capture != "never" else None
        self.max_segments = min(max_items or manifest.max_segments, manifest.max_segments)
        self._planner = Planner(self.ladder, self.max_segments, times)
        num_rows, num_slots = 4 * self.ladder[-1], manifest.max_segments
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._by_budget = dict.fromkeys(self.ladder, 0)
        self._buckets: dict[int, Bucket] = {}
        self.capture_ms = 0.0
        # What is made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False), torch.no_grad(), self._on_device():
            self._stage = InputStage(
                num_rows, self._config.patch_dim, num_slots, self.dtype, device
            )
            self._ring = RunRing(num_slots, device)
            if self._is_cuda:
                # One stream for every warm-up, capture and uncaptured run: the allocator keeps a
                # cache a stream.
                self._stream = torch.cuda.Stream(device)
                self._pool = torch.cuda.graph_pool_handle()
                self._last_run = torch.cuda.Event()
                self._last_stream = 0
                # The weights may still be under way, on the stream of whoever loaded them.
                torch.cuda.synchronize(device)
            if self.capture != "lazy":
                started = time.perf_counter()
                self._make_buckets(self.ladder, on_bucket)
                self.capture_ms = 1000 * (time.perf_counter() - started)

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self._is_cuda else nullcontext()

    def _make_buckets(
        self, budgets: Sequence[int], on_bucket: Callable[[int, int], None] | None = None
    ) -> None:
        """Warm up and capture, largest budget first. Nothing may be under way."""
        rows, segments = self._stage.pixel_values, self._stage.segments
        descending = sorted(budgets, reverse=True)
        if self.capture == "never":
            for budget in descending:
                self._buckets[budget] = CalledBucket(self._call, rows[: 4 * budget], segments)
            return
        with torch.cuda.stream(self._stream):
            # Attention may not see segments that a bucket does not hold.
            self._stage.clear_segments()
            for budget in descending:
                with self._failing(f"warming up budget {budget}"):
                    self._program(rows[: 4 * budget], segments)
            self._stream.synchronize()
            for done, budget in enumerate(descending, 1):
                with self._failing(f"capturing budget {budget}"):
                    self._buckets[budget] = self._program.capture(
                        rows[: 4 * budget], segments, self._pool
                    )
                if on_bucket is not None:
                    on_bucket(done, len(descending))

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """Say what failed and how much memory there is: the program's own error does not."""
        try:
            yield
        except RuntimeError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            is_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
            what = "out of device memory" if is_memory else "the program failed"
            raise OperationError(
                f"{what} while {doing} on {self.device}{self._free_memory()}: {lines[0]}"
            ) from error

    def _free_memory(self) -> str:
        if not self._is_cuda:
            return ""
        try:
            free, total = torch.cuda.mem_get_info(self.device)
        except RuntimeError:
            return ", which no longer answers"
        return (
            f" with {free / 1e9:.1f} of {total / 1e9:.1f} GB free (fewer or smaller budgets, or "
            "capture: lazy, need less)"
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
        return self._locked(batch, lambda: self._planner.plan(batch.segment_tokens))

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
        return self._locked(batch, lambda: [run] if pieces else [])

    def _locked(self, batch: Batch, plan: Callable[[], list[Run]]) -> list[Tensor]:
        # The caller's modes are not ours: buffers outlive them.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._closed:
                raise EncoderClosedError("the encoder is closed")
            runs = plan()
            self._counts["calls"] += 1
            self._counts["items"] += len(batch.grids)
            with self._on_device():
                return self._encode(batch, runs)

    def _encode(self, batch: Batch, runs: list[Run]) -> list[Tensor]:
        parts: list[list[tuple[int, Tensor]]] = [[] for _ in batch.grids]
        for run in runs:
            embeddings = self._run(batch, run)
            offset = 0
            for piece in run.pieces:
                rows = embeddings[offset : offset + piece.tokens]
                parts[piece.item].append((piece.first_segment, rows))
                offset += piece.tokens
        return [
            found[0][1] if len(found) == 1
            else torch.cat([rows for _, rows in sorted(found, key=lambda part: part[0])])
            for found in parts
        ]  # fmt: skip

    def _run(self, batch: Batch, run: Run) -> Tensor:
        """One run; the result (tokens, O) is fresh memory."""
        bucket = self._bucket(run.budget)
        slot = self._ring.take()
        if self._is_cuda:
            # The buffers and the pool are shared: this run starts after the last, on any stream.
            stream = torch.cuda.current_stream()
            if stream.cuda_stream != self._last_stream:
                stream.wait_event(self._last_run)
        try:
            with self._failing(f"running {run.tokens} tokens"):
                self._stage.write_segments(run_segments(batch, run), slot)
                rows = self._stage.write_rows(run_sources(batch, run), 4 * run.tokens)
                if bucket is None:
                    embeddings, is_nonfinite = self._call(rows, self._stage.segments)
                else:
                    embeddings, is_nonfinite = bucket.run()
                embeddings = embeddings[: run.tokens]
                if self._is_cuda:
                    embeddings = embeddings.clone()
                slot.flags.copy_(is_nonfinite, non_blocking=True)
        finally:
            if slot.done is not None:
                slot.done.record(stream)
                self._last_run, self._last_stream = slot.done, stream.cuda_stream
        slot.expect(run_items(run), self._counts["calls"])
        self._count(run)
        return embeddings

    def _bucket(self, budget: int | None) -> Bucket | None:
        if budget is not None and budget not in self._buckets:
            self._last_run.synchronize()
            self._make_buckets([budget])
        return self._buckets[budget] if budget is not None else None

    def _call(self, rows: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """The program, uncaptured. On CUDA its result is copied before the next run starts."""
        if not self._is_cuda:
            return self._program(rows, segments)
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            result = self._program(rows, segments)
        caller.wait_stream(self._stream)
        return result

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
            budget of the ladder).
        """
        with self._lock:
            return {
                **self._counts,
                "nonfinite_items": self._ring.total(),
                "by_budget": dict(self._by_budget),
            }

    def time_run(
        self,
        pixel_values: Tensor,
        segments: Sequence[tuple[int, int, int]],
        budget: int | None,
        repeats: int,
    ) -> list[float]:
        """Milliseconds of a run alone, without a copy in or out; for judges.

        On CUDA the device's time between two events, launching included where nothing is captured.

        Args:
            pixel_values: (P, patch_dim), at most the rows of the bucket.
            segments: (t, h, w) of every segment, that together have at most P rows.
            budget: the bucket, or None for the uncaptured program at P rows.
            repeats: how many runs are timed, after two that are not.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad(), self._on_device():
            bucket = self._bucket(budget)
            slot = self._ring.take()
            if self._is_cuda:
                torch.cuda.synchronize(self.device)
            self._stage.write_segments(segments, slot)
            rows = self._stage.write_rows([pixel_values], len(pixel_values))
            if bucket is None:
                bucket = CalledBucket(self._call, rows, self._stage.segments)
            samples = [self._time(bucket) for _ in range(repeats + 2)]
            return samples[2:]

    def _time(self, bucket: Bucket) -> float:
        if not self._is_cuda:
            started = time.perf_counter()
            bucket.run()
            return 1000 * (time.perf_counter() - started)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        bucket.run()
        end.record()
        end.synchronize()
        elapsed: float = start.elapsed_time(end)
        return elapsed

    @property
    def num_graphs(self) -> int:
        """CUDA graphs held."""
        return sum(bucket.is_graph for bucket in self._buckets.values())

    def close(self) -> None:
        """Wait for the runs under way and release graphs, buffers and weights; may be repeated.

        Results that were handed out stay valid.
        """
        with self._lock:
            if self._closed:
                return
            self._ring.total()
            self._closed = True
            if self._is_cuda:
                torch.cuda.synchronize(self.device)
            self._buckets.clear()
            del self._program, self._stage
            self._release()
            if self._is_cuda:
                # Else the allocator keeps it from other users of the device.
                torch.cuda.empty_cache()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _release_weights(weights: list[Tensor]) -> None:
    """Give the device memory back: the compiled package never drops its references."""
    for tensor in weights:
        if tensor.device.type == "cuda":
            tensor.untyped_storage().resize_(0)
