"""Files that commands read and write: what `--input` takes, and where a result may go."""

from __future__ import annotations

import os
from pathlib import Path

import click

from m3compile.errors import InputNotFoundError, RequestError


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


def check_output(flag: str, name: str) -> Path:
    """Refuse the name of a file that could not be written in the end, before anything slow."""
    target = Path(name)
    if not os.path.isdir(target.absolute().parent):
        raise RequestError(f"{flag} {name}: its folder does not exist")
    if os.path.isdir(target):
        raise RequestError(f"{flag} {name}: a folder; expected the name of a file")
    return target


def has_rows(name: str) -> bool:
    """Whether a file holds rows that a processor made, going by its name; else it is an image."""
    return name.lower().endswith(".safetensors")
