"""How long work reports to whoever asked for it; the reporter decides whether to print."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Told of named stages and of counted steps inside them. This one stays silent."""

    def start(self, stage: str) -> None:
        """A stage begins."""

    def advance(self, done: int, total: int) -> None:
        """Inside a stage, `done` of `total` steps are behind us."""

    def finish(self, stage: str, seconds: float) -> None:
        """The stage ended well."""

    @contextmanager
    def stage(self, name: str, seconds: dict[str, float] | None = None) -> Iterator[None]:
        """Run a block as a stage; its time is also noted in `seconds`."""
        self.start(name)
        started = time.perf_counter()
        yield
        elapsed = time.perf_counter() - started
        if seconds is not None:
            seconds[name] = elapsed
        self.finish(name, elapsed)
