"""Bodies of HTTP requests and answers: read within limits, never trusted."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from torch import Tensor

from m3compile.config import PreprocessConfig
from m3compile.errors import InputError, TooLargeError
from m3compile.images import decode_image, image_rows
from m3compile.integrations.ray.refusals import Refused, check_size
from m3compile.wire import COUNTS, EMBEDDINGS, GRIDS, JSON, MULTIPART, OCTETS, PIXELS, SAFETENSORS

_ALLOWED = f"{SAFETENSORS}, or {MULTIPART} with image files"


class ImageFile(NamedTuple):
    """An uploaded file; `name` is what the client calls it."""

    name: str
    data: bytes


class Parts(NamedTuple):
    """A safetensors body as it came, not yet joined: that is no work for the event loop."""

    parts: list[bytes]


async def read_request(request: Request, max_bytes: int, max_items: int) -> Parts | list[ImageFile]:
    """The body: of safetensors, or image files in the order of the form.

    Raises:
        Refused: of another content type.
        TooLargeError: the body is over `max_bytes`, told before or while it arrives, or the form
            has over `max_items` files.
        InputError: the form is malformed, or has no files.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (SAFETENSORS, OCTETS, MULTIPART):
        raise Refused.media_type(kind, _ALLOWED)
    told = request.headers.get("content-length", "")
    if told.isdecimal():
        check_size("bytes", int(told), max_bytes)
    if kind != MULTIPART:
        return Parts([chunk async for chunk in _within(request, max_bytes)])
    return await _read_form(request, max_bytes, max_items)


async def _within(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    found = 0
    async for chunk in request.stream():
        found += len(chunk)
        check_size("bytes", found, max_bytes)
        yield chunk


async def _read_form(request: Request, max_bytes: int, max_items: int) -> list[ImageFile]:
    if "boundary=" not in request.headers["content-type"].lower():
        raise InputError(f"{MULTIPART} without a boundary; expected boundary=...")
    parser = MultiPartParser(request.headers, _within(request, max_bytes), max_files=max_items)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        if "Too many files" in error.message:
            raise TooLargeError(f"the form has over {max_items} files, the most allowed") from None
        raise InputError(f"the form is malformed: {error.message}") from None
    files = []
    try:
        for _, value in form.multi_items():
            if isinstance(value, UploadFile):
                files.append(ImageFile(value.filename or "unnamed", await value.read()))
    finally:
        # Its files lie in temporary ones.
        await form.close()
    if not files:
        raise InputError("the form has no files; expected one image file an item")
    return files


def read_rows(body: Parts) -> tuple[Tensor, Tensor]:
    """pixel_values and grid_thw of a safetensors body, whatever their dtypes and shapes.

    Raises:
        InputError: the body is not safetensors, or a tensor is missing.
    """
    try:
        tensors = load(b"".join(body.parts))
    except (SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        # torch adds its own stack to what it says.
        reason = next(iter(str(error).splitlines()), "")
        raise InputError(f"the body is not a readable safetensors file: {reason}") from None
    for name in (PIXELS, GRIDS):
        if name not in tensors:
            raise InputError(f"tensor {name} is missing; found {sorted(tensors)[:8]}")
    return tensors[PIXELS], tensors[GRIDS]


def read_images(
    files: Sequence[ImageFile], config: PreprocessConfig, max_pixels: int, max_tokens: int
) -> tuple[list[Tensor], list[tuple[int, int, int]]]:
    """Rows and grid of every file.

    Raises:
        InputError: naming the item, as `decode_image` and `image_rows`.
        TooLargeError: an image has over `max_pixels` pixels; it is not decoded. Or all have over
            `max_tokens` output tokens; the images after those are not decoded.
    """
    rows, grids, tokens = [], [], 0
    for index, (name, data) in enumerate(files):
        item = f"item {index}: {name}"
        image = decode_image(io.BytesIO(data), item, max_pixels)
        try:
            item_rows, grid = image_rows(image, config)
        except InputError as error:
            raise InputError(f"{item}: {error}") from None
        tokens += len(item_rows) // config.merge_size**2
        if tokens > max_tokens:
            raise TooLargeError(
                f"the images have over {max_tokens} output tokens, the most allowed"
            )
        rows.append(item_rows)
        grids.append(grid)
    return rows, grids


def wants_json(request: Request) -> bool:
    accept = request.headers.get("accept", "").lower()
    return JSON in accept and SAFETENSORS not in accept


def write_answer(embeddings: Tensor, counts: Sequence[int], as_json: bool) -> bytes:
    """(tokens, width) embeddings of all items end to end, and tokens of every item."""
    if as_json:
        return msgspec.json.encode({EMBEDDINGS: embeddings.float().tolist(), COUNTS: counts})
    return save({EMBEDDINGS: embeddings, COUNTS: torch.tensor(counts, dtype=torch.int64)})
