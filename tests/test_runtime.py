"""`Encoder` on the CPU: routes, inputs and results.

Compared with: golden cases, which transformers made; the eager tower, one item at a time; and the
same call made otherwise, bit for bit where both go through one bucket. What bad pixels do is in
`test_nonfinite`, modes, threads and closing in `test_encoder_life`, the field's cases in
`test_cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    BOUND,
    GOLDEN_NAMES,
    PATCH_DIM,
    Grid,
    assert_close_to_eager,
    assert_same_bits,
    error_of,
    golden_cases,
    num_tokens,
    random_rows,
    segments_of_item,
    split_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import m3compile
from m3compile import Encoder
from m3compile.config import PreprocessConfig
from m3compile.errors import InputError
from m3compile.images import load_images
from m3compile.program import CompiledProgram
from m3compile.tower import Tower

IMAGES = Path(__file__).parent / "goldens" / "images"
GRIDS: list[Grid] = [(1, 4, 4), (1, 4, 6), (6, 4, 4)]
sides = st.integers(1, 5).map(lambda blocks: 2 * blocks)


# --- golden cases, by every route ---


def assert_golden(results: list[Tensor], expected: list[Tensor]) -> None:
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert error_of(result, wanted) <= BOUND


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_cases_in_their_bucket(name: str, encoder: Encoder) -> None:
    case = golden_cases()[name]
    assert_golden(encoder.encode(case.pixel_values, case.grids), case.outputs)
    stats = encoder.stats()
    assert (stats["exact_runs"], stats["nonfinite_items"]) == (0, 0)
    assert stats["real_tokens"] == sum(map(len, case.outputs))


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_cases_at_their_exact_shape(name: str, encoder: Encoder) -> None:
    case = golden_cases()[name]
    assert_golden(encoder.encode_at(case.pixel_values, case.grids, None), case.outputs)
    stats = encoder.stats()
    assert (stats["exact_runs"], stats["replays"], stats["padded_tokens"]) == (1, 0, 0)


@pytest.mark.parametrize("budget", [256, 576])
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_cases_in_larger_buckets(name: str, budget: int, encoder: Encoder) -> None:
    case = golden_cases()[name]
    parts = split_rows(case.pixel_values, case.grids)
    assert_golden(encoder.encode_at(parts, case.grids, budget), case.outputs)


def test_all_golden_cases_as_one_call(encoder: Encoder) -> None:
    cases = [golden_cases()[name] for name in GOLDEN_NAMES]
    grids = [grid for case in cases for grid in case.grids]
    outputs = [output for case in cases for output in case.outputs]
    assert_golden(encoder.encode(torch.cat([case.pixel_values for case in cases]), grids), outputs)


# --- any mix ---


@pytest.fixture(scope="module")
def narrow(golden_artifact: Path) -> Iterator[Encoder]:
    """A ladder so small that items are packed, cut, and run at their exact shape."""
    with m3compile.load(golden_artifact, budgets=[4, 16, 64], max_items=3) as encoder:
        yield encoder


@given(
    grids=st.lists(st.tuples(st.integers(1, 10), sides, sides), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_any_mix_equals_eager(
    grids: list[Grid], seed: int, narrow: Encoder, eager_tower: Tower
) -> None:
    rows = random_rows(grids, seed)
    before = narrow.stats()
    assert_close_to_eager(narrow.encode(rows, grids), eager_tower, rows, grids)
    after = narrow.stats()
    assert after["items"] - before["items"] == len(grids)
    assert after["real_tokens"] - before["real_tokens"] == sum(map(num_tokens, grids))


def test_every_kind_of_route_in_one_call(narrow: Encoder, eager_tower: Tower) -> None:
    grids: list[Grid] = [(10, 8, 8), (1, 2, 2), (4, 10, 10), (14, 2, 2), (1, 4, 4)]
    rows = random_rows(grids)
    before = narrow.stats()
    assert_close_to_eager(narrow.encode(rows, grids), eager_tower, rows, grids)
    after = narrow.stats()
    assert after["exact_runs"] > before["exact_runs"]
    assert after["replays"] > before["replays"] + 3


# --- one photo, however it comes ---


def test_a_photo_alone_in_a_batch_and_in_another_order(golden_artifact: Path) -> None:
    files = ["tiny.png", "portrait.png", "gray.png", "wide.png"]
    rows, grid_thw = load_images([IMAGES / name for name in files], PreprocessConfig())
    grids = [tuple(grid) for grid in grid_thw.tolist()]
    parts = split_rows(rows, grids)
    total = sum(map(num_tokens, grids))
    # One bucket for all, so that bits may be compared.
    with m3compile.load(golden_artifact, budgets=[total + 10]) as encoder:
        alone = [encoder.encode(part, [grid])[0] for part, grid in zip(parts, grids, strict=True)]
        assert_same_bits(encoder.encode(rows, grid_thw), alone)
        assert_same_bits(encoder.encode(parts[::-1], grids[::-1])[::-1], alone)
        for bad in range(len(parts)):
            spoiled = [part.clone() for part in parts]
            spoiled[bad][5, 7] = float("nan")
            results = encoder.encode(spoiled, grids)
            for index, result in enumerate(results):
                if index == bad:
                    assert bool(result.isnan().all())
                else:
                    assert torch.equal(result, alone[index])


# --- what goes in, what comes out ---


def test_a_program_sees_its_run_and_nothing_else(
    golden_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer segments after more: what the table held before must be gone."""
    seen: list[tuple[Tensor, Tensor]] = []
    original = CompiledProgram.__call__

    def call(self: CompiledProgram, pixel_values: Tensor, segments: Tensor) -> Any:
        seen.append((pixel_values.clone(), segments.clone()))
        return original(self, pixel_values, segments)

    monkeypatch.setattr(CompiledProgram, "__call__", call)
    batches: list[list[Grid]] = [
        [(1, 2, 2)] * 12, [(1, 4, 4), (1, 2, 2)], [(1, 4, 4)], [(1, 4, 4)], [(9, 2, 2), (1, 2, 4)],
        [(1, 4, 4), (1, 2, 2)], [(1, 2, 8)],
    ]  # fmt: skip
    with m3compile.load(golden_artifact) as encoder:
        seen.clear()
        for budget in (16, 576, None):
            for seed, grids in enumerate(batches):
                rows = random_rows(grids, seed)
                encoder.encode_at(rows, grids, budget)
                pixel_values, table = seen.pop()
                assert table.dtype == torch.int32
                segments = [part for grid in grids for part in segments_of_item(grid)]
                unused = [(0, 0, 0)] * (encoder.manifest.max_segments - len(segments))
                assert [tuple(row) for row in table.tolist()] == segments + unused
                assert torch.equal(pixel_values[: len(rows)], rows)
                assert len(pixel_values) == (4 * budget if budget else len(rows))
    assert not seen


def test_results_have_the_encoders_dtype_and_device(encoder: Encoder) -> None:
    results = encoder.encode(random_rows(GRIDS), GRIDS)
    width = encoder.manifest.tower.output_size
    assert [tuple(result.shape) for result in results] == [(4, width), (6, width), (24, width)]
    for result in results:
        assert (result.dtype, result.device) == (encoder.dtype, encoder.device)
        assert result.is_contiguous()
        assert not result.requires_grad


AS: dict[str, Callable[[Tensor], Any]] = {
    "float16": lambda rows: rows.half(),
    "bfloat16": lambda rows: rows.bfloat16(),
    "float64": lambda rows: rows.double(),
    "float8": lambda rows: rows.to(torch.float8_e4m3fn),
    "transposed": lambda rows: rows.T.contiguous().T,
    "strided": lambda rows: rows.repeat_interleave(2, 0)[::2],
    "offset": lambda rows: torch.cat([rows[:3], rows])[3:],
    "negated view": lambda rows: torch.complex(rows, -rows).conj().imag,
    "requires grad": lambda rows: rows.clone().requires_grad_(),
    "parameter": torch.nn.Parameter,
    "list": lambda rows: split_rows(rows, GRIDS),
    "tuple": lambda rows: tuple(split_rows(rows, GRIDS)),
    "list of mixed dtypes": lambda rows: [
        part.to(dtype)
        for part, dtype in zip(
            split_rows(rows, GRIDS),
            (torch.bfloat16, torch.float8_e5m2, torch.float64),
            strict=True,
        )
    ],
    "list of one float8": lambda rows: [
        part.to(torch.float8_e4m3fn) for part in split_rows(rows, GRIDS)
    ],
}


@pytest.mark.parametrize("budget", [64, None])
@pytest.mark.parametrize("kind", AS)
def test_any_float_tensor(kind: str, budget: int | None, encoder: Encoder) -> None:
    """Converted to the encoder's dtype, and then the same bits."""
    given_rows = AS[kind](random_rows(GRIDS))
    parts = given_rows if isinstance(given_rows, (list, tuple)) else [given_rows]
    plain = torch.cat([part.detach().to(torch.float32) for part in parts]).contiguous()
    assert_same_bits(
        encoder.encode_at(given_rows, GRIDS, budget), encoder.encode_at(plain, GRIDS, budget)
    )


def test_rows_that_are_one_row_expanded(encoder: Encoder) -> None:
    row = random_rows([(1, 2, 2)])[:1]
    assert_same_bits(
        encoder.encode(row.expand(16, PATCH_DIM), [(1, 4, 4)]),
        encoder.encode(row.repeat(16, 1), [(1, 4, 4)]),
    )


# --- encode_at ---


@pytest.mark.parametrize("budget", [0, -16, 17, 4096, "16", [16], 1.5, True])
def test_there_is_no_such_bucket(budget: Any, encoder: Encoder) -> None:
    with pytest.raises(InputError, match=r"no bucket of.*16, 64, 256, 576"):
        encoder.encode_at(random_rows([(1, 4, 4)]), [(1, 4, 4)], budget)
    assert encoder.stats()["calls"] == 0


def test_a_batch_that_one_run_does_not_hold(encoder: Encoder) -> None:
    grids: list[Grid] = [(1, 4, 10), (1, 4, 8)]
    with pytest.raises(InputError, match=r"18 tokens in 2 segments .* 16 tokens and 32 segments"):
        encoder.encode_at(random_rows(grids), grids, 16)
    many: list[Grid] = [(1, 2, 2)] * 33
    for budget in (64, None):
        with pytest.raises(InputError, match="33 tokens in 33 segments"):
            encoder.encode_at(random_rows(many), many, budget)
    assert encoder.stats()["calls"] == 0
