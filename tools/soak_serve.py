#!/usr/bin/env python3
"""Serve an artifact to many clients, every tenth request bad, and look for what must not be.

Good answers must equal `encode` of the request alone, bad ones their own 4xx, none may hang, and no
process of the server may grow. With --kill, a replica is killed meanwhile: no answer may be wrong,
no request may end without an answer or an error, and the server must heal. Exits 1 otherwise.

    python tools/soak_serve.py exported/NAME [--requests 5000] [--kill] [--json FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from safetensors.torch import load, save
from torch import Tensor

from m3compile.wire import COUNTS, EMBEDDINGS, ENCODE_PATH, GRIDS, PIXELS, SAFETENSORS, read_fault

ITEMS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((1, 4, 4),),
    ((1, 8, 8),),
    ((1, 4, 36), (1, 2, 2)),
    ((3, 4, 8),),
    ((1, 16, 16),),
    ((1, 6, 4), (2, 8, 6), (1, 4, 4)),
)
BOUND = 1e-5
BAD_EVERY = 10
ALLOWED_GROWTH_BYTES = 64 * 2**20
HANG_SECONDS = 90.0
# Of a replica that died: what its proxy says, and what a dropped connection looks like.
DIED = (500, 502, 503)


class Case(NamedTuple):
    """A request and what must come of it: embeddings, or a status."""

    name: str
    send: dict[str, Any]
    expected: list[Tensor] | int


def rows_case(name: str, pixels: Tensor, grids: Sequence[Any], expected: Any) -> Case:
    body = save({PIXELS: pixels.contiguous(), GRIDS: torch.tensor(list(grids)).reshape(-1, 3)})
    return Case(name, {"content": body, "headers": {"Content-Type": SAFETENSORS}}, expected)


def file_case(name: str, files: Sequence[bytes], expected: Any) -> Case:
    return Case(name, {"files": [("images", ("a.png", data)) for data in files]}, expected)


def png(width: int, height: int, colour: int = 0) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    # One bit a pixel: a bomb of a few kilobytes.
    Image.new("1", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def good_cases(encoder: Any, seed: int) -> list[Case]:
    from m3compile.config import PreprocessConfig
    from m3compile.images import decode_image, image_rows

    generator = torch.Generator().manual_seed(seed)
    cases = []
    for grids in ITEMS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            pixels = torch.randn(sum(map(math.prod, grids)), 1176, generator=generator).to(dtype)
            expected = encoder.encode(pixels, grids)
            cases.append(rows_case(f"{dtype} {grids}", pixels, grids, expected))
    files = [png(60, 40), png(200, 90, 1)]
    made = [image_rows(decode_image(io.BytesIO(file), "a"), PreprocessConfig()) for file in files]
    expected = encoder.encode([rows for rows, _ in made], [grid for _, grid in made])
    return [*cases, file_case("images", files, expected)]


def bad_cases() -> list[Case]:
    pixels = torch.zeros(64, 1176)
    poisoned = pixels.clone()
    poisoned[7, 3] = math.nan
    return [
        rows_case("odd grid", pixels[:56], [(1, 8, 7)], 400),
        rows_case("wrong rows", pixels[:60], [(1, 8, 8)], 400),
        rows_case("NaN", poisoned, [(1, 8, 8)], 400),
        file_case("not an image", [png(8, 8), b"not an image"], 400),
        file_case("bomb", [png(20_000, 20_000)], 413),
    ]


class Soak:
    """Sends cases from many threads and notes what came of them."""

    def __init__(self, url: str, encoder: Any, seed: int = 0) -> None:
        self.url = url
        self.good, self.bad = good_cases(encoder, seed), bad_cases()
        self.seed = seed
        self.statuses: Counter[str] = Counter()
        self.faults: list[str] = []
        self.largest_difference = 0.0
        self.died = 0
        self._lock = threading.Lock()

    def run(self, requests: int, clients: int, may_die: bool = False) -> None:
        def one(client: int) -> None:
            chosen = random.Random(self.seed * 1000 + client)
            with httpx.Client(base_url=self.url, timeout=HANG_SECONDS) as http:
                for index in range(client, requests, clients):
                    is_bad = index % BAD_EVERY == BAD_EVERY - 1
                    case = chosen.choice(self.bad if is_bad else self.good)
                    self._send(http, case, may_die)

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(one, range(clients)))

    def _send(self, http: httpx.Client, case: Case, may_die: bool) -> None:
        try:
            answer = http.post(ENCODE_PATH, **case.send)
            fault = self._judge(case, answer)
            status = str(answer.status_code)
            died = fault is not None and may_die and answer.status_code in DIED
        except httpx.TimeoutException:
            fault, status, died = f"hung for {HANG_SECONDS:g} s", "hung", False
        except httpx.TransportError as error:
            fault, status, died = f"{type(error).__name__}: {error}", "dropped", may_die
        with self._lock:
            self.statuses[status] += 1
            self.died += died
            if fault is not None and not died:
                self.faults.append(f"{case.name}: {fault}")

    def _judge(self, case: Case, answer: httpx.Response) -> str | None:
        """What is wrong with an answer."""
        if isinstance(case.expected, int):
            told = read_fault(answer.content)
            if answer.status_code != case.expected or told is None:
                return f"{answer.status_code}, expected {case.expected}: {answer.text[:200]}"
            return None
        if answer.status_code != 200:
            return f"{answer.status_code}: {answer.text[:200]}"
        tensors = load(answer.content)
        if tensors[COUNTS].tolist() != [len(rows) for rows in case.expected]:
            return f"token_counts {tensors[COUNTS].tolist()}"
        expected = torch.cat(case.expected)
        difference = float((tensors[EMBEDDINGS] - expected).norm() / expected.norm())
        with self._lock:
            self.largest_difference = max(self.largest_difference, difference)
        return None if difference <= BOUND else f"differs by {difference:.1e}"


def descendants() -> dict[int, str]:
    """Command line by id of every process below this one."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text(encoding="utf-8")
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
        parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
        names[int(folder.name)] = line
    found, left = {}, [os.getpid()]
    while left:
        parent = left.pop()
        for child in [pid for pid, above in parents.items() if above == parent]:
            found[child] = names[child]
            left.append(child)
    return found


def server_processes() -> dict[int, str]:
    """Replicas and proxies of this process's server."""
    return {
        pid: name
        for pid, name in descendants().items()
        if "ServeReplica" in name or "ProxyActor" in name or "haproxy" in name.lower()
    }


def replicas() -> list[int]:
    return [pid for pid, name in server_processes().items() if "ServeReplica" in name]


def resident_bytes() -> dict[int, int]:
    found = {}
    for pid in server_processes():
        try:
            pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
        except OSError:
            continue
        found[pid] = int(pages) * os.sysconf("SC_PAGE_SIZE")
    return found


def kill_one_replica(server: Any, seconds: float = 60.0) -> float:
    """Kill a replica; seconds until Serve runs as many as before."""
    before = replicas()
    os.kill(before[0], signal.SIGKILL)
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        time.sleep(0.2)
        states = server.status().deployments["Encoder"].replica_states
        alive = replicas()
        if (
            before[0] not in alive
            and len(alive) == server.replicas
            and states.get("RUNNING", 0) == server.replicas
        ):
            return time.monotonic() - started
    raise TimeoutError(f"not back to {server.replicas} replicas after {seconds:g} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--kill", action="store_true", help="a replica, a third of the way")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    import m3compile
    from m3compile.bench.circumstances import describe
    from m3compile.host import detect
    from m3compile.integrations.ray.options import serve_options
    from m3compile.integrations.ray.proxy import prefer_haproxy

    prefer_haproxy()
    import msgspec
    import ray

    from m3compile.integrations.ray.server import Server
    from m3compile.ops import OP_SCHEMA

    settings = {"artifact": str(options.artifact.absolute()), "replicas": options.replicas}
    started = time.time()
    with Server(serve_options(settings), "127.0.0.1", options.port) as server:
        with m3compile.load(options.artifact) as encoder:
            soak = Soak(server.url, encoder)
            manifest = encoder.manifest
        soak.run(options.requests // 5, options.clients)
        before = resident_bytes()
        healed = None
        if options.kill:
            with ThreadPoolExecutor(1) as pool:
                load = pool.submit(soak.run, options.requests // 2, options.clients, True)
                time.sleep(3)
                healed = kill_one_replica(server)
                load.result()
            soak.run(options.requests // 5, options.clients)
        else:
            soak.run(options.requests - options.requests // 5, options.clients)
        after = resident_bytes()
    growth = {str(pid): after[pid] - before[pid] for pid in after if pid in before}
    grew = not options.kill and any(value > ALLOWED_GROWTH_BYTES for value in growth.values())
    machine = detect(manifest.requirements.device, OP_SCHEMA)
    report = {
        "what": "a server under load with every tenth request bad"
        + (", and one replica killed" if options.kill else ""),
        "circumstances": {
            **msgspec.to_builtins(describe(manifest, machine)),
            "ray": ray.__version__,
        },
        "requests": sum(soak.statuses.values()),
        "clients": options.clients,
        "replicas": options.replicas,
        "statuses": dict(sorted(soak.statuses.items())),
        "largest_difference": soak.largest_difference,
        "allowed_difference": BOUND,
        "faults": len(soak.faults),
        "first_faults": soak.faults[:5],
        "failed_with_the_replica": soak.died,
        "seconds_to_heal": healed,
        "growth_bytes": growth,
        "seconds": time.time() - started,
        "passed": not soak.faults and not grew,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
