#!/usr/bin/env python3
"""Time and memory of an exported ONNX file in ONNX Runtime against eager PyTorch, on the CPU.

Both run the same pixels with the same weights, each in a process of its own, by turns. A number is
the median over all rounds; memory is the highest resident set of the process, and how far it rose
over what the loaded encoder took. Results of the two are compared with each other. Prints a table
and writes JSON.

    python tools/bench_onnx.py [--json FILE] [--rounds N] [--calls N]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from m3compile.config import TINY, TowerConfig
from m3compile.onnx_format import CHECK_BOUNDS

MID = TowerConfig(
    hidden_size=640,
    num_attention_heads=8,
    num_hidden_layers=12,
    intermediate_size=2560,
    projector_hidden_size=2048,
    output_size=2048,
)
CONFIGS = {"tiny": TINY, "mid": MID}
# Image grids by tokens; the large ones are there for their memory, and timed once.
GRIDS = {64: (1, 16, 16), 256: (1, 32, 32), 1024: (1, 64, 64), 4096: (1, 128, 128)}
LARGE = 1024
ENGINES = ("eager", "onnx")


def status_mb(key: str) -> float:
    """`VmRSS` or `VmHWM` of this process, in MB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"/proc/self/status has no {key}")


def load_eager(folder: Path) -> Callable[[np.ndarray, tuple[int, int, int]], np.ndarray]:
    """The eager tower in float32 from a checkpoint."""
    import torch

    from m3compile.tower import make_tower
    from m3compile.verify import eager
    from m3compile.weights import load_module_state, open_checkpoint

    checkpoint = open_checkpoint(folder / "checkpoint")
    state = load_module_state(checkpoint, torch.float32)
    tower = make_tower(checkpoint.config, state, "TORCH_SDPA")
    return lambda pixels, grid: eager(tower, torch.from_numpy(pixels), grid).numpy()


def load_onnx(folder: Path) -> Callable[[np.ndarray, tuple[int, int, int]], np.ndarray]:
    import m3compile.onnx

    encoder = m3compile.onnx.load(folder / "encoder.onnx")
    return lambda pixels, grid: encoder.encode(pixels, [grid])[0]


def measure_here(engine: str, folder: Path, tokens: int, calls: int) -> dict[str, Any]:
    """One engine in this process, which must not have imported the other.

    Milliseconds of every call after the first, and memory.
    """
    grid = GRIDS[tokens]
    pixels = np.random.default_rng(tokens).standard_normal((4 * tokens, 1176), np.float32)
    encode = {"eager": load_eager, "onnx": load_onnx}[engine](folder)
    loaded = status_mb("VmRSS")
    # The high-water mark of what follows, not of the load.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        result = encode(pixels, grid)
        times.append(1000 * (time.perf_counter() - started))
    np.save(folder / f"{engine}-{tokens}.npy", result)
    peak = status_mb("VmHWM")
    return {"times": times[1:] or times, "peak_mb": peak, "rise_mb": peak - loaded}


def measure(engine: str, folder: Path, tokens: int, calls: int) -> dict[str, Any]:
    """`measure_here` in a fresh process."""
    command = [sys.executable, __file__, "--child", engine, str(folder), str(tokens), str(calls)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare(name: str, folder: Path, tokens: int, rounds: int, calls: int) -> dict[str, Any]:
    """One row: both engines by turns."""
    if tokens >= LARGE:
        rounds, calls = 1, 1
    found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for _ in range(rounds):
        for engine in ENGINES:
            found[engine].append(measure(engine, folder, tokens, calls))
    eager, onnx = (np.load(folder / f"{engine}-{tokens}.npy") for engine in ENGINES)
    error = float(np.linalg.norm(onnx - eager) / np.linalg.norm(eager))
    if not error <= (CHECK_BOUNDS["float32"].relative_error or 0):
        raise SystemExit(f"error: {name} at {tokens} tokens differs from eager by {error:.1e}")
    row: dict[str, Any] = {"config, tokens": f"{name}, {tokens:,}"}
    for title, engine in (("ONNX Runtime", "onnx"), ("eager", "eager")):
        samples = [sample for part in found[engine] for sample in part["times"]]
        row[f"{title} ms"] = round(statistics.median(samples), 2)
    for title, engine in (("ONNX Runtime", "onnx"), ("eager", "eager")):
        for key, word in (("peak_mb", "peak MB"), ("rise_mb", "over loaded MB")):
            row[f"{title} {word}"] = round(statistics.median(p[key] for p in found[engine]))
    return {**row, "error": error}


def prepare(folder: Path, config: TowerConfig) -> None:
    """A checkpoint with random weights, and its ONNX file."""
    from m3compile.onnx_export import export_onnx
    from m3compile.weights import init_checkpoint

    init_checkpoint(folder / "checkpoint", config)
    export_onnx(folder / "checkpoint", folder / "encoder.onnx")


def circumstances(rounds: int, calls: int, load: float) -> dict[str, Any]:
    """`load` is the machine's average load before the first measurement."""
    from m3compile.bench.circumstances import source_commit
    from m3compile.host import detect

    commit, clean = source_commit(Path(__file__).parent)
    host = detect("cpu", "")
    return {
        "cpu": f"{host.cpu_name}, {os.cpu_count()} threads",
        "load of others": round(load, 2),
        "dtype": "float32",
        "onnxruntime": importlib.metadata.version("onnxruntime"),
        "torch": host.torch_full,
        "mid": "hidden 640, 12 layers, output 2048",
        "calls": f"{rounds} processes of {calls}, the first left out; one at {LARGE:,} and more",
        "commit": commit,
        "clean": clean,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=15)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        engine, folder, tokens, calls = options.child
        print(json.dumps(measure_here(engine, Path(folder), int(tokens), int(calls))))
        return 0
    rows = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="m3compile-") as parent:
        for name, config in CONFIGS.items():
            folder = Path(parent) / name
            folder.mkdir()
            prepare(folder, config)
            for tokens in GRIDS:
                rows.append(compare(name, folder, tokens, options.rounds, options.calls))
                print(rows[-1], flush=True)
    document = {
        "title": "ONNX Runtime against eager PyTorch on the CPU",
        "circumstances": circumstances(options.rounds, options.calls, load),
        "rows": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
