#!/usr/bin/env python3
"""Serve an artifact thousands of mixed calls and look for what must not change.

A set of items is encoded once, alone in every bucket that holds it. Then random batches of them are
encoded, some with a NaN, an infinite or a huge neighbour. Every result must be equal, bit for bit,
to the item's own in that bucket, and memory may not grow. Exits 1 where either fails.

    python tools/soak.py exported/NAME --calls 10000
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from pathlib import Path

import torch
from torch import Tensor

import m3compile
from m3compile.buckets import budget_for

GRIDS = (
    (1, 2, 2),
    (1, 4, 6),
    (1, 8, 8),
    (1, 16, 16),
    (2, 8, 6),
    (1, 4, 36),
    (1, 20, 12),
    (3, 4, 8),
)
BAD_VALUES = (math.nan, math.inf, -math.inf, 1e4)
WARM_UP_CALLS = 200
ALLOWED_GROWTH_BYTES = 64 * 2**20


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Resident memory of this process, and what the allocator holds on the device."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    found = {"host": pages * 4096}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        found["device"] = torch.cuda.memory_reserved(device)
    return found


class Soak:
    def __init__(self, encoder: m3compile.Encoder, seed: int) -> None:
        self.encoder = encoder
        self.random = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        width = encoder.manifest.tower.patch_dim
        self.pixels = [
            torch.randn(math.prod(grid), width, generator=generator).to(encoder.device)
            for grid in GRIDS
        ]
        self.known: dict[tuple[int, int], Tensor] = {}
        self.compared = 0
        self.different: list[str] = []

    def expected(self, item: int, budget: int) -> Tensor:
        key = (item, budget)
        if key not in self.known:
            (rows,) = self.encoder.encode_at([self.pixels[item]], [GRIDS[item]], budget)
            self.known[key] = rows.cpu()
        return self.known[key]

    def call(self) -> None:
        items = [self.random.randrange(len(GRIDS)) for _ in range(self.random.randint(1, 8))]
        pixels = [self.pixels[item] for item in items]
        bad = self.random.randrange(len(items)) if self.random.random() < 0.3 else None
        if bad is not None:
            pixels[bad] = pixels[bad].clone()
            pixels[bad][self.random.randrange(len(pixels[bad]))] = self.random.choice(BAD_VALUES)
        grids = [GRIDS[item] for item in items]
        # By name, since the packer may split a batch, and only equal buckets promise equal bits.
        budget = budget_for(sum(map(math.prod, grids)) // 4, self.encoder.ladder)
        results = self.encoder.encode_at(pixels, grids, budget)
        if budget is None:
            return
        for index, (item, rows) in enumerate(zip(items, results, strict=True)):
            if index != bad:
                self.compared += 1
                if not torch.equal(rows.cpu(), self.expected(item, budget)):
                    self.different.append(f"{GRIDS[item]} in bucket {budget} beside {items}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with m3compile.load(options.artifact) as encoder:
        soak = Soak(encoder, options.seed)
        graphs = encoder.num_graphs
        start: dict[str, int] = {}
        for done in range(options.calls):
            if done == min(WARM_UP_CALLS, options.calls - 1):
                start = memory_bytes(encoder.device)
            soak.call()
        end = memory_bytes(encoder.device)
        growth = {key: end[key] - start[key] for key in end}
        grew = any(value > ALLOWED_GROWTH_BYTES for value in growth.values())
        passed = not soak.different and not grew and encoder.num_graphs == graphs
    report = {
        "calls": options.calls,
        "results_compared": soak.compared,
        "different": len(soak.different),
        "first_different": soak.different[:3],
        "growth_bytes": growth,
        "graphs": graphs,
        "passed": passed,
    }
    print(json.dumps(report, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
