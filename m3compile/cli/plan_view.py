"""What `plan` prints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from m3compile.cli.console import stdout, table

if TYPE_CHECKING:
    from m3compile.plan import PlanReport

_BAR_WIDTH = 40


def show_plan(report: PlanReport) -> None:
    """Print the comparison of ladders, the histogram and the plan."""
    console = stdout()
    traffic = report.traffic
    packed = (
        f"; {traffic.packed_calls:,} calls of several segments, {traffic.simulated_calls:,} of "
        "them simulated"
        if traffic.packed_calls
        else ""
    )
    console.print(
        f"{traffic.name}: {traffic.calls:,} calls, {traffic.items:,} items, {traffic.tokens:,} "
        f"tokens{packed}",
        markup=False,
    )
    console.print(f"times: {report.times}", markup=False)
    rows = table(
        "", "ladder", "graphs", "ms a call", "calls/s", "over ideal", "padding",
        "one bucket a call", "exact per 100", "memory",
    )  # fmt: skip
    for ladder in report.ladders:
        rows.add_row(
            ladder.name,
            str(len(ladder.budgets)),
            f"{ladder.ms_per_call:.2f}",
            f"{1000 / ladder.ms_per_call:.1f}",
            f"{ladder.over_ideal:.1%}",
            f"{ladder.padding:.1%}",
            f"{ladder.one_bucket_padding:.1%}",
            f"{ladder.exact_runs:.1f}",
            f"{ladder.memory_bytes / 1e9:.2f} GB",
        )
    ideal = report.ideal_ms_per_call
    rows.add_row("ideal: exact sizes", "", f"{ideal:.2f}", f"{1000 / ideal:.1f}", "0.0%", "0.0%")
    console.print(rows)
    console.print(_histogram(report), markup=False)
    console.print(
        f"budgets: {','.join(map(str, report.budgets))}\nmax_items: {report.max_items}\n"
        f"exact shape: above {report.exact_above} tokens"
        + (
            f"; the largest such run takes {report.exact_run_bytes / 1e9:.2f} GB more while it runs"
            if report.exact_run_bytes
            else ""
        ),
        markup=False,
    )


def _histogram(report: PlanReport) -> str:
    most = max(bin.calls for bin in report.histogram)
    width = len(f"{report.histogram[-1].last:,}")
    lines = [f"\n{'tokens of a call':>{2 * width + 3}}  calls, and the budgets among those sizes"]
    for bin in report.histogram:
        bar = "█" * math.ceil(_BAR_WIDTH * bin.calls / most)
        budgets = " ".join(map(str, bin.budgets))
        lines.append(
            f"{bin.first:>{width},} - {bin.last:>{width},}  {bar:<{_BAR_WIDTH}} {bin.calls:>6,}  "
            f"| {budgets}".rstrip()
        )
    return "\n".join([*lines, ""])
