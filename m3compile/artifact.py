"""The artifact: a folder with a program, one copy of the weights and a manifest.

Layout of the folder:

    manifest.json              parsed strictly; says everything below
    encoder.pt2                AOTInductor package without weights (engine aoti)
    weights.safetensors        every weight, by the program's own names
    verify.json                what the build's verification found
    preprocessor_config.json   the checkpoint's, where it has one

Every file but the manifest is listed there with its size and SHA-256. A folder MUST hold the
files that its manifest lists and MAY hold others, which are ignored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from m3compile.buckets import RouteTimes
from m3compile.config import Bounds, BuildConfig, TowerConfig
from m3compile.errors import (
    ArtifactDamagedError,
    ArtifactIncompatibleError,
    ArtifactNotFoundError,
    OperationError,
    RequestError,
)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PROGRAM = "encoder.pt2"
WEIGHTS = "weights.safetensors"
VERIFY = "verify.json"
PREPROCESSOR = "preprocessor_config.json"

_MAX_MANIFEST_BYTES = 16 * 1024 * 1024


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tensor by name; a size is a number or the name of a symbolic one."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    size: int
    sha256: str


class Requirements(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a machine must have to run the program.

    Attributes:
        torch: its public version; compiled code calls that version's internals.
        platform: operating system and processor, such as `linux-x86_64`.
        cpu_flags: instruction set extensions that the compiler was allowed to use.
        device: `cpu` or `cuda`.
        gpu_arch, cuda: architecture such as `sm_90` and CUDA version; None for `cpu`.
        attention_backend: the implementation that the program calls by name.
        attention_version: package and version that it was built and verified with.
        op_schema: schema of the attention op.
    """

    torch: str
    platform: str
    cpu_flags: tuple[str, ...]
    device: str
    gpu_arch: str | None
    cuda: str | None
    attention_backend: str
    attention_version: str
    op_schema: str


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the artifact comes from; informs, and decides nothing.

    Attributes:
        weights: `checkpoint`, or `random` where the embeddings mean nothing.
        checkpoint_files: names and sizes of the files that were read.
        attention_reason: why the backend was chosen.
        created: UTC time, ISO 8601.
    """

    m3compile: str
    torch: str
    created: str
    host: str
    weights: str
    checkpoint: str | None
    checkpoint_files: dict[str, int]
    attention_reason: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format_version: int
    tower: TowerConfig
    build: BuildConfig
    bounds: Bounds
    ladder: tuple[int, ...]
    max_segments: int
    dtype: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[TensorSpec, ...]
    requirements: Requirements
    files: dict[str, FileEntry]
    provenance: Provenance
    times: RouteTimes | None = None


def read_manifest(folder: Path) -> Manifest:
    """Parse `manifest.json`, strictly.

    Raises:
        ArtifactNotFoundError: there is no such folder, or no manifest in it.
        ArtifactIncompatibleError: it has another format version.
        ArtifactDamagedError: it is not JSON, or has a missing, unknown or impossible field.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ArtifactNotFoundError(f"{folder}: no such artifact folder")
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ArtifactDamagedError(
                f"{path}: found {path.stat().st_size} bytes, expected at most {_MAX_MANIFEST_BYTES}"
            )
        data = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactNotFoundError(f"{folder}: not an artifact, it has no {MANIFEST}") from None
    except OSError as error:
        raise ArtifactDamagedError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ArtifactDamagedError(f"{path}: not valid JSON: {error}") from None
    version = document.get("format_version") if isinstance(document, dict) else None
    if isinstance(version, bool) or not isinstance(version, int):
        raise ArtifactDamagedError(f"{path}: found no format_version, expected {FORMAT_VERSION}")
    if version != FORMAT_VERSION:
        raise ArtifactIncompatibleError(
            f"{path}: found format version {version}, this m3compile reads {FORMAT_VERSION}"
        )
    try:
        manifest = msgspec.convert(document, Manifest)
    except msgspec.ValidationError as error:
        raise ArtifactDamagedError(f"{path}: {error}") from None
    _check_meaning(manifest, path)
    return manifest


def _check_meaning(manifest: Manifest, path: Path) -> None:
    """Refuse what parses but cannot be: the loader sizes buffers from these numbers."""
    ladder = manifest.ladder
    if any(b <= a for a, b in itertools.pairwise((0, *ladder))):
        raise ArtifactDamagedError(f"{path}: ladder is {list(ladder)}, expected increasing budgets")
    if manifest.max_segments < 1:
        raise ArtifactDamagedError(
            f"{path}: max_segments is {manifest.max_segments}, expected >= 1"
        )
    if manifest.requirements.device not in ("cpu", "cuda"):
        raise ArtifactDamagedError(
            f"{path}: device is {manifest.requirements.device!r}, expected cpu or cuda"
        )
    if manifest.dtype not in ("float32", "bfloat16"):
        raise ArtifactDamagedError(
            f"{path}: dtype is {manifest.dtype!r}, expected float32 or bfloat16"
        )
    if WEIGHTS not in manifest.files:
        raise ArtifactDamagedError(f"{path}: files does not list {WEIGHTS}")
    for name in manifest.files:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or "\\" in name or ".." in parts:
            raise ArtifactDamagedError(
                f"{path}: file name {name!r}, expected one inside the artifact"
            )


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare size, then SHA-256, of every file that the manifest lists.

    Raises:
        ArtifactDamagedError: naming the file, what was found and what was expected.
    """
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise ArtifactDamagedError(f"{path}: cannot be read: {error.strerror}") from None
        if size is None:
            raise ArtifactDamagedError(f"{path}: missing, expected {entry.size} bytes")
        if size != entry.size:
            raise ArtifactDamagedError(f"{path}: found {size} bytes, expected {entry.size}")
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            digest = file_digest(path)
        except OSError as error:
            raise ArtifactDamagedError(f"{path}: cannot be read: {error.strerror}") from None
        if digest != entry.sha256:
            raise ArtifactDamagedError(f"{path}: found SHA-256 {digest}, expected {entry.sha256}")


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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(msgspec.to_builtins(manifest), indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """A JSON file of an artifact whose digests were checked."""
    return msgspec.json.decode(path.read_bytes())


def check_target(out: Path, *, force: bool) -> None:
    """Refuse, before any work, a name that a build could not publish under.

    Raises:
        RequestError: `out` exists and `force` is off, or `out` is not an artifact.
    """
    if not os.path.lexists(out):
        return
    if not (out / MANIFEST).is_file() or out.is_symlink():
        raise RequestError(f"{out} exists and is not an artifact; choose another --out")
    if not force:
        raise RequestError(f"{out} exists; pass --force to replace it, or choose another --out")


@contextmanager
def publishing(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder to fill; renamed to `out` when the block ends, removed when it raises.

    Raises:
        RequestError: as `check_target`, before the block and again before the rename.
        OperationError: the folder cannot be made or renamed.
    """
    check_target(out, force=force)
    out = out.absolute()
    staging = out.parent / f".{out.name}.building-{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        raise OperationError(f"cannot write to {out.parent}: {error.strerror}") from None
    try:
        yield staging
        check_target(out, force=force)
        _swap_in(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _swap_in(staging: Path, out: Path) -> None:
    replaced = out.parent / f".{out.name}.replaced-{os.getpid()}"
    try:
        if out.exists():
            out.rename(replaced)
        try:
            staging.rename(out)
        except OSError:
            if replaced.exists():
                replaced.rename(out)
            raise
    except OSError as error:
        raise OperationError(f"cannot publish {out}: {error.strerror}") from None
    shutil.rmtree(replaced, ignore_errors=True)
