"""Traffic: the sizes of calls, read from a trace, and recorded from what a loader serves.

A trace is one of these, one call a line:

    {"grid_thw": [[1, 12, 28], [1, 8, 4]]}      JSON lines; other keys are ignored
    width,height                                CSV, images in pixels before the resize
    tokens                                      CSV, items of one segment in output tokens

The first line that is not blank decides which: `{` starts JSON lines, anything else is a CSV's
header. A line of a CSV is a call of one item.
"""

from __future__ import annotations

import csv
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from m3compile.config import PreprocessConfig, TowerConfig
from m3compile.config.build import MAX_TOKENS
from m3compile.config.resize import resized_size
from m3compile.config.shown import shown
from m3compile.errors import InputError, InputNotFoundError, RequestError
from m3compile.grids import Grid, read_grids

Call = tuple[Grid, ...]

# How many bad lines an error quotes.
_QUOTED = 3

# A recorder writes once it holds this much, or has held it this long.
_FLUSH_BYTES = 1 << 15
_FLUSH_SECONDS = 2.0
_MAX_RECORD_BYTES = 8 << 20
# A call with a longer line is not noted: it would take the place of thousands of others.
_LONGEST_LINE = 1 << 20
_LINE_START = b'{"grid_thw": '


class Traffic(msgspec.Struct, frozen=True):
    """Calls in the order of their trace.

    Attributes:
        calls: the grids (t, h, w), in patches, of every call's items; a call may have none.
        skipped: what was wrong with the lines left out, each with its number.
    """

    calls: tuple[Call, ...]
    skipped: tuple[str, ...] = ()


def read_traffic(
    path: str | Path,
    *,
    skip_bad: bool = False,
    max_frames: int = TowerConfig().vision_segment_max_frames,
    preprocess: PreprocessConfig | None = None,
) -> Traffic:
    """Read a trace. Every call of it is one that an encoder would accept.

    Args:
        path: the trace, see above.
        skip_bad: leave bad lines out and name them in the result.
        max_frames: frames of a segment; a segment has at most the tokens of one run.
        preprocess: decides the size of images given in pixels; None for the released settings.

    Raises:
        InputNotFoundError: there is no such file.
        InputError: the file cannot be read, or holds no calls, or a line is bad; says which line.
    """
    path = Path(path)
    config = preprocess or PreprocessConfig()
    calls: list[Call] = []
    skipped: list[str] = []
    for number, call in _lines(path, config):
        try:
            if isinstance(call, Exception):
                raise call
            if not all(_is_good(grid, max_frames) for grid in call):
                _check(call, max_frames)
        except (ValueError, msgspec.DecodeError) as error:
            skipped.append(f"line {number}: {error}")
        else:
            calls.append(call)
    if skipped and not skip_bad:
        more = len(skipped) - _QUOTED
        raise InputError(
            f"{path}: {len(skipped)} bad lines: {'; '.join(skipped[:_QUOTED])}"
            + (f"; and {more} more" if more > 0 else "")
            + "; correct them, or leave them out with --skip-bad"
        )
    if not calls:
        raise InputError(f"{path}: holds no calls; expected one a line, of grid_thw or of sizes")
    return Traffic(tuple(calls), tuple(skipped))


class _Line(msgspec.Struct):
    grid_thw: list[Grid]


def _lines(path: Path, config: PreprocessConfig) -> Iterator[tuple[int, Call | Exception]]:
    """The number of every line that is not blank, and its call or what is wrong with it."""
    parse: Callable[[bytes], Call] | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                if parse is None:
                    # A mark that some spreadsheets put in front.
                    line = line.removeprefix(b"\xef\xbb\xbf")
                    if not line.lstrip().startswith(b"{"):
                        parse = _csv_parser(path, line, config)
                        continue
                    parse = _json_call
                try:
                    yield number, parse(line)
                except (ValueError, msgspec.DecodeError, csv.Error) as error:
                    yield number, error
    except FileNotFoundError:
        raise InputNotFoundError(f"traffic file {path} does not exist") from None
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"traffic file {path} cannot be read: {reason}") from None


_decode_line = msgspec.json.Decoder(_Line).decode


def _json_call(line: bytes) -> Call:
    return tuple(_decode_line(line).grid_thw)


def _csv_parser(path: Path, header: bytes, config: PreprocessConfig) -> Callable[[bytes], Call]:
    names = [name.strip().lower() for name in _fields(header)]
    if "tokens" in names:
        at = [names.index("tokens")]
    elif "width" in names and "height" in names:
        at = [names.index("width"), names.index("height")]
    else:
        raise InputError(
            f"{path}: begins with {shown(','.join(names))}; expected JSON lines with grid_thw, or "
            "a CSV with the header width,height or tokens"
        )

    def parse(line: bytes) -> Call:
        row = _fields(line)
        if len(row) != len(names):
            raise ValueError(f"has {len(row)} fields, expected {len(names)}")
        numbers = [_whole_number(row[index], names[index]) for index in at]
        if len(numbers) == 1:
            # One row of blocks of 2 by 2 patches: any number of tokens is such a grid.
            return ((1, 2, 2 * numbers[0]),)
        height, width = resized_size(numbers[1], numbers[0], config)
        return ((1, height // config.patch_size, width // config.patch_size),)

    return parse


def _fields(line: bytes) -> list[str]:
    return next(csv.reader([line.decode(errors="replace")]))


def _whole_number(text: str, name: str) -> int:
    # Nothing longer can be in range, and Python does not read numbers of thousands of digits.
    if not text.strip().isdecimal() or len(text.strip()) > 9:
        raise ValueError(f"{name} is {shown(text)}, expected a whole number")
    return int(text)


@lru_cache(maxsize=1 << 14)
def _is_good(grid: Grid, max_frames: int) -> bool:
    try:
        _check([grid], max_frames)
    except InputError:
        return False
    return True


def _check(call: Sequence[Grid], max_frames: int) -> None:
    for index, (t, h, w) in enumerate(read_grids(call)):
        tokens = min(t, max_frames) * h * w // 4
        if tokens > MAX_TOKENS:
            raise InputError(
                f"item {index}: a segment has {tokens} tokens; allowed: at most {MAX_TOKENS}, "
                "those of one run"
            )


class TrafficRecorder:
    """Appends the sizes of calls to a trace of bounded size; nothing else of a call is kept.

    At the bound every second line is dropped, and from then on only every second call is noted;
    and so on: the trace stays an even sample of everything that was served. One process a file.
    Not for several threads at once: the encoder calls it under its lock.

    Args:
        path: the trace; one that is there already is continued.
        max_bytes: bound of the file's size.

    Raises:
        RequestError: the file cannot be written, or is something else than a recorded trace.
    """

    def __init__(self, path: str | Path, max_bytes: int = _MAX_RECORD_BYTES) -> None:
        self.path = Path(path)
        self.error: str | None = None
        self.every = 1
        self.num_seen = 0
        self._max_bytes = max_bytes
        self._encode = msgspec.json.Encoder().encode
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._flushed = time.monotonic()
        try:
            _check_target(self.path)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise RequestError(f"record_traffic {path}: {error.strerror}") from None

    def add(self, grids: Sequence[Grid]) -> None:
        """Note one call. Costs microseconds; a file that fails ends the recording, not the call."""
        self.num_seen += 1
        if self.num_seen % self.every or self.error is not None:
            return
        line = _LINE_START + self._encode(grids) + b"}\n"
        if len(line) > min(_LONGEST_LINE, self._max_bytes // 4):
            return
        self._pending.append(line)
        self._pending_bytes += len(line)
        if (
            self._pending_bytes >= min(_FLUSH_BYTES, self._max_bytes // 4)
            or time.monotonic() - self._flushed > _FLUSH_SECONDS
        ):
            self.flush()

    def flush(self) -> None:
        """Write what is held back, whole lines only."""
        lines, self._pending, self._pending_bytes = self._pending, [], 0
        self._flushed = time.monotonic()
        if not lines or self.error is not None or self._file.closed:
            return
        try:
            self._file.write(b"".join(lines))
            while self._file.tell() > self._max_bytes:
                self._thin()
        except OSError as error:
            self.error = f"{self.path}: {error.strerror}"
            warnings.warn(f"traffic is no longer recorded: {self.error}", RuntimeWarning, 2)

    def state(self) -> dict[str, Any]:
        """What became of the recording: file, calls (seen), every (how many of them each line
        stands for) and error (None, or why the recording has ended)."""
        return {
            "file": str(self.path),
            "calls": self.num_seen,
            "every": self.every,
            "error": self.error,
        }

    def _thin(self) -> None:
        """Keep every second line. The file is exchanged whole: a reader sees the old or the new."""
        aside = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with self.path.open("rb") as file:
            aside.write_bytes(b"".join(islice(file, 1, None, 2)))
        os.replace(aside, self.path)
        self._file.close()
        self._file = self.path.open("ab", buffering=0)
        self._file.seek(0, os.SEEK_END)
        self.every *= 2

    def close(self) -> None:
        """Write what is held back and close the file; may be repeated."""
        self.flush()
        self._file.close()


def _check_target(path: Path) -> None:
    """Refuse to append to another kind of file; cut off a line that a crash left half-written."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        first = file.readline(_LONGEST_LINE)
        if not first.endswith(b"\n"):
            if not _LINE_START.startswith(first[: len(_LINE_START)]):
                raise _foreign(path)
            file.truncate(0)
            return
        try:
            _decode_line(first)
        except (ValueError, msgspec.DecodeError):
            raise _foreign(path) from None
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _LONGEST_LINE)
        file.seek(start)
        file.truncate(start + file.read().rfind(b"\n") + 1)


def _foreign(path: Path) -> RequestError:
    return RequestError(
        f"record_traffic {path}: exists and is not a trace of grid_thw; name another file"
    )
