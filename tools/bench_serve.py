#!/usr/bin/env python3
"""What serving costs and gains on one machine: one run, one artifact, results compared as it goes.

    latency     one client: a request over HTTP against `encode` in this process, by turns
    batching    requests per second of one client, one at a time, against many clients
    traffic     calls per second of a trace over HTTP with many clients, against `encode` in this
                process on calls joined as the server joins them, with both copies

    python tools/bench_serve.py exported/NAME [--traffic FILE] [--json FILE]

Prints tables, writes JSON. Exits 1 where an answer differs from `encode`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from m3compile.wire import COUNTS, EMBEDDINGS, ENCODE_PATH, GRIDS, PIXELS, SAFETENSORS

Grids = Sequence[tuple[int, int, int]]
HEADERS = {"Content-Type": SAFETENSORS}
# Single images, by output tokens.
SIZES = {16: (1, 8, 8), 64: (1, 16, 16)}
# Batches of other neighbours have other buckets, and so other last bits.
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}
WARM_UP = 8


def make_pixels(grids: Grids, patch_dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(map(math.prod, grids))
    return torch.randn(rows, patch_dim, generator=generator).to(dtype)


def body_of(pixels: Tensor, grids: Grids) -> bytes:
    return save({PIXELS: pixels, GRIDS: torch.tensor(list(grids)).reshape(-1, 3)})


def post(client: httpx.Client, body: bytes) -> dict[str, Tensor]:
    answer = client.post(ENCODE_PATH, content=body, headers=HEADERS)
    answer.raise_for_status()
    return load(answer.content)


def clients_here(url: str, bodies: Sequence[bytes], threads: int, requests: int) -> float:
    """Send the bodies in turn from threads of this process; seconds it took."""

    def one(thread: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            for index in range(thread, requests, threads):
                post(client, bodies[index % len(bodies)])

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(threads)))
    return time.perf_counter() - started


def traffic_here(url: str, calls: Sequence[Grids], dtype: str, patch_dim: int, threads: int) -> Any:
    """As `clients_here`, for a process that makes the bodies of its calls itself."""
    bodies = [
        body_of(make_pixels(call, patch_dim, getattr(torch, dtype), index), call)
        for index, call in enumerate(calls)
    ]
    started = time.time()
    clients_here(url, bodies, threads, len(bodies))
    return started, time.time()


class Bench:
    def __init__(self, artifact: Path, server: Any, encoder: Any, requests: int) -> None:
        self.artifact, self.server, self.encoder = artifact, server, encoder
        self.requests = requests
        self.bound = BOUNDS[encoder.manifest.dtype]
        self.errors: list[float] = []

    def pixels(self, grids: Grids, seed: int = 0) -> Tensor:
        return make_pixels(grids, self.encoder.manifest.tower.patch_dim, self.encoder.dtype, seed)

    def compare(self, answer: dict[str, Tensor], expected: list[Tensor]) -> None:
        assert answer[COUNTS].tolist() == [len(rows) for rows in expected]
        for found, rows in zip(
            answer[EMBEDDINGS].split([*map(len, expected)]), expected, strict=True
        ):
            rows = rows.cpu().float()
            self.errors.append(float((found.float() - rows).norm() / rows.norm()))

    def latency(self, tokens: int) -> dict[str, Any]:
        grids = [SIZES[tokens]]
        pixels = self.pixels(grids)
        body = body_of(pixels, grids)
        times: dict[str, list[float]] = {"encode": [], "http": []}
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            calls: dict[str, Callable[[], Any]] = {
                "encode": lambda: [rows.cpu() for rows in self.encoder.encode(pixels, grids)],
                "http": lambda: post(client, body),
            }
            for number in range(WARM_UP + self.requests):
                found = {}
                for name, call in calls.items():
                    started = time.perf_counter()
                    found[name] = call()
                    if number >= WARM_UP:
                        times[name].append(1000 * (time.perf_counter() - started))
            self.compare(found["http"], found["encode"])
        encode, http = (statistics.median(times[name]) for name in calls)
        return {
            "tokens": tokens,
            "body KB": round(len(body) / 1000),
            "encode ms": encode,
            "HTTP ms": http,
            "added ms": http - encode,
        }

    def batching(self, tokens: int, clients: int) -> dict[str, Any]:
        grids = [SIZES[tokens]]
        bodies = [body_of(self.pixels(grids, seed), grids) for seed in range(8)]
        rates: dict[int, list[float]] = {1: [], clients: []}
        for _ in range(3):
            for threads in rates:
                seconds = clients_here(self.server.url, bodies, threads, self.requests)
                rates[threads].append(self.requests / seconds)
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            self.compare(post(client, bodies[3]), self.encoder.encode(self.pixels(grids, 3), grids))
        one, many = (statistics.median(found) for found in rates.values())
        return {
            "tokens": tokens,
            "1 client, requests/s": one,
            f"{clients} clients, requests/s": many,
            "times": many / one,
        }

    def traffic(self, calls: Sequence[Grids], clients: int, processes: int) -> dict[str, Any]:
        """In-process first: the server's replica has the device to itself afterwards."""
        manifest = self.encoder.manifest
        jobs = self.jobs(calls)
        direct: list[float] = []
        for _ in range(3):
            started = time.perf_counter()
            for batch in joined(jobs, max(self.encoder.ladder)):
                encode_batch(self.encoder, batch)
            direct.append(len(calls) / (time.perf_counter() - started))
        served = [self.traffic_served(calls, clients, processes) for _ in range(3)]
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            for call, job in list(zip(calls, jobs, strict=True))[:20]:
                body = body_of(torch.cat(list(job.rows)), call)
                self.compare(post(client, body), self.encoder.encode(list(job.rows), call))
        one, many = statistics.median(direct), statistics.median(served)
        return {
            "calls": len(calls),
            "clients": clients,
            "dtype": manifest.dtype,
            "encode, calls/s": one,
            "HTTP, calls/s": many,
            "share": many / one,
        }

    def jobs(self, calls: Sequence[Grids]) -> list[Any]:
        from m3compile.integrations.ray.batching import make_job

        tower = self.encoder.manifest.tower
        return [make_job(self.pixels(call, seed), call, tower) for seed, call in enumerate(calls)]

    def traffic_served(self, calls: Sequence[Grids], clients: int, processes: int) -> float:
        dtype, patch_dim = self.encoder.manifest.dtype, self.encoder.manifest.tower.patch_dim
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            spans = [
                pool.submit(
                    traffic_here,
                    self.server.url,
                    calls[part::processes],
                    dtype,
                    patch_dim,
                    max(1, clients // processes),
                )
                for part in range(processes)
            ]
            found = [span.result() for span in spans]
        return len(calls) / (max(end for _, end in found) - min(start for start, _ in found))


def joined(jobs: Sequence[Any], max_tokens: int) -> Iterator[list[Any]]:
    """Jobs in order, as many together as the server would take."""
    batch: list[Any] = []
    for job in jobs:
        if batch and sum(sum(other.tokens) for other in [*batch, job]) > max_tokens:
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def encode_batch(encoder: Any, batch: Sequence[Any]) -> None:
    from m3compile.integrations.ray.batching import encode_jobs

    failed = [found for found in encode_jobs(encoder, batch) if not isinstance(found, Tensor)]
    assert not failed, failed


def circumstances(encoder: Any, server: Any, load: float) -> dict[str, Any]:
    """`load` is the machine's average load before the first measurement."""
    from m3compile.bench.circumstances import describe
    from m3compile.host import detect
    from m3compile.ops import OP_SCHEMA

    manifest = encoder.manifest
    found = msgspec.to_builtins(describe(manifest, detect(manifest.requirements.device, OP_SCHEMA)))
    for package in ("ray", "fastapi", "uvicorn", "httpx"):
        found[package] = importlib.metadata.version(package)
    return {
        **found,
        "cores": os.cpu_count(),
        "load of others": round(load, 2),
        "replicas": server.replicas,
    }


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(title)
    for row in rows:
        shown = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  " + "   ".join(shown), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--requests", type=int, default=320, help="of a measurement")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--replicas", default="1")
    parser.add_argument("--concurrent-batches", type=int, default=1)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--traffic", type=Path, help="a trace, as `plan` reads it")
    parser.add_argument("--traffic-clients", type=int, default=32)
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    import m3compile
    from m3compile.bench.summary import title_of
    from m3compile.integrations.ray.options import serve_options
    from m3compile.integrations.ray.proxy import prefer_haproxy
    from m3compile.traffic import read_traffic

    prefer_haproxy()
    from m3compile.integrations.ray.server import Server

    load_before = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    settings = {
        "artifact": str(options.artifact.absolute()),
        "replicas": options.replicas,
        "concurrent_batches": options.concurrent_batches,
        "cpus_per_replica": cores,
        "queue_limit": max(64, 2 * options.traffic_clients),
    }
    with (
        Server(serve_options(settings), "127.0.0.1", options.port) as server,
        m3compile.load(options.artifact) as encoder,
    ):
        bench = Bench(options.artifact, server, encoder, options.requests)
        latency = [bench.latency(tokens) for tokens in SIZES]
        show("one client", latency)
        batching = [bench.batching(tokens, options.clients) for tokens in SIZES]
        show("batching", batching)
        traffic = []
        if options.traffic is not None:
            calls = read_traffic(options.traffic).calls
            traffic = [bench.traffic(calls, options.traffic_clients, options.processes)]
            show("traffic", traffic)
        found = circumstances(encoder, server, load_before)
    worst = max(bench.errors)
    passed = worst <= bench.bound
    print(f"largest difference from encode {worst:.1e}, allowed {bench.bound:.0e}")
    if options.json is not None:
        document = {
            "title": f"Serving over HTTP. {title_of(encoder.manifest)}",
            "circumstances": found,
            "options": {
                **msgspec.to_builtins(server.options),
                "artifact": Path(server.options.artifact).name,
            },
            "rows": latency,
            "batching_rows": batching,
            "traffic_rows": traffic,
            "largest_difference": worst,
            "passed": passed,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
