"""`calibrate`."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from m3compile.cli.console import StageProgress, stderr, stdout, table
from m3compile.cli.inputs import ManyInputs, check_inputs, check_output, has_rows
from m3compile.config import BuildConfig
from m3compile.config.build import DEVICES, DTYPES
from m3compile.config.scales import write_scales
from m3compile.errors import RequestError
from m3compile.version import VERSION

if TYPE_CHECKING:
    from m3compile.calibrate import CalibrationReport, Recorded, Source
    from m3compile.weights import Checkpoint


@click.command(cls=ManyInputs)
@click.argument("checkpoint")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    metavar="FILE...",
    help="Safetensors files with pixel_values and grid_thw, or image files.",
)
@click.option("--out", required=True, metavar="FILE", help="Where to write the scales, JSON.")
@click.option(
    "--margin", type=float, default=1.5, show_default=True, help="Room above what was seen."
)
@click.option("--device", type=click.Choice(DEVICES), help="Default: cuda if there is one.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Default: bfloat16 on cuda, float32 on cpu."
)
@click.option("--force", is_flag=True, help="Replace a file of the same name.")
@click.option("--json", "as_json", is_flag=True, help="Print what was seen as JSON, alone.")
def calibrate(
    checkpoint: str,
    inputs: tuple[str, ...],
    out: str,
    margin: float,
    device: str | None,
    dtype: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Find static FP8 scales for CHECKPOINT from real images, or rows that a processor made.

    Runs the eager encoder over every item. Writes one JSON file, which vLLM reads as well with
    --mm-encoder-fp8-scale-path.
    """
    _check_out(out, force)
    check_inputs(inputs)
    from m3compile.build.resolve import resolve
    from m3compile.calibrate import calibrate as run_calibration
    from m3compile.calibrate import check_margin
    from m3compile.weights import open_checkpoint

    check_margin(margin)
    machine = resolve(BuildConfig(device=device, dtype=dtype))
    assert machine.device is not None
    assert machine.dtype is not None
    opened = open_checkpoint(checkpoint)
    with StageProgress() as progress:
        report = run_calibration(
            opened,
            _sources(inputs, opened),
            margin=margin,
            device=machine.device,
            dtype=machine.dtype,
            progress=progress,
        )
    write_scales(Path(out), report.scales, _facts(report))
    for warning in opened.warnings:
        stderr().print(f"warning: {warning}", markup=False)
    if as_json:
        summary = {**_facts(report), "kinds": _kinds(report), "recorded": report.recorded}
        summary["unusual"] = [record.name for record in report.unusual]
        print(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
        sys.stdout.flush()
    else:
        _show(report, out)


def _check_out(out: str, force: bool) -> None:
    if os.path.lexists(check_output("--out", out)) and not force:
        raise RequestError(f"--out {out} exists; --force replaces it")


def _sources(inputs: tuple[str, ...], checkpoint: Checkpoint) -> list[Source]:
    from m3compile.calibrate import Source
    from m3compile.images import load_images
    from m3compile.rows import read_rows
    from m3compile.weights import checkpoint_preprocess

    config = checkpoint_preprocess(checkpoint)
    return [
        Source(
            name,
            partial(read_rows, name) if has_rows(name) else partial(load_images, [name], config),
        )
        for name in inputs
    ]


def _facts(report: CalibrationReport) -> dict[str, Any]:
    """What is said of a calibration in the file and in the summary."""
    names = ("device", "dtype", "weights", "margin", "items", "tokens")
    return {"version": VERSION, **{name: getattr(report, name) for name in names}}


def _kinds(report: CalibrationReport) -> dict[str, dict[str, Recorded]]:
    """Per kind of tensor, over all layers: where scale and ratio are at their ends."""
    kinds: dict[str, list[Recorded]] = {}
    for record in report.recorded:
        kinds.setdefault(re.sub(r"^layers\.\d+\.", "", record.name), []).append(record)
    return {
        kind: {
            "smallest": min(records, key=lambda record: record.scale),
            "largest": max(records, key=lambda record: record.scale),
            "peak": max(records, key=lambda record: record.ratio),
        }
        for kind, records in kinds.items()
    }


def _show(report: CalibrationReport, out: str) -> None:
    rows = table(
        f"{report.items} items, {report.tokens} tokens, {report.dtype} on {report.device}, margin "
        f"{report.margin:g}",
        "scale of", "smallest", "layer", "largest", "layer", "peak / rms", "layer",
    )  # fmt: skip
    for kind, ends in _kinds(report).items():
        rows.add_row(
            kind,
            f"{ends['smallest'].scale:.3e}",
            _layer(ends["smallest"]),
            f"{ends['largest'].scale:.3e}",
            _layer(ends["largest"]),
            f"{ends['peak'].ratio:.1f}",
            _layer(ends["peak"]),
        )
    console = stdout()
    console.print(rows)
    for record in report.unusual:
        console.print(
            f"  {record.name} peaks at {record.amax:.3g}, {record.ratio:.0f} times its root mean "
            "square: most of its values use little of the range.",
            markup=False,
        )
    console.print(f"Wrote {out}", markup=False)
    if report.weights == "random":
        console.print("  The weights are random: these scales mean nothing.", markup=False)


def _layer(record: Recorded) -> str:
    return record.name.split(".")[1] if record.name.startswith("layers.") else "-"
