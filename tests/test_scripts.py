"""The set-up scripts, run in an empty checkout: with interpreters and compilers that must be
refused, and with a stand-in for the environment's Python that notes what it is asked to run.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("tools/quickstart", "tools/test")


@pytest.mark.parametrize("name", [*SCRIPTS, ".ci/run"])
def test_scripts_are_executable_and_parse(name: str) -> None:
    path = ROOT / name
    assert path.stat().st_mode & stat.S_IXUSR
    for shell in ("sh", "bash"):
        subprocess.run([shell, "-n", str(path)], check=True)


def test_ci_runs_the_test_command() -> None:
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "exec ./tools/test"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without .venv, as far as the scripts look before they set anything up."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def refused(checkout: Path, script: str, **settings: str) -> str:
    """Run a script that must stop before it makes anything; what it says."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHON", "CXX")
    } | settings
    result = subprocess.run(
        [checkout / script], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 2
    assert not (checkout / ".venv").exists()
    (message,) = result.stderr.splitlines()
    return message


def fake_python(folder: Path, body: str) -> str:
    path = folder / "fake-python"
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_old_python_is_refused(checkout: Path, script: str) -> None:
    message = refused(checkout, script, PYTHON=fake_python(checkout, "echo 3.9"))
    assert "no Python from 3.10 to 3.13" in message
    assert "fake-python is 3.9" in message


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_python_is_refused(checkout: Path, script: str) -> None:
    message = refused(checkout, script, PYTHON="no-such-python")
    assert "none of no-such-python runs" in message


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_python_without_venv_is_refused(checkout: Path, script: str) -> None:
    body = "case $2 in *venv*) exit 1 ;; esac\necho 3.12"
    message = refused(checkout, script, PYTHON=fake_python(checkout, body))
    assert "lacks the venv module" in message
    assert "python3-venv" in message


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_compiler_is_refused(checkout: Path, script: str) -> None:
    message = refused(checkout, script, CXX="no-such-compiler")
    assert "no C++ compiler (no-such-compiler is not on the PATH)" in message


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_compiler_without_openmp_is_refused(checkout: Path, script: str) -> None:
    message = refused(checkout, script, CXX="false")
    assert "false cannot build an OpenMP program" in message


@pytest.fixture
def calls(checkout: Path) -> Path:
    """A .venv whose Python fails at what $FAILS names; the file where it notes its calls."""
    notes = checkout / "calls"
    (checkout / ".venv/bin").mkdir(parents=True)
    python = checkout / ".venv/bin/python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" != -c ] || {{ echo 3.12; exit; }}\necho "$2 $3" >>{notes}\n'
        'case "$2 $3" in "${FAILS:-none}"*) exit 7 ;; esac\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    return notes


def run(checkout: Path, script: str, fails: str = "none") -> int:
    environment = {**os.environ, "FAILS": fails}
    environment.pop("PYTHON", None)
    return subprocess.run([checkout / script], env=environment, capture_output=True).returncode


CHECKS = ["ruff check", "ruff format", "mypy ", "pytest "]


def test_the_second_run_installs_nothing(checkout: Path, calls: Path) -> None:
    ready = ["pip --version"]
    assert run(checkout, "tools/test") == 0
    assert calls.read_text().splitlines() == [*ready, "pip install", *CHECKS]
    calls.unlink()
    assert run(checkout, "tools/test") == 0
    assert calls.read_text().splitlines() == [*ready, *CHECKS]
    calls.unlink()
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# another pin\n")
    assert run(checkout, "tools/test") == 0
    assert calls.read_text().splitlines() == [*ready, "pip install", *CHECKS]


def test_a_failed_installation_is_tried_again(checkout: Path, calls: Path) -> None:
    assert run(checkout, "tools/test", "pip install") == 7
    assert run(checkout, "tools/test") == 0
    assert calls.read_text().splitlines().count("pip install") == 2


@pytest.mark.parametrize("check", CHECKS)
def test_the_test_command_fails_with_each_check(checkout: Path, calls: Path, check: str) -> None:
    assert run(checkout, "tools/test", check) == 7
    assert calls.read_text().splitlines()[-1] == check


@pytest.mark.parametrize("step", ["init-checkpoint", "build", "verify", "encode"])
def test_the_quickstart_stops_at_a_step_that_fails(checkout: Path, calls: Path, step: str) -> None:
    assert run(checkout, "tools/quickstart", f"m3compile {step}") == 7
    assert calls.read_text().splitlines()[-1] == f"m3compile {step}"
    assert run(checkout, "tools/quickstart") == 0
    assert calls.read_text().splitlines()[-1] == "m3compile encode"
