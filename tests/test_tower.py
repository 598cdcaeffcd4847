"""`tower`: the eager encoder.

Compared with: the golden cases, which transformers made; with itself where padding, neighbours and
bad pixels must not matter; and with wrong encoders, each of which must fail the golden check.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from conftest import golden_tower
from helpers import (
    BOUND,
    GOLDEN_NAMES,
    PATCH_DIM,
    Grid,
    eager,
    error_of,
    golden_cases,
    num_tokens,
    random_rows,
    segment_table,
    segments_of_item,
    split_rows,
)
from torch import Tensor
from torch.nn import functional

from m3compile import geometry
from m3compile.tower import Tower

NAN, INF = float("nan"), float("inf")
UNUSED: Grid = (0, 0, 0)
# An error that nobody takes for rounding.
VISIBLE = 100 * BOUND


@torch.no_grad()
def run(tower: Tower, rows: Tensor, segments: list[Grid]) -> tuple[Tensor, Tensor]:
    embeddings, is_nonfinite = tower(rows, segment_table(segments))
    return embeddings, is_nonfinite


Change = Callable[[Tower, Grid], AbstractContextManager[object]]


def unchanged(tower: Tower, grid: Grid) -> AbstractContextManager[object]:
    return nullcontext()


def golden_error(tower: Tower, name: str, change: Change = unchanged) -> float:
    """Largest error of an item of a case, each item alone; `change` makes another tower of it."""
    case = golden_cases()[name]
    errors = []
    for part, grid, expected in zip(
        split_rows(case.pixel_values, case.grids), case.grids, case.outputs, strict=True
    ):
        with change(tower, grid):
            errors.append(error_of(eager(tower, part, grid), expected))
    return max(errors)


@contextmanager
def hidden_through(tower: Tower, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The last hidden state goes through a function on its way to the projector."""
    handle = tower.projector.fc1.register_forward_pre_hook(lambda _, inputs: function(*inputs))
    try:
        yield
    finally:
        handle.remove()


# --- golden cases ---


def test_all_cases_are_there() -> None:
    assert len(GOLDEN_NAMES) == 12
    assert sum(len(golden_cases()[name].grids) for name in GOLDEN_NAMES) == 21


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_items_alone(name: str, eager_tower: Tower) -> None:
    assert golden_error(eager_tower, name) <= BOUND


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_items_together(name: str, eager_tower: Tower) -> None:
    """All segments of a case in one run, with unused slots between and padding behind them."""
    case = golden_cases()[name]
    segments = [part for grid in case.grids for part in (UNUSED, *segments_of_item(grid), UNUSED)]
    rows = torch.cat([case.pixel_values, torch.full((40, PATCH_DIM), NAN)])
    seen: list[Tensor] = []

    def keep(hidden: Tensor) -> Tensor:
        seen.append(hidden.clone())
        return hidden

    with hidden_through(eager_tower, keep):
        embeddings, is_nonfinite = run(eager_tower, rows, segments)
    assert not bool(is_nonfinite.any())
    tokens = [num_tokens(grid) for grid in case.grids]
    (hidden,) = seen
    found = (
        *embeddings[: sum(tokens)].split(tokens),
        *split_rows(hidden[: len(case.pixel_values)], case.grids),
    )
    for got, expected in zip(found, (*case.outputs, *case.hidden), strict=True):
        assert error_of(got, expected) <= BOUND


def test_features_are_the_last_hidden_state(eager_tower: Tower) -> None:
    case = golden_cases()["square"]
    with torch.no_grad():
        hidden = eager_tower.features(case.pixel_values, segment_table(case.grids))
    assert error_of(hidden, case.hidden[0]) <= BOUND


def test_bfloat16_keeps_directions() -> None:
    tower = golden_tower(torch.bfloat16)
    for name in GOLDEN_NAMES:
        case = golden_cases()[name]
        parts = split_rows(case.pixel_values.to(torch.bfloat16), case.grids)
        for part, grid, expected in zip(parts, case.grids, case.outputs, strict=True):
            got = eager(tower, part, grid)
            assert got.dtype == torch.bfloat16
            cosines = torch.cosine_similarity(got.float(), expected, dim=1)
            assert float(cosines.min()) >= 0.999, (name, grid)


# --- encoders that look almost right ---


@contextmanager
def tanh_gelu(tower: Tower, grid: Grid) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "gelu", functools.partial(functional.gelu, approximate="tanh"))
        yield


def raster_merge(tower: Tower, grid: Grid) -> AbstractContextManager[object]:
    """Merges four patches that follow each other in raster order."""
    _, height, width = grid
    time, y, x = located(grid).unbind(1)
    rows = ((time * height + y) * width + x).argsort()
    return hidden_through(tower, lambda hidden: hidden[rows])


def final_norm(tower: Tower, grid: Grid) -> AbstractContextManager[object]:
    """Has the layer norm behind the last block that the released encoder lacks."""
    return hidden_through(tower, lambda hidden: functional.layer_norm(hidden, hidden.shape[1:]))


@contextmanager
def rounded_frequencies(tower: Tower, grid: Grid) -> Iterator[None]:
    """Keeps its rotary frequencies in bfloat16."""
    exact = tower.inverse_frequency.data
    tower.inverse_frequency.data = exact.bfloat16().float()
    try:
        yield
    finally:
        tower.inverse_frequency.data = exact


@contextmanager
def raster_positions(tower: Tower, grid: Grid) -> Iterator[None]:
    """Takes rows for raster order, as a port does that never heard of merge blocks."""
    _, height, width = grid
    exact = geometry.rotary_tables

    def tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(len(positions))
        y, x = place % (height * width) // width, place % width
        return exact(torch.stack((positions[:, 0], y, x), 1), frequencies)

    with pytest.MonkeyPatch.context() as patch:
        for module in list(sys.modules.values()):
            if getattr(module, "rotary_tables", None) is exact:
                patch.setattr(module, "rotary_tables", tables)
        yield


def located(grid: Grid) -> Tensor:
    """(t*h*w, 3): time, height and width of every row of an item, in order."""
    frames, height, width = grid
    places = torch.cartesian_prod(
        torch.arange(frames), torch.arange(0, height, 2), torch.arange(0, width, 2),
        torch.arange(2), torch.arange(2),
    )  # fmt: skip
    time, top, left, down, right = places.unbind(1)
    return torch.stack((time, top + down, left + right), 1)


# An item that is one block wide is in raster order as it is.
WIDE_NAMES = [
    name for name in GOLDEN_NAMES if any(width > 2 for _, _, width in golden_cases()[name].grids)
]


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_ik_llama_2086_tanh_gelu_fails(name: str, eager_tower: Tower) -> None:
    assert golden_error(eager_tower, name, tanh_gelu) > 20 * BOUND


@pytest.mark.parametrize("name", WIDE_NAMES)
def test_ik_llama_2086_raster_merge_fails(name: str, eager_tower: Tower) -> None:
    assert golden_error(eager_tower, name, raster_merge) > VISIBLE


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_ik_llama_2086_final_norm_fails(name: str, eager_tower: Tower) -> None:
    assert golden_error(eager_tower, name, final_norm) > VISIBLE


@pytest.mark.parametrize("name", WIDE_NAMES)
def test_raster_positions_fail(name: str, eager_tower: Tower) -> None:
    assert golden_error(eager_tower, name, raster_positions) > VISIBLE


def test_rounded_frequencies_fail(eager_tower: Tower) -> None:
    assert golden_error(eager_tower, "far", rounded_frequencies) > VISIBLE


def test_attention_over_a_whole_clip_fails(eager_tower: Tower) -> None:
    case = golden_cases()["clip_split"]
    whole, _ = run(eager_tower, case.pixel_values, case.grids)
    assert error_of(whole, case.outputs[0]) > VISIBLE


def test_wrong_encoders_are_right_but_for_their_fault(eager_tower: Tower) -> None:
    """Else they would fail for another reason than theirs. One block is in raster order."""
    for change in (raster_merge, raster_positions):
        assert golden_error(eager_tower, "smallest", change) <= BOUND
    same = functools.partial(hidden_through, function=lambda hidden: hidden)
    assert golden_error(eager_tower, "square", lambda tower, grid: same(tower)) <= BOUND
    assert golden_error(eager_tower, "square") <= BOUND


# --- padding, neighbours, bad pixels ---


SEGMENTS: list[Grid] = [(1, 4, 4), (2, 4, 6), (1, 2, 2)]


@pytest.mark.parametrize("filler", [0.0, 1e4, NAN, INF, -INF])
def test_padding_may_hold_anything(filler: float, eager_tower: Tower) -> None:
    rows = random_rows(SEGMENTS)
    tokens = len(rows) // 4
    padded = torch.cat([rows, torch.full((60, PATCH_DIM), filler)])
    zeros = torch.cat([rows, torch.zeros(60, PATCH_DIM)])
    got, is_nonfinite = run(eager_tower, padded, [*SEGMENTS, UNUSED])
    assert is_nonfinite.tolist() == [False] * 4
    assert torch.equal(got[:tokens], run(eager_tower, zeros, [*SEGMENTS, UNUSED])[0][:tokens])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("where", ["first", "last", "all"])
def test_a_bad_pixel_is_its_segments_alone(
    bad: float, slot: int, where: str, eager_tower: Tower
) -> None:
    rows = random_rows(SEGMENTS)
    clean = split_rows(run(eager_tower, rows, SEGMENTS)[0], [(1, 1, 4), (1, 1, 12), (1, 1, 1)])
    parts = split_rows(rows, SEGMENTS)
    if where == "first":
        parts[slot][0, 0] = bad
    elif where == "last":
        parts[slot][-1, -1] = bad
    else:
        parts[slot][:] = bad
    embeddings, is_nonfinite = run(eager_tower, torch.cat(parts), SEGMENTS)
    assert is_nonfinite.tolist() == [index == slot for index in range(3)]
    found = split_rows(embeddings, [(1, 1, 4), (1, 1, 12), (1, 1, 1)])
    for index, (got, expected) in enumerate(zip(found, clean, strict=True)):
        if index == slot:
            assert bool(got.isnan().all())
        else:
            assert torch.equal(got, expected)


def test_flags_name_the_slot_among_unused_ones(eager_tower: Tower) -> None:
    segments = [UNUSED, SEGMENTS[0], UNUSED, SEGMENTS[1], SEGMENTS[2], UNUSED]
    rows = random_rows(SEGMENTS)
    rows[16, 3] = NAN
    rows[-1, 3] = INF
    _, is_nonfinite = run(eager_tower, rows, segments)
    assert is_nonfinite.tolist() == [False, False, False, True, True, False]


def test_no_segment_at_all(eager_tower: Tower) -> None:
    embeddings, is_nonfinite = run(eager_tower, torch.full((16, PATCH_DIM), NAN), [UNUSED, UNUSED])
    assert embeddings.shape == (4, eager_tower.config.output_size)
    assert not bool(is_nonfinite.any())
