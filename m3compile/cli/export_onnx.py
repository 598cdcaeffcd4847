"""`export-onnx`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from m3compile.cli.console import StageProgress, stderr, stdout, table
from m3compile.onnx_format import DEFAULT_OPSET, DTYPES, OPSETS

if TYPE_CHECKING:
    from m3compile.onnx_check import CheckReport


@click.command("export-onnx")
@click.argument("source", metavar="CHECKPOINT|ARTIFACT")
@click.option("--out", required=True, metavar="FILE", help="The file; replaced if it exists.")
@click.option("--dtype", type=click.Choice(DTYPES), default=DTYPES[0], show_default=True)
@click.option(
    "--opset",
    type=click.IntRange(OPSETS[0], OPSETS[-1]),
    default=DEFAULT_OPSET,
    show_default=True,
    help="Of ONNX's standard operators.",
)
@click.option("--check", is_flag=True, help="Compare with eager; what differs isn't written.")
@click.option(
    "--external-data",
    is_flag=True,
    help="Weights in FILE.data beside it. Over 2 GB they always are.",
)
def export_onnx(
    source: str, out: str, dtype: str, opset: int, check: bool, external_data: bool
) -> None:
    """Write the encoder as one ONNX file, for runtimes that are not PyTorch.

    pixel_values (num_patches, 1176) and int64 segments (num_segments, 3) in, embeddings
    (num_patches/4, width) out. With --check, ONNX Runtime runs it on the CPU on several mixes of
    grids; a difference exits 1.
    """
    from m3compile.onnx_export import OnnxCheckError
    from m3compile.onnx_export import export_onnx as run_export

    try:
        with StageProgress() as progress:
            report = run_export(
                source,
                out,
                dtype=dtype,
                opset=opset,
                check=check,
                external=external_data,
                progress=progress,
            )
    except OnnxCheckError as error:
        _show(error.report, dtype)
        raise
    for warning in report.warnings:
        stderr().print(f"warning: {warning}", markup=False)
    if report.check is not None:
        _show(report.check, dtype)
    console = stdout()
    files = ", ".join(f"{path} ({size / 1e6:.1f} MB)" for path, size in report.files.items())
    console.print(f"Wrote {files}: {dtype}, opset {opset}", markup=False)
    rounded = report.metadata.weights_dtype
    if rounded not in ("mixed", dtype):
        console.print(f"  The artifact's weights had been rounded to {rounded}.", markup=False)
    if report.metadata.weights == "random":
        console.print("  The weights are random: its embeddings mean nothing.", markup=False)


def _show(report: CheckReport, dtype: str) -> None:
    rows = table(
        f"{dtype} in {report.runtime}, against eager float32",
        "mix", "items", "patches", "max error", "min cosine", "eager error", "verdict",
    )  # fmt: skip
    for row in report.rows:
        rows.add_row(
            row.mix,
            str(row.items),
            f"{row.patches:,}",
            f"{row.max_error:.2e}",
            f"{row.min_cosine:.6f}",
            "-" if row.eager_error is None else f"{row.eager_error:.2e}",
            "ok" if row.passed else "FAILED",
        )
    console = stdout()
    console.print(rows)
    console.print(("ok: " if report.passed else "FAILED: ") + report.summary, markup=False)
