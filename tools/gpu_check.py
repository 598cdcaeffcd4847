"""Run the CUDA checks on a machine with a GPU: tests, a full-size build, then times.

    python tools/gpu_check.py OUT [--skip tests,build] [--program FILE]

Correctness first, times after it on an idle card. Every step runs in its own process and leaves a
log and a JSON file in OUT, so that a late failure loses nothing; a short table comes last.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("tests", "build", "times")
# Issue's table, in milliseconds of a replay at an exact bucket.
GOALS = {64: 2.4, 256: 4.8, 576: 10.6, 1296: 28.6, 4096: 144.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu_check"))
    parser.add_argument("--skip", default="", help=f"comma-separated, of {', '.join(STEPS)}")
    parser.add_argument("--step", help="run one step in this process")
    parser.add_argument("--seconds", type=float, default=280, help="for everything")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.step:
        steps = {"build": step_build, "times": step_times}
        for name in ("encoder", "few_rows"):
            steps[name] = partial(step_compile, name=name)
        steps[options.step](options.out, options.work)
        return 0
    return run_all(options)


def run_all(options: argparse.Namespace) -> int:
    deadline = time.monotonic() + options.seconds
    skipped = options.skip.split(",")
    running: dict[str, subprocess.Popen[bytes]] = {}
    if "build" not in skipped:
        running["build"] = start(options, "build", step_command(options, "build"))
    if "tests" not in skipped:
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "--durations=8"]
        command += ["-p", "no:cacheprovider", "tests/test_gpu.py", "tests/test_gpu_attention.py"]
        running["tests"] = start(options, "tests", command)
    codes = {name: finish(process, deadline) for name, process in running.items()}
    if "times" not in skipped and codes.get("build", 0) == 0:
        process = start(options, "times", step_command(options, "times"))
        codes["times"] = finish(process, deadline)
    for name in codes:
        print(f"==== {name}: exit {codes[name]}")
        print(tail(options.out / f"{name}.log", 45 if name == "tests" else 70))
    return int(any(codes.values()))


def step_command(options: argparse.Namespace, step: str) -> list[str]:
    script = str(Path(__file__).resolve())
    return [sys.executable, script, str(options.out), "--work", str(options.work), "--step", step]


def start(options: argparse.Namespace, name: str, command: list[str]) -> subprocess.Popen[bytes]:
    log = (options.out / f"{name}.log").open("wb")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
    )


def finish(process: subprocess.Popen[bytes], deadline: float) -> int:
    try:
        return process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return 124


def tail(path: Path, lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def save(out: Path, name: str, values: dict[str, Any]) -> None:
    (out / f"{name}.json").write_text(json.dumps(values, indent=1, default=str))


def step_build(out: Path, work: Path) -> None:
    """A full-size checkpoint and its artifact; what verification finds is kept, not raised."""
    import shutil

    import msgspec

    from m3compile import pipeline, verify
    from m3compile.config import BuildConfig, TowerConfig
    from m3compile.progress import Progress
    from m3compile.weights import init_checkpoint

    class Printed(Progress):
        def finish(self, stage: str, seconds: float) -> None:
            print(f"{stage}: {seconds:.1f} s")

    verified = pipeline.verify_encoder

    def report_only(*arguments: Any, **options: Any) -> Any:
        report = verified(*arguments, **options)
        for row in report.rows:
            print(
                f"{row.route:8} {row.budget or '':5} items {row.items:3} cosine "
                f"{row.min_cosine:.6f} error {row.max_error:.2e} eager {row.eager_error or 0:.2e} "
                f"{row.reason or 'ok'}"
            )
        return msgspec.structs.replace(report, passed=True)

    def reuse_program(exported: Any, package: Path) -> None:
        shutil.copyfile(work / package.name, package)

    pipeline.compile_package = reuse_program
    pipeline.export_tower = lambda *arguments: None
    pipeline.verify_encoder = report_only
    verify._routes = quick_routes(verify._routes)
    started = time.perf_counter()
    if not (work / "full").exists():
        init_checkpoint(work / "full", TowerConfig())
    print(f"init-checkpoint: {time.perf_counter() - started:.1f} s")
    compile_programs(out, work)
    config = BuildConfig(
        checkpoint=str(work / "full"), out=str(work / "artifact"), device="cuda", force=True
    )
    report = pipeline.build(config, Printed())
    save(
        out,
        "build",
        {
            "seconds": report.seconds,
            "attention": report.manifest.provenance.attention_reason,
            "times": msgspec.to_builtins(report.manifest.times),
            "verification": msgspec.to_builtins(report.verification),
        },
    )
    print(report.manifest.provenance.attention_reason)


def compile_programs(out: Path, work: Path) -> None:
    """Both programs at once, each in its own process, unless they are there already."""
    script = str(Path(__file__).resolve())
    processes = []
    started = time.perf_counter()
    for name in ("encoder", "few_rows"):
        if not (work / f"{name}.pt2").is_file():
            command = [sys.executable, script, str(out), "--work", str(work), "--step", name]
            processes.append(subprocess.Popen(command, cwd=ROOT))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(1)
    print(f"compile, both at once: {time.perf_counter() - started:.1f} s")


def step_compile(out: Path, work: Path, name: str) -> None:
    """Compile one program of the full-size encoder; a copy goes to OUT, for a later call."""
    import shutil

    import torch

    from m3compile.attention import choose_backend
    from m3compile.build.aoti import compile_package
    from m3compile.build.export import export_tower
    from m3compile.config.build import DEFAULT_FEW_ROWS_TOKENS, MAX_TOKENS
    from m3compile.geometry import inverse_frequencies
    from m3compile.tower import make_tower
    from m3compile.weights import load_tower_state, open_checkpoint

    started = time.perf_counter()
    checkpoint = open_checkpoint(work / "full")
    config = checkpoint.config
    state = load_tower_state(checkpoint, torch.bfloat16, "cuda")
    state["inverse_frequency"] = inverse_frequencies(config).cuda()
    backend, _ = choose_backend(
        "auto", "cuda", "bfloat16", captured=True, num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
    )  # fmt: skip
    is_few = name == "few_rows"
    tower = make_tower(config, state, backend, "few_rows" if is_few else "triton")
    exported = export_tower(tower, 128, DEFAULT_FEW_ROWS_TOKENS if is_few else MAX_TOKENS)
    exported_at = time.perf_counter()
    package = work / f"{name}.partial.pt2"
    compile_package(exported, package)
    seconds = exported_at - started, time.perf_counter() - exported_at
    print(f"{name}: export {seconds[0]:.1f} s, compile {seconds[1]:.1f} s")
    print(f"{name}: {package.stat().st_size} bytes")
    if package.stat().st_size < 15e6:
        shutil.copyfile(package, out / f"{name}.pt2")
    package.rename(work / f"{name}.pt2")


def quick_routes(routes: Callable[..., Any]) -> Callable[..., Any]:
    """Verification of some budgets: those with a goal, the smallest and the largest."""

    def chosen(encoder: Any) -> Any:
        budgets = {*GOALS, encoder.ladder[0], encoder.ladder[-1], 112, None}
        return (route for route in routes(encoder) if route[1] in budgets)

    return chosen


def step_times(out: Path, work: Path) -> None:
    """Load, replays, end to end, padding and traffic of the full-size artifact."""
    import torch

    import m3compile
    from m3compile import loading

    started = time.perf_counter()
    free_before = torch.cuda.mem_get_info()[0]
    context_s = time.perf_counter() - started
    found: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    stages: dict[str, float] = {"context": context_s}
    for name in ("check_files", "check_machine", "load_weights", "CompiledProgram"):
        setattr(loading, name, timed(getattr(loading, name), name, stages))
    started = time.perf_counter()
    encoder = m3compile.load(work / "artifact")
    loaded = time.perf_counter()
    rows = torch.randn(16384, 1176, device="cuda").bfloat16()
    torch.cuda.synchronize()
    again = time.perf_counter()
    encoder.encode(rows[:256], [[1, 16, 16]])
    torch.cuda.synchronize()
    found["load_s"] = context_s + loaded - started
    found["first_embedding_s"] = found["load_s"] + time.perf_counter() - again
    found["capture_ms"] = encoder.capture_ms
    found["stages_s"] = stages
    torch.cuda.empty_cache()
    others = encoder.manifest.files["weights.safetensors"].size + rows.numel() * 2
    used = free_before - torch.cuda.mem_get_info()[0]
    found["memory_above_weights"] = used - others
    found["reserved_above_weights"] = torch.cuda.memory_reserved() - others
    found["num_graphs"] = encoder.num_graphs
    save(out, "times", found)
    print(json.dumps(found, indent=1))

    found["replay_ms"] = {}
    for tokens in encoder.ladder:
        grid = (1, 2, 2 * tokens)
        run = encoder.prepare_run(tokens, [grid], rows[: 4 * tokens])
        found["replay_ms"][tokens] = device_ms(run, 20 if tokens in GOALS else 5)
    for tokens in GOALS:
        grid = (1, 2, 2 * tokens)
        run = encoder.prepare_run(None, [grid], rows[: 4 * tokens])
        found.setdefault("exact_ms", {})[tokens] = device_ms(run, 5)
    small = (1, 16, 16)
    padded = encoder.prepare_run(4096, [small], rows[:256])
    found["padded_64_in_4096_ms"] = device_ms(padded, 20)
    save(out, "times", found)

    for tokens in (64, 256):
        side = 2 * math.isqrt(tokens)
        other = rows[: 4 * tokens].clone()
        grids = torch.tensor([[1, side, side]])
        flat = torch.tensor([[1, side // 2, side * 2]])
        calls = [partial(encoder.encode, other, grids), partial(encoder.encode, other, flat)]
        same = [wall_ms(calls[0]) for _ in range(60)]
        mixed = [wall_ms(calls[index % 2]) for index in range(60)]
        replay = found["replay_ms"][tokens]
        found[f"end_to_end_{tokens}"] = {
            "same_ms": statistics.median(same[10:]),
            "mixed_ms": statistics.median(mixed[10:]),
            "above_replay_ms": statistics.median(mixed[10:]) - replay,
        }
        found[f"host_us_{tokens}"] = host_us(calls)
    save(out, "times", found)
    found["traffic"] = traffic(encoder, rows)
    save(out, "times", found)
    print_table(found)
    (out / "profile.txt").write_text(
        "\n".join(profile(encoder, rows, tokens) for tokens in (64, 1296))
    )
    encoder.close()
    print("reserved after close:", torch.cuda.memory_reserved())


def timed(work: Callable[..., Any], name: str, stages: dict[str, float]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = work(*arguments, **options)
        stages[name] = stages.get(name, 0.0) + time.perf_counter() - started
        return result

    return wrapped


def device_ms(run: Callable[[], object], repeats: int) -> float:
    import torch

    samples = []
    for _ in range(3 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return round(statistics.median(samples[3:]), 4)


def wall_ms(call: Callable[[], object]) -> float:
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started)


def host_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds until `encode` returns, the device idle before it."""
    import torch

    samples = []
    for index in range(60):
        torch.cuda.synchronize()
        started = time.perf_counter()
        calls[index % 2]()
        samples.append(1e6 * (time.perf_counter() - started))
    return statistics.median(samples[10:])


def traffic(encoder: Any, rows: Any) -> dict[str, float]:
    import torch

    lines = (ROOT / "bench" / "traffic" / "mixed.jsonl").read_text().splitlines()
    calls = [json.loads(line)["grid_thw"] for line in lines]
    counts = [sum(math.prod(grid) for grid in call) for call in calls]
    pixels = torch.randn(max(max(counts), len(rows)), 1176, device="cuda").bfloat16()
    for call, count in list(zip(calls, counts, strict=True))[:40]:
        encoder.encode(pixels[:count], call)
    before = encoder.stats()
    latencies = [
        wall_ms(partial(encoder.encode, pixels[:count], call))
        for call, count in zip(calls, counts, strict=True)
    ]
    after = encoder.stats()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for call, count in zip(calls, counts, strict=True):
        encoder.encode(pixels[:count], call)
    torch.cuda.synchronize()
    back_to_back = time.perf_counter() - started
    latencies.sort()
    return {
        "calls_per_s": 1000 * len(calls) / sum(latencies),
        "p50_ms": latencies[len(latencies) // 2],
        "p99_ms": latencies[int(0.99 * len(latencies))],
        "back_to_back_calls_per_s": len(calls) / back_to_back,
        **{
            key: after[key] - before[key]
            for key in ("replays", "exact_runs", "real_tokens", "padded_tokens")
        },
    }


def profile(encoder: Any, rows: Any, tokens: int) -> str:
    """Where a replay's time goes, kernel by kernel."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    run = encoder.prepare_run(tokens, [(1, 2, 2 * tokens)], rows[: 4 * tokens])
    run()
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    events = sorted(profiled.key_averages(), key=lambda event: -event.device_time_total)
    lines = [f"{tokens} tokens, one replay: kernel, calls, total us"]
    for event in events[:45]:
        lines.append(f"{event.key[:110]:110} {event.count:5} {event.device_time_total:10.1f}")
    return "\n".join(lines)


def print_table(found: dict[str, Any]) -> None:
    print(f"{'tokens':>8} {'replay':>9} {'goal':>7} {'uncaptured':>11}")
    for tokens, goal in GOALS.items():
        replay, exact = found["replay_ms"][tokens], found["exact_ms"][tokens]
        print(f"{tokens:8} {replay:9.3f} {goal:7.1f} {exact:11.3f}")
    print(f"64 tokens padded to 4096: {found['padded_64_in_4096_ms']:.2f} ms (at most 50)")
    for tokens in (64, 256):
        print(f"end to end at {tokens}: {found[f'end_to_end_{tokens}']}")
        print(f"host, until encode returns: {found[f'host_us_{tokens}']:.0f} us")
    print(f"load {found['load_s']:.2f} s, first embedding {found['first_embedding_s']:.2f} s "
          f"(at most 5), capture {found['capture_ms']:.0f} ms (at most 3000)")  # fmt: skip
    print(f"memory above weights {found['memory_above_weights'] / 1e9:.2f} GB (at most 2.5)")
    print(f"mixed.jsonl: {found['traffic']}")


if __name__ == "__main__":
    sys.exit(main())
