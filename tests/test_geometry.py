"""`geometry`: segments, positions and rotary tables.

Compared with: plain Python loops over frames, merge blocks and patches, and the rotary formula in
float64.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from m3compile.config import TINY, TowerConfig
from m3compile.geometry import inverse_frequencies, locate_rows, rotary_tables, rotate

Grid = tuple[int, int, int]
UNUSED: Grid = (0, 0, 0)
RELEASED = TowerConfig()
# The largest picture, 2016 x 2016 pixels, has this many patches a side.
LARGEST_SIDE = 144

sides = st.integers(1, 6).map(lambda blocks: 2 * blocks)
slots = st.one_of(st.just(UNUSED), st.tuples(st.integers(1, 4), sides, sides))


def plain_positions(segments: list[Grid]) -> list[tuple[int, int, int, int]]:
    """Slot, time, height and width of every real row, by the loops that lay rows out."""
    found = []
    for slot, (frames, height, width) in enumerate(segments):
        for time in range(frames):
            for top, left in itertools.product(range(0, height, 2), range(0, width, 2)):
                for down, right in itertools.product(range(2), range(2)):
                    found.append((slot, time, top + down, left + right))
    return found


def check_located(segments: list[Grid], num_padding: int) -> None:
    expected = plain_positions(segments)
    table = torch.tensor(segments, dtype=torch.int32).reshape(-1, 3)
    located = locate_rows(table, len(expected) + num_padding)
    ends = itertools.accumulate(map(math.prod, segments), initial=0)
    assert located.cu_seqlens.dtype == torch.int32
    assert located.cu_seqlens.tolist() == list(ends)
    real = len(expected)
    assert located.is_real.tolist() == [True] * real + [False] * num_padding
    assert located.segment_of_row[:real].tolist() == [row[0] for row in expected]
    assert located.positions[:real].tolist() == [list(row[1:]) for row in expected]
    # What follows indexes with it, for padding too.
    assert located.segment_of_row[real:].tolist() == [len(segments) - 1] * num_padding


@given(st.lists(slots, min_size=1, max_size=9), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_rows_are_placed_as_a_plain_loop_places_them(
    segments: list[Grid], num_padding: int
) -> None:
    # `arange` of nothing is no size that a run has.
    check_located(segments, max(num_padding, 0 if any(map(math.prod, segments)) else 4))


@pytest.mark.parametrize(
    "segments",
    [
        [UNUSED, UNUSED, (1, 4, 6)],
        [(1, 4, 6), UNUSED, UNUSED, (2, 2, 4), UNUSED],
        [(1, 2, 2)] * 12,
        [(4, 2, 12), (4, 12, 2)],
        [UNUSED] * 3,
    ],
)
def test_unused_slots_and_padding_own_nothing(segments: list[Grid]) -> None:
    check_located(segments, 8)


def test_the_largest_run() -> None:
    """65,536 rows, the most that one run takes; the last row is the far corner."""
    located = locate_rows(torch.tensor([[1, 256, 256], UNUSED], dtype=torch.int32), 65_536)
    assert located.cu_seqlens.tolist() == [0, 65_536, 65_536]
    assert bool(located.is_real.all())
    assert located.positions[-1].tolist() == [0, 255, 255]
    assert located.positions.amin().item() == 0


@pytest.mark.parametrize("config", [RELEASED, TINY])
def test_frequencies(config: TowerConfig) -> None:
    size = config.axis_dim
    expected = [config.rope_theta ** (-2 * index / size) for index in range(size // 2)]
    found = inverse_frequencies(config)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=2**-24)


def test_frequencies_ignore_the_callers_defaults() -> None:
    expected = inverse_frequencies(RELEASED)
    with torch.device("meta"):
        assert torch.equal(inverse_frequencies(RELEASED), expected)


def exact_angles(positions: Tensor, config: TowerConfig) -> Tensor:
    """(P, R) float64: time's angles, then height's, then width's."""
    steps = torch.arange(0, config.axis_dim, 2, dtype=torch.float64) / config.axis_dim
    frequencies = config.rope_theta**-steps
    return (positions.double()[:, :, None] * frequencies).flatten(1)


def far_positions() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, LARGEST_SIDE + 1, (200, 3), generator=generator, dtype=torch.int32)


def table_error(positions: Tensor, frequencies: Tensor) -> float:
    cos, sin = rotary_tables(positions, frequencies)
    assert cos.dtype == sin.dtype == torch.float32
    angles = exact_angles(positions, RELEASED)
    return max(float((cos - angles.cos()).abs().max()), float((sin - angles.sin()).abs().max()))


def test_tables_are_exact_at_the_far_corner() -> None:
    positions = far_positions()
    positions[0] = torch.tensor([3, LARGEST_SIDE, LARGEST_SIDE], dtype=torch.int32)
    # float32 places an angle of 144 within 144 * 2**-24 * 2.
    assert table_error(positions, inverse_frequencies(RELEASED)) < 2e-5


def test_tables_of_rounded_frequencies_are_visibly_wrong() -> None:
    """What the bound above is for: it tells bfloat16 frequencies from float32 ones."""
    rounded = inverse_frequencies(RELEASED).to(torch.bfloat16).to(torch.float32)
    assert table_error(far_positions(), rounded) > 1e-2


def rotated_in_float64(x: Tensor, angles: Tensor) -> Tensor:
    """Dim j pairs with dim j + R, by a loop over the dims of a head."""
    half = angles.shape[1]
    out = x.double().clone()
    for dim in range(half):
        cos, sin = angles[:, dim, None].cos(), angles[:, dim, None].sin()
        first, second = x[:, :, dim].double(), x[:, :, dim + half].double()
        out[:, :, dim] = first * cos - second * sin
        out[:, :, dim + half] = second * cos + first * sin
    return out


def head_inputs(config: TowerConfig, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    positions = far_positions()
    generator = torch.Generator().manual_seed(1)
    shape = (len(positions), config.num_attention_heads, config.head_dim)
    x = torch.randn(shape, generator=generator).to(dtype)
    return (
        x,
        exact_angles(positions, config),
        *rotary_tables(positions, inverse_frequencies(config)),
    )


# 80 dims leave two that pass through; 48 leave none; 6 is the fewest.
@pytest.mark.parametrize(("hidden_size", "num_heads"), [(1280, 16), (96, 2), (12, 2)])
def test_rotation_is_the_formula(hidden_size: int, num_heads: int) -> None:
    config = TowerConfig(hidden_size=hidden_size, num_attention_heads=num_heads)
    x, angles, cos, sin = head_inputs(config)
    rotated = rotate(x, cos, sin)
    assert float((rotated - rotated_in_float64(x, angles)).abs().max()) < 1e-4
    passed = 3 * config.axis_dim
    assert torch.equal(rotated[:, :, passed:], x[:, :, passed:])


def test_bfloat16_heads_are_rotated_in_float32() -> None:
    x, angles, cos, sin = head_inputs(RELEASED, torch.bfloat16)
    rotated = rotate(x, cos, sin)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate(x.float(), cos, sin).to(torch.bfloat16))
    # Rounded once: half a unit in the last place, where bfloat16 arithmetic would add to it.
    exact = rotated_in_float64(x, angles)
    assert bool(((rotated.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all())


def test_the_origin_is_not_rotated() -> None:
    x = head_inputs(RELEASED)[0]
    origin = torch.zeros(len(x), 3, dtype=torch.int32)
    assert torch.equal(rotate(x, *rotary_tables(origin, inverse_frequencies(RELEASED))), x)
