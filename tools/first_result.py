"""How long an artifact takes from `load` to its first result, and that no program has weights.

    python tools/first_result.py exported/quickstart

The clock starts in a running interpreter with torch imported, and stops when the embeddings of one
64-token image are on the host. Exits 1 where that took longer than --limit, or where a program file
holds weights.
"""

from __future__ import annotations

import argparse
import sys
import time
import zipfile
from pathlib import Path

import torch
from torch import Tensor

PROGRAMS = "*.pt2"
WEIGHTS = "weights.safetensors"

# A window this long, of a tensor whose values differ, does not turn up elsewhere by chance.
_WINDOW_BYTES = 64
_IMAGE = [1, 16, 16]


def first_result(artifact: Path) -> tuple[float, float]:
    """Seconds for `load`, and for `load` with the first result."""
    pixel_values = torch.randn(256, 1176, generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    import m3compile

    with m3compile.load(artifact) as encoder:
        loaded = time.perf_counter()
        rows = encoder.encode(pixel_values, [_IMAGE])[0].cpu()
        done = time.perf_counter()
    assert bool(rows.isfinite().all())
    return loaded - start, done - start


def weights_in_program(artifact: Path) -> list[str]:
    """Names of the weights of which a part stands in a program file.

    Looked for are the first bytes, the last and those in the middle, in each file as it is and in
    every member of the archive, unpacked.
    """
    from safetensors import safe_open

    texts = []
    for program in artifact.glob(PROGRAMS):
        texts.append(program.read_bytes())
        with zipfile.ZipFile(program) as archive:
            texts += [archive.read(name) for name in archive.namelist()]
    found = []
    with safe_open(artifact / WEIGHTS, framework="pt") as file:
        for name in sorted(file.keys()):
            windows = _windows(file.get_tensor(name))
            if any(window in text for window in windows for text in texts):
                found.append(name)
    return found


def _windows(tensor: Tensor) -> list[bytes]:
    """Bytes of a tensor to look for; none where it holds one value throughout, such as zeros."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    starts = (0, (len(data) - _WINDOW_BYTES) // 2, len(data) - _WINDOW_BYTES)
    windows = [
        data[max(0, start) : max(0, start) + _WINDOW_BYTES].numpy().tobytes() for start in starts
    ]
    size = tensor.element_size()
    return [window for window in windows if window != window[:size] * (len(window) // size)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--limit", type=float, default=4.0, help="seconds; default 4, for `tiny`")
    options = parser.parse_args(arguments)

    load_seconds, first_seconds = first_result(options.artifact)
    print(f"load {load_seconds:.2f} s, load to first result {first_seconds:.2f} s")
    program_bytes = sum(path.stat().st_size for path in options.artifact.glob(PROGRAMS))
    weights_bytes = (options.artifact / WEIGHTS).stat().st_size
    print(f"program {program_bytes / 1e6:.1f} MB, weights {weights_bytes / 1e6:.1f} MB")

    faults = []
    if first_seconds > options.limit:
        faults.append(f"the first result took {first_seconds:.2f} s, allowed {options.limit:.2f} s")
    if program_bytes >= weights_bytes:
        faults.append("the programs are not smaller than the weights that they should not hold")
    inside = weights_in_program(options.artifact)
    if inside:
        faults.append(f"a program file holds {len(inside)} weights, such as {inside[0]}")
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if not faults:
        print(f"ok: within {options.limit:.1f} s, and no weight stands in a program file")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
