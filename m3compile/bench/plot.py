"""Latency over tokens, with the floor under it."""

from __future__ import annotations

from pathlib import Path

from m3compile.bench.records import BenchReport
from m3compile.plotting import new_figure, save_figure

Points = list[tuple[int, float]]


def curves(report: BenchReport) -> dict[str, Points]:
    """By label, (tokens, milliseconds) of the images that fill a bucket, by tokens."""
    found: dict[str, Points] = {}
    for case in report.cases:
        if case.kind != "full":
            continue
        values = {
            "m3compile, end to end": case.end_to_end.median_ms,
            "m3compile, replay": case.replay.median_ms,
            **{
                f"{peer.name}, end to end": peer.end_to_end.median_ms
                for peer in case.peers
                if peer.end_to_end is not None
            },
            f"floor ({report.ceilings.flops_per_s / 1e12:.0f} TFLOP/s, "
            f"{report.ceilings.bytes_per_s / 1e12:.2f} TB/s)": case.floor.ms,
        }
        for label, ms in values.items():
            found.setdefault(label, []).append((case.tokens, ms))
    return {label: sorted(points) for label, points in found.items()}


def draw(report: BenchReport, path: Path) -> None:
    """Write the plot; its format is that of the name.

    Raises:
        DependencyError: matplotlib is not installed.
        OperationError: the file cannot be written.
    """
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    for label, points in curves(report).items():
        is_floor = label.startswith("floor")
        axes.plot(
            *zip(*points, strict=True),
            label=label,
            color="black" if is_floor else None,
            linestyle="--" if is_floor else "-",
            marker=None if is_floor else ".",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of one image")
    axes.set_ylabel("milliseconds")
    axes.set_title(f"{report.circumstances.device}, {report.circumstances.dtype}")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    save_figure(figure, path)
