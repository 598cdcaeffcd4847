"""`encode`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from m3compile.artifact import Manifest, read_preprocess
from m3compile.cli.console import StageProgress, counted, stderr, stdout
from m3compile.cli.inputs import ManyInputs, check_inputs, check_output, has_rows
from m3compile.config.build import DEVICES
from m3compile.errors import RequestError
from m3compile.writing import write_whole

if TYPE_CHECKING:
    import torch


@click.command(cls=ManyInputs)
@click.argument("artifact")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    metavar="FILE...",
    help="One safetensors file with pixel_values and grid_thw, or image files.",
)
@click.option("--output", required=True, help="Where to write embeddings and token_counts.")
@click.option("--device", type=click.Choice(DEVICES), help="Default: the artifact's.")
def encode(artifact: str, inputs: tuple[str, ...], output: str, device: str | None) -> None:
    """Encode images, or rows that a processor made, with ARTIFACT.

    Writes one safetensors file: embeddings (tokens, width) of all items end to end, and
    token_counts (num_items,).
    """
    target = check_output("--output", output)
    check_inputs(inputs)
    import torch

    from m3compile.loading import load

    with StageProgress() as progress:
        with progress.stage("load"):
            encoder = load(artifact, device, capture="lazy")
        with encoder:
            with progress.stage("read input"):
                pixel_values, grid_thw = _read(Path(artifact), encoder.manifest, inputs, progress)
            with progress.stage("encode"):
                results = encoder.encode(pixel_values, grid_thw)
                width = encoder.manifest.tower.output_size
                embeddings = (
                    torch.cat(results).cpu()
                    if results
                    else torch.zeros((0, width), dtype=encoder.dtype)
                )
            stats = encoder.stats()
    counts = torch.tensor([len(rows) for rows in results], dtype=torch.int64)
    _write(target, embeddings, counts, {"artifact": str(artifact), "inputs": json.dumps(inputs)})
    stdout().print(
        f"Wrote {output}: {counted(len(results), 'item')}, {counted(len(embeddings), 'token')} "
        f"of {width}",
        markup=False,
    )
    if stats["nonfinite_items"]:
        stderr().print(
            f"warning: {stats['nonfinite_items']} items had non-finite pixels and are NaN",
            markup=False,
        )


def _read(
    folder: Path, manifest: Manifest, inputs: tuple[str, ...], progress: StageProgress
) -> tuple[Any, Any]:
    """pixel_values (N, patch_dim) and grid_thw (num_items, 3)."""
    if any(has_rows(name) for name in inputs):
        if len(inputs) > 1:
            raise RequestError("--input takes one safetensors file, or image files")
        from m3compile.rows import read_rows

        return read_rows(inputs[0])
    from m3compile.images import load_images

    config = read_preprocess(folder, manifest)
    return load_images([Path(name) for name in inputs], config, progress.advance)


def _write(
    target: Path, embeddings: torch.Tensor, counts: torch.Tensor, metadata: dict[str, str]
) -> None:
    from safetensors.torch import save

    tensors = {"embeddings": embeddings.contiguous(), "token_counts": counts}
    write_whole(target, save(tensors, metadata))
