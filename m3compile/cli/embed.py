"""`embed`."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from m3compile.cli.console import StageProgress, counted, stderr, stdout
from m3compile.cli.inputs import ManyInputs
from m3compile.errors import DependencyError

if TYPE_CHECKING:
    from m3compile.integrations.ray.data.run import EmbedReport

_NEEDED = {"ray": "ray", "pyarrow": "pyarrow", "PIL": "Pillow"}


@click.command(cls=ManyInputs)
@click.argument("artifact")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    metavar="FOLDER|FILE...",
    help="Folders of images, image files, or Parquet files with id and image, or with path.",
)
@click.option("--output", required=True, metavar="FOLDER", help="New, or of the job to resume.")
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help="Encoders. Default: one a GPU; one on the CPU.",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    help="Tokens of a batch and of a file at most. Default: the largest budget.",
)
@click.option(
    "--dtype",
    type=click.Choice(("float32", "float16")),
    default="float32",
    show_default=True,
    help="Of the embeddings; Parquet has no bfloat16.",
)
@click.option("--max-errors", type=click.IntRange(min=0), help="Stop after more rows with errors.")
@click.option(
    "--address",
    envvar="RAY_ADDRESS",
    default="local",
    show_default=True,
    help="Of a Ray cluster; local starts one for this job. Also RAY_ADDRESS.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def embed(
    artifact: str,
    inputs: tuple[str, ...],
    output: str,
    concurrency: int | None,
    batch_tokens: int | None,
    dtype: Literal["float32", "float16"],
    max_errors: int | None,
    address: str,
    as_json: bool,
) -> None:
    """Embed folders of images with ARTIFACT, on Ray Data.

    Writes Parquet files with path or id, token_count, embeddings and error. The same command goes
    on where an earlier one was stopped. An image that cannot be read is a row with its error.
    """
    missing = [name for key, name in _NEEDED.items() if importlib.util.find_spec(key) is None]
    if missing:
        raise DependencyError(f"embed needs {', '.join(missing)}: pip install 'm3compile[serve]'")
    from m3compile.integrations.ray.data.run import Request
    from m3compile.integrations.ray.data.run import embed as run_embed

    request = Request(
        Path(artifact),
        inputs,
        Path(output),
        concurrency=concurrency,
        batch_tokens=batch_tokens,
        dtype=dtype,
        max_errors=max_errors,
        address=address,
    )
    # Ray tells of processes that died on stdout, where the summary alone belongs.
    with redirect_stdout(sys.stderr), StageProgress() as progress:
        report = run_embed(request, progress)
    _show(report, output, as_json)


def _show(report: EmbedReport, output: str, as_json: bool) -> None:
    if report.skipped:
        stderr().print(f"warning: {report.skipped} files are not images, left out", markup=False)
    if report.errors_written:
        stderr().print(
            f"warning: {report.errors_written} rows have no embeddings; column error says why",
            markup=False,
        )
    if as_json:
        stdout().print(msgspec.json.encode(report).decode(), markup=False)
        return
    before = f" ({report.rows_before:,} were there)" if report.rows_before else ""
    stdout().print(
        f"Wrote {output}: {counted(report.rows_written, 'row')}{before}, "
        f"{report.errors_written:,} with an error, {counted(report.tokens_written, 'token')}, "
        f"{counted(report.files, 'file')}, {report.bytes_written / 1e6:,.1f} MB in "
        f"{report.seconds:.1f} s",
        markup=False,
    )
