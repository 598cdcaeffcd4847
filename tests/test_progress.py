"""Stages: what a reporter is told is compared with what was done; what the command line shows, with
what a reporter was told.
"""

from __future__ import annotations

import io
import time
from contextlib import suppress

import pytest
from rich.console import Console

from m3compile.cli import console
from m3compile.cli.console import StageProgress
from m3compile.progress import Progress


class Told(Progress):
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def start(self, stage: str) -> None:
        self.calls.append(("start", stage))

    def finish(self, stage: str, seconds: float) -> None:
        self.calls.append(("finish", stage, seconds))


def test_a_stage_is_begun_and_finished_with_its_time() -> None:
    told, seconds = Told(), {"before": 1.0}
    with told.stage("pack", seconds):
        assert told.calls == [("start", "pack")]
        assert "pack" not in seconds
        time.sleep(0.01)
    assert told.calls == [("start", "pack"), ("finish", "pack", seconds["pack"])]
    assert seconds["pack"] >= 0.01
    assert list(seconds) == ["before", "pack"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_stage_that_fails_does_not_finish(error: type[BaseException]) -> None:
    told: Told = Told()
    seconds: dict[str, float] = {}
    with pytest.raises(error), told.stage("pack", seconds):
        raise error
    assert told.calls == [("start", "pack")]
    assert seconds == {}


def test_the_plain_one_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    with progress.stage("pack"):
        progress.advance(1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_line_a_stage_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with StageProgress() as progress:
        with progress.stage("pack [bold]"):
            for done in range(100):
                progress.advance(done, 100)
        with suppress(ValueError), progress.stage("fail"):
            raise ValueError
        with progress.stage("ship"):
            pass
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "  pack [bold] ...",
        "  pack [bold]: 0.0 s",
        "  fail ...",
        "  ship ...",
        "  ship: 0.0 s",
    ]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        console, "stderr", lambda: Console(file=screen, force_terminal=True, width=80)
    )
    with StageProgress() as progress, progress.stage("pack"):
        progress.advance(1, 2)
        assert progress._live is not None
        (task,) = progress._live.tasks
        assert (task.description, task.completed, task.total) == ("pack", 1, 2)
    assert progress._live.tasks == []
    assert "pack: " in screen.getvalue()


def test_a_failed_stage_leaves_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        console, "stderr", lambda: Console(file=screen, force_terminal=True, width=80)
    )
    with pytest.raises(ValueError, match="x"), StageProgress() as progress, progress.stage("pack"):
        raise ValueError("x")
    # The cursor is shown again.
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


def test_a_long_stage_in_a_log_says_where_it_stands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with StageProgress() as progress:
        progress.start("pack")
        for now, done in ((101.0, 1), (130.0, 1234), (159.0, 1300), (160.0, 1400)):  # noqa: B007
            progress.advance(done, 5000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["  pack ...", "  pack: 1,234 of 5,000", "  pack: 1,400 of 5,000"]
