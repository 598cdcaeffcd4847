"""A job from its request to its summary: what is asked for is checked, the output is looked at, and
what it lacks goes through the pipeline.

This process sees the work to do, and for every file the numbers of what was written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import pyarrow as pa
import torch

from m3compile.artifact import (
    MANIFEST,
    Manifest,
    check_files,
    file_digest,
    read_manifest,
    read_preprocess,
)
from m3compile.config.build import MAX_TOKENS
from m3compile.errors import OperationError, RequestError
from m3compile.integrations.ray.data.cluster import LOCAL, connected, divide_cluster
from m3compile.integrations.ray.data.decode import Decoder
from m3compile.integrations.ray.data.find import resolve_inputs
from m3compile.integrations.ray.data.job import (
    Job,
    Settings,
    Work,
    locked,
    open_inputs,
    open_job,
    remaining,
)
from m3compile.integrations.ray.data.pipeline import pipeline
from m3compile.integrations.ray.data.stages import DTYPES, BatchWriter
from m3compile.loading import check_machine
from m3compile.progress import Progress
from m3compile.version import VERSION

# Decoding tasks that a job is divided into at most; each is an object that Ray keeps track of.
_MAX_TASKS = 4096
# Shards whose work is put into a table at a time.
_PART_SHARDS = 4096
_WORK = pa.schema([("shard", pa.int64()), ("gaps", pa.list_(pa.list_(pa.int64())))])
# Of a list in Parquet, whose offsets are 32-bit.
_MOST_VALUES = 2**31 - 1


class Request(NamedTuple):
    """What is asked for.

    Attributes:
        inputs: folders, files or patterns.
        concurrency: encoders; None for one a GPU, or one where there are none.
        batch_tokens: output tokens of a batch and so of a file; None for the largest budget.
        max_errors: rows with an error, after which the job stops; None for any number.
    """

    artifact: Path
    inputs: Sequence[str]
    output: Path
    concurrency: int | None = None
    batch_tokens: int | None = None
    dtype: Literal["float32", "float16"] = "float32"
    max_errors: int | None = None
    address: str = LOCAL


class EmbedReport(msgspec.Struct):
    """What a run did.

    Attributes:
        rows: of the job; `rows_before` of them were done when the run began.
        skipped: files in the inputs' folders that are not images.
        encoders: processes that encoded.
        rows_written, errors_written, tokens_written, bytes_written: by this run, in `files`.
        seconds: from the request to the last file, wall clock.
    """

    rows: int
    rows_before: int
    skipped: int
    encoders: int = 0
    files: int = 0
    rows_written: int = 0
    errors_written: int = 0
    tokens_written: int = 0
    bytes_written: int = 0
    seconds: float = 0.0


def embed(request: Request, progress: Progress | None = None) -> EmbedReport:
    """Embed every input that the output folder does not have yet.

    Whatever ends it, what is written is whole, and the same request goes on from there.

    Raises:
        RequestError: the request is wrong, or the output is another job's.
        ArtifactError: the artifact is missing, damaged or incompatible.
        OperationError: a stage failed, or too many rows had an error.
    """
    progress = progress or Progress()
    started = time.perf_counter()
    output = request.output.absolute()
    with progress.stage("check artifact"):
        manifest = read_manifest(request.artifact)
        check_files(request.artifact, manifest)
        if request.address == LOCAL:
            check_machine(request.artifact, manifest, None)
        settings = _settings(request, manifest)
    _check_apart(output, settings.inputs)
    with locked(output):
        with progress.stage("list inputs"):
            job = open_job(output, settings)
            works = Works(remaining(output, open_inputs(output, job)))
        report = EmbedReport(job.rows, job.rows - works.rows, job.skipped)
        if works.rows:
            _run(request, manifest, job, works, report, progress)
            left = Works(remaining(output, open_inputs(output, job))).rows
            if left:
                # An image that changes while its task is repeated moves the edges of files.
                raise OperationError(f"{left} rows are not written; run the same command again")
    report.seconds = time.perf_counter() - started
    return report


def _settings(request: Request, manifest: Manifest) -> Settings:
    tokens = request.batch_tokens or max(manifest.ladder)
    most = min(MAX_TOKENS, _MOST_VALUES // manifest.tower.output_size)
    if tokens > most:
        raise RequestError(f"--batch-tokens is {tokens}; allowed: at most {most}")
    return Settings(
        artifact=file_digest(request.artifact / MANIFEST),
        inputs=resolve_inputs(request.inputs),
        batch_tokens=tokens,
        dtype=request.dtype,
    )


def _run(
    request: Request,
    manifest: Manifest,
    job: Job,
    works: Works,
    report: EmbedReport,
    progress: Progress,
) -> None:
    """Do the work on Ray, counting into the report."""
    output, tower, settings = request.output.absolute(), manifest.tower, job.settings
    decoder = Decoder(
        output,
        job,
        read_preprocess(request.artifact, manifest),
        getattr(torch, manifest.dtype),
        settings.batch_tokens,
        manifest.build.max_items,
    )
    writer = BatchWriter(
        output,
        settings.dtype,
        tower.output_size,
        open_inputs(output, job).name_field,
        {"version": VERSION, "artifact": settings.artifact},
    )
    batch_bytes = decoder.batch_bytes + (
        settings.batch_tokens * tower.output_size * DTYPES[settings.dtype].itemsize
    )
    with ExitStack() as stack:
        with progress.stage("start Ray"):
            stack.enter_context(connected(request.address, batch_bytes))
        share = divide_cluster(request.concurrency, manifest.requirements.device)
        report.encoders = share.encoders
        with progress.stage("embed"):
            artifact = str(request.artifact.absolute())
            files = pipeline(works.tables(), decoder, artifact, share, writer)
            _drain(files, report, request.max_errors, progress)


def _check_apart(output: Path, inputs: Sequence[str]) -> None:
    # Links followed: a folder reached by two names is one.
    real = output.resolve()
    for name in inputs:
        other = Path(name).resolve()
        if real == other or other in real.parents or real in other.parents:
            raise RequestError(f"--output {output} and --input {name}: one lies in the other")


class Works:
    """Work to do, as tables: some 50 bytes a shard that is not finished, in this process.

    Attributes:
        rows: to do.
    """

    def __init__(self, works: Iterator[Work]) -> None:
        self.rows = 0
        self._parts: list[pa.Table] = []
        while part := list(islice(works, _PART_SHARDS)):
            self.rows += sum(stop - start for work in part for start, stop in work.gaps)
            rows = [{"shard": work.shard, "gaps": list(map(list, work.gaps))} for work in part]
            self._parts.append(pa.Table.from_pylist(rows, _WORK))

    def tables(self) -> list[pa.Table]:
        """The work of every decoding task."""
        table = pa.concat_tables(self._parts)
        size = -(-len(table) // _MAX_TASKS)
        return [table.slice(first, size) for first in range(0, len(table), size)]


def _drain(
    files: Iterator[dict[str, int]],
    report: EmbedReport,
    max_errors: int | None,
    progress: Progress,
) -> None:
    """Run a pipeline to its end, counting into the report."""
    for file in files:
        report.files += 1
        for name in ("rows", "errors", "tokens", "bytes"):
            field = f"{name}_written"
            setattr(report, field, getattr(report, field) + file[name])
        progress.advance(report.rows_before + report.rows_written, report.rows)
        if max_errors is not None and report.errors_written > max_errors:
            raise OperationError(
                f"{report.errors_written} rows have an error, --max-errors is {max_errors}; what "
                "is written stays, and the same command goes on from there"
            )
