"""A plan as a build config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from m3compile.config import BuildConfig
from m3compile.config.shown import shown
from m3compile.errors import OperationError, RequestError
from m3compile.plan.report import PlanReport

_FIRST_LINE = "# Made by m3compile plan"
# What a plan decides, what the builder chooses again for other budgets, and what is no property of
# the build that was planned for.
_LEFT_OUT = ("budgets", "max_items", "specialize", "out", "force")


def build_file(report: PlanReport, base: BuildConfig | None = None) -> str:
    """The YAML of a build with the plan's budgets.

    Args:
        base: of the artifact that was planned for: its other keys are kept. None leaves them to
            the builder.
    """
    values: dict[str, Any] = {}
    if base is not None:
        default = BuildConfig()
        for key in BuildConfig.__struct_fields__:
            value = getattr(base, key)
            if key not in _LEFT_OUT and value != getattr(default, key):
                values[key] = msgspec.to_builtins(value)
    values |= {"budgets": list(report.budgets), "max_items": report.max_items}
    plan, traffic = report.ladders[0], report.traffic
    lines = [
        f"{_FIRST_LINE} {report.m3compile} on {report.created[:10]} from {shown(traffic.name)}: "
        f"{traffic.calls:,} calls.",
        f"# Expected: {plan.ms_per_call:.2f} ms a call, {plan.over_ideal:.1%} over exact sizes; "
        f"padding {plan.padding:.1%}.",
        f"# Runs of more than {report.exact_above} tokens go at their exact shape.",
    ]
    # Lists on one line; the mapping itself has one, so its keys get a line each.
    return "\n".join(
        [*lines, yaml.safe_dump(values, default_flow_style=None, sort_keys=False, width=88)]
    )


def check_build_file(path: Path, force: bool) -> None:
    """Refuse to write over a build config that a person wrote.

    Raises:
        RequestError: it exists and no plan made it, and `force` is not given; or its folder does
            not exist.
    """
    if not path.absolute().parent.is_dir():
        raise RequestError(f"--out {path}: its folder does not exist")
    if force or not path.exists():
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            is_ours = file.readline().startswith(_FIRST_LINE)
    except OSError as error:
        raise RequestError(f"--out {path}: {error.strerror}") from None
    if not is_ours:
        raise RequestError(f"--out {path} exists and is no plan's; --force replaces it")


def write_build_file(path: Path, text: str) -> None:
    """Write the YAML.

    Raises:
        OperationError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OperationError(f"cannot write {path}: {error.strerror}") from None
