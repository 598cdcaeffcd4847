"""Getting a run's inputs to its buffers, and its non-finite flags back, without a wait.

On CUDA the host reads and writes small pinned blocks, in rings guarded by events: a later run must
not touch what an earlier copy still needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_RUN_SLOTS = 32
_PIXEL_SLOTS = 2

Segment = tuple[int, int, int]


class RunSlot:
    """One run under way: its segment table on the host, and its flags on their way back.

    Attributes:
        table: (S, 3) int32, pinned on CUDA.
        flags: (S,) bool, pinned on CUDA; the run's once `done` has passed.
        done: recorded behind the run; None on a CPU.
    """

    def __init__(self, table: Tensor, flags: Tensor, done: torch.cuda.Event | None) -> None:
        self.table = table
        self.flags = flags
        self.done = done
        self._rows = table.numpy()
        self._flags = flags.numpy()
        self._used = 0
        self._items: list[int] | None = None
        self._call = -1

    def write(self, segments: Sequence[Segment]) -> None:
        """Fill the table; unused slots become zero."""
        count = len(segments)
        if count:
            self._rows[:count] = segments
        if count < self._used:
            self._rows[count : self._used] = 0
        self._used = count

    def expect(self, items: list[int], call: int) -> None:
        """Flags will come; `items` has the item of every used slot."""
        self._items, self._call = items, call

    def is_done(self) -> bool:
        """Whether the run has passed."""
        return self.done is None or self.done.query()

    def nonfinite_items(self) -> tuple[int, set[int]]:
        """The call, and its items that had a non-finite pixel; waits for the run. Once a run."""
        if self.done is not None:
            self.done.synchronize()
        items, self._items = self._items, None
        if not items or not self._flags.any():
            return self._call, set()
        return self._call, {item for item, flag in zip(items, self._flags, strict=False) if flag}


class RunRing:
    """The slots of the latest runs, and the count of items that had a non-finite pixel.

    An item of several runs is counted once.
    """

    def __init__(self, max_segments: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        slots = _RUN_SLOTS if is_cuda else 1
        tables = torch.zeros(
            (slots, max_segments, 3), dtype=torch.int32, device="cpu", pin_memory=is_cuda
        )
        flags = torch.zeros(
            (slots, max_segments), dtype=torch.bool, device="cpu", pin_memory=is_cuda
        )
        self._slots = [
            RunSlot(table, flag, torch.cuda.Event() if is_cuda else None)
            for table, flag in zip(tables, flags, strict=True)
        ]
        self._next = 0
        self._total = 0
        self._call = -1
        self._counted: set[int] = set()

    def slot(self) -> RunSlot:
        """The next run's slot, which no earlier run needs any more."""
        return self._slots[self._next]

    def advance(self) -> None:
        """Make the slot after it the next; called once a run is under way, to cost it nothing."""
        self._next = (self._next + 1) % len(self._slots)
        self._settle(self._slots[self._next])

    def total(self, wait: bool = True) -> int:
        """The count so far; with `wait` that of the runs under way too, else up to them."""
        for slot in (*self._slots[self._next :], *self._slots[: self._next]):
            if not wait and not slot.is_done():
                break
            self._settle(slot)
        return self._total

    def _settle(self, slot: RunSlot) -> None:
        call, items = slot.nonfinite_items()
        if not items:
            return
        if call != self._call:
            self._call = call
            self._counted.clear()
        self._total += len(items - self._counted)
        self._counted |= items


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
        self._prefixes: dict[int, Tensor] = {}
        self._written: Sequence[Segment] | None = ()
        self._pixels: PinnedRing | None = None

    def write_segments(self, segments: Sequence[Segment], slot: RunSlot) -> None:
        """Put a run's segments into the shared table, by way of the run's slot."""
        if segments == self._written:
            return
        # Until the copy is under way, whatever interrupts it: the table may hold anything.
        self._written = None
        slot.write(segments)
        self.segments.copy_(slot.table, non_blocking=True)
        self._written = segments

    def clear_segments(self) -> None:
        """Empty the shared table: no row belongs to a segment."""
        self.segments.zero_()
        self._written = ()

    def write_rows(self, sources: Sequence[Tensor], count: int) -> Tensor:
        """Copy the sources, `count` rows end to end, to the start of the shared rows.

        Returns:
            (count, patch_dim): those rows, or fresh ones where they are more than the shared.
        """
        if count > len(self.pixel_values):
            target = self.pixel_values.new_empty((count, self.pixel_values.shape[1]))
            # Beyond the ladder a run takes tens of milliseconds; a blocking copy hides in it.
            _gather(sources, target)
            return target
        target = self._prefix(count)
        if target.is_cuda and not any(source.is_cuda for source in sources):
            # Through pinned memory, also from a caller's pinned tensor: the caller may write to it
            # as soon as the call returns.
            if self._pixels is None:
                self._pixels = PinnedRing(
                    _PIXEL_SLOTS, tuple(self.pixel_values.shape), target.dtype
                )
            block = self._pixels.take()[:count]
            _gather(sources, block)
            target.copy_(block, non_blocking=True)
            self._pixels.give()
        else:
            _gather(sources, target)
        return target

    def _prefix(self, count: int) -> Tensor:
        """The first rows of the shared ones; the views are kept, since making one takes time."""
        prefix = self._prefixes.get(count)
        if prefix is None:
            prefix = self._prefixes[count] = self.pixel_values[:count]
        return prefix


class PinnedRing:
    """Pinned blocks of one shape, handed out in turn.

    `take` returns a block no earlier copy still reads; `give` marks it as read by the work on the
    current stream so far.
    """

    def __init__(self, slots: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._blocks = [
            torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=True) for _ in range(slots)
        ]
        # An event that was never recorded has passed.
        self._events = [torch.cuda.Event() for _ in range(slots)]
        self._next = 0

    def take(self) -> Tensor:
        self._events[self._next].synchronize()
        return self._blocks[self._next]

    def give(self) -> None:
        self._events[self._next].record()
        self._next = (self._next + 1) % len(self._blocks)


def _gather(sources: Sequence[Tensor], target: Tensor) -> None:
    """Copy the sources, one after the other, into `target`; waits where the host is involved."""
    if len(sources) == 1:
        target.copy_(sources[0], non_blocking=sources[0].is_cuda and target.is_cuda)
        return
    # `cat` has no common dtype for some mixtures of float8.
    kinds = {(source.device, source.dtype) for source in sources}
    if len(kinds) == 1 and sources[0].device == target.device:
        torch.cat(list(sources), out=target)
        return
    offset = 0
    for source in sources:
        part = target[offset : offset + len(source)]
        part.copy_(source, non_blocking=source.is_cuda and target.is_cuda)
        offset += len(source)
