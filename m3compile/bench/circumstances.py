"""On what, with what and when something was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import msgspec

from m3compile.artifact import MANIFEST, Manifest, file_digest
from m3compile.bench.records import Circumstances, Subject
from m3compile.host import Host
from m3compile.version import VERSION

# Names the commit where the code runs outside of its repository: `HASH`, or `HASH-dirty`.
COMMIT_VARIABLE = "M3COMPILE_COMMIT"
_COMMAND_SECONDS = 20


def describe(manifest: Manifest, host: Host) -> Circumstances:
    """The circumstances of a run of an artifact on a machine, now."""
    commit, clean = source_commit(Path(__file__).parent)
    is_cuda = manifest.requirements.device == "cuda"
    return Circumstances(
        device=(host.gpu_name if is_cuda else None) or host.cpu_name,
        driver=_driver_version() if is_cuda else None,
        cpu=f"{host.cpu_name}, {os.cpu_count()} threads",
        platform=host.platform,
        python=platform.python_version(),
        torch=host.torch_full,
        cuda=host.cuda if is_cuda else None,
        triton=_installed("triton") if is_cuda else None,
        attention=f"{manifest.requirements.attention_backend} "
        f"({host.attention_versions[manifest.requirements.attention_backend]})",
        m3compile=VERSION,
        engine=manifest.build.engine,
        dtype=manifest.dtype,
        weights=manifest.provenance.weights,
        commit=commit,
        clean=clean,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def subject_of(folder: Path, manifest: Manifest) -> Subject:
    """What was measured. Where it lies says nothing about it: digests do."""
    build = manifest.build
    digests = {name: entry.sha256 for name, entry in manifest.files.items()}
    return Subject(
        name=folder.resolve().name,
        tower=manifest.tower,
        build=msgspec.structs.replace(
            build, checkpoint=_name(build.checkpoint), out=_name(build.out)
        ),
        ladder=manifest.ladder,
        max_segments=manifest.max_segments,
        digests={MANIFEST: file_digest(folder / MANIFEST), **digests},
        precision=manifest.precision,
    )


def _name(path: str | None) -> str | None:
    return None if path is None else Path(path).name


def source_commit(folder: Path) -> tuple[str | None, bool | None]:
    """The commit of the repository around a folder, and whether its tree is clean.

    Outside of a repository `M3COMPILE_COMMIT` may say it; (None, None) where nothing does.
    """
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    if commit:
        changes = _output("git", "-C", str(folder), "status", "--porcelain")
        return commit, None if changes is None else not changes
    named = os.environ.get(COMMIT_VARIABLE, "").strip()
    if named:
        return named.removesuffix("-dirty"), not named.endswith("-dirty")
    return None, None


def _driver_version() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        pass
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def _output(*command: str) -> str | None:
    """What a command prints, None where it does not exist or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
