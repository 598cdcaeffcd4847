"""What tests share: the golden checkpoint, one artifact a run, and the only table of skips."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch starts its threads: two busy cores serve the tests and the compiler.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

GOLDENS = Path(__file__).parent / "goldens"
GOLDEN_CHECKPOINT = GOLDENS / "tiny-m3"

# Reason by marker; a test with the marker is skipped where the condition holds.
SKIPS = {"gpu": (not torch.cuda.is_available(), "needs a CUDA device, this machine has none")}

# A small ladder whose edges the tests use; other ladders are given to `load`, which needs no
# second compile.
BUDGETS = (16, 64, 256, 576)
MAX_ITEMS = 32


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, (holds, reason) in SKIPS.items():
            if holds and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def golden_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint compiled in float32 for the CPU, once a run. Do not alter it."""
    from m3compile.config import BuildConfig
    from m3compile.pipeline import build

    out = tmp_path_factory.mktemp("artifacts") / "golden"
    config = BuildConfig(
        checkpoint=str(GOLDEN_CHECKPOINT),
        out=str(out),
        device="cpu",
        budgets=BUDGETS,
        max_items=MAX_ITEMS,
    )
    return build(config).path
