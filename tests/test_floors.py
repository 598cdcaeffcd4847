"""The floors of the package: who imports whom, who prints, how long a file is, what loads torch.

Compared with: the table of floors in `docs/architecture.md`, by the import statements of every
module, function-level ones included; and fresh interpreters, by their `sys.modules`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import run_fresh

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "m3compile"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 350

# A process that serves has these, and what they import.
RUNNER = ("graph", "program", "staging", "runner", "runtime", "loading")
# What the builder alone may need.
BUILDER = ("tower", "build", "weights")
DOORS = ("cli", "__main__")
HEAVY = {"torch", "numpy"}
# Facts that are computed from arrays; nothing else of their floor imports them.
ARRAYS = ("plan",)


class Place(NamedTuple):
    """Where a module stands; a module may import what stands before it."""

    floor: str
    order: int


@cache
def floors() -> dict[str, Place]:
    """The table of `docs/architecture.md`, in its order."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d\w?): [^|]*\|([^|]*)\|$", text, re.MULTILINE)
    names = [(floor, name) for floor, cell in rows for name in re.findall(r"`(\w+)`", cell)]
    return {name: Place(floor, order) for order, (floor, name) in enumerate(names)}


def unit_of(path: Path) -> str:
    """The module of the table that a file belongs to: a file or a folder of the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def units() -> set[str]:
    return {unit_of(path) for path in FILES}


def imports_of(path: Path) -> Iterator[str]:
    """Every dotted name that a file imports, at any level."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # Of `from m3compile import x`, x may be a module.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            # What `importlib.import_module` is given.
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"m3compile(\.\w+)+", node.value)
        ):
            yield node.value


@cache
def imported_units(path: Path) -> frozenset[str]:
    """The package's own modules that a file imports."""
    found = set()
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "m3compile":
            inner = parts[1] if len(parts) > 1 else "__init__"
            found.add(inner if inner in units() else "__init__")
    return frozenset(found - {unit_of(path)})


@cache
def reached_from(unit: str) -> frozenset[str]:
    """Every module of the package that importing one pulls in, itself included."""
    reached, left = {unit}, [unit]
    while left:
        current = left.pop()
        for path in FILES:
            if unit_of(path) == current:
                left += imported_units(path) - reached
                reached |= imported_units(path)
    return frozenset(reached)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_the_table_has_every_module() -> None:
    assert set(floors()) == units()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    mine = floors()[unit_of(path)]
    for name in imported_units(path):
        assert floors()[name].order < mine.order, f"{name_of(path)} imports {name}, above it"


def test_builder_and_runner_meet_only_in_the_folder() -> None:
    assert {floors()[unit].floor for unit in RUNNER} == {"3b"}
    assert floors()["build"].floor == "3a"
    for unit in RUNNER:
        assert reached_from(unit).isdisjoint(BUILDER), unit
    assert reached_from("build").isdisjoint(RUNNER)


def test_the_check_of_what_is_reached_can_fail() -> None:
    assert {"tower", "build", "weights", "loading"} <= reached_from("pipeline")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_facts_know_no_tensor(path: Path) -> None:
    """Floor 0 has plain values only, so that looking at an artifact needs no torch."""
    unit = unit_of(path)
    if floors()[unit].floor == "0":
        heavy = {"torch"} if unit in ARRAYS else HEAVY
        assert heavy.isdisjoint(name.partition(".")[0] for name in imports_of(path))
        assert unit in ARRAYS or imported_units(path).isdisjoint(ARRAYS)


def leaves(node: ast.AST) -> str | None:
    """What a node prints or exits with, or None."""
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in {"print", "exit", "quit", "sys.exit", "os._exit", "os.abort"}:
            return called
    if isinstance(node, ast.Raise) and node.exc is not None:
        raised = ast.unparse(node.exc)
        if raised.startswith("SystemExit"):
            return raised
    if isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr"}:
        return ast.unparse(node)
    return None


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_command_line_prints_and_exits(path: Path) -> None:
    if unit_of(path) not in DOORS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = [
            f"line {getattr(node, 'lineno', '?')}: {leaves(node)}"
            for node in ast.walk(tree)
            if leaves(node)
        ]
        assert not found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


# --- fresh interpreters ---


def modules_after(code: str, *arguments: object) -> set[str]:
    """What is in `sys.modules` once the code has run."""
    ending = "\nimport sys\nprint('MODULES', *sys.modules)"
    return set(run_fresh(code + ending, *arguments).rpartition("MODULES ")[2].split())


def test_importing_the_package_imports_no_torch() -> None:
    found = modules_after("import m3compile; m3compile.__version__; dir(m3compile)")
    assert "m3compile" in found
    assert HEAVY.isdisjoint(found)


_INSPECT = """
import runpy, sys
sys.argv[1:] = ["inspect", *sys.argv[1:]]
try:
    runpy.run_module("m3compile", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_inspect_imports_no_torch(flags: list[str], golden_artifact: Path) -> None:
    found = modules_after(_INSPECT, golden_artifact, *flags)
    assert "m3compile.cli.inspect" in found
    assert HEAVY.isdisjoint(found)


@pytest.mark.parametrize("words", ["--help", "build --help", "--version", "verify --help"])
def test_help_imports_no_torch(words: str) -> None:
    code = _INSPECT.replace('["inspect", *sys.argv[1:]]', repr(words.split()))
    assert HEAVY.isdisjoint(modules_after(code))


_SERVE = """
import sys, torch, m3compile
with m3compile.load(sys.argv[1]) as encoder:
    for budget in (16, None):
        (result,) = encoder.encode_at(torch.zeros(16, 1176), [(1, 4, 4)], budget)
        assert result.isfinite().all()
    encoder.stats()
"""


def test_a_process_that_serves_never_sees_the_builder(golden_artifact: Path) -> None:
    found = modules_after(_SERVE, golden_artifact)
    assert "m3compile.runtime" in found
    for name in (*BUILDER, "verify", "pipeline", "images", "cli"):
        assert not {each for each in found if f"{each}.".startswith(f"m3compile.{name}.")}, name
    # Nor what takes seconds to import, and what only a compiler needs.
    for name in ("torch._inductor", "torch._dynamo", "triton", "sympy.solvers", "PIL", "click"):
        assert name not in found, name
