"""The stages after decoding: encode a batch, write a batch."""

from __future__ import annotations

import uuid
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from m3compile.errors import InputError, M3CompileError, OperationError
from m3compile.integrations.ray.data.decode import Grid, bytes_cell, cell_tensor
from m3compile.integrations.ray.data.job import PARTIAL, attempt, file_of
from m3compile.loading import load
from m3compile.runtime import Encoder

DTYPES = {"float32": torch.float32, "float16": torch.float16}


class EncodeBatches:
    """An encoder in a process of its own, which Ray Data hands batches.

    Args:
        artifact: a folder, on every machine that encodes.
        output: of the job.
        dtype: of the embeddings that are handed on.
        threads: torch's, where the encoder runs on the CPU.
    """

    def __init__(self, artifact: str, output: Path, dtype: str, threads: int) -> None:
        # The pixels lie in Ray's store, which nobody may write to; no encoder does.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        torch.set_num_threads(threads)
        self._encoder: Encoder | M3CompileError
        try:
            self._encoder = load(artifact)
        except M3CompileError as error:
            # Kept for the first batch: Ray would start the actor again, and again.
            self._encoder = error
        self._output = output
        self._dtype = DTYPES[dtype]

    def __call__(self, table: pa.Table) -> pa.Table:
        """A batch of `decode.batch_table`, its grids and pixels replaced by what became of them:
        token_counts, and embeddings as the bytes of (tokens, width).
        """
        if isinstance(self._encoder, M3CompileError):
            raise self._encoder
        encoder = self._encoder
        errors = table["errors"][0].as_py()
        grids = np.asarray(table["grids"][0].values).reshape(-1, 3)
        good = [index for index, error in enumerate(errors) if error is None]
        counts = [0] * len(errors)
        parts = []
        if good:
            patch_dim = encoder.manifest.tower.patch_dim
            pixels = cell_tensor(table["pixels"], encoder.dtype).view(-1, patch_dim)
            wanted: list[Grid] = [tuple(grids[index].tolist()) for index in good]
            name = f"encode-{table['shard'][0]}-{table['start'][0]}"
            with attempt(self._output, name):
                results = self._encode(encoder, pixels, wanted)
            for index, result in zip(good, results, strict=True):
                if isinstance(result, str):
                    errors[index] = result
                else:
                    counts[index] = len(result)
                    parts.append(result)
        embeddings = torch.cat(parts) if parts else torch.empty(0, dtype=self._dtype)
        table = table.drop_columns(["errors", "grids", "pixels"])
        table = table.append_column("errors", pa.array([errors], pa.list_(pa.string())))
        table = table.append_column("token_counts", pa.array([counts], pa.list_(pa.int32())))
        return table.append_column("embeddings", bytes_cell(embeddings))

    def _encode(
        self, encoder: Encoder, pixels: torch.Tensor, grids: list[Grid]
    ) -> list[torch.Tensor | str]:
        """Of every item (tokens, width) on the host in the output's dtype, or why not."""
        try:
            results = encoder.encode(pixels, grids)
        except InputError as error:
            if len(grids) == 1:
                return [" ".join(str(error).split())]
            # One item that no batch may have must not take the others with it.
            rows = pixels.split([t * h * w for t, h, w in grids])
            alone = zip(rows, grids, strict=True)
            return [self._encode(encoder, part, [grid])[0] for part, grid in alone]
        # One copy for all: each waits for the device.
        together = torch.cat(results).to(self._dtype).cpu()
        parts = together.split([len(result) for result in results])
        return [part if bool(part.isfinite().all()) else self._not_finite(part) for part in parts]

    def _not_finite(self, embeddings: torch.Tensor) -> str:
        if bool(embeddings.isnan().any()):
            return "the embeddings are not finite"
        return f"the embeddings don't fit into {str(self._dtype).removeprefix('torch.')}"


class BatchWriter(NamedTuple):
    """Writes batches of `EncodeBatches` as files of `job.file_of`.

    Attributes:
        width: of an embedding.
        origin: stands in every file's metadata.
    """

    output: Path
    dtype: str
    width: int
    name_field: pa.Field
    origin: dict[str, str]

    def __call__(self, batch: pa.Table) -> pa.Table:
        """One row: the numbers of rows, errors, tokens and bytes that were written.

        Raises:
            OperationError: the file cannot be written.
        """
        table = self._rows(batch)
        start = batch["start"][0].as_py()
        target = file_of(self.output, batch["shard"][0].as_py(), start, start + len(table))
        # A task that Ray repeats may run beside its first attempt.
        partial = target.with_name(f".{target.stem}-{uuid.uuid4().hex}{PARTIAL}")
        try:
            target.parent.mkdir(exist_ok=True)
            pq.write_table(table, partial, compression="zstd", use_dictionary=False)
            size = partial.stat().st_size
            partial.replace(target)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise OperationError(f"cannot write {target}: {error.strerror or error}") from None
        return pa.table(
            {
                "rows": [len(table)],
                "errors": [len(table) - table["error"].null_count],
                "tokens": [sum(table["token_count"].to_pylist())],
                "bytes": [size],
            }
        )

    def _rows(self, batch: pa.Table) -> pa.Table:
        """The output's rows: path or id, token_count, embeddings, error."""
        counts = np.asarray(batch["token_counts"][0].values)
        errors = batch["errors"][0].values
        values = cell_tensor(batch["embeddings"], DTYPES[self.dtype]).numpy()
        offsets = np.concatenate([[0], np.cumsum(counts * self.width)]).astype(np.int32)
        embeddings = pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(values), mask=errors.is_valid()
        )
        metadata = {"width": str(self.width), **self.origin}
        schema = pa.schema(
            [
                self.name_field,
                pa.field("token_count", pa.int32()),
                pa.field("embeddings", embeddings.type),
                pa.field("error", pa.string()),
            ],
            {f"m3compile.{key}": value for key, value in metadata.items()},
        )
        names = batch["names"][0].values
        return pa.Table.from_arrays([names, pa.array(counts), embeddings, errors], schema=schema)
