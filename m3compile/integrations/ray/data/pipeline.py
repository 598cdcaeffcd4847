"""The pipeline of a job, on Ray Data.

    decode (a task a CPU)  ->  encode (an actor a GPU)  ->  write (tasks)
    rows of patches            embeddings                   a file a batch

What Ray Data holds between stages is bounded by its backpressure, so memory does not grow with the
input.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import ray
import ray.data

from m3compile import errors
from m3compile.errors import M3CompileError, OperationError
from m3compile.integrations.ray.data.cluster import Share
from m3compile.integrations.ray.data.decode import Decoder
from m3compile.integrations.ray.data.stages import BatchWriter, EncodeBatches

# Below a batch's size, so that Ray Data never joins two batches.
_BLOCK_BYTES = 1 << 20
# Writing tasks at a time, for every encoder.
_WRITERS = 2
# How an error of ours ends the text of Ray's.
_OURS = re.compile(r"^\s*m3compile\.errors\.(\w+): (.+)$", re.MULTILINE)


def pipeline(
    works: list[pa.Table], decoder: Decoder, artifact: str, share: Share, writer: BatchWriter
) -> Iterator[dict[str, int]]:
    """What was written, file by file: rows, errors, tokens, bytes. Runs as it is read.

    Args:
        works: `Work` as tables, one a decoding task.
        artifact: a path that holds on every machine.

    Raises:
        M3CompileError: of a stage, as that stage raised it.
        OperationError: Ray failed.
    """
    try:
        with _settings():
            batches = ray.data.from_arrow(works).map_batches(
                decoder.__call__,
                batch_size=None,
                batch_format="pyarrow",
                num_cpus=1,
                # Its images, and the batch they become. Where two stages ask for the same, Ray Data
                # would fuse them, and nothing would be decoded while the encoder runs.
                memory=2 * decoder.batch_bytes,
            )
            encoded = batches.map_batches(
                EncodeBatches,
                fn_constructor_args=(artifact, writer.output, writer.dtype, max(share.cpus, 1)),
                batch_size=1,
                batch_format="pyarrow",
                zero_copy_batch=True,
                compute=ray.data.ActorPoolStrategy(size=share.encoders),
                num_cpus=share.cpus,
                num_gpus=share.gpus,
            )
            # No CPU of their own: decoding that waits for room keeps its CPU, and would wait for
            # ever.
            written = encoded.map_batches(
                writer.__call__,
                batch_size=1,
                batch_format="pyarrow",
                zero_copy_batch=True,
                compute=ray.data.TaskPoolStrategy(size=_WRITERS * share.encoders),
                num_cpus=0,
            )
            yield from written.iter_rows()
    except Exception as error:
        raise _cause(error) from error


@contextmanager
def _settings() -> Iterator[None]:
    """Ray Data's own, while a pipeline is made: nothing printed beside ours, no joined batches.

    What it would print of an error is in the error.
    """
    context = ray.data.DataContext.get_current()
    before = context.enable_progress_bars, context.target_max_block_size
    context.enable_progress_bars, context.target_max_block_size = False, _BLOCK_BYTES
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        context.enable_progress_bars, context.target_max_block_size = before
        logger.setLevel(level)


def _cause(error: BaseException) -> M3CompileError:
    """The error of ours that Ray's tells of; of some, Ray hands on the text alone."""
    for name, message in reversed(_OURS.findall(str(error))):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, M3CompileError):
            return kind(message)
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return OperationError(f"Ray: {lines[-1].strip()}")
