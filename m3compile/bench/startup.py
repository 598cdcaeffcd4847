"""How soon a fresh process serves, measured in one."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from m3compile.bench.cases import square_grid
from m3compile.bench.records import FirstCall, Startup
from m3compile.errors import OperationError
from m3compile.loading import load
from m3compile.runtime import Encoder

_CHILD = "from m3compile.bench.startup import run_child; run_child()"
# On a slow device the calls after the first stop here.
_NEXT_SECONDS = 4.0


def measure_startup(
    artifact: Path, device: torch.device, budgets: Sequence[int], next_calls: int
) -> Startup:
    """Load the artifact in a fresh process and call each bucket there for the first time.

    Args:
        device: where to load it.
        budgets: whose first calls are measured.
        next_calls: how many calls after a bucket's first.

    Raises:
        OperationError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="m3compile-") as folder:
        out = Path(folder) / "startup.json"
        request = json.dumps([str(artifact), str(device), list(budgets), next_calls, str(out)])
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, request], capture_output=True, text=True, check=False
        )
        if child.returncode != 0 or not out.is_file():
            lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
            raise OperationError(f"the process that measures the start failed: {lines[-1]}")
        return msgspec.json.decode(out.read_bytes(), type=Startup)


def run_child() -> None:
    """In the fresh process: measure, and leave the record in the file that the request names."""
    artifact, device, budgets, next_calls, out = json.loads(sys.argv[1])
    startup = _measure(Path(artifact), torch.device(device), budgets, next_calls)
    Path(out).write_bytes(msgspec.json.encode(startup))


def _measure(
    artifact: Path, device: torch.device, budgets: Sequence[int], next_calls: int
) -> Startup:
    before = time.perf_counter()
    with load(artifact, device) as encoder:
        loaded = time.perf_counter()
        num_graphs = encoder.num_graphs
        calls = []
        first_embedding_ms = 0.0
        for budget in budgets:
            grid = square_grid(budget)
            pixels = torch.randn(math.prod(grid), encoder.manifest.tower.patch_dim)
            pixels = pixels.to(encoder.device, encoder.dtype)
            calls.append(_first_call(encoder, pixels, grid, budget, next_calls))
            # Without the making of the pixels, which is not the encoder's.
            first_embedding_ms = first_embedding_ms or (
                1000 * (loaded - before) + calls[0].first_ms
            )
        return Startup(
            load_ms=1000 * (loaded - before),
            capture_ms=encoder.capture_ms,
            first_embedding_ms=first_embedding_ms,
            num_graphs=num_graphs,
            graphs_after=encoder.num_graphs,
            first_calls=tuple(calls),
        )


def _first_call(
    encoder: Encoder, pixels: torch.Tensor, grid: tuple[int, int, int], budget: int, next_calls: int
) -> FirstCall:
    def call() -> float:
        _synchronize(encoder.device)
        started = time.perf_counter()
        encoder.encode_at(pixels, [grid], budget)
        _synchronize(encoder.device)
        return 1000 * (time.perf_counter() - started)

    first = call()
    after = [call()]
    while len(after) < next_calls and sum(after) < 1000 * _NEXT_SECONDS:
        after.append(call())
    return FirstCall(
        budget=budget,
        first_ms=round(first, 4),
        next_ms=round(statistics.median(after), 4),
        next_calls=len(after),
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
