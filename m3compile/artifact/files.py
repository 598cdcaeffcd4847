"""Files of an artifact by size and SHA-256."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from m3compile.artifact.manifest import MANIFEST, FileEntry, Manifest
from m3compile.config.shown import one_line
from m3compile.errors import ArtifactDamagedError


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare size, then SHA-256, of every file that the manifest lists.

    Raises:
        ArtifactDamagedError: naming the file, what was found and what was expected.
    """
    for name, entry in manifest.files.items():
        path = folder / name
        if not os.path.lexists(path):
            raise ArtifactDamagedError(f"{path}: missing, expected {entry.size} bytes")
        if not os.path.isfile(path):
            raise ArtifactDamagedError(
                f"{path}: found no regular file, expected one of {entry.size} bytes"
            )
        size = path.stat().st_size
        if size != entry.size:
            raise ArtifactDamagedError(f"{path}: found {size} bytes, expected {entry.size}")
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            digest = file_digest(path)
        except OSError as error:
            raise ArtifactDamagedError(f"{path}: cannot be read: {error.strerror}") from None
        if digest != entry.sha256:
            raise ArtifactDamagedError(
                f"{path}: found SHA-256 {digest}, expected {entry.sha256[:64]}"
            )


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(4 * 1024 * 1024))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Every file of a folder but the manifest, by its path relative to it."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(
            size=path.stat().st_size, sha256=file_digest(path)
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }


def read_json(path: Path) -> Any:
    """A JSON file of an artifact whose digests were checked.

    Raises:
        ArtifactDamagedError: it is not JSON, or can no longer be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ArtifactDamagedError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ArtifactDamagedError(f"{path}: not valid JSON: {one_line(error)}") from None
