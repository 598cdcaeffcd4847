"""The first stage: the inputs of a shard, decoded, as batches of rows of patches.

A batch is one row of a table, because Ray Data cuts and joins tables between rows only.
"""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from m3compile.config import PreprocessConfig
from m3compile.errors import InputError, InputNotFoundError, OperationError
from m3compile.images import decode_image, image_rows, load_image
from m3compile.integrations.ray.data.inputs import Source
from m3compile.integrations.ray.data.job import Job, Work, attempt, open_inputs

Grid = tuple[int, int, int]


class Item(NamedTuple):
    """One input, decoded or not.

    Attributes:
        rows: (N, patch_dim), or None where there is an error.
        grid: (t, h, w) in patches; its product is N.
        error: why there are no rows.
    """

    name: str | int | None
    rows: torch.Tensor | None
    grid: Grid
    error: str | None


class Decoder(NamedTuple):
    """Settings of the stage.

    Attributes:
        dtype: the encoder's; rows travel in it.
        batch_tokens, batch_items: a batch is full before it has more; one image always fits.
    """

    output: Path
    job: Job
    preprocess: PreprocessConfig
    dtype: torch.dtype
    batch_tokens: int
    batch_items: int

    @property
    def batch_bytes(self) -> int:
        """Of the pixels of a full batch."""
        patch = self.preprocess.patch_size**2 * self.preprocess.temporal_patch_size * 3
        return 4 * self.batch_tokens * patch * self.dtype.itemsize

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        """Batches of the `Work` in a table, one row each, in order."""
        torch.set_num_threads(1)
        inputs = open_inputs(self.output, self.job)
        for row in table.to_pylist():
            work = Work(row["shard"], [tuple(gap) for gap in row["gaps"]])
            with _reading(self.output, work.shard) as read:
                for start, stop in work.gaps:
                    sources = inputs.read(work.shard, start, stop)
                    items = (self._item(source, read) for source in sources)
                    yield from self._batches(items, work.shard, start, inputs.name_field.type)

    def _item(self, source: Source, read: Read) -> Item:
        if source.image is None:
            return Item(source.name, None, (0, 0, 0), "no image: the input is null")
        try:
            rows, grid = image_rows(read(source.image), self.preprocess)
        except (InputError, InputNotFoundError, OperationError) as error:
            return Item(source.name, None, (0, 0, 0), " ".join(str(error).split()))
        return Item(source.name, rows.to(self.dtype), grid, None)

    def _batches(
        self, items: Iterator[Item], shard: int, start: int, name_type: pa.DataType
    ) -> Iterator[pa.Table]:
        batch: list[Item] = []
        tokens = 0
        for item in items:
            more = item.grid[0] * item.grid[1] * item.grid[2] // 4
            # One image always fits, and what has none adds nothing.
            is_over = bool(tokens and more) and tokens + more > self.batch_tokens
            if is_over or len(batch) == self.batch_items:
                yield batch_table(batch, shard, start, name_type)
                start += len(batch)
                batch, tokens = [], 0
            batch.append(item)
            tokens += more
        if batch:
            yield batch_table(batch, shard, start, name_type)


def batch_table(batch: list[Item], shard: int, start: int, name_type: pa.DataType) -> pa.Table:
    """A table of one row: shard, start, names, errors, grids (flat) and pixels (bytes)."""
    rows = [item.rows for item in batch if item.rows is not None]
    pixels = torch.cat(rows) if rows else torch.empty(0)
    columns = {
        "shard": pa.array([shard], pa.int64()),
        "start": pa.array([start], pa.int64()),
        "names": pa.array([[item.name for item in batch]], pa.list_(name_type)),
        "errors": pa.array([[item.error for item in batch]], pa.list_(pa.string())),
        "grids": pa.array([[side for item in batch for side in item.grid]], pa.list_(pa.int32())),
        "pixels": bytes_cell(pixels),
    }
    return pa.table(columns)


def bytes_cell(tensor: torch.Tensor) -> pa.Array:
    """A column of one cell with the bytes of a tensor on the host, not copied."""
    data = pa.py_buffer(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    offsets = pa.py_buffer(np.array([0, data.size], np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data])


def cell_tensor(column: pa.ChunkedArray, dtype: torch.dtype) -> torch.Tensor:
    """The only cell of a column that `bytes_cell` made, flat, not copied: don't write to it."""
    data = column[0].as_buffer()
    if not data.size:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype)


def read_image(image: str | memoryview) -> torch.Tensor:
    """As `load_image`, of a path or of a file's content."""
    if not isinstance(image, str):
        return decode_image(io.BytesIO(image), "the image")
    # Opening a pipe would wait for whoever writes to it.
    if os.path.exists(image) and not os.path.isfile(image):
        raise InputError(f"{image}: not a regular file")
    return load_image(image)


Read = Callable[[Any], torch.Tensor]


@contextmanager
def _reading(output: Path, shard: int) -> Iterator[Read]:
    """How a shard's images are read: here; or in a process beside, if one died of them before.

    A decoder that crashes takes its process with it. Then each image is at risk alone.
    """
    with attempt(output, f"decode-{shard}") as deaths:
        if not deaths:
            yield read_image
            return
        with ProcessReader(read_image) as reader:
            yield reader


class ProcessReader:
    """Calls a function in a process of its own, and in a new one after it has crashed.

    Args:
        function: of one argument; found by its name in the process.
    """

    def __init__(self, function: Read) -> None:
        self._function = function
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, image: str | memoryview) -> torch.Tensor:
        """Raises OperationError where the process died, and what the function raises."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, torch.set_num_threads, (1,))
        sent = image if isinstance(image, str) else bytes(image)
        try:
            array = self._pool.submit(_as_array, self._function, sent).result()
        except BrokenProcessPool:
            self.__exit__()
            raise OperationError(
                "the process that decoded it crashed, as did one before it"
            ) from None
        return torch.from_numpy(array)

    def __enter__(self) -> ProcessReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _as_array(function: Read, image: Any) -> np.ndarray:
    # torch would send it through shared memory, which a small /dev/shm has no room for.
    return function(image).numpy()
