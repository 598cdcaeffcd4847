"""Opening bad artifacts: what the loader says of every folder in `bad_folders.CASES` is compared
with what it has to say (class of the error, file, found, expected). All of them are tried in one
fresh process, which must live and load a good artifact afterwards.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bad_meanings  # noqa: F401 (adds to the cases)
import pytest
import torch
from bad_folders import CASES, PROGRAM
from crafted import copy, edited

import m3compile
from m3compile.errors import (
    ArtifactDamagedError,
    ArtifactIncompatibleError,
    ConfigError,
    OperationError,
    RequestError,
)
from m3compile.loading import check_machine, load_weights, open_program

# Tries every folder that it is given, by `load` and by the command line; a line of JSON each.
TRY_ALL = """
import contextlib, io, json, sys
import torch
import m3compile
from m3compile.cli.app import main

def tried(folder):
    try:
        m3compile.load(folder)
    except m3compile.M3CompileError as error:
        return type(error).__name__, int(error.exit_code), str(error)
    return "loaded", 0, ""

*bad, good = sys.argv[1:]
for folder in bad:
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        code = main(["inspect", folder])
    print(json.dumps([*tried(folder), code, said.getvalue()]), flush=True)
with m3compile.load(good) as encoder:
    (rows,) = encoder.encode(torch.ones(16, 1176), [[1, 4, 4]])
print(json.dumps([list(rows.shape), bool(rows.isfinite().all())]))
"""


@pytest.fixture(scope="module")
def refusals(
    golden_artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, list[Any]], list[Any]]:
    """By name of the case, what loading and inspecting it gave; and what came of a good one."""
    root = tmp_path_factory.mktemp("bad")
    folders = [root / str(index) for index in range(len(CASES))]
    for folder, made in zip(folders, CASES.values(), strict=True):
        made.make(copy(golden_artifact, folder))
    result = subprocess.run(
        [sys.executable, "-c", TRY_ALL, *map(str, folders), str(golden_artifact)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    died_at = f"died at {[*CASES, 'the good one'][len(lines) :][:1]}: {result.stderr[-2000:]}"
    assert result.returncode == 0, died_at
    return dict(zip(CASES, lines, strict=False)), lines[-1]


@pytest.mark.parametrize("name", CASES)
def test_a_bad_folder_is_refused(refusals: tuple[dict[str, list[Any]], Any], name: str) -> None:
    expected = CASES[name]
    error, code, message, inspect_code, said = refusals[0][name]
    assert (error, code) == (expected.error, 3), message
    for part in expected.says:
        assert part in message
    assert len(message) < 1500
    assert inspect_code == (3 if expected.inspect else 0), said
    if expected.inspect:
        assert said.startswith("error: ")
        assert len(said.splitlines()) == 1
        assert said.isprintable() or said[:-1].isprintable()


def test_the_process_lives_and_serves(refusals: tuple[dict[str, list[Any]], Any]) -> None:
    assert refusals[1] == [[4, 96], True]


def test_several_reasons_are_all_told(golden_artifact: Path, tmp_path: Path) -> None:
    folder = copy(golden_artifact, tmp_path / "a")
    with edited(folder) as manifest:
        manifest["requirements"].update(torch="1.0.0", platform="windows-arm64")
    with pytest.raises(
        ArtifactIncompatibleError, match=r"torch 1\.0\.0.*; .*windows-arm64"
    ) as error:
        m3compile.load(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", torch.device("cuda")])
def test_another_device_than_the_artifacts(golden_artifact: Path, device: Any) -> None:
    # With a GPU here, one of an index that it lacks is another request, not another artifact.
    errors = (ArtifactIncompatibleError, RequestError)
    with pytest.raises(errors, match="device") as error:
        m3compile.load(golden_artifact, device)
    if not torch.cuda.is_available():
        assert "built for device cpu, asked to run on cuda" in str(error.value)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "mps", "", "cuda:-1", 1.5, ["cpu"]])
def test_no_device(golden_artifact: Path, device: Any) -> None:
    with pytest.raises(RequestError, match=r"device is .*allowed: cpu, cuda, cuda:N"):
        m3compile.load(golden_artifact, device)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_artifacts_own_device(golden_artifact: Path, device: Any) -> None:
    opened = open_program(golden_artifact, device)
    assert opened.device == torch.device("cpu")
    assert sorted(opened.weights) == sorted(spec.name for spec in opened.manifest.weights)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budgets": []}, "budgets"),
        ({"budgets": [64, 64]}, "64 after 64"),
        ({"budgets": [16_385]}, "16385"),
        ({"budgets": [True]}, "True"),
        ({"max_items": 0}, "max_items is 0"),
        ({"capture": "often"}, "capture is 'often'"),
    ],
)
def test_options_are_checked_before_the_folder(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        m3compile.load("no/such/folder", **options)


def test_a_path_that_no_system_has() -> None:
    for path in ("x" * 5000, "a\0b", ""):
        with pytest.raises(m3compile.M3CompileError):
            m3compile.load(path)


def test_an_unreadable_file(
    golden_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests may run as root, who may read everything.
    folder = copy(golden_artifact, tmp_path / "a")
    real = Path.open

    def deny(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == PROGRAM:
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(
        ArtifactDamagedError, match=rf"{PROGRAM}: cannot be read: Permission denied"
    ):
        m3compile.load(folder)


def test_too_little_memory_is_no_damage(
    golden_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import m3compile.loading

    class Full:
        def __enter__(self) -> Full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TB\nmore")

        def __exit__(self, *info: object) -> None: ...

    monkeypatch.setattr(m3compile.loading, "safe_open", lambda *args, **options: Full())
    opened = m3compile.artifact.read_manifest(golden_artifact)
    with pytest.raises(OperationError, match=r"out of device memory.*1 TB$"):
        load_weights(golden_artifact, opened, torch.device("cpu"))


def test_check_machine_returns_where_to_run(golden_artifact: Path) -> None:
    manifest = m3compile.artifact.read_manifest(golden_artifact)
    assert check_machine(golden_artifact, manifest, None) == torch.device("cpu")
    assert check_machine(golden_artifact, manifest, torch.device("cpu")) == torch.device("cpu")
