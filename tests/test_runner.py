"""The device's side of an encoder with programs that stand in for the compiled one, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m3compile.errors import OperationError
from m3compile.graph import Bucket, Pool
from m3compile.runner import DeviceRunner

CPU = torch.device("cpu")


class Summing:
    """Token i is the sum of its four rows' first columns; every slot's flag is false."""

    def __init__(self) -> None:
        self.shapes: list[int] = []
        self.fails = False

    def __call__(self, pixel_values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        if self.fails:
            raise RuntimeError("CUDA error: something\nwith details")
        self.shapes.append(len(pixel_values))
        tokens = pixel_values[:, :1].unflatten(0, (-1, 4)).sum(1)
        return tokens, torch.zeros(len(segments), dtype=torch.bool)

    def capture(self, pixel_values: Tensor, segments: Tensor, pool: Pool) -> Bucket:
        raise AssertionError("nothing is captured on a CPU")


def make_runner(program: Summing) -> DeviceRunner:
    return DeviceRunner(
        program, CPU, torch.float32, (2, 4), patch_dim=3, max_segments=4, capture="never"
    )


def test_a_bucket_runs_at_its_size_and_the_exact_shape_at_its_own() -> None:
    program = Summing()
    runner = make_runner(program)
    rows = torch.arange(36.0).reshape(12, 3)
    expected = rows[:, :1].unflatten(0, (3, 4)).sum(1)
    for budget, shape in ((4, 16), (None, 12)):
        got = runner.run(budget, [(1, 2, 6)], [rows], 3, [0], 1)
        assert torch.equal(got, expected)
        assert program.shapes[-1] == shape
    assert runner.num_graphs == 0


def test_results_are_not_overwritten_by_the_next_run() -> None:
    runner = make_runner(Summing())
    first = runner.run(2, [(1, 2, 4)], [torch.ones(8, 3)], 2, [0], 1)
    runner.run(2, [(1, 2, 4)], [torch.zeros(8, 3)], 2, [0], 2)
    assert first.tolist() == [[4.0], [4.0]]


def test_a_failing_program_is_one_line_and_the_runner_lives() -> None:
    program = Summing()
    runner = make_runner(program)
    program.fails = True
    with pytest.raises(OperationError) as caught:
        runner.run(2, [(1, 2, 2)], [torch.ones(4, 3)], 1, [0], 1)
    message = str(caught.value)
    assert message == "the program failed while running 1 tokens on cpu: CUDA error: something"
    program.fails = False
    assert runner.run(2, [(1, 2, 2)], [torch.ones(4, 3)], 1, [0], 2).tolist() == [[4.0]]
    assert runner.nonfinite_items(wait=True) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_lost_device_is_the_same_error(fails: bool) -> None:
    """Nothing can be recorded on it any more, whether the program noticed or not."""

    class Lost:
        def record(self) -> None:
            raise RuntimeError("CUDA error: it is gone")

    program = Summing()
    runner = make_runner(program)
    program.fails = fails
    runner._ring.slot().done = Lost()  # type: ignore[assignment]
    with pytest.raises(OperationError, match="the program failed while running 1 tokens"):
        runner.run(2, [(1, 2, 2)], [torch.ones(4, 3)], 1, [0], 1)


def test_a_prepared_run_repeats_the_batch_it_was_given() -> None:
    program = Summing()
    runner = make_runner(program)
    run = runner.prepare_run(4, [(1, 2, 4)], torch.ones(8, 3))
    assert [run()[0][:2].tolist() for _ in range(3)] == [[[4.0], [4.0]]] * 3
    exact = runner.prepare_run(None, [(1, 2, 4)], torch.ones(8, 3))
    assert exact()[0].shape == (2, 1)
    assert program.shapes == [16, 16, 16, 8]


def test_what_becomes_of_a_prepared_runs_segments_is_the_callers_matter() -> None:
    """The caller's list grows into the next run's table, which has to be written still."""
    tables = []

    class Noting(Summing):
        def __call__(self, pixel_values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
            tables.append(segments.tolist())
            return super().__call__(pixel_values, segments)

    runner = make_runner(Noting())
    segments = [(1, 2, 2)]
    runner.prepare_run(4, segments, torch.ones(4, 3))
    segments.append((1, 2, 4))
    runner.run(4, [(1, 2, 2), (1, 2, 4)], [torch.ones(12, 3)], 3, [0, 1], 1)
    assert tables == [[[1, 2, 2], [1, 2, 4], [0, 0, 0], [0, 0, 0]]]
