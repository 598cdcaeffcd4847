"""The traffic as a histogram, with the plan's budgets drawn on it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from m3compile.errors import DependencyError, OperationError, RequestError
from m3compile.plan.report import PlanReport


def check_plot(path: Path) -> None:
    """Refuse, before the planning, a picture that could not be written.

    Raises:
        DependencyError: matplotlib is not installed.
        RequestError: there is no such folder, or matplotlib does not write such files.
    """
    figure = _figure()
    if not path.absolute().parent.is_dir():
        raise RequestError(f"--plot {path}: its folder does not exist")
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise RequestError(f"--plot {path}: expected a name that ends in .{', .'.join(known)}")


def draw(report: PlanReport, path: Path) -> None:
    """Write the picture; its format is that of the name.

    Raises:
        DependencyError: matplotlib is not installed.
        OperationError: the file cannot be written.
    """
    figure = _figure()
    axes = figure.add_subplot()
    bins, plan = report.histogram, report.ladders[0]
    edges = [bin.first for bin in bins] + [bins[-1].last + 1]
    axes.stairs([bin.calls for bin in bins], edges, fill=True, color="tab:blue", alpha=0.5)
    for index, budget in enumerate(report.budgets):
        label = f"{len(report.budgets)} budgets" if index == 0 else None
        axes.axvline(budget, color="tab:red", linewidth=0.9, label=label)
    axes.set_xscale("log", base=2)
    ticks = [2**power for power in range(15) if edges[0] <= 2**power <= edges[-1]]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel("tokens of a call")
    axes.set_ylabel("calls")
    axes.set_title(
        f"{report.traffic.name}: {report.traffic.calls:,} calls, {plan.ms_per_call:.2f} ms a call, "
        f"{plan.over_ideal:.1%} over exact sizes",
        parse_math=False,
    )
    axes.legend(loc="upper left")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise OperationError(f"cannot write {path}: {error.strerror or error}") from None


def _figure() -> Any:
    """A figure of its own, not pyplot's: nothing global is touched, no window is opened."""
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise DependencyError(
            f"--plot needs matplotlib, which does not import here ({error}); "
            "install m3compile[plot]"
        ) from error
    return module.Figure(figsize=(9, 4.5), layout="constrained")
