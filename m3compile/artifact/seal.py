"""The seal: a note inside the compiled package that says what it was compiled for.

A package does not know its own sizes, dtypes or machine, and a program that is called by a
manifest of another one crashes or returns wrong numbers. So the builder writes into the package
what it was compiled for, and a loader compares that with the manifest before it loads any code.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from m3compile.artifact.manifest import MANIFEST, Manifest, Requirements, TensorSpec
from m3compile.config import TowerConfig
from m3compile.config.shown import shown
from m3compile.errors import ArtifactDamagedError

# `extra` is the format's own place for what torch does not read.
_MEMBER = "extra/m3compile.json"
_MAX_BYTES = 16 * 1024 * 1024
# What `zipfile` raises on bytes that it does not understand.
_ZIP_ERRORS = (
    zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error, OSError, EOFError,
    NotImplementedError, RuntimeError, ValueError, LookupError, OverflowError,
)  # fmt: skip


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a program was compiled for; fields as in `Manifest`."""

    tower: TowerConfig
    dtype: str
    max_segments: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[TensorSpec, ...]
    requirements: Requirements


def program_inputs(tower: TowerConfig, dtype: str, max_segments: int) -> tuple[TensorSpec, ...]:
    """The program's inputs, in order."""
    return (
        TensorSpec(name="pixel_values", dtype=dtype, shape=("num_patches", tower.patch_dim)),
        TensorSpec(name="segments", dtype="int32", shape=(max_segments, 3)),
    )


def program_outputs(tower: TowerConfig, dtype: str, max_segments: int) -> tuple[TensorSpec, ...]:
    """The program's outputs, in order."""
    return (
        TensorSpec(name="embeddings", dtype=dtype, shape=("num_patches/4", tower.output_size)),
        TensorSpec(name="is_nonfinite", dtype="bool", shape=(max_segments,)),
    )


def seal(package: Path, manifest: Manifest) -> None:
    """Write into a package what it was compiled for."""
    with zipfile.ZipFile(package, "a", zipfile.ZIP_STORED) as archive:
        root = archive.namelist()[0].split("/", 1)[0]
        archive.writestr(f"{root}/{_MEMBER}", msgspec.json.encode(_of(manifest)))


def check_seal(package: Path, manifest: Manifest) -> None:
    """Compare a package with the manifest beside it; no code is loaded.

    Raises:
        ArtifactDamagedError: it is no package, has no seal, or was compiled for something else;
            names what differs.
    """
    try:
        found = msgspec.json.decode(_read(package), type=Seal)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ArtifactDamagedError(f"{package}: its seal is not valid: {error}") from None
    difference = _difference("", found, _of(manifest))
    if difference:
        raise ArtifactDamagedError(f"{package}: compiled for {difference} in {MANIFEST}")


def _of(manifest: Manifest) -> Seal:
    return Seal(**{name: getattr(manifest, name) for name in Seal.__struct_fields__})


def _read(package: Path) -> bytes:
    try:
        with zipfile.ZipFile(package) as archive:
            names = [name for name in archive.namelist() if name.endswith("/" + _MEMBER)]
            if len(names) != 1:
                raise ArtifactDamagedError(
                    f"{package}: found {len(names)} seals, expected one; build the artifact again"
                )
            if archive.getinfo(names[0]).file_size > _MAX_BYTES:
                raise ArtifactDamagedError(f"{package}: its seal is over {_MAX_BYTES} bytes")
            return archive.read(names[0])
    except _ZIP_ERRORS as error:
        if isinstance(error, ArtifactDamagedError):
            raise
        raise ArtifactDamagedError(f"{package}: not a compiled package: {error}") from None


def _difference(field: str, found: Any, expected: Any) -> str:
    """The first field that differs, in words, or ""."""
    if found == expected:
        return ""
    if isinstance(found, msgspec.Struct) and not isinstance(found, TensorSpec):
        differences = (
            _difference(
                f"{field}.{name}".lstrip("."), getattr(found, name), getattr(expected, name)
            )
            for name in found.__struct_fields__
        )
        return next(filter(None, differences), "")
    if field in ("inputs", "outputs", "weights"):
        ours, theirs = _by_name(found), _by_name(expected)
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                kind = "tensor" if field == "weights" else field.removesuffix("s")
                return f"{kind} {name}: {_told(ours.get(name))}, found {_told(theirs.get(name))}"
    return f"{field} {shown(found)}, found {shown(expected)}"


def _by_name(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in specs}


def _told(spec: TensorSpec | None) -> str:
    return "no such tensor" if spec is None else f"{spec.dtype} {list(spec.shape)}"
