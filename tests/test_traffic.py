"""Traces: reading, and recording what is served.

Compared with: the rules of `grids` and of the released resize for what a line may say; the calls that
were handed in for what a recorder wrote; and, for a loaded encoder, the batches it was given.
"""

from __future__ import annotations

import errno
import gc
import json
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import m3compile
from m3compile.config import PreprocessConfig
from m3compile.config.build import MAX_TOKENS
from m3compile.config.resize import resized_size
from m3compile.errors import ExitCode, InputError, InputNotFoundError, RequestError
from m3compile.grids import read_grids
from m3compile.traffic import TrafficRecorder, read_traffic

MIXED = Path(__file__).parent.parent / "bench" / "traffic" / "mixed.jsonl"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def json_lines(calls: list[object]) -> str:
    return "".join(json.dumps({"grid_thw": call}) + "\n" for call in calls)


# --- reading


def test_json_lines(trace: Path) -> None:
    trace.write_text(
        '{"grid_thw": [[1, 4, 6]]}\n\n  {"at": 3.5, "grid_thw": [[9, 4, 4], [1, 2, 2]]}\n'
        '{"grid_thw": []}'
    )
    assert read_traffic(trace).calls == (((1, 4, 6),), ((9, 4, 4), (1, 2, 2)), ())


def test_the_shipped_trace() -> None:
    calls = read_traffic(MIXED).calls
    assert len(calls) == 400
    expected = [json.loads(line)["grid_thw"] for line in MIXED.read_text().splitlines()]
    assert [[list(grid) for grid in call] for call in calls] == expected


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_of_pixels(trace: Path, mark: str, end: str) -> None:
    lines = ["Width, height ,name", "640,480,a.png", '"2016","2016","b"', "", "28,1000,c"]
    trace.write_bytes((mark + end.join(lines)).encode())
    config = PreprocessConfig()
    expected = []
    for width, height in ((640, 480), (2016, 2016), (28, 1000)):
        rows, columns = resized_size(height, width, config)
        expected.append(((1, rows // 14, columns // 14),))
    assert read_traffic(trace).calls == tuple(expected)


def test_csv_of_pixels_follows_the_preprocessor(trace: Path) -> None:
    trace.write_text("width,height\n2016,2016\n")
    large = PreprocessConfig(max_pixels=2016 * 2016)
    assert read_traffic(trace, preprocess=large).calls == (((1, 144, 144),),)


def test_csv_of_tokens(trace: Path) -> None:
    trace.write_text(f"id,tokens\na,1\nb,577\nc,{MAX_TOKENS}\n")
    calls = read_traffic(trace).calls
    assert [t * h * w // 4 for ((t, h, w),) in calls] == [1, 577, MAX_TOKENS]
    assert all(read_grids(list(call)) == list(call) for call in calls)


BAD_JSON = [
    "{",
    "[[1, 4, 4]]",
    '{"grid": [[1, 4, 4]]}',
    '{"grid_thw": [1, 4, 4]}',
    '{"grid_thw": [[1, 4]]}',
    '{"grid_thw": [[1, 4, 4.5]]}',
    '{"grid_thw": [[1, 4, true]]}',
    '{"grid_thw": [[1, 0, 4]]}',
    '{"grid_thw": [[1, 4, -4]]}',
    '{"grid_thw": [[1, 3, 4]]}',
    '{"grid_thw": [[1, 4, 2097152]]}',
    '{"grid_thw": [[1, 4, 99999999999999999999999]]}',
    '{"grid_thw": [[4, 256, 66]]}',
    '{"grid_thw": [[1, 4, 4]]} {"grid_thw": [[1, 4, 4]]}',
]


@pytest.mark.parametrize("bad", BAD_JSON)
def test_bad_json_lines_are_named_and_skipped_only_on_request(trace: Path, bad: str) -> None:
    good = '{"grid_thw": [[1, 4, 4]]}'
    trace.write_text("\n".join([good, "", bad, good]))
    with pytest.raises(InputError, match=r"1 bad lines: line 3: .*--skip-bad") as caught:
        read_traffic(trace)
    assert "\n" not in str(caught.value)
    traffic = read_traffic(trace, skip_bad=True)
    assert traffic.calls == (((1, 4, 4),),) * 2
    assert len(traffic.skipped) == 1
    assert traffic.skipped[0].startswith("line 3: ")


@pytest.mark.parametrize("header", ["tokens", "width,height"])
@pytest.mark.parametrize(
    "bad", ["", ",", "0", "0,5", "-3,-3", "x,y", "1e3,1e3", "5.0,5.0", "1,2,3", "9" * 5000, "\0,1"]
)
def test_bad_csv_lines(trace: Path, header: str, bad: str) -> None:
    good = ",".join(["60"] * len(header.split(",")))
    trace.write_text(f"{header}\n{good}\n{bad}\n{good}\n")
    if not bad:
        assert len(read_traffic(trace).calls) == 2
        return
    with pytest.raises(InputError, match="line 3: "):
        read_traffic(trace)
    assert len(read_traffic(trace, skip_bad=True).calls) == 2


def test_bytes_that_are_no_text_are_a_bad_line(trace: Path) -> None:
    trace.write_bytes(b'{"grid_thw": [[1, 4, 4]]}\n\xff\xfe\n')
    with pytest.raises(InputError, match="line 2: "):
        read_traffic(trace)


def test_an_error_quotes_few_lines(trace: Path) -> None:
    trace.write_text("tokens\n" + "x\n" * 1000)
    with pytest.raises(InputError, match="1000 bad lines: line 2: .*; and 997 more") as caught:
        read_traffic(trace)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["", "\n\n", "tokens\n", '{"grid_thw": 1}\n'])
def test_a_trace_without_calls_is_refused(trace: Path, text: str) -> None:
    trace.write_text(text)
    with pytest.raises(InputError, match="holds no calls|begins with"):
        read_traffic(trace, skip_bad=True)


def test_other_files_are_refused(trace: Path) -> None:
    with pytest.raises(InputNotFoundError, match="does not exist"):
        read_traffic(trace)
    with pytest.raises(InputError, match="cannot be read"):
        read_traffic(trace.parent)
    trace.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="expected JSON lines with grid_thw, or a CSV") as caught:
        read_traffic(trace)
    assert caught.value.exit_code == ExitCode.REQUEST


def test_the_limit_of_a_segment_follows_the_frames(trace: Path) -> None:
    trace.write_text(json_lines([[[4, 256, 66]]]))
    with pytest.raises(InputError, match=f"a segment has 16896 tokens; allowed: at most {MAX_TOK}"):
        read_traffic(trace)
    assert read_traffic(trace, max_frames=2).calls == (((4, 256, 66),),)


sides = st.integers(-2, 300)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 9), sides, sides), max_size=4))
def test_a_call_is_good_where_the_encoder_takes_it(call: list[tuple[int, int, int]]) -> None:
    path = Path(__file__).parent / "no-such-trace"
    assert not path.exists()
    expected = True
    try:
        read_grids(call)
    except InputError:
        expected = False
    expected = expected and all(min(t, 4) * h * w // 4 <= MAX_TOKENS for t, h, w in call)
    assert (read_one(call) is not None) == expected


def read_one(call: list[tuple[int, int, int]]) -> object | None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_text(json_lines([[[1, 2, 2]], call]))
        calls = read_traffic(path, skip_bad=True).calls
    return calls[1] if len(calls) == 2 else None
