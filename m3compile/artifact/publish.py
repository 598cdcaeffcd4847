"""Publishing: an artifact is written aside and renamed into place, whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from m3compile.artifact.manifest import MANIFEST
from m3compile.errors import OperationError, RequestError

# How often another build of the same name may come in between before we give up.
_MAX_SWAPS = 10


def check_target(out: Path, *, force: bool) -> None:
    """Refuse, before any work, a name that a build could not publish under.

    Raises:
        RequestError: `out` exists and `force` is off, or `out` is not an artifact.
    """
    found = _look(out)
    if found == "nothing":
        return
    if found == "other":
        raise RequestError(f"{out} exists and is not an artifact; choose another --out")
    if not force:
        raise RequestError(f"{out} exists; pass --force to replace it, or choose another --out")


def _look(out: Path) -> Literal["nothing", "artifact", "other"]:
    """What stands at `out`, never a mixture of what stood there before and after another build."""
    found: Literal["nothing", "artifact", "other"] = "nothing"
    for _ in range(_MAX_SWAPS):
        before = _identity(out)
        if before is None:
            return "nothing"
        found = "artifact" if not out.is_symlink() and _is_artifact(out) else "other"
        if _identity(out) == before:
            break
    return found


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Of whatever stands there now; a rename changes the last part. None where nothing does."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _is_artifact(folder: Path) -> bool:
    """Whether a folder may be replaced: other programs have a manifest.json too."""
    path = folder / MANIFEST
    if not os.path.isfile(path):
        return False
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and {"format_version", "files", "tower"} <= document.keys()


@contextmanager
def publishing(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder to fill; renamed to `out` when the block ends, removed when it raises.

    Raises:
        RequestError: as `check_target`, before the block and again before the rename.
        OperationError: the folder cannot be made or renamed.
    """
    check_target(out, force=force)
    out = Path(os.path.abspath(out))
    staging = out.parent / f".{out.name}.building-{uuid.uuid4().hex}"
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            staging.mkdir()
        except OSError as error:
            raise OperationError(f"cannot write to {out.parent}: {error.strerror}") from None
        yield staging
        _swap_in(staging, out, force=force)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _swap_in(staging: Path, out: Path, *, force: bool) -> None:
    """Rename `staging` to `out`; what was there is moved aside first, and back if that fails."""
    aside: list[Path] = []
    try:
        for _ in range(_MAX_SWAPS):
            check_target(out, force=force)
            if os.path.lexists(out):
                replaced = staging.with_name(f".{out.name}.replaced-{uuid.uuid4().hex}")
                try:
                    out.rename(replaced)
                except FileNotFoundError:
                    continue
                aside.append(replaced)
            try:
                staging.rename(out)
                return
            except OSError:
                # Another build may have published here since; then its artifact is in the way.
                if not os.path.lexists(out):
                    raise
        raise OperationError(f"cannot publish {out}: other builds keep writing it")
    except OSError as error:
        raise OperationError(f"cannot publish {out}: {error.strerror}") from None
    finally:
        if aside and not os.path.lexists(out):
            # Fails where another build publishes just now, which is as good as what was there.
            with suppress(OSError):
                aside[-1].rename(out)
        for folder in aside:
            shutil.rmtree(folder, ignore_errors=True)
