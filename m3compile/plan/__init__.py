"""Budgets that fit the traffic: traces and times in, a build config and a report out.

Plain Python and numpy over sizes; imports neither torch nor anything above floor 0. `served` is the
part that a running encoder uses.
"""

from m3compile.plan.build_file import build_file, check_build_file, write_build_file
from m3compile.plan.memory import MemoryModel, memory_model
from m3compile.plan.optimum import best_ladder
from m3compile.plan.report import LadderReport, PlanReport, plan_traffic
from m3compile.plan.runs import Limits
from m3compile.plan.times import h200_times, read_times

__all__ = [
    "LadderReport",
    "Limits",
    "MemoryModel",
    "PlanReport",
    "best_ladder",
    "build_file",
    "check_build_file",
    "h200_times",
    "memory_model",
    "plan_traffic",
    "read_times",
    "write_build_file",
]
