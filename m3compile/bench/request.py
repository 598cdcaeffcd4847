"""What a bench is asked for, checked before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from m3compile.artifact import WEIGHTS, Manifest, check_files, read_manifest
from m3compile.bench.cases import FULL, QUICK, Effort, choose_budgets
from m3compile.errors import RequestError
from m3compile.loading import check_machine, load_weights
from m3compile.traffic import Call, read_traffic

# The weight that two artifacts of one checkpoint hold alike.
_NEVER_FP8 = "patch_embed.weight"


class Request(NamedTuple):
    """A request that can be served.

    Attributes:
        budgets: to measure.
        trace: file of the traffic, None without.
        calls: of the trace, as many as will be run.
        against: folder of another artifact, None without.
        reference: the artifact whose weights the judge and the eager peers have: the other one
            where that alone is without fp8.
        notes: what the request itself leaves out.
    """

    folder: Path
    manifest: Manifest
    device: torch.device
    budgets: tuple[int, ...]
    quick: bool
    effort: Effort
    trace: Path | None
    calls: tuple[Call, ...]
    against: Path | None
    reference: Path
    notes: tuple[str, ...]


def make_request(
    path: str | Path,
    *,
    budgets: Sequence[int] | None,
    quick: bool,
    traffic: str | Path | None,
    skip_bad: bool,
    against: str | Path | None,
) -> Request:
    """Arguments and errors as `bench`. Reads every file of the artifact, for its digest."""
    folder = Path(path)
    manifest = read_manifest(folder)
    chosen = choose_budgets(manifest.ladder, budgets, quick)
    effort = QUICK if quick else FULL
    notes: list[str] = []
    calls: tuple[Call, ...] = ()
    if traffic is not None:
        max_frames = manifest.tower.vision_segment_max_frames
        found = read_traffic(traffic, skip_bad=skip_bad, max_frames=max_frames)
        calls = found.calls[: effort.calls]
        notes += [f"{Path(traffic).name}: left out {line}" for line in found.skipped]
        if not any(calls):
            raise RequestError(f"{traffic}: its calls have no items; expected at least one")
    # A load finds the files in the page cache after this.
    check_files(folder, manifest)
    device = check_machine(folder, manifest, None)
    reference = folder
    if against is not None:
        other = _checked_other(Path(against), folder, manifest)
        if manifest.precision is not None and other.precision is None:
            reference = Path(against)
    if manifest.precision is not None:
        notes.append(
            f"floor: at the rate of {manifest.dtype} products; those in fp8 have twice that"
        )
    return Request(
        folder,
        manifest,
        device,
        chosen,
        quick,
        effort,
        Path(traffic) if traffic is not None else None,
        calls,
        Path(against) if against is not None else None,
        reference,
        tuple(notes),
    )


def _checked_other(other: Path, folder: Path, manifest: Manifest) -> Manifest:
    """The manifest of another artifact that may be compared with.

    Only artifacts of the same weights in the same dtype give comparable results.

    Of the same checkpoint, where one of them holds its weights in fp8.
    """
    found = read_manifest(other)
    compared = [
        ("dtype", found.dtype, manifest.dtype),
        ("device", found.requirements.device, manifest.requirements.device),
    ]
    if found.precision == manifest.precision:
        theirs, ours = (each.files[WEIGHTS].sha256[:16] for each in (found, manifest))
        compared.append(("weights", theirs, ours))
    else:
        theirs, ours = (_source(each) for each in (found, manifest))
        compared.append(("checkpoint files", theirs, ours))
    for what, theirs, ours in compared:
        if theirs != ours:
            raise RequestError(f"--against {other}: has {what} {theirs}; {folder} has {ours}")
    # Another training of the same encoder has files of the same names and sizes.
    weights = (
        load_weights(*pair, torch.device("cpu")) for pair in ((other, found), (folder, manifest))
    )
    theirs, ours = (each[_NEVER_FP8] for each in weights)
    if not torch.equal(theirs, ours):
        raise RequestError(
            f"--against {other}: has another {_NEVER_FP8} than {folder}; expected artifacts of one "
            "checkpoint"
        )
    return found


def _source(manifest: Manifest) -> str:
    files = manifest.provenance.checkpoint_files
    return ", ".join(f"{name} ({size} bytes)" for name, size in sorted(files.items()))
