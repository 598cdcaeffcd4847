"""The list of a job's inputs: taken once, kept in a file, read back shard by shard.

A shard is what one decoding task works through: `SHARD_ROWS` image files, or a row group of a
Parquet file. The list is an Arrow file, zstd inside, whose batches are found without reading the
others: `path`, and for Parquet files also `group`, `rows`, `size` and `mtime_ns`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from m3compile.errors import InputError, OperationError
from m3compile.integrations.ray.data.find import Listing, list_inputs

SHARD_ROWS = 512
# Rows of a Parquet file that are read at a time: with images in them, tens of megabytes.
_READ_ROWS = 8
_READ_BYTES = 1 << 20

Kind = Literal["files", "paths", "images"]

_FILES = pa.schema([("path", pa.binary())])
_GROUPS = pa.schema(
    [
        ("path", pa.binary()),
        ("group", pa.int32()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("mtime_ns", pa.int64()),
    ]
)


class Source(NamedTuple):
    """One input.

    Attributes:
        name: its path or id, as the output will have it.
        image: a path to read, the image's bytes, or None where the input has none.
    """

    name: str | int | None
    image: str | memoryview | None


class Inputs:
    """A list that was written, open for reading.

    Attributes:
        name_field: the output's first column.
    """

    def __init__(self, path: Path, kind: Kind, name_type: str) -> None:
        self.kind = kind
        self.name_field = pa.field("id" if kind == "images" else "path", _NAME_TYPES[name_type])
        self._list = pa.ipc.open_file(pa.memory_map(str(path)))

    def shard_rows(self) -> Iterator[int]:
        """The number of rows of every shard."""
        last = self._list.num_record_batches - 1
        for index in range(last + 1):
            if self.kind == "files" and index < last:
                yield SHARD_ROWS
            elif self.kind == "files":
                yield self._list.get_batch(index).num_rows
            else:
                yield from self._list.get_batch(index).column("rows").to_pylist()

    def read(self, shard: int, start: int, stop: int) -> Iterator[Source]:
        """Rows start to stop of a shard.

        Raises:
            InputError: a Parquet file is damaged, or changed since the list was taken.
        """
        if self.kind == "files":
            paths = self._list.get_batch(shard).column("path")
            for raw in paths[start:stop].to_pylist():
                path = os.fsdecode(raw)
                yield Source(raw.decode(errors="backslashreplace"), path)
            return
        batch = self._list.get_batch(shard // SHARD_ROWS)
        group = {
            name: batch.column(name)[shard % SHARD_ROWS].as_py() for name in batch.schema.names
        }
        path = os.fsdecode(group["path"])
        try:
            found = os.stat(path)
            if (found.st_size, found.st_mtime_ns) != (group["size"], group["mtime_ns"]):
                raise InputError(
                    f"{path} changed since the job began: restore it, or embed into another output"
                )
            yield from self._read_group(path, group["group"], start, stop)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path}: cannot be read: {error}") from None

    def _read_group(self, path: str, group: int, start: int, stop: int) -> Iterator[Source]:
        columns = [self.name_field.name, *(["image"] if self.kind == "images" else [])]
        # Page by page: a row group of images may be larger than memory.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES) as file:
            position = 0
            for batch in file.iter_batches(_READ_ROWS, row_groups=[group], columns=columns):
                first, last = max(start - position, 0), min(stop - position, batch.num_rows)
                position += batch.num_rows
                for row in range(first, last):
                    name = batch.column(0)[row].as_py()
                    if self.kind == "images":
                        data = batch.column(1)[row].as_buffer()
                        yield Source(name, None if data is None else memoryview(data))
                    else:
                        # A relative path is meant from where its list lies.
                        yield Source(name, name and os.path.join(os.path.dirname(path), name))
                if position >= stop:
                    return


class Found(NamedTuple):
    """What a list holds.

    Attributes:
        skipped: files in folders that are neither images nor Parquet.
    """

    kind: Kind
    name_type: str
    rows: int
    skipped: int


def write_list(inputs: Sequence[str], target: Path) -> Found:
    """List the inputs into a file. Of Parquet files only the footers are read.

    Raises:
        InputError: as `list_inputs`; or there is nothing to embed, or a Parquet file lacks the
            columns.
        OperationError: the file cannot be written.
    """
    listing = Listing()
    files = list_inputs(inputs, listing)
    first = next(files, None)
    if first is None:
        raise InputError(
            f"--input {', '.join(inputs)}: no images and no Parquet files "
            f"({listing.others} other files)"
        )
    paths = chain([first], files)
    try:
        if listing.parquets:
            return _write_groups(paths, target, listing)
        rows = 0
        with pa.OSFile(str(target), "wb") as sink, _writer(sink, _FILES) as writer:
            while part := [os.fsencode(path) for path in islice(paths, SHARD_ROWS)]:
                writer.write_batch(pa.record_batch([pa.array(part, pa.binary())], schema=_FILES))
                rows += len(part)
    except OSError as error:
        raise OperationError(f"cannot write {target}: {error.strerror or error}") from None
    return Found("files", "string", rows, listing.others)


def _writer(sink: Any, schema: pa.Schema) -> Any:
    return pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))


def _write_groups(paths: Iterator[str], target: Path, listing: Listing) -> Found:
    rows = 0
    seen: tuple[str, tuple[Kind, str]] | None = None

    def groups() -> Iterator[dict[str, Any]]:
        nonlocal rows, seen
        for path in paths:
            metadata, columns = _footer(path)
            if seen is not None and columns != seen[1]:
                raise InputError(
                    f"{path}: has {columns[0]} by {columns[1]}; {seen[0]} has {seen[1][0]} by "
                    f"{seen[1][1]}; give one kind a job"
                )
            seen = seen or (path, columns)
            rows += metadata.num_rows
            found = os.stat(path)
            for group in range(metadata.num_row_groups):
                yield {
                    "path": os.fsencode(path),
                    "group": group,
                    "rows": metadata.row_group(group).num_rows,
                    "size": found.st_size,
                    "mtime_ns": found.st_mtime_ns,
                }

    entries = groups()
    with pa.OSFile(str(target), "wb") as sink, _writer(sink, _GROUPS) as writer:
        while part := list(islice(entries, SHARD_ROWS)):
            writer.write_batch(pa.RecordBatch.from_pylist(part, _GROUPS))
    assert seen is not None
    return Found(*seen[1], rows, listing.others)


_NAME_TYPES = {"string": pa.string(), "int64": pa.int64()}


def _footer(path: str) -> tuple[pq.FileMetaData, tuple[Kind, str]]:
    """Of a Parquet file: its footer, what its rows are, and the type of their names."""
    try:
        with pq.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not a readable Parquet file: {error}") from None
    types = dict(zip(schema.names, schema.types, strict=True))
    image, name, path_type = (types.get(key) for key in ("image", "id", "path"))
    if image is not None and name is not None and _is_bytes(image):
        if _is_string(name):
            return metadata, ("images", "string")
        if pa.types.is_signed_integer(name):
            return metadata, ("images", "int64")
    elif image is None and path_type is not None and _is_string(path_type):
        return metadata, ("paths", "string")
    columns = ", ".join(f"{key}: {kind}" for key, kind in types.items())
    raise InputError(
        f"{path}: has columns {columns}; expected id (string or int64) and image (binary, an image "
        "file's content), or path (string)"
    )


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
