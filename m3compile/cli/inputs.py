"""Items from files: what `--input` takes, for every command that has it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from m3compile.errors import InputError, InputNotFoundError

if TYPE_CHECKING:
    import torch


class ManyInputs(click.Command):
    """Lets one `--input` take several files, as shells expand `--input *.jpg`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        flag = ""
        has_value = False
        for word in args:
            if word.startswith("-") and word != "-":
                flag, has_value = word.partition("=")[0], "=" in word
            elif has_value and flag == "--input":
                spread.append(flag)
            else:
                has_value = True
            spread.append(word)
        return super().parse_args(ctx, spread)


def check_inputs(names: tuple[str, ...]) -> None:
    """Refuse names of what is no file, before anything slow begins."""
    for name in names:
        if not os.path.isfile(name):
            raise InputNotFoundError(f"--input {name}: no such file")


def has_rows(name: str) -> bool:
    """Whether a file holds rows that a processor made, going by its name; else it is an image."""
    return name.lower().endswith(".safetensors")


def read_rows(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`pixel_values` and `grid_thw` of a safetensors file, as they are.

    Raises:
        InputError: the file is none, or lacks one of them.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(name, framework="pt") as file:
            keys = set(file.keys())
            missing = [key for key in ("pixel_values", "grid_thw") if key not in keys]
            if missing:
                raise InputError(f"{name}: tensor {missing[0]} is missing; found {sorted(keys)}")
            return file.get_tensor("pixel_values"), file.get_tensor("grid_thw")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{name}: not a readable safetensors file: {error}") from None
