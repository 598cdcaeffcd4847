"""`inspect`: what an artifact says of itself. Never imports torch."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from m3compile.artifact import (
    VERIFY,
    Manifest,
    Provenance,
    check_files,
    check_seal,
    read_json,
    read_manifest,
)
from m3compile.cli.console import stdout, table
from m3compile.cli.precision import fp8_line
from m3compile.errors import ArtifactDamagedError


@click.command()
@click.argument("artifact")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON, alone.")
def inspect(artifact: str, as_json: bool) -> None:
    """Check the files of ARTIFACT and show its manifest."""
    folder = Path(artifact)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    for name in manifest.programs:
        check_seal(folder / name, manifest)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(manifest), indent=2).decode())
        sys.stdout.flush()
        return
    _show(folder, manifest)


def _show(folder: Path, manifest: Manifest) -> None:
    console = stdout()
    needs, source = manifest.requirements, manifest.provenance
    parameters = sum(_product(spec.shape) for spec in manifest.weights)
    facts = {
        "format version": manifest.format_version,
        "encoder": f"{parameters / 1e6:.1f} M parameters, {manifest.dtype}, "
        f"embeddings {manifest.tower.output_size} wide",
        "weights from": _weights_source(source),
        "built": f"{source.created} on {source.host} by m3compile {source.m3compile}",
        "engine": manifest.build.engine,
        "needs": f"torch {needs.torch}, {needs.platform}, device {needs.device}"
        + (f", {needs.gpu_arch}, CUDA {needs.cuda}" if needs.device == "cuda" else ""),
        "attention": f"{needs.attention_backend} ({needs.attention_version}); "
        f"{source.attention_reason}",
        "budgets": " ".join(map(str, manifest.ladder)) + f" tokens, at most "
        f"{manifest.max_segments} segments",
    }
    if manifest.precision is not None:
        facts["fp8"] = fp8_line(manifest.precision).removeprefix("fp8: ")
    if VERIFY in manifest.files:
        facts["verified"] = _summary(folder / VERIFY)
    facts["files"] = f"{len(manifest.files)}, each of the size and SHA-256 that the manifest lists"
    for name, value in facts.items():
        console.print(f"{name:15} {value}", markup=False)
    files = table("", "file", "bytes", "sha256")
    for name, entry in manifest.files.items():
        files.add_row(name, f"{entry.size:,}", entry.sha256[:16])
    console.print(files)


def _weights_source(source: Provenance) -> str:
    if source.weights != "random":
        return str(source.checkpoint)
    meaningless = "random numbers: its embeddings mean nothing"
    return f"{source.checkpoint} ({meaningless})" if source.checkpoint else meaningless


def _summary(path: Path) -> str:
    report = read_json(path)
    summary = report.get("summary") if isinstance(report, dict) else None
    if not isinstance(summary, str):
        raise ArtifactDamagedError(f"{path}: found no summary, expected a verification report")
    return summary


def _product(shape: tuple[int | str, ...]) -> int:
    result = 1
    for size in shape:
        assert isinstance(size, int)
        result *= size
    return result
