"""JSON and safetensors files of a checkpoint, read strictly.

safetensors files are read with plain reads: mapping one needs address space for the whole file,
which fails on a single-file checkpoint larger than memory, and a mapped file that is cut short
while it is read kills the process.

The format: 8 bytes with the header's length (little endian), the header (a JSON object of
`{"dtype", "shape", "data_offsets"}` by tensor name), then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from m3compile.config.shown import shown
from m3compile.errors import CheckpointError, CheckpointNotFoundError

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PREPROCESSOR_FILE = "preprocessor_config.json"
# Top-level key of a config.json whose weights are random numbers.
RANDOM_KEY = "m3compile_random_weights"

# The format's own limit for a header; the largest real index is a few megabytes.
MAX_JSON_BYTES = 100_000_000

FLOAT_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

_NAMES_SHOWN = 5


class ShardTensor(NamedTuple):
    """Where one tensor lies in a safetensors file.

    Attributes:
        dtype: the format's own code, such as `BF16`.
        start, stop: its bytes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def listed(names: Iterable[str]) -> str:
    """Names for a message on one line: the first few, then how many more."""
    found = [name if name.isprintable() else repr(name) for name in names]
    more = len(found) - _NAMES_SHOWN
    return ", ".join(found[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a file that holds one JSON object, refusing duplicate keys, NaN and Infinity.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: it cannot be read, is too large, or is not such an object.
    """
    size = file_size(path)
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {size} bytes; expected at most {MAX_JSON_BYTES}")
    return _parse_object(read_bytes(path, 0, size), str(path))


def read_shard_header(path: Path) -> dict[str, ShardTensor]:
    """The tensors of a safetensors file, by name; no tensor's bytes are read.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: the file is truncated, or not a safetensors file.
    """
    size = file_size(path)
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes; expected a safetensors file, at least 8")
    length = int.from_bytes(read_bytes(path, 0, 8), "little")
    if length > min(size - 8, MAX_JSON_BYTES):
        raise CheckpointError(
            f"{path}: header of {length} bytes in a file of {size}; expected a safetensors header, "
            f"at most {min(size - 8, MAX_JSON_BYTES)}"
        )
    header = _parse_object(read_bytes(path, 8, length), f"{path} (header)")
    header.pop("__metadata__", None)
    tensors = {
        name: _shard_tensor(entry, path, name, first_byte=8 + length)
        for name, entry in header.items()
    }
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if tensor.start != end:
            raise CheckpointError(
                f"{path}: {listed([name])} starts at byte {tensor.start}; expected {end}, "
                "where the tensor before it ends"
            )
        end = tensor.stop
    if end != size:
        raise CheckpointError(
            f"{path}: {size} bytes; expected {end} by its header (truncated, or damaged)"
        )
    return tensors


def file_size(path: Path) -> int:
    """Bytes of a regular file.

    Raises:
        CheckpointNotFoundError: there is no such file, or it is a link to nothing.
        CheckpointError: it is a folder or a device, or may not be read.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path} does not exist; expected a file") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file; expected one")
    return status.st_size


def read_bytes(path: Path, start: int, count: int) -> bytes:
    """`count` bytes of a file; CheckpointError if it ends before."""
    return bytes(_read_into(path, start, bytearray(count)))


def read_tensor(path: Path, tensor: ShardTensor) -> torch.Tensor:
    """One tensor on the host, in its own shape and dtype (one of `FLOAT_DTYPES`).

    Raises:
        CheckpointError: the file cannot be read that far.
    """
    raw = torch.empty(tensor.stop - tensor.start, dtype=torch.uint8)
    _read_into(path, tensor.start, raw.numpy())
    return raw.view(FLOAT_DTYPES[tensor.dtype]).reshape(tensor.shape)


def _read_into(path: Path, start: int, buffer: Any) -> memoryview:
    view = memoryview(buffer)
    filled = 0
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start, os.SEEK_SET)
            while filled < len(view):
                count = file.readinto(view[filled:])
                if not count:
                    raise CheckpointError(
                        f"{path} ends at byte {start + filled}; expected {start + len(view)}"
                    )
                filled += count
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    return view


def _shard_tensor(entry: Any, path: Path, name: str, first_byte: int) -> ShardTensor:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    shape: Any
    offsets: Any
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (
        isinstance(dtype, str)
        and _are_counts(shape)
        and _are_counts(offsets)
        and len(offsets) == 2
        and offsets[0] <= offsets[1]
    ):
        raise CheckpointError(
            f"{path}: header entry of {listed([name])} is {shown(entry)}; "
            "expected dtype, shape and two data_offsets"
        )
    found = offsets[1] - offsets[0]
    if dtype in FLOAT_DTYPES:
        expected = math.prod(shape) * FLOAT_DTYPES[dtype].itemsize
        if found != expected:
            raise CheckpointError(
                f"{path}: {listed([name])} has {found} bytes; expected {expected} for "
                f"{dtype} {shape}"
            )
    return ShardTensor(dtype, tuple(shape), first_byte + offsets[0], first_byte + offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 64 for value in values
    )


def _parse_object(text: bytes, source: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"key {twice!r} twice")
        return result

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    # ValueError covers bytes that are not UTF-8, too.
    except (ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{source} is not valid JSON: {detail}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{source} holds a {type(document).__name__}; expected an object")
    return document
