"""What is measured: our encoder, and its peers behind the same interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from m3compile.buckets import segments_of
from m3compile.runtime import Encoder
from m3compile.tower import Tower

Grid = tuple[int, int, int]


class Runner(Protocol):
    """Encodes batches.

    Attributes:
        name: in tables.
    """

    name: str

    def encode(self, pixel_values: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """(N, patch_dim) on the device to one (t*h*w / 4, O) tensor an item, in order."""
        ...

    def prepare(
        self, pixel_values: Tensor, grids: Sequence[Grid], budget: int | None = None
    ) -> tuple[Callable[[], object], int | None] | None:
        """The device work of one run of a batch, to be repeated, and its bucket.

        Args:
            budget: a bucket to use; None for the one the runner would take.

        Returns:
            None where the runner would need several runs, or has no such bucket.
        """
        ...

    def padding(self) -> tuple[int, int]:
        """Real tokens and tokens of padding of everything encoded so far."""
        ...


class EncoderRunner:
    """Our encoder, or one of another artifact."""

    def __init__(self, encoder: Encoder, name: str) -> None:
        self.name = name
        self.encoder = encoder

    def encode(self, pixel_values: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        return self.encoder.encode(pixel_values, grids)

    def prepare(
        self, pixel_values: Tensor, grids: Sequence[Grid], budget: int | None = None
    ) -> tuple[Callable[[], object], int | None] | None:
        tokens = len(pixel_values) // 4
        if budget is None:
            budget = next((size for size in self.encoder.ladder if size >= tokens), None)
        max_frames = self.encoder.manifest.tower.vision_segment_max_frames
        segments = segments_of_items(grids, max_frames)
        if budget not in self.encoder.ladder or len(segments) > self.encoder.max_segments:
            return None
        return self.encoder.prepare_run(budget, segments, pixel_values), budget

    def padding(self) -> tuple[int, int]:
        stats = self.encoder.stats()
        return stats["real_tokens"], stats["padded_tokens"]


class EagerRunner:
    """The tower as a module, kernel by kernel, the whole batch at its exact shape."""

    name = "eager"

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        self._real_tokens = 0

    def encode(self, pixel_values: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        if not grids:
            return []
        embeddings = self._forward(pixel_values, self._table(pixel_values, grids))
        self._real_tokens += len(embeddings)
        return list(embeddings.split([math.prod(grid) // 4 for grid in grids]))

    def prepare(
        self, pixel_values: Tensor, grids: Sequence[Grid], budget: int | None = None
    ) -> tuple[Callable[[], object], int | None] | None:
        if budget is not None:
            return None
        table = self._table(pixel_values, grids)
        return lambda: self._forward(pixel_values, table), None

    def padding(self) -> tuple[int, int]:
        return self._real_tokens, 0

    def _forward(self, pixel_values: Tensor, table: Tensor) -> Tensor:
        with torch.no_grad():
            embeddings: Tensor = self._tower(pixel_values, table)[0]
        return embeddings

    def _table(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        """(num_segments, 3) int32 on the device."""
        segments = segments_of_items(grids, self._tower.config.vision_segment_max_frames)
        return torch.tensor(segments, dtype=torch.int32).to(pixel_values.device)


def item_rows(grids: Sequence[Grid]) -> list[int]:
    """First row of every item in `pixel_values`, and N last."""
    return [0, *accumulate(math.prod(grid) for grid in grids)]


def segments_of_items(grids: Sequence[Grid], max_frames: int) -> list[Grid]:
    """(t, h, w) of every segment of a batch, in order."""
    return [part for grid in grids for part in segments_of(*grid, max_frames)]
