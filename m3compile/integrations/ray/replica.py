"""One encoder in a replica: from checked requests to embeddings, without the HTTP around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from m3compile.artifact import read_manifest, read_preprocess
from m3compile.integrations.ray.batching import Batcher, Job, Outcome, encode_jobs, make_job
from m3compile.integrations.ray.metrics import ReplicaMetrics
from m3compile.integrations.ray.options import ServeOptions
from m3compile.integrations.ray.refusals import Refused, check_size
from m3compile.loading import load
from m3compile.version import VERSION

_T = TypeVar("_T")
_PARSE_THREADS = 4


class EncoderService:
    """An encoder that many callers of one event loop share.

    Made inside a replica; returns once every budget is captured.

    Raises:
        ArtifactError, OperationError: as `m3compile.load`.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        folder = Path(options.artifact)
        manifest = read_manifest(folder)
        self.preprocess = read_preprocess(folder, manifest)
        if manifest.requirements.device == "cpu":
            torch.set_num_threads(options.cpus_per_replica)
        self.encoder = load(folder)
        self._metrics = ReplicaMetrics()
        self._parsers = ThreadPoolExecutor(_PARSE_THREADS, "parse")
        self._encode_threads = ThreadPoolExecutor(options.concurrent_batches, "encode")
        self._num_held = 0
        self._num_waiting = 0
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._batcher = Batcher(
            self._run,
            options.max_batch_tokens or max(self.encoder.ladder),
            options.batch_wait_ms / 1000,
            lambda: self._num_held > self._num_waiting,
            options.concurrent_batches,
        )

    async def _run(self, jobs: list[Job]) -> list[Outcome]:
        def run() -> tuple[list[Outcome], float, dict[str, int]]:
            started = time.perf_counter()
            outcomes = encode_jobs(self.encoder, jobs)
            # Another batch may be under way, which is not to be waited for.
            counts = self.encoder.counts(wait=False)
            return outcomes, time.perf_counter() - started, counts

        loop = asyncio.get_running_loop()
        outcomes, seconds, counts = await loop.run_in_executor(self._encode_threads, run)
        tokens = sum(sum(job.tokens) for job in jobs)
        self._metrics.encoded(tokens, len(jobs), seconds, counts)
        return outcomes

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold a request while it is served.

        Raises:
            Refused: the server is draining, or holds as many requests as it may.
        """
        if self._draining:
            raise Refused.draining()
        if self._num_held >= self.options.queue_limit:
            raise Refused.full(self.options.queue_limit)
        self._num_held += 1
        self._empty.clear()
        self._metrics.queue(self._num_held)
        try:
            yield
        finally:
            self._num_held -= 1
            self._metrics.queue(self._num_held)
            if not self._num_held:
                self._empty.set()

    def answered(self, status: int, seconds: float) -> None:
        self._metrics.answered(status, seconds)

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Parsing and decoding, aside of the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._parsers, work)

    def job(self, pixel_values: Any, grid_thw: Any) -> Job:
        """A request as a job.

        Raises:
            InputError: as `Encoder.encode`.
            TooLargeError: it has too many items or tokens.
        """
        # Before the items are looked at: each costs time and memory.
        check_size("items", _num_items(grid_thw), self.options.max_items)
        job = make_job(pixel_values, grid_thw, self.encoder.manifest.tower)
        check_size("output tokens", sum(job.tokens), self.options.max_request_tokens)
        return job

    async def encode(self, job: Job) -> Tensor:
        """(tokens, width) of all items end to end, on the host, in the artifact's dtype.

        Raises:
            InputError: an item has a non-finite pixel.
            OperationError: the device failed.
        """
        self._num_waiting += 1
        try:
            return await self._batcher.encode(job)
        finally:
            self._num_waiting -= 1

    async def drain(self) -> None:
        """Refuse new requests; returns when all that were accepted are answered."""
        self._draining = True
        await self._empty.wait()

    @property
    def is_draining(self) -> bool:
        return self._draining

    def info(self) -> dict[str, Any]:
        """The manifest in short, and the limits of a request."""
        manifest, options = self.encoder.manifest, self.options
        return {
            "m3compile": VERSION,
            "artifact": Path(options.artifact).name,
            "weights": manifest.provenance.weights,
            "device": manifest.requirements.device,
            "dtype": manifest.dtype,
            "engine": manifest.build.engine,
            "attention": manifest.requirements.attention_backend,
            "patch_dim": manifest.tower.patch_dim,
            "width": manifest.tower.output_size,
            "budgets": list(self.encoder.ladder),
            "captured": self.encoder.num_graphs,
            "limits": {
                "body_bytes": options.max_body_bytes,
                "items": options.max_items,
                "tokens": options.max_request_tokens,
                "image_pixels": options.max_image_pixels,
                "json_tokens": options.max_json_tokens,
                "queued_requests": options.queue_limit,
                "timeout_s": options.timeout_s,
            },
        }


def _num_items(grid_thw: Any) -> int:
    """Of a table of grids; 0 for what is none, which `make_job` refuses."""
    try:
        return len(grid_thw)
    except TypeError:
        return 0
