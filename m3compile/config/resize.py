"""The size a picture is resized to: arithmetic on two numbers, without a picture."""

from __future__ import annotations

import math

from m3compile.config.preprocess import PreprocessConfig
from m3compile.errors import InputError

MAX_ASPECT_RATIO = 200


def resized_size(height: int, width: int, config: PreprocessConfig) -> tuple[int, int]:
    """Height and width in pixels after the resize, each a positive multiple of `config.factor`.

    Each side goes to the nearest multiple, at least one. If the area is then over `max_pixels`,
    both sides shrink by one scale and round down; if it is under `min_pixels`, both grow and round
    up. A thin picture may end above `max_pixels`: where its short side would shrink to nothing (the
    released rule gives 0 there) it stays at one multiple. At the default limits no picture that
    passes the ratio check is that thin; it takes a `max_pixels` under 200 * factor**2.

    Raises:
        InputError: a side is not positive, or one is over 200 times the other.
    """
    if height < 1 or width < 1:
        raise InputError(f"the image is {height}x{width} pixels; allowed: at least 1x1")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise InputError(
            f"the image is {height}x{width} pixels, its aspect ratio is over "
            f"{MAX_ASPECT_RATIO}; crop or pad it first"
        )
    factor = config.factor
    rounded = (
        max(factor, round(height / factor) * factor),
        max(factor, round(width / factor) * factor),
    )
    area = rounded[0] * rounded[1]
    if area > config.max_pixels:
        shrink = math.sqrt(height * width / config.max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if area < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        return (
            math.ceil(height * grow / factor) * factor,
            math.ceil(width * grow / factor) * factor,
        )
    return rounded
