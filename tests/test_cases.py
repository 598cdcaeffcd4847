"""Cases from the field, as far as a CPU shows them; each test bears its report's name.

Compared with: the eager tower, one item at a time, and with the same call made otherwise, bit for
bit where both go through one bucket.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers import (
    PATCH_DIM,
    Grid,
    assert_close_to_eager,
    assert_same_bits,
    eager,
    error_of,
    num_tokens,
    random_rows,
    split_rows,
)
from torch import Tensor

import m3compile
from m3compile import Encoder
from m3compile.tower import Tower

NAN = float("nan")
SMALL: Grid = (1, 16, 16)
LARGE: Grid = (1, 52, 92)


# --- vllm 57136: graphs share a pool, and old NaNs in unwritten rows reach real ones ---


def test_vllm_57136_a_small_item_before_and_after_a_large_one(
    golden_artifact: Path, eager_tower: Tower
) -> None:
    small, large = random_rows([SMALL], 1), random_rows([LARGE], 2)
    with m3compile.load(golden_artifact, budgets=[64, 256, 1024, 2048, 4096, 16_384]) as encoder:
        first = encoder.encode(small, [SMALL])
        assert_close_to_eager(first, eager_tower, small, [SMALL])
        expected_large = eager(eager_tower, large, LARGE)
        for _ in range(3):
            before = encoder.encode(small, [SMALL])
            between = encoder.encode(large, [LARGE])
            after = encoder.encode(small, [SMALL])
            assert error_of(between[0], expected_large) <= 1e-5
            assert_same_bits(before, first)
            assert_same_bits(after, first)
        assert encoder.stats()["by_budget"] == {
            64: 7, 256: 0, 1024: 0, 2048: 3, 4096: 0, 16_384: 0
        }  # fmt: skip


def test_vllm_57136_a_large_bucket_full_of_nan_before(
    golden_artifact: Path, eager_tower: Tower
) -> None:
    rows = random_rows([SMALL], 1)
    full: Grid = (1, 32, 64)
    with m3compile.load(golden_artifact, budgets=[64, 512, 2048]) as encoder:
        clean = {budget: encoder.encode_at(rows, [SMALL], budget) for budget in encoder.ladder}
        for budget, results in clean.items():
            assert_close_to_eager(results, eager_tower, rows, [SMALL])
            spoiled = encoder.encode_at(torch.full((2048, PATCH_DIM), NAN), [full], 512)
            assert bool(spoiled[0].isnan().all())
            assert_same_bits(encoder.encode_at(rows, [SMALL], budget), results)


def test_vllm_57136_the_largest_bucket_there_may_be(golden_artifact: Path) -> None:
    rows = random_rows([SMALL], 1)
    with m3compile.load(golden_artifact, budgets=[64, 16_384]) as encoder:
        alone = encoder.encode(rows, [SMALL])
        padded = encoder.encode_at(rows, [SMALL], 16_384)
        assert error_of(padded[0], alone[0]) <= 1e-5


# --- sglang 16902, 37043: a graph keyed by total length replays another batch's boundaries ---


def test_sglang_16902_the_same_rows_with_other_boundaries(
    encoder: Encoder, eager_tower: Tower
) -> None:
    rows = random_rows([(1, 6, 12)])
    batches: list[list[Grid]] = [
        [(1, 4, 4), (1, 4, 6), (1, 4, 8)],
        [(1, 4, 4), (1, 4, 4), (1, 4, 10)],
        [(1, 2, 36)],
        [(1, 6, 12)],
    ]
    found = []
    for _ in range(2):
        for grids in batches:
            results = encoder.encode(rows, grids)
            assert_close_to_eager(results, eager_tower, rows, grids)
            found.append(torch.cat(results))
    for first in range(4):
        assert torch.equal(found[first], found[first + 4])
        for second in range(first):
            assert error_of(found[first], found[second]) > 1e-2
    assert encoder.stats()["by_budget"][64] == encoder.stats()["replays"] == 8


# --- TensorRT-LLM 2183, 2495: two images of a batch see each other ---


@pytest.mark.parametrize("budget", [64, 256, 576])
def test_tensorrt_llm_2183_neighbours_change_nothing(encoder: Encoder, budget: int) -> None:
    grids: dict[str, Grid] = {"A": (1, 8, 10), "B": (1, 6, 12), "C": (3, 4, 6)}
    rows = {name: random_rows([grid], seed) for seed, (name, grid) in enumerate(grids.items())}
    rows["B x 1000"], grids["B x 1000"] = rows["B"] * 1000, grids["B"]

    def encoded(*names: str) -> dict[str, Tensor]:
        batch = [rows[name] for name in names]
        results = encoder.encode_at(batch, [grids[name] for name in names], budget)
        return dict(zip(names, results, strict=True))

    alone = encoded("A")["A"]
    for names in (
        ("A", "B"), ("A", "C"), ("B", "A"), ("A", "B x 1000"), ("B x 1000", "A"),
        ("C", "B", "A"), ("B x 1000", "A", "C"),
    ):  # fmt: skip
        assert torch.equal(encoded(*names)["A"], alone), names


# --- pytorch 104435, 170604: a kept result changes with the next replay ---


@pytest.mark.parametrize("as_list", [False, True])
def test_pytorch_104435_results_are_the_callers(encoder: Encoder, as_list: bool) -> None:
    grids: list[Grid] = [(1, 4, 4), (6, 4, 4), (1, 8, 8), (1, 52, 52)]
    rows = random_rows(grids)
    kept = encoder.encode(split_rows(rows, grids) if as_list else rows, grids)
    copies = [result.clone() for result in kept]
    for seed, other in enumerate(([(1, 4, 4)], [(1, 16, 16)], [(1, 48, 48)], grids), 1):
        later = encoder.encode(random_rows(other, seed), other)
        # And the other way round: what a caller does to a result is not seen by anyone else.
        for result in later:
            result.fill_(NAN)
    assert_same_bits(kept, copies)
    again = encoder.encode(rows, grids)
    assert_same_bits(again, copies)
    encoder.close()
    assert_same_bits(kept, copies)


def test_pytorch_104435_items_of_a_batch_do_not_overlap(encoder: Encoder) -> None:
    grids: list[Grid] = [(1, 4, 4), (9, 4, 4), (1, 2, 2), (1, 8, 8)]
    rows = random_rows(grids)
    results = encoder.encode(rows, grids)
    copies = [result.clone() for result in results]
    for index, result in enumerate(results):
        result.fill_(NAN)
        assert_same_bits(results[index + 1 :], copies[index + 1 :])
    assert_same_bits(encoder.encode(rows, grids), copies)


@pytest.mark.parametrize("budget", [16, None])
def test_pytorch_104435_inputs_stay_as_they_are(encoder: Encoder, budget: int | None) -> None:
    rows, grid_thw = random_rows([(1, 8, 8)]), torch.tensor([[1, 8, 8]])
    copies = rows.clone(), grid_thw.clone()
    (result,) = encoder.encode_at(rows, grid_thw, budget)
    kept = result.clone()
    assert torch.equal(rows, copies[0])
    assert torch.equal(grid_thw, copies[1])
    rows.fill_(NAN)
    assert torch.equal(result, kept)


# --- vllm 8068, vllm-omni 7650: off by one at a budget's edge, too many items ---


@pytest.mark.parametrize(
    ("grid", "budget"),
    [
        ((1, 2, 2), 64),
        ((1, 16, 16), 64),
        ((1, 10, 26), 256),
        ((1, 32, 32), 256),
        ((1, 2, 514), 576),
        ((1, 48, 48), 576),
        ((1, 2, 1154), None),
        ((1, 40, 60), None),
    ],
)
def test_vllm_8068_edges(
    grid: Grid, budget: int | None, golden_artifact: Path, eager_tower: Tower
) -> None:
    """T 1, 64, 65, 256, 257, 576, 577 and 600."""
    rows = random_rows([grid])
    with m3compile.load(golden_artifact, budgets=[64, 256, 576], max_items=4) as encoder:
        assert_close_to_eager(encoder.encode(rows, [grid]), eager_tower, rows, [grid])
        expected = {
            "calls": 1,
            "items": 1,
            "replays": int(budget is not None),
            "exact_runs": int(budget is None),
            "real_tokens": num_tokens(grid),
            "padded_tokens": 0 if budget is None else budget - num_tokens(grid),
            "nonfinite_items": 0,
            "by_budget": {each: int(each == budget) for each in (64, 256, 576)},
        }
        assert expected.items() <= encoder.stats().items()


def test_vllm_8068_five_items_take_two_replays(golden_artifact: Path, eager_tower: Tower) -> None:
    grids: list[Grid] = [(1, 4, 4), (1, 4, 6), (1, 6, 4), (1, 2, 2), (1, 8, 2)]
    rows = random_rows(grids)
    with m3compile.load(golden_artifact, budgets=[64, 256, 576], max_items=4) as encoder:
        assert_close_to_eager(encoder.encode(rows, grids), eager_tower, rows, grids)
        stats = encoder.stats()
        assert (stats["replays"], stats["exact_runs"], stats["items"]) == (2, 0, 5)
        assert stats["by_budget"] == {64: 2, 256: 0, 576: 0}
        assert stats["padded_tokens"] == 128 - stats["real_tokens"] == 128 - 21


def test_vllm_omni_7650_more_items_than_a_run_holds(encoder: Encoder, eager_tower: Tower) -> None:
    grids: list[Grid] = [(1, 2, 2 + 2 * (index % 3)) for index in range(100)]
    rows = random_rows(grids)
    assert_close_to_eager(encoder.encode(rows, grids), eager_tower, rows, grids)
    assert encoder.stats()["replays"] >= 4


def test_vllm_8068_twelve_images_in_input_order(golden_artifact: Path, eager_tower: Tower) -> None:
    grids: list[Grid] = [
        (1, 4, 4), (1, 40, 60), (1, 16, 16), (1, 2, 2), (1, 26, 10), (1, 8, 8), (9, 4, 4),
        (1, 4, 4), (1, 32, 32), (1, 6, 12), (1, 12, 6), (1, 48, 48),
    ]  # fmt: skip
    rows = random_rows(grids)
    with m3compile.load(golden_artifact, budgets=[64, 256, 576], max_items=4) as encoder:
        assert_close_to_eager(encoder.encode(rows, grids), eager_tower, rows, grids)
        # The two equal grids have different pixels: an exchange would show.
        order = list(range(len(grids)))
        random.Random(0).shuffle(order)
        parts = split_rows(rows, grids)
        shuffled = encoder.encode([parts[i] for i in order], [grids[i] for i in order])
        assert_close_to_eager(
            shuffled, eager_tower, torch.cat([parts[i] for i in order]), [grids[i] for i in order]
        )


# --- what all of these have in common ---


def test_a_batch_of_everything_twice(encoder: Encoder, eager_tower: Tower) -> None:
    grids: Sequence[Grid] = [
        (1, 2, 2), (4, 8, 8), (5, 8, 8), (1, 48, 48), (33, 4, 4), (1, 50, 50), (13, 16, 16),
    ]  # fmt: skip
    rows = random_rows(grids)
    first = encoder.encode(rows, grids)
    assert_close_to_eager(first, eager_tower, rows, grids)
    assert_same_bits(encoder.encode(rows.clone(), torch.tensor(grids)), first)
