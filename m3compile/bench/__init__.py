"""Measuring an artifact: ceilings first, then every budget, its peers, the start, and traffic.

Returns records and prints nothing. Every number is measured together with its floor and its
peers, and the result that was timed is compared with eager in the same run.
"""

from m3compile.bench.records import BenchReport, encode_report, read_report
from m3compile.bench.run import bench

__all__ = ["BenchReport", "bench", "encode_report", "read_report"]
