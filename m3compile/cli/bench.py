"""`bench`."""

from __future__ import annotations

import click


@click.command()
@click.argument("artifact")
def bench(artifact: str) -> None:
    """Measure ARTIFACT."""
