"""What a run's inputs and flags go through, on the CPU: against plain tensors made anew.

The pinned rings need CUDA; `test_gpu` sees them through the encoder.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from m3compile.staging import InputStage, RunRing, RunSlot

CPU = torch.device("cpu")
SLOTS = 6
segments = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))


def make_stage(num_rows: int = 12, dtype: torch.dtype = torch.float32) -> InputStage:
    return InputStage(num_rows, 3, SLOTS, dtype, CPU)


@given(st.lists(st.lists(segments, max_size=SLOTS), min_size=1, max_size=8))
def test_table_holds_the_run_and_zeros_whatever_came_before(
    runs: list[list[tuple[int, int, int]]],
) -> None:
    stage, ring = make_stage(), RunRing(SLOTS, CPU)
    for table in runs:
        stage.write_segments(table, ring.slot())
        expected = torch.zeros(SLOTS, 3, dtype=torch.int32)
        for slot, segment in enumerate(table):
            expected[slot] = torch.tensor(segment)
        assert torch.equal(stage.segments, expected)


def test_a_cleared_table_is_written_again() -> None:
    stage, ring = make_stage(), RunRing(SLOTS, CPU)
    stage.write_segments([(1, 2, 2)], ring.slot())
    stage.clear_segments()
    assert not stage.segments.any()
    stage.write_segments([(1, 2, 2)], ring.slot())
    assert stage.segments[0].tolist() == [1, 2, 2]


def test_rows_come_end_to_end_in_the_programs_dtype() -> None:
    stage = make_stage(dtype=torch.bfloat16)
    sources = [torch.randn(4, 3), torch.randn(2, 3).double(), torch.randn(2, 3).half()]
    rows = stage.write_rows(sources, 8)
    expected = torch.cat([source.to(torch.bfloat16) for source in sources])
    assert torch.equal(rows, expected)
    assert rows.data_ptr() == stage.pixel_values.data_ptr()


def test_more_rows_than_the_largest_bucket_are_fresh() -> None:
    stage = make_stage()
    held = stage.pixel_values.clone()
    source = torch.randn(16, 3)
    rows = stage.write_rows([source], 16)
    assert torch.equal(rows, source)
    assert rows.data_ptr() not in (source.data_ptr(), stage.pixel_values.data_ptr())
    assert torch.equal(stage.pixel_values, held)


def test_an_item_of_several_runs_is_counted_once_a_call() -> None:
    ring = RunRing(SLOTS, CPU)
    bad = torch.tensor([False, True, True, False, False, False])

    def run(items: list[int], call: int) -> None:
        slot = ring.slot()
        slot.flags.copy_(bad)
        slot.expect(items, call)
        ring.advance()

    run([0, 1, 1], call=1)
    run([1, 1, 2], call=1)
    assert ring.total() == 2
    run([0, 1, 1], call=2)
    assert ring.total() == 3
    # A run that failed before its flags came counts nothing.
    ring.advance()
    assert ring.total() == 3


class Pending:
    """An event of a run that is under way until it is waited for."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


def test_a_count_that_does_not_wait_stops_at_the_first_run_under_way() -> None:
    ring = RunRing(SLOTS, CPU)
    slots = []
    for flag in (True, True, True):
        table = torch.zeros(SLOTS, 3, dtype=torch.int32)
        slot = RunSlot(table, torch.full((SLOTS,), flag), Pending())  # type: ignore[arg-type]
        slot.expect([0], len(slots))
        slots.append(slot)
    slots[0].done.passed = slots[2].done.passed = True
    ring._slots = slots
    assert ring.total(wait=False) == 1
    assert not slots[1].done.passed
    assert ring.total() == 3


def test_flags_of_unused_slots_are_not_counted() -> None:
    ring = RunRing(SLOTS, CPU)
    slot = ring.slot()
    slot.flags.fill_(True)
    slot.expect([0, 1], 1)
    assert ring.total() == 2
