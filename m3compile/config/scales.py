"""The file of static FP8 scales: what vLLM reads for q, k and v, and the linears' beside it.

    {
      "vision_tower.vision_model.encoder.layers.0.self_attn.attn": {"q": 0.1, "k": 0.2, "v": 0.1},
      ...
      "m3compile": {"margin": 1.5, ..., "linears": {"patch_embed": 0.03, "layers.0.qkv": 0.02, ...}}
    }

A scale is what a value is divided by before it is rounded to float8_e4m3fn. vLLM looks its layers
up by name and passes over every entry without q, k and v, so one file serves both.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from m3compile.config.shown import one_line, shown
from m3compile.errors import ConfigError, InputNotFoundError
from m3compile.writing import write_whole

# The largest float8_e4m3fn.
FP8_MAX = 448.0

# The normal numbers of float32, in which kernels hold a scale.
SMALLEST_SCALE, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
_ALLOWED = "a positive number that is normal in float32"

_MAX_BYTES = 4 * 1024 * 1024
_OURS = "m3compile"
_LAYER_NAME = "vision_tower.vision_model.encoder.layers.{}.self_attn.attn"
_LAYER = re.compile(r"(?:[^.]+\.)*?layers\.(\d{1,6})(?:\.self_attn)?(?:\.attn)?", re.ASCII)
_PARTS = ("q", "k", "v")


class LayerScales(msgspec.Struct, frozen=True):
    """One layer's scales of q, k and v, as attention takes them: after rotation.

    Raises:
        ValueError: from the constructor, for a scale that nothing can be divided by.
    """

    q: float
    k: float
    v: float

    def __post_init__(self) -> None:
        for part in _PARTS:
            check_scale(part, getattr(self, part))


class Fp8Scales(msgspec.Struct, frozen=True):
    """Static scales of a tower.

    Attributes:
        attention: of every layer, in order.
        linears: of every linear's input, by the names of `linear_names`; empty where the file has
            none, as those that vLLM writes.

    Raises:
        ValueError: from the constructor, for a scale that nothing can be divided by.
    """

    attention: tuple[LayerScales, ...]
    linears: dict[str, float]

    def __post_init__(self) -> None:
        for name, scale in self.linears.items():
            check_scale(name, scale)


def linear_names(num_layers: int) -> tuple[str, ...]:
    """The tower's linears by its modules' names, in the order of the forward pass."""
    inner = (
        f"layers.{index}.{name}"
        for index in range(num_layers)
        for name in ("qkv", "out_proj", "fc1", "fc2")
    )
    outer = (f"{owner}.{name}" for owner in ("projector", "merger") for name in ("fc1", "fc2"))
    return ("patch_embed", *inner, *outer)


def read_scales(path: Path, num_layers: int) -> Fp8Scales:
    """Read a file of scales, made by `calibrate` or by vLLM, for a tower of that many layers.

    A layer is found by its number, whatever stands before `layers.N` in its name. As vLLM does,
    this takes `q_scale` for `q`, takes the layers of an object under `layers`, and passes over what
    has neither a layer's name nor scales. The linears' scales are all there, or none is.

    Raises:
        ConfigError: the file cannot be read, is too large, is not JSON or gives a key twice; or
            a layer or one of its scales is missing, impossible or one too many. Says which.
        InputNotFoundError: there is no such file.
    """
    document = _read_object(path)
    nested = document.get("layers")
    found: dict[int, LayerScales] = {}
    for name, entry in (nested if isinstance(nested, dict) else document).items():
        match = _LAYER.fullmatch(name)
        if match is None:
            if isinstance(entry, dict) and any(_part(entry, part) is not None for part in _PARTS):
                raise ConfigError(
                    f"{path}: {shown(name)} names no layer; expected {_LAYER_NAME.format('N')}"
                )
            continue
        index = int(match[1])
        if index >= num_layers:
            raise ConfigError(
                f"{path}: {shown(name)} is a layer too many; expected layers 0 to {num_layers - 1}"
            )
        scales = _layer_scales(entry, f"{path}: {shown(name)}")
        if found.setdefault(index, scales) != scales:
            raise ConfigError(
                f"{path}: {shown(name)} has other scales than another entry of layer {index}; "
                "expected one entry a layer"
            )
    for index in range(num_layers):
        if index not in found:
            raise ConfigError(
                f"{path}: layer {index} is missing; expected {_LAYER_NAME.format(index)}"
            )
    attention = tuple(found[index] for index in range(num_layers))
    return Fp8Scales(attention, _linears(document, num_layers, path))


def write_scales(path: Path, scales: Fp8Scales, facts: Mapping[str, Any] | None = None) -> None:
    """Write a file that `read_scales` and vLLM read; what was under the name is replaced, whole.

    Args:
        facts: about how the scales were found, kept in the file beside those of the linears.

    Raises:
        OperationError: the file cannot be written.
    """
    document: dict[str, Any] = {
        _LAYER_NAME.format(index): msgspec.structs.asdict(layer)
        for index, layer in enumerate(scales.attention)
    }
    document[_OURS] = {**(facts or {}), "linears": scales.linears}
    text = json.dumps(document, indent=1, allow_nan=False)
    write_whole(path, text.encode() + b"\n")


def check_scale(name: str, value: Any) -> None:
    """Refuse what nothing can be divided by.

    Raises:
        ValueError: naming it, the value found and what is allowed.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared, not converted: a whole number can be too large for a float. NaN fails it too.
    if not number or not SMALLEST_SCALE <= value <= _LARGEST:
        raise ValueError(f"{name} is {shown(value)}; allowed: {_ALLOWED}")


def _read_object(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise InputNotFoundError(f"fp8 scales {path} do not exist")
    # Opening a pipe would wait for whoever writes to it.
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: not a regular file; expected a JSON file of fp8 scales")
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path}: found more than {_MAX_BYTES} bytes; expected a file of scales")
    try:
        document = json.loads(data, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {one_line(error)}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: holds a {type(document).__name__}; expected an object")
    return document


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {shown(key)} is given twice")
        result[key] = value
    return result


def _part(entry: Mapping[str, Any], part: str) -> Any:
    return entry.get(part, entry.get(f"{part}_scale"))


def _layer_scales(entry: Any, where: str) -> LayerScales:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {shown(entry)}; expected an object with q, k and v")
    values = {part: _part(entry, part) for part in _PARTS}
    for part, value in values.items():
        if value is None:
            raise ConfigError(f"{where}: {part} is missing; expected q, k and v")
    try:
        scales = LayerScales(**values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return LayerScales(float(scales.q), float(scales.k), float(scales.v))


def _linears(document: Mapping[str, Any], num_layers: int, path: Path) -> dict[str, float]:
    ours = document.get(_OURS, {})
    found = ours.get("linears", {}) if isinstance(ours, dict) else ours
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path}: {_OURS} is {shown(ours)}; expected an object with an object linears"
        )
    if not found:
        return {}
    names = linear_names(num_layers)
    for name in found:
        if name not in names:
            raise ConfigError(
                f"{path}: {shown(name)} in linears is no linear of the tower, which has "
                f"{num_layers} layers"
            )
    for name in names:
        if name not in found:
            raise ConfigError(f"{path}: {name} is missing in linears; expected all, or none")
        try:
            check_scale(name, found[name])
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
    return {name: float(found[name]) for name in names}
