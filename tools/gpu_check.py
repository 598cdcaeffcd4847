"""Check and measure on a machine with a GPU, with what users have: tests, build, bench.

    python tools/gpu_check.py OUT [--work DIR] [--skip tests,bench]

The CUDA tests run beside the full-size build, whose compiler leaves the card idle; times come last.
Every step leaves its log in OUT, so that a late failure loses nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAFFIC = ROOT / "bench" / "traffic" / "mixed.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for logs and results")
    parser.add_argument("--work", type=Path, help="folder for checkpoint and artifact: OUT")
    parser.add_argument("--skip", default="", help="comma-separated: tests, build, bench")
    options = parser.parse_args()
    out, skipped = options.out.resolve(), options.skip.split(",")
    work = (options.work or out).resolve()
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    tests = None if "tests" in skipped else _start(out, "tests", "pytest", "-q", "-m", "gpu")
    codes = {}
    if "build" not in skipped:
        full = str(work / "full")
        codes["checkpoint"] = 0
        if not (work / "full").exists():
            arguments = ("init-checkpoint", full, "--preset", "full")
            codes["checkpoint"] = _start(out, "checkpoint", "m3compile", *arguments).wait()
        flags = ("--out", str(work / "artifact"), "--device", "cuda", "--force")
        codes["build"] = _start(out, "build", "m3compile", "build", full, *flags).wait()
    if tests is not None:
        codes["tests"] = tests.wait()
    if "bench" not in skipped and not codes.get("build"):
        command = ["m3compile", "bench", str(work / "artifact"), "--traffic", str(TRAFFIC)]
        bench = _start(out, "bench", *command, "--json", str(out / "bench.json"))
        codes["bench"] = bench.wait()
    for name, code in codes.items():
        print(f"==== {name}: exit code {code}")
        log = out / f"{name}.log"
        if log.is_file():
            print("\n".join(log.read_text(errors="replace").splitlines()[-60:]))
    return int(any(codes.values()))


def _start(out: Path, name: str, *command: str) -> subprocess.Popen[bytes]:
    with (out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
        )


if __name__ == "__main__":
    sys.exit(main())
