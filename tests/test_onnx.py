"""`m3compile.onnx`: one exported file in ONNX Runtime, through the loader that knows no torch.

Compared with: the golden outputs, which another implementation made; the eager tower, item by
item; and for requests that are refused, the item and the rule that the message has to name.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GOLDEN_CHECKPOINT
from helpers import (
    GOLDEN_NAMES,
    PATCH_DIM,
    Grid,
    eager,
    error_of,
    golden_cases,
    random_rows,
    run_fresh,
    split_rows,
)
from onnx_support import golden_onnx, small_onnx, small_tower

import m3compile.onnx
from m3compile.errors import (
    ArtifactDamagedError,
    ArtifactIncompatibleError,
    ArtifactNotFoundError,
    DependencyError,
    InputError,
    RequestError,
)
from m3compile.onnx import OnnxEncoder
from m3compile.tower import Tower

# Of an item in float32: the golden bound of the issue, and what another order of sums may make.
GOLDEN_BOUND = 1e-4
EAGER_BOUND = 1e-5


@pytest.fixture(scope="module")
def loaded() -> OnnxEncoder:
    return m3compile.onnx.load(golden_onnx())


def encode(encoder: OnnxEncoder, rows: torch.Tensor, grids: list[Grid]) -> list[torch.Tensor]:
    return [torch.from_numpy(item) for item in encoder.encode(rows.numpy(), np.array(grids))]


# --- numbers ---


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_case(loaded: OnnxEncoder, name: str) -> None:
    case = golden_cases()[name]
    results = encode(loaded, case.pixel_values, case.grids)
    assert len(results) == len(case.outputs)
    for got, expected in zip(results, case.outputs, strict=True):
        assert error_of(got, expected) <= GOLDEN_BOUND


@pytest.mark.parametrize(
    "grids",
    [
        [(1, 2, 2)],
        [(1, 2, 2)] * 24,
        [(1, 4, 4), (1, 2, 6), (1, 6, 2)] * 8,
        [(1, 64, 64)],
        [(4, 32, 32)],
        [(1, 32, 32), (24, 4, 4), (1, 2, 2048 // 2)],
        [(1, 2, 2), (1, 60, 58), (1, 2, 2)],
        [(95, 2, 2), (1, 2, 6)],
    ],
    ids=lambda grids: f"{len(grids)} items, {sum(map(math.prod, grids))} patches",
)
def test_sizes_that_it_was_not_exported_with(
    loaded: OnnxEncoder, eager_tower: Tower, grids: list[Grid]
) -> None:
    """From 4 patches to 4,096 and from 1 segment to 25."""
    rows = random_rows(grids)
    results = encode(loaded, rows, grids)
    for got, part, grid in zip(results, split_rows(rows, grids), grids, strict=True):
        assert error_of(got, eager(eager_tower, part, grid)) <= EAGER_BOUND


def test_items_do_not_see_each_other(loaded: OnnxEncoder) -> None:
    grids: list[Grid] = [(1, 8, 16), (1, 16, 8), (1, 6, 6)]
    a, b, c = split_rows(random_rows(grids), grids)
    of_a, of_b, of_c = grids
    alone = encode(loaded, a, [of_a])[0]
    batches = {
        0: [(a, of_a), (b, of_b)],
        1: [(b, of_b), (a, of_a)],
        2: [(c, of_c), (1000 * b, of_b), (a, of_a), (c, of_c)],
    }
    for place, batch in batches.items():
        results = encode(loaded, torch.cat([rows for rows, _ in batch]), [g for _, g in batch])
        assert error_of(results[place], alone) <= EAGER_BOUND
    first, second = (
        encode(loaded, torch.cat([a, neighbour]), [of_a, of_b])[0] for neighbour in (b, 1000 * b)
    )
    assert torch.equal(first, second)


def test_the_same_rows_cut_elsewhere(loaded: OnnxEncoder) -> None:
    rows = random_rows([(1, 2, 36)])
    cuts: list[list[Grid]] = [
        [(1, 4, 4), (1, 4, 6), (1, 4, 8)],
        [(1, 4, 4), (1, 4, 4), (1, 4, 10)],
        [(1, 2, 36)],
        [(1, 6, 12)],
    ]
    results = [torch.cat(encode(loaded, rows, grids)) for grids in cuts]
    for index, result in enumerate(results):
        for other in results[:index]:
            assert error_of(result, other) > 1e-2


@pytest.mark.parametrize("max_patches", [4, 16, 100])
def test_a_batch_cut_into_runs(
    eager_tower: Tower, loaded: OnnxEncoder, monkeypatch: pytest.MonkeyPatch, max_patches: int
) -> None:
    """Cut between segments: of three long clips and an image over the limit by itself."""
    small = m3compile.onnx.load(golden_onnx(), max_patches=max_patches)
    sizes: list[int] = []
    run = OnnxEncoder.run

    def counted(self: OnnxEncoder, pixel_values: Any, segments: Any) -> Any:
        assert len(pixel_values) == segments.prod(1).sum()
        assert len(segments) == 1 or len(pixel_values) <= max_patches
        sizes.append(len(segments))
        return run(self, pixel_values, segments)

    monkeypatch.setattr(OnnxEncoder, "run", counted)
    grids: list[Grid] = [(9, 2, 4), (1, 12, 12), (130, 2, 2), (5, 2, 2)]
    rows = random_rows(grids)
    results = encode(small, rows, grids)
    assert len(sizes) > 2
    assert sum(sizes) == 3 + 1 + 33 + 2
    for got, part, grid in zip(results, split_rows(rows, grids), grids, strict=True):
        assert error_of(got, eager(eager_tower, part, grid)) <= EAGER_BOUND


def test_many_segments_are_cut_too(loaded: OnnxEncoder) -> None:
    grids: list[Grid] = [(1, 2, 2)] * 130
    rows = random_rows(grids)
    results = torch.cat(encode(loaded, rows, grids))
    expected = torch.cat([encode(loaded, rows[:4], grids[:1])[0], results[1:]])
    assert error_of(results, expected) <= EAGER_BOUND


# --- what is not finite ---


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_pixel_that_is_not_finite(loaded: OnnxEncoder, value: float) -> None:
    """Its segment is NaN throughout; the other one of its item and neighbours keep their bits."""
    # The clip's segments have 64 rows and 32, 16 tokens and 8.
    grids: list[Grid] = [(1, 4, 4), (6, 4, 4), (1, 4, 6)]
    rows = random_rows(grids)
    expected = encode(loaded, rows, grids)
    rows[16 + 70, 1175] = value
    results = encode(loaded, rows, grids)
    assert torch.equal(results[0], expected[0])
    assert torch.equal(results[2], expected[2])
    assert torch.equal(results[1][:16], expected[1][:16])
    assert results[1][16:].isnan().all()


def test_padding_may_hold_anything(loaded: OnnxEncoder) -> None:
    rows = random_rows([(1, 4, 4), (1, 4, 6)])
    expected = loaded.run(rows.numpy(), np.array([[1, 4, 4], [1, 4, 6]]))
    for value in (math.nan, math.inf, 1e30):
        padded = torch.cat([rows, torch.full((24, PATCH_DIM), value)])
        for table in ([[1, 4, 4], [1, 4, 6]], [[1, 4, 4], [0, 0, 0], [1, 4, 6], [0, 0, 0]]):
            got = loaded.run(padded.numpy(), np.array(table))
            assert got.shape == (16, 96)
            error = error_of(torch.from_numpy(got[:10]), torch.from_numpy(expected))
            assert error <= EAGER_BOUND


def test_more_segments_than_rows_is_an_error(loaded: OnnxEncoder) -> None:
    rows = random_rows([(1, 4, 4)]).numpy()
    with pytest.raises(m3compile.errors.OperationError, match="ONNX Runtime failed"):
        loaded.run(rows, np.array([[1, 4, 6]]))


# --- what may be handed in ---


def test_a_list_of_arrays_and_nested_lists(loaded: OnnxEncoder) -> None:
    grids: list[Grid] = [(1, 4, 4), (1, 4, 6)]
    rows = random_rows(grids)
    expected = encode(loaded, rows, grids)
    parts = [part.numpy() for part in split_rows(rows, grids)]
    for spelled in (grids, [list(grid) for grid in grids], np.array(grids, np.uint8)):
        results = loaded.encode(parts, spelled)
        for got, wanted in zip(results, expected, strict=True):
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, wanted.numpy())


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_any_float_dtype(loaded: OnnxEncoder, dtype: Any) -> None:
    rows = random_rows([(1, 4, 4)]).numpy().astype(dtype)
    (result,) = loaded.encode(rows, [[1, 4, 4]])
    np.testing.assert_array_equal(result, loaded.encode(rows.astype(np.float32), [[1, 4, 4]])[0])


def test_half_precision() -> None:
    """float16 in and out; its error against eager float32 is of the order of eager float16's."""
    encoder = m3compile.onnx.load(small_onnx("float16"))
    grids: list[Grid] = [(1, 8, 8), (5, 4, 4)]
    rows = random_rows(grids)
    results = encode(encoder, rows, grids)
    for got, part, grid in zip(results, split_rows(rows, grids), grids, strict=True):
        assert got.dtype == torch.float16
        exact = eager(small_tower(torch.float32), part, grid)
        rounded = eager(small_tower(torch.float16), part.to(torch.float16), grid)
        assert error_of(got, exact) <= 1.25 * error_of(rounded, exact)


def test_a_pixel_beyond_half_precision_is_infinite() -> None:
    encoder = m3compile.onnx.load(small_onnx("float16"))
    rows = random_rows([(1, 4, 4)]).numpy()
    rows[3, 3] = 1e5
    assert np.isnan(encoder.encode(rows, [[1, 4, 4]])[0]).all()


@pytest.mark.parametrize(
    ("pixel_values", "grid_thw"),
    [([], []), (np.zeros((0, PATCH_DIM)), np.zeros((0, 3), int)), ((), np.array([]))],
)
def test_nothing(loaded: OnnxEncoder, pixel_values: Any, grid_thw: Any) -> None:
    assert loaded.encode(pixel_values, grid_thw) == []


ROWS = np.zeros((40, PATCH_DIM), np.float32)


@pytest.mark.parametrize(
    ("pixel_values", "grid_thw", "found"),
    [
        (ROWS, [[1, 4, 4], [1, 3, 8]], "item 1: grid is [1, 3, 8], height and width must be"),
        (ROWS, [[1, 4, 4], [1, 0, 160]], "item 1: grid is [1, 0, 160], every side must be at"),
        (ROWS, [[0, 4, 4]], "item 0: grid is [0, 4, 4], every side"),
        (ROWS, [[1, -2, 4]], "item 0: grid is [1, -2, 4], every side"),
        (ROWS, [1, 4, 4], "item 0: grid is 1, expected three integers"),
        (ROWS, np.array([1, 4, 4]), "grid_thw has shape (3,), expected (num_items, 3)"),
        (ROWS, [[1.0, 4, 4]], "item 0: grid is [1.0, 4, 4], expected three integers"),
        (ROWS, np.ones((1, 3)), "grid_thw has dtype float64, expected integers"),
        (ROWS, [[1, 4, 4]], "pixel_values has 40 rows, expected 16: the sum of t*h*w of 1 items"),
        (ROWS[:, 1:], [[1, 4, 10]], "has shape (40, 1175), expected (rows, 1176)"),
        (ROWS[None], [[1, 4, 10]], "has shape (1, 40, 1176), expected (rows, 1176)"),
        (ROWS.astype(int), [[1, 4, 10]], "has dtype int64, expected a float dtype"),
        (ROWS.astype(complex), [[1, 4, 10]], "expected a float dtype"),
        (ROWS, [], "pixel_values has 40 rows, expected 0"),
        (torch.zeros(40, PATCH_DIM), [[1, 4, 10]], "is a Tensor, expected a NumPy array"),
        ([ROWS], [[1, 4, 4], [1, 4, 6]], "a list of 1 arrays, grid_thw has 2 items"),
        ([ROWS[:16], ROWS[:20]], [[1, 4, 4], [1, 4, 6]], "item 1: pixel_values has 20 rows"),
        ([ROWS[:16], None], [[1, 4, 4], [1, 4, 6]], "item 1: pixel_values is a NoneType"),
        ([ROWS[:16, 2:]], [[1, 4, 4]], "item 0: pixel_values has shape (16, 1174)"),
    ],
)
def test_a_wrong_batch(loaded: OnnxEncoder, pixel_values: Any, grid_thw: Any, found: str) -> None:
    with pytest.raises(InputError) as caught:
        loaded.encode(pixel_values, grid_thw)
    assert found in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert loaded.encode(ROWS[:16], [[1, 4, 4]])[0].shape == (4, 96)


# --- files ---


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="no such file"):
        m3compile.onnx.load(tmp_path / "encoder.onnx")


@pytest.mark.parametrize("length", [0, 1000, -1])
def test_a_file_cut_short(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.onnx"
    path.write_bytes(small_onnx().read_bytes()[:length])
    with pytest.raises(ArtifactDamagedError, match=r"cut\.onnx"):
        m3compile.onnx.load(path)


def test_a_model_of_somebody_else(tmp_path: Path) -> None:
    import onnx

    model = onnx.load(str(small_onnx()))
    del model.metadata_props[:]
    onnx.save(model, str(tmp_path / "other.onnx"))
    with pytest.raises(ArtifactDamagedError, match="not written by export-onnx"):
        m3compile.onnx.load(tmp_path / "other.onnx")


def test_a_dtype_without_kernels() -> None:
    with pytest.raises(ArtifactIncompatibleError) as caught:
        m3compile.onnx.load(small_onnx("bfloat16"))
    assert "(CPUExecutionProvider) has no kernel for its Gemm" in str(caught.value)


def test_a_provider_that_is_not_there() -> None:
    with pytest.raises(RequestError, match="has no NoSuchProvider here; available: "):
        m3compile.onnx.load(small_onnx(), providers=["NoSuchProvider"])


@pytest.mark.parametrize("max_patches", [0, 3, 4.5, "8"])
def test_impossible_runs(max_patches: Any) -> None:
    with pytest.raises(RequestError, match="allowed: whole numbers from 4"):
        m3compile.onnx.load(small_onnx(), max_patches=max_patches)


def test_without_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(DependencyError, match=r"m3compile\[onnx\]"):
        m3compile.onnx.load(small_onnx())


_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
import m3compile.onnx
assert "onnxruntime" not in sys.modules
from safetensors.numpy import load_file
import numpy as np
case = load_file(sys.argv[2] + "/cases.safetensors")
encoder = m3compile.onnx.load(sys.argv[1])
results = encoder.encode(case["mixed.pixel_values"], case["mixed.grid_thw"])
expected = case["mixed.output"]
print(np.linalg.norm(np.concatenate(results) - expected) / np.linalg.norm(expected))
"""


def test_a_process_without_torch() -> None:
    error = float(run_fresh(_WITHOUT_TORCH, golden_onnx(), GOLDEN_CHECKPOINT))
    assert error <= GOLDEN_BOUND
