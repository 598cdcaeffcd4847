"""What is in fp8, in words."""

from __future__ import annotations

from m3compile.artifact import Precision

_SHOWN = 4


def fp8_line(precision: Precision) -> str:
    """One line: what is in fp8, what is not and why, and how far off eager was with it."""
    parts = [f"{len(precision.linears)} linear layers"] if precision.linears else []
    parts += ["attention"] if precision.attention else []
    line = f"fp8: {' and '.join(parts)}"
    if precision.fast_accumulation:
        line += ", fast accumulation"
    line += (
        f"; eager with it has error {precision.max_error:.1%} and cosine "
        f"{precision.min_cosine:.4f} on {precision.inputs} inputs"
    )
    if precision.kept:
        worst = ", ".join(f"{kept.name} ({kept.error:.1%})" for kept in precision.kept[:_SHOWN])
        more = len(precision.kept) - _SHOWN
        line += f"; kept out of fp8: {worst}" + (f" and {more} more" if more > 0 else "")
    return line
