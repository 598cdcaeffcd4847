"""Reading `manifest.json`, strictly, and writing it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from m3compile.artifact.files import read_json
from m3compile.artifact.manifest import FORMAT_VERSION, MANIFEST, PREPROCESSOR, Manifest
from m3compile.artifact.meaning import check_meaning
from m3compile.config import PreprocessConfig, preprocess_config_for_tower
from m3compile.config.shown import one_line, shown
from m3compile.errors import (
    ArtifactDamagedError,
    ArtifactIncompatibleError,
    ArtifactNotFoundError,
)

_MAX_MANIFEST_BYTES = 16 * 1024 * 1024


def read_manifest(folder: Path) -> Manifest:
    """Parse `manifest.json`, strictly, and refuse what parses but cannot be.

    Raises:
        ArtifactNotFoundError: there is no such folder, or no manifest in it.
        ArtifactIncompatibleError: it has another format version.
        ArtifactDamagedError: it is not JSON, or has a missing, unknown or impossible field.
    """
    path = folder / MANIFEST
    data = _read(folder, path)
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ArtifactDamagedError(f"{path}: not valid JSON: {one_line(error)}") from None
    if not isinstance(document, dict):
        raise ArtifactDamagedError(f"{path}: holds a {type(document).__name__}, expected an object")
    version = document.get("format_version")
    if isinstance(version, bool) or not isinstance(version, int):
        raise ArtifactDamagedError(
            f"{path}: format_version is {shown(version)}, expected {FORMAT_VERSION}"
        )
    if version != FORMAT_VERSION:
        raise ArtifactIncompatibleError(
            f"{path}: found format version {shown(version)}, this m3compile reads {FORMAT_VERSION}"
        )
    try:
        manifest = msgspec.convert(document, Manifest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ArtifactDamagedError(f"{path}: {one_line(error)}") from None
    check_meaning(manifest, path)
    return manifest


def read_preprocess(folder: Path, manifest: Manifest) -> PreprocessConfig:
    """How images become the artifact's rows: its own settings, or the released ones.

    Raises:
        ArtifactDamagedError: its settings are not JSON.
        CheckpointError: they cannot be honoured.
    """
    path = folder / PREPROCESSOR
    document = read_json(path) if PREPROCESSOR in manifest.files else {}
    return preprocess_config_for_tower(document, manifest.tower, str(path))


def _read(folder: Path, path: Path) -> bytes:
    if not os.path.isdir(folder):
        raise ArtifactNotFoundError(f"{folder}: no such artifact folder")
    if not os.path.lexists(path):
        raise ArtifactNotFoundError(f"{folder}: not an artifact, it has no {MANIFEST}")
    # Opening a pipe would wait for whoever writes to it.
    if not os.path.isfile(path):
        raise ArtifactDamagedError(f"{path}: not a regular file")
    try:
        size = path.stat().st_size
        if size > _MAX_MANIFEST_BYTES:
            raise ArtifactDamagedError(
                f"{path}: found {size} bytes, expected at most {_MAX_MANIFEST_BYTES}"
            )
        return path.read_bytes()
    except OSError as error:
        raise ArtifactDamagedError(f"{path}: cannot be read: {error.strerror}") from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(msgspec.to_builtins(manifest), indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
