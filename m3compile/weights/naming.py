"""What checkpoints call the tower's tensors, and which naming one uses."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from m3compile.config import TowerConfig
from m3compile.errors import CheckpointError
from m3compile.weights.files import CONFIG_FILE, listed
from m3compile.weights.table import VISION_PREFIX, tower_tensors

# `transformers` is what that library saves; its parts without the leading `model.` are what it
# saves for the bare model.
NAMINGS = ("released", "transformers", "transformers-bare")

# From the released prefix to the one transformers saves; the first that fits wins.
_TRANSFORMERS_PREFIXES = (
    (f"{VISION_PREFIX}embeddings.patch_embedding.", "vision_tower.embeddings.proj."),
    (f"{VISION_PREFIX}encoder.", "vision_tower."),
    (VISION_PREFIX, "vision_tower."),
    ("patch_merge_mlp.", "multi_modal_projector.merge_"),
)

_TOWER_PREFIXES = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")


def checkpoint_name(released_name: str, naming: str) -> str:
    """What a tensor of the released checkpoint is called under one of `NAMINGS`."""
    if naming == "released":
        return released_name
    name = released_name
    for released, renamed in _TRANSFORMERS_PREFIXES:
        if name.startswith(released):
            name = renamed + name.removeprefix(released)
            break
    return f"model.{name}" if naming == "transformers" else name


def is_tower_name(name: str) -> bool:
    """Whether a checkpoint tensor belongs to the vision encoder, under any naming."""
    return name.removeprefix("model.").startswith(_TOWER_PREFIXES)


def detect_naming(names: Set[str], config: TowerConfig, source: Path) -> str:
    """The naming of a checkpoint whose vision tensors are exactly the tower's.

    Args:
        names: its vision tensors.
        config: what it says it is.
        source: the file that names them, for messages.

    Raises:
        CheckpointError: the names fit no naming or several, some are missing, or there are others.
    """
    released = [part.name for ours in tower_tensors(config) for part in ours.parts]
    if not names:
        raise CheckpointError(
            f"{source}: no vision tensors; expected {len(released)} by {CONFIG_FILE}, under "
            + ", ".join(_TOWER_PREFIXES)
        )
    expected = {n: dict.fromkeys(checkpoint_name(r, n) for r in released) for n in NAMINGS}
    # `multi_modal_projector.linear_1` alone says nothing: two namings share it.
    evidence = {}
    for naming in NAMINGS:
        others = {name for other in NAMINGS if other != naming for name in expected[other]}
        own = [name for name in expected[naming] if name in names and name not in others]
        if own:
            evidence[naming] = own[0]
    if len(evidence) != 1:
        if evidence:
            found = f"vision tensors are named in {len(evidence)} ways: {listed(evidence.values())}"
        else:
            found = f"vision tensors have unknown names: {listed(sorted(names))}"
        raise CheckpointError(
            f"{source}: {found}; expected all as in one of: "
            + ", ".join(f"{naming} ({next(iter(expected[naming]))})" for naming in NAMINGS)
        )
    (naming,) = evidence
    missing = [name for name in expected[naming] if name not in names]
    unexpected = sorted(names - expected[naming].keys())
    if missing or unexpected:
        counted = [
            f"{what} vision tensors ({len(group)}): {listed(group)}"
            for what, group in (("missing", missing), ("unexpected", unexpected))
            if group
        ]
        raise CheckpointError(
            f"{source}: {'; '.join(counted)}; expected {len(released)} by {CONFIG_FILE}, named as "
            f"in {naming} checkpoints"
        )
    return naming
