"""The seal: a note inside the compiled package that says what it was compiled for.

A package does not know its own sizes, dtypes or machine, and a program that is called by a
manifest of another one crashes or returns wrong numbers. So the builder writes into the package
what it was compiled for and what it holds, and a loader compares that with the manifest and with
the package before torch unpacks it and loads its code.
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from m3compile.artifact.manifest import MANIFEST, Manifest, Requirements, TensorSpec
from m3compile.config import TowerConfig
from m3compile.config.shown import one_line, shown
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
    """What a program was compiled for; fields as in `Manifest`.

    Attributes:
        file: name of the package; an artifact may have two, for runs of different sizes.
        members: SHA-256 of every other member of the package, by its name in the archive.
    """

    tower: TowerConfig
    dtype: str
    max_segments: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[TensorSpec, ...]
    requirements: Requirements
    few_rows_tokens: int
    file: str
    members: dict[str, str]


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
    """Write into a package what it was compiled for and what it holds."""
    with zipfile.ZipFile(package, "a", zipfile.ZIP_STORED) as archive:
        members = _digests(archive)
        root = next(iter(members)).split("/", 1)[0]
        archive.writestr(f"{root}/{_MEMBER}", msgspec.json.encode(_of(manifest, package, members)))


def check_seal(package: Path, manifest: Manifest) -> None:
    """Compare a package with its seal, and the seal with the manifest; no code is loaded.

    Raises:
        ArtifactDamagedError: it is no package, has no seal, holds something else than its seal
            says, or was compiled for something else than the manifest says; names what differs.
    """
    try:
        with zipfile.ZipFile(package) as archive:
            found = _read(package, archive)
            members = _digests(archive)
    except ArtifactDamagedError:
        raise
    except _ZIP_ERRORS as error:
        raise ArtifactDamagedError(
            f"{package}: not a compiled package: {one_line(error)}"
        ) from None
    for name in sorted(members.keys() | found.members.keys()):
        if members.get(name) != found.members.get(name):
            raise ArtifactDamagedError(
                f"{package}: member {shown(name)}: found {_digest_told(members.get(name))}, "
                f"expected {_digest_told(found.members.get(name))}"
            )
    difference = _difference("", found, _of(manifest, package, members))
    if difference:
        raise ArtifactDamagedError(f"{package}: compiled for {difference} in {MANIFEST}")


def _of(manifest: Manifest, package: Path, members: dict[str, str]) -> Seal:
    fields = (name for name in Seal.__struct_fields__ if name not in ("file", "members"))
    same = {name: getattr(manifest, name) for name in fields}
    return Seal(file=package.name, members=members, **same)


def _digests(archive: zipfile.ZipFile) -> dict[str, str]:
    """SHA-256 by name of every member but the seal."""
    digests: dict[str, str] = {}
    for info in archive.infolist():
        if not info.filename.endswith("/" + _MEMBER):
            # A name may come twice; then none of the two is what the seal says.
            known = digests.get(info.filename, "")
            digests[info.filename] = known + hashlib.sha256(archive.read(info)).hexdigest()
    return digests


def _read(package: Path, archive: zipfile.ZipFile) -> Seal:
    seals = [info for info in archive.infolist() if info.filename.endswith("/" + _MEMBER)]
    if len(seals) != 1:
        raise ArtifactDamagedError(
            f"{package}: found {len(seals)} seals, expected one; build the artifact again"
        )
    if seals[0].file_size > _MAX_BYTES:
        raise ArtifactDamagedError(f"{package}: its seal is over {_MAX_BYTES} bytes")
    try:
        return msgspec.json.decode(archive.read(seals[0]), type=Seal)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ArtifactDamagedError(f"{package}: its seal is not valid: {one_line(error)}") from None


def _digest_told(digest: str | None) -> str:
    return "no such member" if digest is None else f"SHA-256 {digest[:64]}"


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
