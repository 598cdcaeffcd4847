"""A job on disk: what it embeds and with what, and which rows are done.

    OUTPUT/
      shard-0000000/
        000000000-000000041.parquet   rows 0 to 41 of shard 0, whole or not there
      _m3compile/                     readers of Parquet folders leave it out
        job.json                      what must be the same in a run that resumes
        inputs.arrow                  the list of inputs, see `inputs`
        lock                          held by the run that is writing
        attempts/                     what is being worked on, see `attempt`

A row is done when a file has it in its name; nothing else is kept about progress.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from m3compile.errors import OperationError, RequestError
from m3compile.integrations.ray.data.inputs import Inputs, write_list

FOLDER = "_m3compile"
_JOB = "job.json"
_LIST = "inputs.arrow"
_LOCK = "lock"
_ATTEMPTS = "attempts"
_SHOWN_INPUTS = 3
# Processes that may die of the same shard or batch before the job stops.
_MOST_DEATHS = 3
# How the name of a file ends while it is written; it begins with a dot.
PARTIAL = ".partial"
_NAME = re.compile(r"(\d{9})-(\d{9})\.parquet")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What decides the content of the output; a run that resumes must ask for the same.

    Attributes:
        artifact: SHA-256 of its manifest, which lists the digests of everything else.
        inputs: absolute paths.
        batch_tokens: output tokens of a file at most, unless one image has more.
        dtype: of the embeddings in the output.
    """

    artifact: str
    inputs: tuple[str, ...]
    batch_tokens: int
    dtype: Literal["float32", "float16"]


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`job.json`.

    Attributes:
        kind, name_type, rows, skipped: see `inputs.Found`.
    """

    format_version: Literal[1] = 1
    settings: Settings
    kind: Literal["files", "paths", "images"]
    name_type: Literal["string", "int64"]
    rows: int
    skipped: int


class Work(NamedTuple):
    """Rows of a shard that are not done: half-open ranges."""

    shard: int
    gaps: list[tuple[int, int]]


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Hold an output folder for one run, made if it is not there.

    Raises:
        RequestError: it has other content than a job's, or another run holds it.
        OperationError: it cannot be made.
    """
    try:
        if output.exists() and (not output.is_dir() or _is_foreign(output)):
            raise RequestError(
                f"--output {output}: not empty, and no output of embed; give another folder"
            )
        (output / FOLDER).mkdir(parents=True, exist_ok=True)
        lock = (output / FOLDER / _LOCK).open("wb")
    except OSError as error:
        raise OperationError(f"--output {output}: {error.strerror or error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RequestError(
                f"--output {output}: another run is writing there; wait for it or stop it"
            ) from None
        yield


def _is_foreign(output: Path) -> bool:
    return not (output / FOLDER).is_dir() and any(output.iterdir())


def open_job(output: Path, settings: Settings) -> Job:
    """The job of a locked folder: begun if there is none, resumed if it is the same.

    Raises:
        RequestError: the folder holds another job, or the inputs are wrong (see `write_list`).
        OperationError: the folder cannot be written.
    """
    folder = output / FOLDER
    path = folder / _JOB
    if path.exists():
        try:
            job = msgspec.json.decode(path.read_bytes(), type=Job)
        except (OSError, msgspec.DecodeError) as error:
            raise RequestError(f"{path}: not a job of this version: {error}") from None
        for name in Settings.__struct_fields__:
            theirs, ours = getattr(job.settings, name), getattr(settings, name)
            if theirs != ours:
                raise RequestError(
                    f"--output {output} holds another job: {name} is {_told(theirs)} there, "
                    f"{_told(ours)} here; give another folder, or delete this one"
                )
    else:
        found = write_list(settings.inputs, folder / _LIST)
        job = Job(settings=settings, **found._asdict())
        partial = path.with_suffix(PARTIAL)
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(job), indent=1))
        # Last, so that a job has its list.
        partial.replace(path)
    # Of a run that was killed: a crash is looked for within a run.
    shutil.rmtree(folder / _ATTEMPTS, ignore_errors=True)
    (folder / _ATTEMPTS).mkdir()
    return job


@contextmanager
def attempt(output: Path, what: str) -> Iterator[int]:
    """Work that may take its process with it; how many did before, in this run.

    Ray repeats a task whose process died, and would for ever.

    Args:
        what: names the work, and the file that is there meanwhile.

    Raises:
        OperationError: too many did.
    """
    mark = output / FOLDER / _ATTEMPTS / what
    with mark.open("ab") as file:
        deaths = file.tell()
        file.write(b".")
    if deaths >= _MOST_DEATHS:
        raise OperationError(f"{deaths} processes died at {what}; see Ray's logs for why")
    yield deaths
    mark.unlink(missing_ok=True)


def _told(value: object) -> str:
    if isinstance(value, tuple):
        more = len(value) - _SHOWN_INPUTS
        return ", ".join(value[:_SHOWN_INPUTS]) + (f" and {more} more" if more > 0 else "")
    return str(value)[:16]


def open_inputs(output: Path, job: Job) -> Inputs:
    return Inputs(output / FOLDER / _LIST, job.kind, job.name_type)


def file_of(output: Path, shard: int, start: int, stop: int) -> Path:
    """Where rows start to stop (exclusive) of a shard are written."""
    return _shard_folder(output, shard) / f"{start:09}-{stop - 1:09}.parquet"


def _shard_folder(output: Path, shard: int) -> Path:
    return output / f"shard-{shard:07}"


def remaining(output: Path, inputs: Inputs) -> Iterator[Work]:
    """What is not done, shard by shard. Half-written files are removed on the way.

    Where files overlap (an image changed while a task that had died was repeated), they are
    removed, and their rows are not done.
    """
    for shard, rows in enumerate(inputs.shard_rows()):
        done = _done(_shard_folder(output, shard))
        edges = [(0, 0), *done, (rows, rows)]
        gaps = [(stop, start) for (_, stop), (start, _) in pairwise(edges) if stop < start]
        if gaps:
            yield Work(shard, gaps)


def _done(folder: Path) -> list[tuple[int, int]]:
    """The ranges of a shard that are written, in order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OperationError(f"{folder}: cannot be read: {error.strerror}") from None
    found = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None and name.endswith(PARTIAL):
            (folder / name).unlink(missing_ok=True)
        elif match is not None:
            found[int(match[1]), int(match[2]) + 1] = folder / name
    ranges = sorted(found)
    bad = {
        either for one, other in pairwise(ranges) if other[0] < one[1] for either in (one, other)
    }
    for each in bad:
        found[each].unlink(missing_ok=True)
    return [each for each in ranges if each not in bad]
