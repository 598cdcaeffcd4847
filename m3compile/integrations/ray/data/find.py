"""What `--input` names: image files, or Parquet files with images in them. Listed, not read."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from m3compile.errors import InputError, InputNotFoundError, RequestError

# Of the formats that `images` decodes.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"),
)
PARQUET_SUFFIX = ".parquet"


@dataclass
class Listing:
    """What was found so far; complete once its files have been read to the end.

    Attributes:
        images, parquets: files of that kind.
        others: files in folders that are neither, by their names.
    """

    images: int = 0
    parquets: int = 0
    others: int = 0
    first: dict[str, str] = field(default_factory=dict)


def resolve_inputs(names: Sequence[str]) -> tuple[str, ...]:
    """Absolute paths of files and folders; patterns that the shell left alone are expanded.

    Raises:
        InputNotFoundError: nothing is there.
        RequestError: one lies in another, so that its files would count twice.
    """
    found: dict[str, None] = {}
    for name in names:
        matches = [name] if os.path.lexists(name) else sorted(glob.glob(name, recursive=True))
        if not matches:
            raise InputNotFoundError(f"--input {name}: no such file or folder")
        found.update((os.path.abspath(match), None) for match in matches)
    for path in found:
        outer = next((str(up) for up in Path(path).parents if str(up) in found), None)
        if outer is not None:
            raise RequestError(f"--input {path} lies in {outer}, another input; give one of them")
    return tuple(found)


def list_inputs(inputs: Sequence[str], listing: Listing) -> Iterator[str]:
    """Every image or Parquet file, folder by folder and by name; `listing` counts along.

    Folders are read with all that lies in them, links to folders left out. The entries of one
    folder are held at a time, and those of the folders around it.

    Raises:
        InputError: a folder cannot be read, a file that was named is of neither kind, or there are
            files of both kinds.
    """
    for name in inputs:
        for path in _walk(name) if os.path.isdir(name) else [name]:
            suffix = os.path.splitext(path)[1].lower()
            if suffix in IMAGE_SUFFIXES:
                kind = "images"
            elif suffix == PARQUET_SUFFIX:
                kind = "parquets"
            elif path == name:
                raise InputError(
                    f"--input {name}: neither an image nor a Parquet file by its name; "
                    f"allowed: {', '.join(IMAGE_SUFFIXES)}, {PARQUET_SUFFIX}"
                )
            else:
                listing.others += 1
                continue
            listing.first.setdefault(kind, path)
            if len(listing.first) > 1:
                raise InputError(
                    f"--input has images ({listing.first['images']}) and Parquet files "
                    f"({listing.first['parquets']}); give one kind a job, for example a pattern"
                )
            setattr(listing, kind, getattr(listing, kind) + 1)
            yield path


def _walk(folder: str) -> Iterator[str]:
    """Files below a folder. Links that lead nowhere are among them: their row tells."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from None
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)
        elif not entry.is_dir():
            yield entry.path
