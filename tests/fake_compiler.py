"""A build without its slow parts, for tests of everything around them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from m3compile import pipeline
from m3compile.config import BOUNDS
from m3compile.verify import VerifyReport

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
