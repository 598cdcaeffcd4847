"""What turns an image into rows: the released defaults, or a `preprocessor_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from m3compile.config.shown import shown
from m3compile.config.tower import TowerConfig
from m3compile.errors import CheckpointError

_SIZE_FIELDS = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
# Whole numbers up to here are exact as floats.
_LARGEST = 2**53
_KEY_FIELDS = ("patch_size", "temporal_patch_size", "merge_size")


class PreprocessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the released image processor.

    Attributes:
        min_pixels, max_pixels: bounds of height x width after the resize, in pixels.
        mean, std: per channel (R, G, B), on the 0 to 1 scale.
        rescale_factor: what a byte is multiplied by before `mean` and `std`.
    """

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 4 * 28 * 28
    max_pixels: int = 451_584
    rescale_factor: float = 1 / 255
    # The mean and standard deviation that CLIP was trained with.
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def factor(self) -> int:
        """Height and width after the resize are multiples of this many pixels."""
        return self.patch_size * self.merge_size


def preprocess_config_from_mapping(config: Mapping[str, Any], source: str) -> PreprocessConfig:
    """Read a parsed `preprocessor_config.json`.

    `size` may be `{"shortest_edge": min, "longest_edge": max}` or the released file's `[672, 672]`,
    which the released processor itself ignores; `min_pixels` and `max_pixels` win over `size`.

    Raises:
        CheckpointError: a value is impossible or asks for a step this processor does not do.
    """
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{source}: holds a {type(config).__name__}; allowed: an object")
    values: dict[str, Any] = {}
    for key in _KEY_FIELDS:
        if key in config:
            values[key] = _positive(config[key], key, source)
    values.update(_pixel_bounds(config, source))
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if config.get(key, True) is not True:
            raise CheckpointError(f"{source}: {key} is {shown(config[key])}; allowed: true")
    # 3 is PIL's number for bicubic.
    if config.get("resample", 3) not in (3, "bicubic"):
        raise CheckpointError(
            f"{source}: resample is {shown(config['resample'])}; allowed: 3 (bicubic)"
        )
    if "rescale_factor" in config:
        values["rescale_factor"] = _number(config["rescale_factor"], "rescale_factor", source)
        if values["rescale_factor"] <= 0:
            raise CheckpointError(
                f"{source}: rescale_factor is {values['rescale_factor']}; allowed: above 0"
            )
    for key, field in (("image_mean", "mean"), ("image_std", "std")):
        if key in config:
            values[field] = _triple(config[key], key, source)
    if any(value <= 0 for value in values.get("std", (1,))):
        raise CheckpointError(f"{source}: image_std is {list(values['std'])}; allowed: above 0")
    result = PreprocessConfig(**values)
    if not result.factor**2 <= result.min_pixels <= result.max_pixels:
        raise CheckpointError(
            f"{source}: min_pixels is {result.min_pixels} and max_pixels is {result.max_pixels}; "
            f"allowed: {result.factor**2} <= min_pixels <= max_pixels"
        )
    return result


def preprocess_config_for_tower(
    config: Mapping[str, Any], tower: TowerConfig, source: str
) -> PreprocessConfig:
    """As `preprocess_config_from_mapping`, for images that a given tower will see.

    What the mapping leaves out is taken from the tower.

    Raises:
        CheckpointError: also where the rows would not be those that the tower takes.
    """
    sizes = {
        "patch_size": tower.patch_size,
        "temporal_patch_size": tower.temporal_patch_size,
        "merge_size": tower.spatial_merge_size,
    }
    result = preprocess_config_from_mapping(
        {**sizes, **config} if isinstance(config, Mapping) else config, source
    )
    for key, expected in sizes.items():
        if getattr(result, key) != expected:
            raise CheckpointError(
                f"{source}: {key} is {getattr(result, key)}; allowed: {expected}, the encoder's own"
            )
    return result


def _pixel_bounds(config: Mapping[str, Any], source: str) -> dict[str, int]:
    bounds: dict[str, int] = {}
    size = config.get("size")
    if isinstance(size, Mapping):
        for key, value in size.items():
            if value is None:
                continue
            if key not in _SIZE_FIELDS:
                raise CheckpointError(
                    f"{source}: size has unknown key {shown(key)} = {shown(value)}; allowed: "
                    + ", ".join(_SIZE_FIELDS)
                )
            bounds[_SIZE_FIELDS[key]] = _positive(value, f"size.{key}", source)
    elif size is not None and size != [672, 672]:
        raise CheckpointError(
            f"{source}: size is {shown(size)}; allowed: an object with "
            + " and ".join(_SIZE_FIELDS)
        )
    for key in ("min_pixels", "max_pixels"):
        if config.get(key) is not None:
            bounds[key] = _positive(config[key], key, source)
    return bounds


def _positive(value: Any, key: str, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise CheckpointError(
            f"{source}: {key} is {shown(value)}; allowed: a whole number from 1 to {_LARGEST}"
        )
    return value


def _number(value: Any, key: str, source: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared, not converted: a whole number can be too large for a float.
    if not number or not abs(value) <= _LARGEST:
        raise CheckpointError(f"{source}: {key} is {shown(value)}; allowed: a finite number")
    return float(value)


def _triple(value: Any, key: str, source: str) -> tuple[float, float, float]:
    if not isinstance(value, list) or len(value) != 3:
        raise CheckpointError(f"{source}: {key} is {shown(value)}; allowed: three numbers")
    red, green, blue = (_number(part, key, source) for part in value)
    return red, green, blue
