"""What commands print with: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from m3compile import progress

# Of a long stage in a log: how often it says where it stands.
_LINE_SECONDS = 30

# Wide enough that a table in a log file is not cut.
_PLAIN_WIDTH = 140


def stdout() -> Console:
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, soft_wrap=True)


def stderr() -> Console:
    width = None if sys.stderr.isatty() else _PLAIN_WIDTH
    return Console(file=sys.stderr, width=width, highlight=False, soft_wrap=True)


def counted(number: int, noun: str) -> str:
    """`1 item`, `2,000 items`; for nouns that take an s."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return result


class StageProgress(progress.Progress):
    """Shows stages: a live bar on a terminal, a line a stage and every half minute elsewhere.

    A context manager.
    """

    def __init__(self) -> None:
        self._console = stderr()
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._next_line = 0.0
        if self._console.is_terminal:
            self._live = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )

    def __enter__(self) -> StageProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def start(self, stage: str) -> None:
        self._stage, self._next_line = stage, time.monotonic() + _LINE_SECONDS
        if self._live is None:
            self._console.print(f"  {stage} ...", markup=False)
        else:
            self._task = self._live.add_task(stage, total=None)

    def advance(self, done: int, total: int) -> None:
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=done, total=total)
        elif self._live is None and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_SECONDS
            self._console.print(f"  {self._stage}: {done:,} of {total:,}", markup=False)

    def finish(self, stage: str, seconds: float) -> None:
        if self._live is not None and self._task is not None:
            self._live.remove_task(self._task)
            self._task = None
        self._console.print(f"  {stage}: {seconds:.1f} s", markup=False)
