"""What tests share: the golden checkpoint, one artifact a run, and the only table of skips."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch starts its threads: two busy cores serve the tests and the compiler.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

if TYPE_CHECKING:
    from m3compile import Encoder
    from m3compile.tower import Tower

GOLDENS = Path(__file__).parent / "goldens"
GOLDEN_CHECKPOINT = GOLDENS / "tiny-m3"

HAS_FA3 = any(
    importlib.util.find_spec(name) for name in ("fa3_fwd_interface", "flash_attn_interface")
)
# Reason by marker; a test with the marker is skipped where the condition holds.
SKIPS = {
    "gpu": (not torch.cuda.is_available(), "needs a CUDA device, this machine has none"),
    "fa3": (not HAS_FA3, "needs FlashAttention 3"),
}

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


@pytest.fixture
def encoder(golden_artifact: Path) -> Iterator[Encoder]:
    """The golden artifact with its own ladder, freshly loaded."""
    import m3compile

    with m3compile.load(golden_artifact) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def eager_tower() -> Tower:
    """The golden checkpoint as the eager float32 tower. Do not alter it."""
    return golden_tower()


def golden_tower(dtype: torch.dtype = torch.float32) -> Tower:
    from m3compile.tower import make_tower
    from m3compile.weights import load_module_state, open_checkpoint

    checkpoint = open_checkpoint(GOLDEN_CHECKPOINT)
    state = load_module_state(checkpoint, dtype)
    return make_tower(checkpoint.config, state, "TORCH_SDPA")


@pytest.fixture(scope="session")
def gpu_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint compiled in bfloat16 for CUDA, once a run. Do not alter it."""
    from m3compile.config import BuildConfig
    from m3compile.pipeline import build

    out = tmp_path_factory.mktemp("artifacts") / "gpu"
    config = BuildConfig(
        checkpoint=str(GOLDEN_CHECKPOINT),
        out=str(out),
        device="cuda",
        dtype="bfloat16",
        budgets=BUDGETS,
        max_items=MAX_ITEMS,
    )
    return build(config).path
