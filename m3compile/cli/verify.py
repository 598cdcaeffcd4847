"""`verify`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from m3compile.cli.console import StageProgress, stdout, table
from m3compile.errors import ExitCode

if TYPE_CHECKING:
    from m3compile.verify import VerifyReport


@click.command()
@click.argument("artifact")
@click.option("--checkpoint", help="What it was built from; proves the conversion too.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, alone.")
def verify(artifact: str, checkpoint: str | None, as_json: bool) -> int:
    """Compare ARTIFACT with eager, item by item, in every budget. Exits 1 past a bound."""
    from m3compile.verify import verify as run_verify

    with StageProgress() as progress:
        report = run_verify(artifact, checkpoint, progress)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        sys.stdout.flush()
    else:
        _show(report)
    return ExitCode.OK if report.passed else ExitCode.VERIFICATION


def _show(report: VerifyReport) -> None:
    console = stdout()
    rows = table(
        f"{report.dtype} on {report.device} against eager float32 from the {report.reference}",
        "route", "items", "min cosine", "max error", "mean error", "eager error", "verdict",
    )  # fmt: skip
    for row in report.rows:
        rows.add_row(
            f"{row.route} {row.budget or ''}".strip(),
            str(row.items),
            f"{row.min_cosine:.6f}",
            f"{row.max_error:.2e}",
            f"{row.mean_error:.2e}",
            "-" if row.eager_error is None else f"{row.eager_error:.2e}",
            "ok" if row.passed else "FAILED",
        )
    console.print(rows)
    if report.bounds.relative_error is not None and report.bounds.cosine is not None:
        # The bounds of fp8, which is where single tokens matter.
        _show_worst(report)
    if report.reference == "artifact weights":
        console.print(
            "The reference used the artifact's own weights: this proves the program, not the "
            "conversion. --checkpoint proves both.",
            markup=False,
        )
    console.print(("ok: " if report.passed else "FAILED: ") + report.summary, markup=False)


def _show_worst(report: VerifyReport) -> None:
    rows = table("The tokens farthest from eager float32", "route", "item", "token", "cosine")
    for token in report.worst_tokens:
        rows.add_row(
            f"{token.route} {token.budget or ''}".strip(),
            " x ".join(map(str, token.grid)),
            str(token.token),
            f"{token.cosine:.6f}",
        )
    stdout().print(rows)
