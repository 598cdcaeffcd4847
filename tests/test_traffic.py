"""Traces: reading, and recording what is served.

Compared with: the rules of `grids` and of the released resize for what a line may say; the calls
that were handed in for what a recorder wrote; and, for a loaded encoder, the batches it was given.
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
    with pytest.raises(InputError, match=r"1000 bad lines: line 2: .*; and 997 more") as caught:
        read_traffic(trace)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["", "\n\n", "tokens\n", '{"grid_thw": 1}\n'])
def test_a_trace_without_calls_is_refused(trace: Path, text: str) -> None:
    trace.write_text(text)
    with pytest.raises(InputError, match=r"holds no calls|begins with"):
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
    with pytest.raises(
        InputError, match=f"a segment has 16896 tokens; allowed: at most {MAX_TOKENS}"
    ):
        read_traffic(trace)
    assert read_traffic(trace, max_frames=2).calls == (((4, 256, 66),),)


sides = st.integers(-2, 300)
calls_of_any_kind = st.lists(
    st.lists(st.tuples(st.integers(-1, 9), sides, sides), max_size=4), min_size=1, max_size=8
)


@settings(max_examples=200, deadline=None)
@given(calls_of_any_kind)
def test_a_call_is_read_where_the_encoder_takes_it(
    tmp_path_factory: pytest.TempPathFactory, calls: list[list[tuple[int, int, int]]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "property-trace"
    path.write_text(json_lines([[[1, 2, 2]], *calls]))
    expected = [((1, 2, 2),), *(tuple(call) for call in calls if is_taken(call))]
    traffic = read_traffic(path, skip_bad=True)
    assert list(traffic.calls) == expected
    assert len(traffic.calls) + len(traffic.skipped) == 1 + len(calls)


def is_taken(call: list[tuple[int, int, int]]) -> bool:
    try:
        read_grids(call)
    except InputError:
        return False
    return all(min(t, 4) * h * w // 4 <= MAX_TOKENS for t, h, w in call)


# --- recording


def some_calls(count: int) -> list[list[tuple[int, int, int]]]:
    rng = random.Random(0)
    return [
        [(1, 2 * rng.randint(1, 40), 2 * rng.randint(1, 40)) for _ in range(rng.randint(0, 5))]
        for _ in range(count)
    ]


def test_what_is_recorded_is_read_back(trace: Path) -> None:
    calls = some_calls(500)
    recorder = TrafficRecorder(trace)
    for call in calls:
        recorder.add(call)
    recorder.flush()
    # A running server's trace is whole lines at any time.
    assert read_traffic(trace).calls == tuple(map(tuple, calls))
    recorder.add([(1, 2, 2)])
    recorder.close()
    recorder.close()
    assert len(read_traffic(trace).calls) == 501
    assert recorder.state() == {"file": str(trace), "calls": 501, "every": 1, "error": None}


def test_a_recording_is_bounded_and_an_even_sample(trace: Path) -> None:
    # The n-th call has n tokens, so that the trace says which calls it holds.
    recorder = TrafficRecorder(trace, max_bytes=4000)
    for number in range(1, 5001):
        recorder.add([(1, 2, 2 * number)])
        if number % 500 == 0:
            recorder.flush()
            assert trace.stat().st_size <= 4000
    recorder.close()
    held = [w // 2 for ((_, _, w),) in read_traffic(trace).calls]
    every = recorder.every
    assert every > 1
    assert held == list(range(every, 5001, every))
    assert len(held) > 4000 / 40 / 2 - 1
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]


def test_a_call_too_long_for_the_trace_is_not_noted(trace: Path) -> None:
    recorder = TrafficRecorder(trace, max_bytes=4000)
    recorder.add([(1, 2, 2)] * 1000)
    recorder.add([(1, 2, 4)])
    recorder.close()
    assert read_traffic(trace).calls == (((1, 2, 4),),)


@pytest.mark.parametrize("tail", [b"", b'{"grid_thw": [[1,2,'])
@pytest.mark.parametrize("first", [b"", b'{"grid_thw": [[1,2,2]]}\n'])
def test_a_recording_goes_on_after_a_crash(trace: Path, first: bytes, tail: bytes) -> None:
    trace.write_bytes(first + tail)
    recorder = TrafficRecorder(trace)
    recorder.add([(1, 2, 4)])
    recorder.close()
    kept = [((1, 2, 2),)] if first else []
    assert list(read_traffic(trace).calls) == [*kept, ((1, 2, 4),)]


@pytest.mark.parametrize(
    "text", ["budgets: [64]\n", "x", "tokens\n5\n", "{}\n", "\n", '{"grid_thw": 5}\n']
)
def test_other_files_are_left_alone(trace: Path, text: str) -> None:
    trace.write_text(text)
    with pytest.raises(RequestError, match="exists and is not a trace"):
        TrafficRecorder(trace)
    assert trace.read_text() == text


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "trace"):
        with pytest.raises(RequestError, match="record_traffic"):
            TrafficRecorder(path)


def test_a_full_disk_ends_the_recording_and_not_the_call(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        closed = False

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            self.closed = True

    recorder = TrafficRecorder(trace)
    recorder._file.close()
    monkeypatch.setattr(recorder, "_file", FullDisk())
    recorder.add([(1, 2, 2)])
    with pytest.warns(RuntimeWarning, match="no longer recorded.*No space left"):
        recorder.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            recorder.add([(1, 2, 2)])
            recorder.flush()
        recorder.close()
    assert "No space left" in recorder.state()["error"]


# --- a loaded encoder


def encode(encoder: m3compile.Encoder, grids: list[list[int]]) -> None:
    rows = sum(t * h * w for t, h, w in grids)
    encoder.encode(torch.zeros(rows, encoder.manifest.tower.patch_dim), grids)


def test_an_encoder_records_what_it_encodes(golden_artifact: Path, trace: Path) -> None:
    calls = [[[1, 4, 4], [9, 4, 6]], [[1, 60, 60]], [], [[1, 4, 4]]]
    with m3compile.load(golden_artifact, record_traffic=trace) as encoder:
        for grids in calls:
            encode(encoder, grids)
        with pytest.raises(InputError):
            encode(encoder, [[1, 3, 4]])
        # What a judge asks for is no traffic.
        encoder.encode_at(torch.zeros(16, 1176), [[1, 4, 4]], 16)
        stats = encoder.stats()
        assert stats["traffic"]["calls"] == len(calls)
        # `stats` writes what is held back.
        assert len(read_traffic(trace).calls) == len(calls)
        encode(encoder, [[1, 2, 2]])
    expected = [tuple(map(tuple, grids)) for grids in [*calls, [[1, 2, 2]]]]
    assert list(read_traffic(trace).calls) == expected
    with m3compile.load(golden_artifact) as encoder:
        assert "traffic" not in encoder.stats()


def test_a_recording_is_complete_without_close(golden_artifact: Path, trace: Path) -> None:
    encoder = m3compile.load(golden_artifact, record_traffic=trace)
    encode(encoder, [[1, 4, 4]])
    del encoder
    gc.collect()
    assert read_traffic(trace).calls == (((1, 4, 4),),)


def test_a_bad_recording_is_refused_before_the_load(tmp_path: Path) -> None:
    # The artifact does not exist: the file is looked at first.
    with pytest.raises(RequestError, match="record_traffic"):
        m3compile.load(tmp_path / "none", record_traffic=tmp_path)


def test_reading_and_planning_need_no_torch() -> None:
    code = "import sys, m3compile.traffic, m3compile.plan, m3compile.plan.served; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
