"""Comparing an artifact with eager, item by item, on a fixed set of grids.

The reference is the eager tower in float32, run on one item at a time at its exact shape. A
bfloat16 artifact is also compared with eager in bfloat16: rounding is no fault, more rounding than
eager is.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from torch import Tensor

from m3compile.config import Bounds, TowerConfig
from m3compile.errors import CheckpointError
from m3compile.loading import load, load_weights
from m3compile.progress import Progress
from m3compile.runtime import Encoder
from m3compile.verify.cases import Grid, routes
from m3compile.verify.judge import (
    Judge,
    VerifyRow,
    WorstToken,
    broken_bound,
    eager,
    relative_error,
)
from m3compile.weights import Checkpoint, load_module_state, open_checkpoint, whole_state

__all__ = [
    "Grid",
    "VerifyReport",
    "VerifyRow",
    "WorstToken",
    "broken_bound",
    "eager",
    "relative_error",
    "verify",
    "verify_encoder",
]


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every route, and what it was compared with.

    Attributes:
        reference: `checkpoint` (proves conversion and program), or `artifact weights` (proves the
            program only; what is in fp8 there counts as the numbers that it stands for).
        worst_tokens: those with the smallest cosines, worst first.
    """

    dtype: str
    device: str
    reference: str
    bounds: Bounds
    passed: bool
    summary: str
    rows: tuple[VerifyRow, ...]
    worst_tokens: tuple[WorstToken, ...] = ()


def verify(
    path: str | Path, checkpoint: str | Path | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Load an artifact and compare it with eager.

    Args:
        path: the artifact.
        checkpoint: what it was built from; without it, the artifact's own weights serve as the
            reference, which proves the program but not the conversion.

    Raises:
        ArtifactError, CheckpointError: either cannot be opened, or they do not belong together.
    """
    progress = progress or Progress()
    source = open_checkpoint(checkpoint) if checkpoint is not None else None
    with progress.stage("load"):
        encoder = load(path, on_bucket=progress.advance)
    with encoder, progress.stage("verify"):
        if source is not None:
            _require_same_tower(source, encoder.manifest.tower, path)
        return verify_encoder(encoder, source, folder=Path(path), progress=progress)


def _require_same_tower(source: Checkpoint, tower: TowerConfig, path: str | Path) -> None:
    for name in tower.__struct_fields__:
        found, expected = getattr(source.config, name), getattr(tower, name)
        if found != expected:
            raise CheckpointError(
                f"{source.path}: {name} is {found}, and {path} was built from a checkpoint with "
                f"{expected}"
            )


def verify_encoder(
    encoder: Encoder,
    checkpoint: Checkpoint | None,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare a loaded encoder with eager; without a checkpoint, `folder` has its weights."""
    manifest = encoder.manifest
    judge = Judge(encoder, _reference_state(encoder, checkpoint, folder))
    cases = list(routes(encoder))
    rows = []
    for done, (route, budget, batches) in enumerate(cases, 1):
        rows.append(judge.row(route, budget, batches))
        if progress is not None:
            progress.advance(done, len(cases))
    failed = [row for row in rows if not row.passed]
    if failed:
        worst = failed[0]
        where = f"{worst.route} {worst.budget or ''}".strip()
        summary = f"{len(failed)} of {len(rows)} routes out of bounds; {where}: {worst.reason}"
    else:
        error = max(row.max_error for row in rows)
        summary = f"{len(rows)} routes within bounds, largest error {error:.1e}"
    return VerifyReport(
        dtype=manifest.dtype,
        device=str(encoder.device),
        reference="artifact weights" if checkpoint is None else "checkpoint",
        bounds=judge.bounds,
        passed=not failed,
        summary=summary,
        rows=tuple(rows),
        worst_tokens=judge.worst_tokens,
    )


def _reference_state(
    encoder: Encoder, checkpoint: Checkpoint | None, folder: Path | None
) -> dict[str, Tensor]:
    if checkpoint is not None:
        return load_module_state(checkpoint, torch.float32, encoder.device)
    assert folder is not None
    return whole_state(load_weights(folder, encoder.manifest, encoder.device), torch.float32)
