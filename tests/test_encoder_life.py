"""`Encoder` on the CPU over its life: the caller's modes, threads, closing, failures.

Compared with: the same call made plainly, bit for bit.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Grid, assert_same_bits, random_rows
from torch import Tensor

import m3compile
from m3compile import Encoder
from m3compile.config.build import MAX_TOKENS
from m3compile.errors import EncoderClosedError, ExitCode, InputError, OperationError
from m3compile.program import CompiledProgram

GRIDS: list[Grid] = [(1, 4, 4), (1, 4, 6), (6, 4, 4)]


# --- the caller's modes ---


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_callers_modes_change_nothing(mode: str, golden_artifact: Path) -> None:
    rows = random_rows(GRIDS)
    with m3compile.load(golden_artifact) as encoder:
        expected = encoder.encode(rows, GRIDS)
        with MODES[mode]():
            inside = encoder.encode(rows, GRIDS)
            loaded = m3compile.load(golden_artifact)
            assert_same_bits(loaded.encode(rows, GRIDS), expected)
        assert_same_bits(inside, expected)
        # What was made inside of a mode serves outside of it, and the other way round.
        assert_same_bits(loaded.encode(rows, GRIDS), expected)
        assert_same_bits(encoder.encode(rows, GRIDS), expected)
        for result in inside:
            result += 1
        loaded.close()


def test_a_cut_item_of_inference_mode_is_the_callers_outside_too(golden_artifact: Path) -> None:
    clip = GRIDS[2:]
    rows = random_rows(clip)
    with m3compile.load(golden_artifact, budgets=[16]) as encoder:
        expected = encoder.encode(rows, clip)
        assert encoder.stats()["replays"] == 2
        with torch.inference_mode():
            inside = encoder.encode(rows, clip)
        assert_same_bits(inside, expected)
        for result in inside:
            result += 1


# --- threads ---


def test_eight_threads_get_what_one_gets(encoder: Encoder) -> None:
    batches: list[list[Grid]] = [
        [(1, 4, 4)], [(1, 4, 6), (1, 6, 4)], [(9, 4, 4)], [(1, 16, 16)], [(1, 2, 2)] * 40,
        [(1, 8, 8), (1, 2, 1200)], [], [(1, 4, 4), (1, 4, 4)],
    ]  # fmt: skip
    rows = [random_rows(grids, seed) for seed, grids in enumerate(batches)]
    expected = [encoder.encode(*batch) for batch in zip(rows, batches, strict=True)]
    start = threading.Barrier(8)

    def serve(first: int) -> list[tuple[int, list[Tensor]]]:
        start.wait()
        found = []
        for step in range(8):
            index = (first + 3 * step) % 8
            found.append((index, encoder.encode(rows[index], batches[index])))
            with pytest.raises(InputError):
                encoder.encode(rows[index], [(1, 3, 4)])
            encoder.stats()
        return found

    with ThreadPoolExecutor(8) as pool:
        for served in pool.map(serve, range(8)):
            for index, results in served:
                assert_same_bits(results, expected[index])
    stats = encoder.stats()
    assert stats["calls"] == 8 + 64
    assert stats["replays"] == sum(stats["by_budget"].values())


def test_closing_under_threads(golden_artifact: Path) -> None:
    """Each call is served whole or refused; none crashes."""
    rows = random_rows(GRIDS)
    encoder = m3compile.load(golden_artifact)
    expected = encoder.encode(rows, GRIDS)
    start = threading.Barrier(5)

    def serve() -> int:
        start.wait()
        for served in range(1000):
            try:
                results = encoder.encode(rows, GRIDS)
            except EncoderClosedError:
                return served
            assert_same_bits(results, expected)
        return -1

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(serve) for _ in range(4)]
        start.wait()
        encoder.close()
        assert all(call.result() >= 0 for call in calls)


# --- closing ---


def test_close_may_be_repeated_and_ends_service(golden_artifact: Path) -> None:
    rows = random_rows(GRIDS)
    # Refused by the plan, of an encoder that is open.
    too_large: Grid = (1, 2, 2 * (MAX_TOKENS + 1))
    encoder = m3compile.load(golden_artifact)
    kept = encoder.encode(rows, GRIDS)
    copies = [result.clone() for result in kept]
    stats = encoder.stats()
    encoder.close()
    encoder.close()
    for call in (
        lambda: encoder.encode(rows, GRIDS),
        lambda: encoder.encode_at(rows, GRIDS, 64),
        lambda: encoder.encode([], []),
        lambda: encoder.encode(rows[:1].expand(math.prod(too_large), -1), [too_large]),
        lambda: encoder.prepare_run(64, [(1, 4, 4)], rows[:16]),
    ):
        with pytest.raises(EncoderClosedError, match="closed") as caught:
            call()
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.exit_code == ExitCode.FAILED
    assert encoder.stats() == stats
    assert_same_bits(kept, copies)


def test_the_block_closes_also_when_it_raises(golden_artifact: Path) -> None:
    with pytest.raises(KeyError), m3compile.load(golden_artifact) as encoder:
        raise KeyError
    with pytest.raises(EncoderClosedError):
        encoder.encode([], [])


def test_two_encoders_do_not_know_each_other(golden_artifact: Path) -> None:
    rows = random_rows(GRIDS)
    first, second = m3compile.load(golden_artifact), m3compile.load(golden_artifact)
    expected = first.encode(rows, GRIDS)
    assert_same_bits(second.encode(rows, GRIDS), expected)
    first.encode(random_rows(GRIDS, 1), GRIDS)
    first.close()
    assert_same_bits(second.encode(rows, GRIDS), expected)
    second.close()


def test_an_encoder_that_nobody_closed_goes_away(golden_artifact: Path) -> None:
    encoder = m3compile.load(golden_artifact)
    kept = encoder.encode(random_rows(GRIDS), GRIDS)
    copies = [result.clone() for result in kept]
    gone = weakref.ref(encoder)
    del encoder
    gc.collect()
    assert gone() is None
    assert_same_bits(kept, copies)


# --- a failing program ---


def test_a_failed_run_is_an_error_and_not_the_end(
    golden_artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = random_rows(GRIDS)
    fails = False
    original = CompiledProgram.__call__

    def call(self: CompiledProgram, pixel_values: Tensor, segments: Tensor) -> Any:
        if fails:
            raise RuntimeError("the device said no\nand more lines")
        return original(self, pixel_values, segments)

    monkeypatch.setattr(CompiledProgram, "__call__", call)
    trace = tmp_path / "trace.jsonl"
    with m3compile.load(golden_artifact, record_traffic=trace) as encoder:
        expected = encoder.encode(rows, GRIDS)
        fails = True
        for _ in range(3):
            with pytest.raises(OperationError, match="the device said no") as caught:
                encoder.encode(random_rows(GRIDS, 1), GRIDS)
            assert "\n" not in str(caught.value)
        fails = False
        assert_same_bits(encoder.encode(rows, GRIDS), expected)
        assert encoder.stats()["nonfinite_items"] == 0
        # What broke the device is traffic too.
        assert encoder.stats()["ladder"]["runs"] == 5
    assert len(trace.read_text().splitlines()) == 5
