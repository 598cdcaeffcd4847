"""A build without its slow parts, for tests of everything around them."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN_CHECKPOINT, MAX_ITEMS

from m3compile import pipeline
from m3compile.config import BOUNDS, BuildConfig
from m3compile.progress import Progress
from m3compile.verify import VerifyReport

STAGES = ["read checkpoint", "choose attention", "export", "compile", "write weights", "load"]
STAGES += ["verify"]

NO_REPORT = VerifyReport(
    dtype="float32",
    device="cpu",
    reference="checkpoint",
    bounds=BOUNDS["float32"],
    passed=True,
    summary="not verified",
    rows=(),
)


def use_golden_program(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Callable[[], object]]:
    """Put an artifact's program in the place of export and compiler, and leave verification out.

    Returns:
        A list; what a test puts into it is called where the compiler would be.
    """
    inside: list[Callable[[], object]] = []

    def compile_package(exported: object, package: Path) -> None:
        for call in inside:
            call()
        with (
            zipfile.ZipFile(artifact / "encoder.pt2") as full,
            zipfile.ZipFile(package, "w") as bare,
        ):
            for name in full.namelist():
                if not name.endswith("m3compile.json"):
                    bare.writestr(name, full.read(name))

    monkeypatch.setattr(pipeline, "export_tower", lambda *args: None)
    monkeypatch.setattr(pipeline, "compile_package", compile_package)
    monkeypatch.setattr(pipeline, "verify_encoder", lambda *args, **options: NO_REPORT)
    return inside


def config(out: Path, **options: Any) -> BuildConfig:
    return BuildConfig(
        **{
            "checkpoint": str(GOLDEN_CHECKPOINT),
            "out": str(out),
            "device": "cpu",
            # As many as segments: the golden program has 32 slots.
            "budgets": (32,),
            "max_items": MAX_ITEMS,
            **options,
        }
    )


def checkpoint_with(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The golden checkpoint with another config."""
    shutil.copytree(GOLDEN_CHECKPOINT, folder)
    document = json.loads((folder / "config.json").read_text())
    change(document)
    (folder / "config.json").write_text(json.dumps(document))
    return folder


class Stages(Progress):
    """Notes what is begun; may do something at the beginning of a stage."""

    def __init__(self, at: str = "", call: Callable[[], object] = int) -> None:
        self.begun: list[str] = []
        self._at, self._call = at, call

    def start(self, stage: str) -> None:
        self.begun.append(stage)
        if stage == self._at:
            self._call()


@contextmanager
def nothing_is_left(folder: Path) -> Iterator[None]:
    """The folder's tree is the same before and after."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    yield
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
