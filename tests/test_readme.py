"""README and the documents against the code: commands, Python examples, the build config, exit
codes, results, links and the pins of constraints.txt are compared with what the package takes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from m3compile.cli.app import app
from m3compile.config import BuildConfig, build_config_from_mapping
from m3compile.errors import ExitCode

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = ("tools/quickstart", "tools/test")
DOCUMENTS = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def command_lines() -> list[str]:
    """The m3compile command lines of README and of the scripts; shell variables stay."""
    texts = [*blocks("sh"), *((ROOT / name).read_text(encoding="utf-8") for name in SCRIPTS)]
    joined = "\n".join(texts).replace("\\\n", " ")
    found = re.findall(r"^ *(?:python -m )?m3compile +([^(].*)$", joined, re.MULTILINE)
    return [line.replace('"$@"', "") for line in found]


def test_readme_opens_with_the_two_commands() -> None:
    lines = [line.split("#")[0].strip() for line in blocks("sh")[0].splitlines()]
    assert lines == [f"./{name}" for name in SCRIPTS]


def test_command_lines_are_found() -> None:
    commands = {shlex.split(line)[0] for line in command_lines()}
    assert commands >= {"build", "verify", "inspect", "encode", "bench", "init-checkpoint"}


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_parse(line: str) -> None:
    name, *words = shlex.split(line)
    command = app.commands[name]
    # Raises what a user would see for an unknown option or a missing argument; runs nothing.
    command.make_context(name, words)


def test_command_lines_with_a_fault_do_not_parse() -> None:
    with pytest.raises(click.UsageError):
        app.commands["verify"].make_context("verify", ["exported/m3", "--checkpint", "x"])


def test_build_config_names_every_key() -> None:
    (text,) = blocks("yaml")
    values = yaml.safe_load(text)
    assert set(values) == set(BuildConfig.__struct_fields__)
    build_config_from_mapping(values, "README.md")


def test_python_examples_run(
    golden_artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photo = ROOT / "tests/goldens/images/large.jpg"
    first, second = blocks("python")
    assert "exported/MiniMax-M3" in first
    exec(first.replace("exported/MiniMax-M3", str(golden_artifact)), {})
    assert "[(256, 96), (384, 96)]" in capsys.readouterr().out
    names: dict[str, object] = {}
    exec(second.replace("photo.jpg", str(photo)), names)
    assert len(names["pixel_values"]) == names["grid_thw"].prod(1).sum()  # type: ignore[arg-type, attr-defined]


def test_exit_codes() -> None:
    # Two columns: the results' rows start with a number too.
    table = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|$", README, re.MULTILINE))
    assert [int(code) for code in table] == [int(code) for code in ExitCode]


def test_results_are_in_sync() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tools/update_readme.py", "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", [*DOCUMENTS, "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_files_that_documents_name_exist() -> None:
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        for target in re.findall(r"\b((?:m3compile|tools|tests)/[\w/]+\.(?:py|jpg))\b", text):
            assert (ROOT / target).is_file(), f"{name}: {target}"


def test_architecture_has_every_module() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| \d.*$", text, re.MULTILINE))))
    package = ROOT / "m3compile"
    modules = {path.stem for path in package.glob("*.py")}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert modules - named == set()


def test_constraints_pin_torch_in_the_allowed_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(
        line.split("#")[0].strip().split("==") for line in lines if line.split("#")[0].strip()
    )
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    minimum = re.search(r'"torch>=([\d.]+)"', project)
    assert minimum is not None
    assert as_numbers(pins["torch"]) >= as_numbers(minimum[1])
    for name in pins:
        assert re.search(rf'"{name}[>=\[]', project), f"{name} is pinned and not required"


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
