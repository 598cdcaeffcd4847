#!/usr/bin/env python3
"""Embed thousands of generated images, killed half-way and resumed, and look for what is lost.

One image in a hundred is broken. Three jobs run, each a command of its own:

- a small one, whose highest memory is noted;
- a large one over ten times as many images, likewise;
- the large one again into another output, killed with SIGKILL once half its rows are written, then
  resumed by the same command.

Every input must be in the output once, the broken ones with an error and the others with
embeddings that equal `Encoder.encode` of the same image; no run of it may need over 300 MB more
than the small one. Memory is the proportional set size (PSS) of the command and of every process
that it started, its Ray cluster included, added up twice a second; a page that several processes
share, Ray's object store among them, counts once. Writes JSON; exits 1 where something fails.

    python tools/soak_embed.py exported/NAME [--images 5000] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.dataset as pads
import torch
from PIL import Image

import m3compile
from m3compile.artifact import read_manifest, read_preprocess
from m3compile.bench.circumstances import describe
from m3compile.config import BOUNDS
from m3compile.host import detect
from m3compile.images import load_images
from m3compile.ops import OP_SCHEMA

SMALLER = 10
BROKEN_EVERY = 100
ALLOWED_RISE_MB = 300
# Small against the small job, so that it too fills every stage.
BATCH_TOKENS = 1024
POLL_SECONDS = 0.5
# How long processes of a killed run may go on.
STAY_SECONDS = 20
# Rows whose embeddings are compared with the encoder's.
COMPARED = 200


def generate(folder: Path, number: int) -> None:
    """Smooth pictures of 60 to 240 pixels a side, some of the files cut short, empty or text."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for index in range(number):
        path = folder / f"{index // 1000:03}" / f"{index:06}.jpg"
        path.parent.mkdir(exist_ok=True)
        width, height = (int(side) for side in random.integers(60, 240, 2))
        few = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        few.resize((width, height)).save(path, quality=85)
        if index % BROKEN_EVERY == BROKEN_EVERY // 2:
            whole = path.read_bytes()
            path.write_bytes((whole[: len(whole) // 2], b"", b"no image")[index // 100 % 3])


def family(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def is_alive(pid: int) -> bool:
    """Whether it runs; one that ended may wait for its parent to look."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pss_kb(pids: list[int]) -> Counter[str]:
    """PSS in KiB by the name of the process; Ray's workers say in theirs what they run."""
    found: Counter[str] = Counter()
    for pid in pids:
        folder = Path("/proc") / str(pid)
        try:
            name = (folder / "cmdline").read_bytes().split(b"\0")[0].decode()
            lines = (folder / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kilobytes = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        found[name.rpartition("/")[2]] += kilobytes
    return found


def to_mb(kibibytes: int) -> float:
    return round(kibibytes * 1024 / 1e6, 1)


class Run:
    """One run of the command.

    Attributes:
        peak_kb: highest PSS of it and its descendants, by name; the sum counts.
        code: how it ended.
        report: its summary, None where it was killed.
    """

    def __init__(
        self, artifact: Path, images: Path, output: Path, stop: Callable[[], bool] = lambda: False
    ) -> None:
        command = [sys.executable, "-m", "m3compile", "embed", str(artifact), "--json"]
        command += ["--input", str(images), "--output", str(output)]
        command += ["--batch-tokens", str(BATCH_TOKENS)]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.peak_kb: Counter[str] = Counter()
        while process.poll() is None:
            pids = family(process.pid)
            self.peak_kb = max(self.peak_kb, pss_kb(pids), key=Counter.total)
            if stop():
                process.send_signal(signal.SIGKILL)
                process.wait()
                _wait_for_end(pids)
            time.sleep(POLL_SECONDS)
        self.seconds = time.perf_counter() - started
        assert process.stdout is not None
        text = process.stdout.read()
        self.code = process.returncode
        self.report: dict[str, Any] | None = json.loads(text) if self.code == 0 else None

    @property
    def peak_mb(self) -> float:
        return to_mb(self.peak_kb.total())

    def figures(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "seconds": round(self.seconds, 1),
            "peak_pss_mb": self.peak_mb,
            "peak_pss_mb_by_process": {key: to_mb(kb) for key, kb in self.peak_kb.items()},
            "report": self.report,
        }


def _wait_for_end(pids: list[int]) -> None:
    """Ray's workers end by themselves once their driver is gone; some that serve Ray do not."""
    deadline = time.monotonic() + STAY_SECONDS
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for pid in filter(is_alive, pids):
        name = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
        if name.startswith(("ray::MapWorker", "ray::MapBatches")):
            raise SystemExit(f"error: {name} outlived a killed run by {STAY_SECONDS} s")
        os.kill(pid, signal.SIGKILL)


def rows_in(output: Path) -> int:
    """Rows that are written, by the names of their files."""
    ranges = (path.stem.split("-") for path in output.glob("shard-*/*-*.parquet"))
    return sum(int(last) - int(first) + 1 for first, last in ranges)


def check(artifact: Path, images: Path, output: Path) -> dict[str, Any]:
    """What is missing, twice there or wrong in an output."""
    inputs = sorted(str(path) for path in images.rglob("*.jpg"))
    broken = inputs[BROKEN_EVERY // 2 :: BROKEN_EVERY]
    columns = ["path", "token_count", "error"]
    table = pads.dataset(output, format="parquet").to_table(columns=columns)
    paths, errors = table["path"].to_pylist(), table["error"].to_pylist()
    counts = Counter(paths)
    told = {path for path, error in zip(paths, errors, strict=True) if error is not None}
    return {
        "inputs": len(inputs),
        "rows": len(paths),
        "missing": len(set(inputs) - set(counts)),
        "unknown": len(set(counts) - set(inputs)),
        "more_than_once": sum(count > 1 for count in counts.values()),
        "broken": len(broken),
        "rows_with_error": sum(error is not None for error in errors),
        "errors_of_others": len(told ^ set(broken)),
        **compare(artifact, output),
    }


def compare(artifact: Path, output: Path) -> dict[str, Any]:
    """Embeddings against the encoder's own, on rows that are spread over the output."""
    manifest = read_manifest(artifact)
    preprocess = read_preprocess(artifact, manifest)
    files = sorted(pads.dataset(output, format="parquet").files)
    errors, cosines = [0.0], [1.0]
    compared = 0
    with m3compile.load(artifact) as encoder:
        for name in files[:: max(1, len(files) // COMPARED)]:
            row = pads.dataset(name).to_table(filter=pads.field("error").is_null()).slice(0, 1)
            if not len(row):
                continue
            flat = torch.tensor(np.asarray(row["embeddings"][0].values))
            found = flat.view(row["token_count"][0].as_py(), -1)
            (rows,) = encoder.encode(*load_images(row["path"].to_pylist(), preprocess))
            wanted = rows.float().cpu()
            errors.append(float((found - wanted).norm() / wanted.norm()))
            cosines.append(float(torch.cosine_similarity(found, wanted).min()))
            compared += 1
    bound = BOUNDS[manifest.dtype]
    return {
        "compared": compared,
        "largest_error": max(errors),
        "smallest_cosine": min(cosines),
        "close": compared > 0
        and (bound.relative_error is None or max(errors) <= bound.relative_error)
        and (bound.cosine is None or min(cosines) >= bound.cosine),
    }


def soak(artifact: Path, number: int, folder: Path) -> dict[str, Any]:
    manifest = read_manifest(artifact)
    few, many = folder / "few", folder / "many"
    generate(few, number // SMALLER)
    generate(many, number)
    small = Run(artifact, few, folder / "out-few")
    large = Run(artifact, many, folder / "out-many")
    output = folder / "out-killed"
    killed = Run(artifact, many, output, lambda: rows_in(output) >= number // 2)
    rows_at_kill = rows_in(output)
    resumed = Run(artifact, many, output)
    results = {"whole": check(artifact, many, folder / "out-many")}
    results["resumed"] = check(artifact, many, output)
    rise = max(run.peak_mb for run in (large, killed, resumed)) - small.peak_mb
    exact = all(
        found["rows"] == found["inputs"]
        and not (found["missing"] or found["unknown"] or found["more_than_once"])
        and not found["errors_of_others"]
        and found["close"]
        for found in results.values()
    )
    was_killed = killed.code == -signal.SIGKILL and number // 2 <= rows_at_kill < number
    circumstances = describe(manifest, detect(manifest.requirements.device, OP_SCHEMA, 0))
    return {
        "circumstances": {
            **msgspec.to_builtins(circumstances),
            **{name: importlib.metadata.version(name) for name in ("ray", "pyarrow", "pillow")},
            "load_average": os.getloadavg()[0],
        },
        "images": number,
        "batch_tokens": BATCH_TOKENS,
        "images_small": number // SMALLER,
        "runs": {
            "small": small.figures(),
            "large": large.figures(),
            "killed": {**killed.figures(), "rows_written": rows_at_kill},
            "resumed": resumed.figures(),
        },
        "outputs": results,
        "peak_rise_mb": round(rise, 1),
        "allowed_rise_mb": ALLOWED_RISE_MB,
        "passed": exact and was_killed and rise <= ALLOWED_RISE_MB,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--json", type=Path, help="also write the result there")
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report = soak(options.artifact, options.images, Path(folder))
    text = json.dumps(report, indent=1)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
