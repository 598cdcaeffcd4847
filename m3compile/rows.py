"""Files of rows that a processor made: safetensors with `pixel_values` and `grid_thw`."""

from __future__ import annotations

import os

from safetensors import SafetensorError, safe_open
from torch import Tensor

from m3compile.errors import InputError, InputNotFoundError


def read_rows(name: str) -> tuple[Tensor, Tensor]:
    """`pixel_values` and `grid_thw` of a safetensors file, as they are.

    Raises:
        InputNotFoundError: there is no such file.
        InputError: the file is no safetensors file, or lacks one of them.
    """
    if not os.path.isfile(name):
        raise InputNotFoundError(f"{name}: no such file")
    try:
        with safe_open(name, framework="pt") as file:
            keys = set(file.keys())
            missing = [key for key in ("pixel_values", "grid_thw") if key not in keys]
            if missing:
                raise InputError(f"{name}: tensor {missing[0]} is missing; found {sorted(keys)}")
            return file.get_tensor("pixel_values"), file.get_tensor("grid_thw")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{name}: not a readable safetensors file: {error}") from None
