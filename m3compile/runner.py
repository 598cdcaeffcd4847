"""The device's side of an encoder: buckets, buffers, and one run after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from m3compile.errors import OperationError
from m3compile.graph import Bucket, CalledBucket
from m3compile.program import Program
from m3compile.staging import InputStage, RunRing, Segment


class DeviceRunner:
    """Runs a program at its budgets. It has no lock: one call at a time.

    Runs share buffers and the graphs' memory, so each starts after the one before, whatever
    streams they come from.

    Args:
        program: bound to its weights.
        device, dtype: the program's.
        ladder: budgets in tokens, increasing.
        patch_dim: columns of `pixel_values`.
        max_segments: slots of the segment table.
        capture: `load`, `lazy` or `never`.
        on_bucket: told the number of buckets ready and in all, while they are made.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        dtype: torch.dtype,
        ladder: tuple[int, ...],
        *,
        patch_dim: int,
        max_segments: int,
        capture: str,
        on_bucket: Callable[[int, int], None] | None = None,
    ) -> None:
        self._program = program
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._capture = capture
        self._buckets: dict[int, Bucket] = {}
        self.capture_ms = 0.0
        self._num_ooms = self._count_ooms()
        with self._modes():
            with self._failing("making the input buffers"):
                self._stage = InputStage(4 * ladder[-1], patch_dim, max_segments, dtype, device)
            self._ring = RunRing(max_segments, device)
            if self._is_cuda:
                # One stream for every uncaptured run: the allocator keeps a cache a stream. And
                # one for captures alone, where cuBLAS then has no workspace yet and takes it from
                # the graphs' pool: outside of it, others may clear it while graphs still use it.
                self._stream = torch.cuda.Stream(device)
                self._capture_stream = torch.cuda.Stream(device)
                self._pool = torch.cuda.graph_pool_handle()
                self._last_run = torch.cuda.Event()
                self._last_stream = 0
                # The weights may still be under way, on the stream of whoever loaded them.
                torch.cuda.synchronize(device)
            if capture != "lazy":
                started = time.perf_counter()
                self._make_buckets(ladder, on_bucket)
                self.capture_ms = 1000 * (time.perf_counter() - started)

    def _modes(self) -> AbstractContextManager[Any]:
        """The caller's modes are not ours: what is made in inference mode, say, cannot be written
        to outside of it, and buffers outlive a call."""
        elsewhere = self._is_cuda and torch.cuda.current_device() != self._device.index
        if not elsewhere and not torch.is_inference_mode_enabled():
            return torch.no_grad()
        modes = ExitStack()
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        if elsewhere:
            modes.enter_context(torch.cuda.device(self._device))
        return modes

    def run(
        self,
        budget: int | None,
        segments: Sequence[Segment],
        sources: Sequence[Tensor],
        tokens: int,
        items: list[int],
        call: int,
    ) -> Tensor:
        """One run, ordered on the current stream; the host does not wait for it.

        Args:
            budget: the bucket in tokens, or None for the exact shape, uncaptured.
            segments: (t, h, w) of every segment, of `tokens` in all.
            sources: `4 * tokens` rows end to end, of any float dtype, on the host or a device.
            items: the item of every segment, and
            call: the number of the call, for the count of non-finite items.

        Returns:
            (tokens, O), fresh memory.

        Raises:
            OperationError: the device failed, or has too little memory.
        """
        with self._modes():
            bucket = self._bucket(budget)
            slot = self._ring.slot()
            try:
                if self._is_cuda:
                    # Its number alone: making a stream object takes time, here before a replay.
                    stream = torch._C._cuda_getCurrentRawStream(self._device.index)
                    if stream != self._last_stream:
                        torch.cuda.current_stream().wait_event(self._last_run)
                try:
                    self._stage.write_segments(segments, slot)
                    rows = self._stage.write_rows(sources, 4 * tokens)
                    if bucket is None:
                        embeddings, is_nonfinite = self._call(rows, self._stage.segments)
                    else:
                        embeddings, is_nonfinite = bucket.run()
                    embeddings = embeddings[:tokens]
                    if self._is_cuda:
                        embeddings = embeddings.clone()
                    slot.flags.copy_(is_nonfinite, non_blocking=True)
                    slot.expect(items, call)
                finally:
                    # On a lost device these fail too, also for what an earlier run did.
                    if slot.done is not None:
                        slot.done.record()
                        self._last_run, self._last_stream = slot.done, stream
                    self._ring.advance()
            except RuntimeError as error:
                raise self._failure(error, f"running {tokens} tokens") from error
            return embeddings

    def prepare_run(
        self, budget: int | None, segments: Sequence[Segment], pixel_values: Tensor
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """A run alone, without a copy in or out; to be repeated on the current stream.

        Arguments as `run`, `pixel_values` (P, patch_dim) with at most the rows of the bucket. The
        result is not the caller's to keep, and what is returned is of no use after the next run.
        """
        with self._modes():
            bucket = self._bucket(budget)
            self.wait()
            # A copy: the next run's are compared with these, and the list is the caller's.
            self._stage.write_segments(list(segments), self._ring.slot())
            rows = self._stage.write_rows([pixel_values], len(pixel_values))
            self.wait()
            if bucket is None:
                bucket = CalledBucket(self._call, rows, self._stage.segments)
            return bucket.run

    def _bucket(self, budget: int | None) -> Bucket | None:
        if budget is not None and budget not in self._buckets:
            self.wait()
            self._make_buckets([budget])
        return self._buckets[budget] if budget is not None else None

    def _make_buckets(
        self, budgets: Sequence[int], on_bucket: Callable[[int, int], None] | None = None
    ) -> None:
        """Warm up and capture, largest budget first. Nothing may be under way."""
        rows, segments = self._stage.pixel_values, self._stage.segments
        descending = sorted(budgets, reverse=True)
        if self._capture == "never":
            for budget in descending:
                self._buckets[budget] = CalledBucket(self._call, rows[: 4 * budget], segments)
            return
        # A bucket must never see more segments than it has rows.
        self._stage.clear_segments()
        self.wait()
        # Lazy set-up, such as loading kernels, is not capturable.
        with torch.cuda.stream(self._stream):
            for budget in descending:
                with self._failing(f"warming up budget {budget}"):
                    self._program(rows[: 4 * budget], segments)
        self.wait()
        with torch.cuda.stream(self._capture_stream):
            for done, budget in enumerate(descending, 1):
                with self._failing(f"capturing budget {budget}"):
                    self._buckets[budget] = self._program.capture(
                        rows[: 4 * budget], segments, self._pool
                    )
                if on_bucket is not None:
                    on_bucket(done, len(descending))

    def _call(self, rows: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """The program, uncaptured. On CUDA its result is to be copied before the next run."""
        if not self._is_cuda:
            return self._program(rows, segments)
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            result = self._program(rows, segments)
        caller.wait_stream(self._stream)
        return result

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._failure(error, doing) from error

    def _failure(self, error: RuntimeError, doing: str) -> OperationError:
        """What failed and how much memory there is: the program's own error does not say."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # A compiled program passes on that an allocation failed, but not why.
        is_memory = isinstance(error, torch.OutOfMemoryError)
        is_memory = is_memory or self._count_ooms() > self._num_ooms
        self._num_ooms = self._count_ooms()
        what = "out of device memory" if is_memory else "the program failed"
        return OperationError(
            f"{what} while {doing} on {self._device}{self._free_memory()}: {lines[0]}"
        )

    def _count_ooms(self) -> int:
        """Allocations on the device that failed so far, in this process."""
        if not self._is_cuda:
            return 0
        stats: dict[str, int] = torch.cuda.memory_stats(self._device)
        return stats.get("num_ooms", 0)

    def _free_memory(self) -> str:
        if not self._is_cuda:
            return ""
        try:
            free, total = torch.cuda.mem_get_info(self._device)
        except RuntimeError:
            return ", which no longer answers"
        return (
            f" with {free / 1e9:.1f} of {total / 1e9:.1f} GB free (fewer or smaller budgets, or "
            "capture: lazy, need less)"
        )

    def nonfinite_items(self, wait: bool) -> int:
        """Items so far that had a non-finite pixel; of runs under way only with `wait`."""
        return self._ring.total(wait)

    @property
    def num_graphs(self) -> int:
        return sum(bucket.is_graph for bucket in self._buckets.values())

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Wait for the runs under way and drop program, graphs and buffers."""
        self.wait()
        self._buckets.clear()
        del self._program, self._stage
