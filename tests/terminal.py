"""Command lines run in this process, as a user would see them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from m3compile.cli.app import main

Run = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]


class Terminal:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *words: object) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        code = main([str(word) for word in words])
        out, err = self._capsys.readouterr()
        return code, out, err

    def refused(self, code: int, *words: object) -> str:
        """A line that must fail with that code: nothing on stdout, one line of error at the end."""
        found, out, err = self.run(*words)
        assert (found, out) == (code, ""), err
        *progress, line = err.splitlines()
        assert line.startswith("error: ")
        assert not any("error" in other or "Traceback" in other for other in progress), err
        return line
