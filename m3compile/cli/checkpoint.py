"""`init-checkpoint`."""

from __future__ import annotations

from pathlib import Path

import click

from m3compile.cli.console import StageProgress, stdout
from m3compile.config import TINY, TowerConfig

_PRESETS = {"tiny": TINY, "full": TowerConfig()}


@click.command("init-checkpoint")
@click.argument("directory")
@click.option("--preset", type=click.Choice(list(_PRESETS)), default="tiny", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def init_checkpoint(directory: str, preset: str, seed: int) -> None:
    """Write random weights in the released layout to DIRECTORY.

    For trying the pipeline and measuring its speed; the embeddings mean nothing.
    """
    from m3compile.weights import init_checkpoint as write_checkpoint

    with StageProgress() as progress, progress.stage(f"write {preset} checkpoint"):
        write_checkpoint(Path(directory), _PRESETS[preset], seed=seed, progress=progress.advance)
    stdout().print(f"Wrote {directory} ({preset}, seed {seed}, random weights)", markup=False)
