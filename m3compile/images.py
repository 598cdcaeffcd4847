"""Image files to rows of patches, as the released image processor makes them.

Shapes: H, W are a picture's pixels; h, w its patches after the resize; N = h*w rows;
patch_dim = 3 * temporal_patch_size * patch_size**2 columns.
"""

from __future__ import annotations

import os
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

import numpy as np
import torch

from m3compile.config import PreprocessConfig
from m3compile.config.resize import resized_size
from m3compile.errors import (
    DependencyError,
    InputError,
    InputNotFoundError,
    RequestError,
    TooLargeError,
)

if TYPE_CHECKING:
    from PIL.Image import Image

# 256 MiB as RGB: where Pillow starts to warn of a decompression bomb. Held here, because Pillow's
# own limit is a global that any other library in the process may change.
MAX_IMAGE_PIXELS = 2**30 // 4 // 3

# Only formats whose decoder is a plain parser: Pillow would hand an EPS file to Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")

# What Pillow's parsers raise on bytes they don't understand.
_PARSER_ERRORS = (SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error)
_DECODER_ERRORS = (OSError, EOFError, RuntimeError, *_PARSER_ERRORS)

_EXIF_ORIENTATION = 0x0112
# By axis of (3, H, W): the orientations that mirror it, counted after the swap that 5 to 8 ask for.
_FLIPPED = {1: (3, 4, 7, 8), 2: (2, 3, 6, 7)}

# `warnings.catch_warnings` swaps a global: two overlapping uses could leave our filter behind.
_warnings_lock = threading.Lock()


def load_image(path: str | os.PathLike[str]) -> torch.Tensor:
    """Decode one image file, upright, as uint8 RGB of shape (3, H, W) on the host.

    The tensor is a view of channels-last memory, the layout that resizes fastest.

    - Grey, palette and CMYK become RGB by Pillow's conversion.
    - Transparency is dropped, not blended: the colours stored under it show. The released processor
      does the same; put the picture on a background first if that matters.
    - 16-bit samples keep their high byte, which Pillow does for colour by itself. For grey it would
      clip at 255, and the released processor sees a nearly white picture.
    - 32-bit integer and float samples have no fixed range and are refused.
    - EXIF orientation is applied. Of an animated or multi-page file the first frame is read.

    Raises:
        InputNotFoundError: there is no such file.
        InputError: the file cannot be read, or as `decode_image`.
        TooLargeError, DependencyError: as `decode_image`.
    """
    try:
        with open(path, "rb") as file:
            return decode_image(file, os.fspath(path))
    except RequestError:
        raise
    except FileNotFoundError as error:
        raise InputNotFoundError(f"{os.fspath(path)}: no such file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{os.fspath(path)}: cannot be read: {reason}") from error


def image_rows(
    image: torch.Tensor, config: PreprocessConfig
) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Resize, normalise and cut one picture into patches.

    Args:
        image: uint8 RGB, (3, H, W), on the host.

    Returns:
        float32 rows (N, patch_dim) and their grid (1, h, w). Rows come merge block by merge block:
        block rows, block columns, inside a block row by row. Columns are in the order channel,
        time, patch row, patch column; the picture is every frame of its patch.

    Raises:
        InputError: the tensor is something else, or `resized_size` refuses its size.
    """
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
        raise InputError(
            f"the image is a {image.dtype} tensor of shape {tuple(image.shape)}; "
            "allowed: torch.uint8, (3, H, W)"
        )
    if image.device.type != "cpu":
        raise InputError(f"the image is on {image.device}; allowed: cpu")
    height, width = resized_size(image.shape[1], image.shape[2], config)
    # Bytes, not floats: the released processor resizes bytes, where torch rounds its weights and
    # the picture between its two passes. Floats rounded at the end are up to three levels away.
    resized = torch.nn.functional.interpolate(
        image[None], size=(height, width), mode="bicubic", antialias=True, align_corners=False
    )[0]
    # Rescale and normalise are one step, as in the released processor: equal to the last bit.
    levels = 1 / config.rescale_factor
    mean = torch.tensor(config.mean).view(3, 1, 1) * levels
    std = torch.tensor(config.std).view(3, 1, 1) * levels
    normalised = (resized.float() - mean) / std

    patch, merge, frames = config.patch_size, config.merge_size, config.temporal_patch_size
    h, w = height // patch, width // patch
    blocks = normalised.reshape(3, h // merge, merge, patch, w // merge, merge, patch)
    # To (block row, block column, row in block, column in block, channel, patch row, patch column).
    patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
    rows = patches.expand(-1, -1, -1, -1, -1, frames, -1, -1).reshape(h * w, -1)
    return rows, (1, h, w)


def load_images(
    paths: Sequence[str | os.PathLike[str]],
    config: PreprocessConfig,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read image files as one batch, in the order of `paths`.

    Args:
        progress: called after each file with the number of files done and of all files.

    Returns:
        pixel_values (N, patch_dim) float32, the rows of all images end to end, and grid_thw
        (num_items, 3) int64; no paths give no rows.

    Raises:
        InputError, InputNotFoundError, DependencyError: as `load_image` and `image_rows`; the
            message names the file.
    """
    patch_dim = 3 * config.temporal_patch_size * config.patch_size**2
    rows = [torch.empty(0, patch_dim)]
    grids: list[tuple[int, int, int]] = []
    for path in paths:
        image = load_image(path)
        try:
            item_rows, grid = image_rows(image, config)
        except InputError as error:
            raise InputError(f"{os.fspath(path)}: {error}") from error
        rows.append(item_rows)
        grids.append(grid)
        if progress is not None:
            progress(len(grids), len(paths))
    return torch.cat(rows), torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)


def decode_image(file: IO[bytes], name: str, max_pixels: int = MAX_IMAGE_PIXELS) -> torch.Tensor:
    """`load_image` of an open file, which `name` stands for in messages.

    Raises:
        InputError: it is not an image of one of `FORMATS`, or is damaged or truncated.
        TooLargeError: it has more than `max_pixels` pixels; nothing is decoded then.
        DependencyError: Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DependencyError(
            "reading image files needs Pillow: pip install 'm3compile[images]'"
        ) from error
    Image.init()
    known = [format_name for format_name in FORMATS if format_name in Image.OPEN]
    try:
        with _warnings_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(file, formats=known)
        if image.width * image.height > max_pixels:
            raise TooLargeError(
                f"{name}: {image.width * image.height} pixels; "
                f"allowed: at most {max_pixels}; scale it down first"
            )
        image.load()
        # A copy, because numpy's own view is read-only and torch knows no such thing.
        pixels = torch.from_numpy(np.array(_to_rgb(image, name))).permute(2, 0, 1)
        return _upright(pixels, image.getexif().get(_EXIF_ORIENTATION))
    except RequestError:
        raise
    except Image.DecompressionBombError as error:
        raise TooLargeError(f"{name}: a decompression bomb: {error}") from error
    except UnidentifiedImageError as error:
        allowed = f"an undamaged file in one of {', '.join(known)}"
        raise InputError(f"{name}: not recognised as an image; allowed: {allowed}") from error
    except _DECODER_ERRORS as error:
        raise InputError(f"{name}: the image is damaged or truncated: {error}") from error


def _upright(pixels: torch.Tensor, orientation: object) -> torch.Tensor:
    """Undo an EXIF orientation, 1 to 8; anything else in the tag counts as upright."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 2)
    flipped = [axis for axis, values in _FLIPPED.items() if orientation in values]
    return pixels.flip(flipped) if flipped else pixels


def _to_rgb(image: Image, name: str) -> Image:
    from PIL.Image import fromarray

    # Pillow holds 16-bit grey as "I;16", or as "I" in PPM files and, before version 11, in PNG.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        image = fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise InputError(f"{name}: 32-bit samples have no fixed range; save it with 8 bits first")
    # Dropped here rather than by `convert`, which warns where a palette has several alpha values.
    image.info.pop("transparency", None)
    return image.convert("RGB")
