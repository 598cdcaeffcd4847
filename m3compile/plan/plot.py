"""The traffic as a histogram, with the plan's budgets drawn on it."""

from __future__ import annotations

from pathlib import Path

from m3compile.plan.report import PlanReport
from m3compile.plotting import new_figure, save_figure


def draw(report: PlanReport, path: Path) -> None:
    """Write the picture; its format is that of the name.

    Raises:
        DependencyError: matplotlib is not installed.
        OperationError: the file cannot be written.
    """
    figure = new_figure(9, 4.5)
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
    save_figure(figure, path)
