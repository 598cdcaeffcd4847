"""Getting a run's inputs to its buffers, and its non-finite flags back, without a wait.

On CUDA the host writes small pinned blocks, in rings guarded by events: a later call must not
overwrite what an earlier copy still reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

_TABLE_SLOTS = 32
_PIXEL_SLOTS = 2


class PinnedRing:
    """Pinned blocks of one shape, handed out in turn.

    `take` returns a block no earlier copy still reads; `give` marks it as read by the work on the
    current stream so far.
    """

    def __init__(self, slots: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._blocks = [torch.zeros(shape, dtype=dtype, pin_memory=True) for _ in range(slots)]
        self._events: list[torch.cuda.Event | None] = [None] * slots
        self._next = 0

    def take(self) -> Tensor:
        event = self._events[self._next]
        if event is not None:
            event.synchronize()
        return self._blocks[self._next]

    def give(self) -> None:
        event = self._events[self._next]
        if event is None:
            event = self._events[self._next] = torch.cuda.Event()
        event.record()
        self._next = (self._next + 1) % len(self._blocks)


class InputStage:
    """The input buffers that all buckets of an encoder share, and the way into them.

    Args:
        num_rows: patch rows of the largest bucket.
        patch_dim: columns of `pixel_values`.
        max_segments: slots of the segment table.
        dtype, device: the program's.
    """

    def __init__(
        self, num_rows: int, patch_dim: int, max_segments: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.pixel_values = torch.zeros((num_rows, patch_dim), dtype=dtype, device=device)
        self.segments = torch.zeros((max_segments, 3), dtype=torch.int32, device=device)
        self._tables: PinnedRing | None = None
        self._pixels: PinnedRing | None = None
        if device.type == "cuda":
            self._tables = PinnedRing(_TABLE_SLOTS, (max_segments, 3), torch.int32)

    def write_segments(self, segments: Sequence[tuple[int, int, int]]) -> None:
        """Fill the table; unused slots become zero."""
        block = self.segments if self._tables is None else self._tables.take()
        block.zero_()
        block[: len(segments)] = torch.tensor(segments, dtype=torch.int32)
        if self._tables is not None:
            self.segments.copy_(block, non_blocking=True)
            self._tables.give()

    def write_rows(self, sources: Sequence[Tensor]) -> None:
        """Copy the sources, one after the other, to the start of the shared rows."""
        count = sum(len(source) for source in sources)
        self._copy(sources, self.pixel_values[:count])

    def fresh_rows(self, sources: Sequence[Tensor]) -> Tensor:
        """The sources as one new tensor, for a run at its exact shape."""
        count = sum(len(source) for source in sources)
        rows = torch.empty(
            (count, self.pixel_values.shape[1]),
            dtype=self.pixel_values.dtype,
            device=self.pixel_values.device,
        )
        self._copy(sources, rows)
        return rows

    def _copy(self, sources: Sequence[Tensor], target: Tensor) -> None:
        on_host = all(source.device.type == "cpu" for source in sources)
        if self._tables is not None and on_host and len(target) <= len(self.pixel_values):
            # Through pinned memory, also from a caller's pinned tensor: the caller may write to it
            # as soon as the call returns.
            if self._pixels is None:
                shape = tuple(self.pixel_values.shape)
                self._pixels = PinnedRing(_PIXEL_SLOTS, shape, self.pixel_values.dtype)
            block = self._pixels.take()[: len(target)]
            _gather(sources, block)
            target.copy_(block, non_blocking=True)
            self._pixels.give()
        else:
            # Beyond the ladder a run takes tens of milliseconds; a blocking copy hides in it.
            _gather(sources, target)


def _gather(sources: Sequence[Tensor], target: Tensor) -> None:
    """Copy the sources, one after the other, into `target`; waits where the host is involved."""
    if len(sources) > 1 and all(source.device == target.device for source in sources):
        torch.cat(list(sources), out=target)
        return
    offset = 0
    for source in sources:
        part = target[offset : offset + len(source)]
        part.copy_(source, non_blocking=source.device == target.device)
        offset += len(source)


class NonfiniteCounter:
    """Counts items that had a non-finite pixel, an item of several runs once.

    On CUDA the flags come back by an asynchronous copy a run, and are read when `total` is asked
    for or when the ring is full.
    """

    def __init__(self, max_segments: int, device: torch.device) -> None:
        self._total = 0
        self._call = -1
        self._counted: set[int] = set()
        self._pending: deque[tuple[torch.cuda.Event, Tensor, list[int], int]] = deque()
        self._spare: list[tuple[torch.cuda.Event, Tensor]] = []
        if device.type == "cuda":
            self._spare = [
                (torch.cuda.Event(), torch.zeros(max_segments, dtype=torch.bool, pin_memory=True))
                for _ in range(_TABLE_SLOTS)
            ]

    def add(self, is_nonfinite: Tensor, items: list[int], call: int) -> None:
        """Note a run's flags (S,) bool; `items` has the item of every used slot."""
        if is_nonfinite.device.type == "cpu":
            self._count(is_nonfinite, items, call)
            return
        while self._pending and (not self._spare or self._pending[0][0].query()):
            self._settle()
        event, flags = self._spare.pop()
        flags.copy_(is_nonfinite, non_blocking=True)
        event.record()
        self._pending.append((event, flags, items, call))

    def total(self) -> int:
        """The count so far; waits for the runs that are under way."""
        while self._pending:
            self._settle()
        return self._total

    def _settle(self) -> None:
        event, flags, items, call = self._pending.popleft()
        event.synchronize()
        self._count(flags, items, call)
        self._spare.append((event, flags))

    def _count(self, flags: Tensor, items: list[int], call: int) -> None:
        if not flags.any():
            return
        if call != self._call:
            self._call = call
            self._counted.clear()
        found = {item for item, flag in zip(items, flags.tolist(), strict=False) if flag}
        self._total += len(found - self._counted)
        self._counted |= found
