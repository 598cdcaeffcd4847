"""The stages of `embed`, called without Ray: batches against what `images` makes of each file,
embeddings against `Encoder.encode`, files against what went in; the division of a cluster, for
machines that nobody has at hand.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="needs the extra serve, which is not installed")

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from conftest import BUDGETS, GOLDENS

import m3compile
from m3compile.config import PreprocessConfig
from m3compile.errors import InputError, OperationError, RequestError
from m3compile.images import image_rows, load_image, load_images
from m3compile.integrations.ray.data.cluster import Share, divide
from m3compile.integrations.ray.data.decode import (
    Decoder,
    Item,
    ProcessReader,
    batch_table,
    cell_tensor,
    read_image,
)
from m3compile.integrations.ray.data.job import Settings, attempt, open_job
from m3compile.integrations.ray.data.stages import BatchWriter, EncodeBatches

IMAGES = GOLDENS / "images"
NAMES = ("tiny.png", "gray.png", "wide.png")
PREPROCESS = PreprocessConfig()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Good files around a broken one, by name."""
    (tmp_path / "in").mkdir()
    for index, name in enumerate((*NAMES, *NAMES)):
        (tmp_path / f"in/{index}.png").write_bytes((IMAGES / name).read_bytes())
    (tmp_path / "in/1b.png").write_bytes(b"broken")
    (tmp_path / "in/9.png").symlink_to(tmp_path / "gone")
    return tmp_path


def decoder(folder: Path, **changes: Any) -> Decoder:
    output = folder / "out"
    (output / "_m3compile").mkdir(parents=True, exist_ok=True)
    settings = Settings(artifact="", inputs=(str(folder / "in"),), batch_tokens=1, dtype="float32")
    values = {
        "output": output,
        "job": open_job(output, settings),
        "preprocess": PREPROCESS,
        "dtype": torch.float32,
        "batch_tokens": 1 << 14,
        "batch_items": 100,
        **changes,
    }
    return Decoder(**values)


def work(*gaps: tuple[int, int]) -> pa.Table:
    kind = pa.list_(pa.list_(pa.int64()))
    return pa.table({"shard": [0], "gaps": pa.array([[list(gap) for gap in gaps]], kind)})


def ranges(batches: list[pa.Table]) -> list[tuple[int, int]]:
    """First row and number of rows of each batch."""
    return [(each["start"][0].as_py(), len(each["names"][0].as_py())) for each in batches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoded_rows_are_those_of_images(folder: Path, dtype: torch.dtype) -> None:
    (batch,) = decoder(folder, dtype=dtype)(work((0, 8)))
    paths = sorted((folder / "in").iterdir())
    good = [path for path in paths if path.name not in ("1b.png", "9.png")]
    rows, grids = load_images(good, PREPROCESS)
    assert batch["names"][0].as_py() == [str(path) for path in paths]
    found = np.asarray(batch["grids"][0].values).reshape(-1, 3)
    assert found[2].tolist() == [0, 0, 0]
    assert np.delete(found, (2, 7), 0).tolist() == grids.tolist()
    assert torch.equal(cell_tensor(batch["pixels"], dtype), rows.to(dtype).view(-1))
    errors = batch["errors"][0].as_py()
    assert errors.pop(7) == f"{folder}/in/9.png: no such file"
    assert "1b.png: not recognised as an image" in errors.pop(2)
    assert errors == [None] * 6
    assert os.listdir(folder / "out/_m3compile/attempts") == []


def test_batches_end_before_they_are_too_large(folder: Path) -> None:
    tokens = [grid[0] * grid[1] * grid[2] // 4 for grid in
              load_images([IMAGES / name for name in NAMES], PREPROCESS)[1].tolist()]  # fmt: skip
    # Rows: tiny, gray, broken, wide, tiny, gray, wide.
    two = list(decoder(folder, batch_tokens=tokens[0] + tokens[1])(work((0, 3))))
    assert ranges(two) == [(0, 3)]
    less = list(decoder(folder, batch_tokens=tokens[0] + tokens[1] - 1)(work((0, 3))))
    assert ranges(less) == [(0, 1), (1, 2)]
    alone = list(decoder(folder, batch_tokens=1)(work((0, 7))))
    assert ranges(alone) == [(0, 1), (1, 2), (3, 1), (4, 1), (5, 1), (6, 1)]
    assert ranges(list(decoder(folder, batch_items=2)(work((0, 7))))) == [
        (0, 2), (2, 2), (4, 2), (6, 1)
    ]  # fmt: skip


def test_only_gaps_are_decoded(folder: Path) -> None:
    batches = list(decoder(folder)(work((1, 3), (5, 6))))
    assert ranges(batches) == [(1, 2), (5, 1)]
    assert [Path(name).name for name in batches[1]["names"][0].as_py()] == ["4.png"]


def test_a_shard_that_killed_a_process_is_read_in_another(folder: Path) -> None:
    stage = decoder(folder)
    (expected,) = stage(work((0, 7)))
    attempt(stage.output, "decode-0").__enter__()
    (batch,) = stage(work((0, 7)))
    assert batch.equals(expected)


def crash(image: str) -> torch.Tensor:
    """Stands in for a decoder: dies of one image, refuses another."""
    if image == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if image == "bad":
        raise InputError("bad image")
    return torch.tensor([os.getpid()])


def test_a_decoder_that_dies_takes_one_image_with_it() -> None:
    with ProcessReader(crash) as read:
        first = read("good").item()
        assert first != os.getpid()
        with pytest.raises(InputError, match="bad image"):
            read("bad")
        assert read("good").item() == first
        with pytest.raises(OperationError, match="the process that decoded it crashed"):
            read("crash")
        assert read("good").item() != first


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    for path in (tmp_path / "pipe.jpg", tmp_path):
        with pytest.raises(InputError, match="not a regular file"):
            read_image(str(path))


def test_bytes_are_read_as_a_file_is() -> None:
    data = (IMAGES / "wide.png").read_bytes()
    assert torch.equal(read_image(memoryview(data)), load_image(IMAGES / "wide.png"))


# Encoding and writing.


def items() -> Iterator[Item]:
    yield Item("none", None, (0, 0, 0), "broken")
    for name in NAMES:
        rows, grid = image_rows(load_image(IMAGES / name), PREPROCESS)
        yield Item(name, rows, grid, None)


def encoded(artifact: Path, output: Path, batch: list[Item], dtype: str = "float32") -> pa.Table:
    (output / "_m3compile/attempts").mkdir(parents=True, exist_ok=True)
    return EncodeBatches(str(artifact), output, dtype, 1)(batch_table(batch, 3, 7, pa.string()))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_file_holds_what_the_encoder_says(
    golden_artifact: Path, encoder: m3compile.Encoder, tmp_path: Path, dtype: str
) -> None:
    writer = BatchWriter(tmp_path, dtype, 96, pa.field("path", pa.string()), {"from": "here"})
    counts = writer(encoded(golden_artifact, tmp_path, list(items()), dtype)).to_pylist()
    expected = encoder.encode(*load_images([IMAGES / name for name in NAMES], PREPROCESS))
    tokens = [len(rows) for rows in expected]
    (path,) = tmp_path.glob("shard-*/*")
    assert path.relative_to(tmp_path).as_posix() == "shard-0000003/000000007-000000010.parquet"
    size = path.stat().st_size
    assert counts == [{"rows": 4, "errors": 1, "tokens": sum(tokens), "bytes": size}]
    table = pq.read_table(path)
    assert table.schema.names == ["path", "token_count", "embeddings", "error"]
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert metadata == {"m3compile.width": "96", "m3compile.from": "here"}
    assert table["path"].to_pylist() == ["none", *NAMES]
    assert table["error"].to_pylist() == ["broken", None, None, None]
    assert table["token_count"].to_pylist() == [0, *tokens]
    assert table["embeddings"][0].as_py() is None
    for row, wanted in zip(table["embeddings"][1:], expected, strict=True):
        found = torch.tensor(np.asarray(row.values)).view(-1, 96)
        assert torch.equal(found, wanted.to(getattr(torch, dtype)))


def test_a_batch_of_errors_alone(golden_artifact: Path, tmp_path: Path) -> None:
    writer = BatchWriter(tmp_path, "float32", 96, pa.field("path", pa.string()), {})
    batch = encoded(golden_artifact, tmp_path, [Item("a", None, (0, 0, 0), "broken")])
    assert writer(batch)["errors"].to_pylist() == [1]
    (path,) = tmp_path.glob("shard-*/*")
    assert pq.read_table(path)["embeddings"].to_pylist() == [None]


def test_what_is_not_finite_is_an_error(golden_artifact: Path, tmp_path: Path) -> None:
    _, first, second, _ = items()
    assert second.rows is not None
    rows = second.rows.clone()
    rows[1, 2] = float("nan")
    batch = encoded(golden_artifact, tmp_path, [first, second._replace(rows=rows)])
    assert batch["errors"][0].as_py() == [None, "the embeddings are not finite"]
    assert batch["token_counts"][0].as_py()[1] == 0


def test_an_item_that_no_batch_may_have_goes_alone(
    golden_artifact: Path, encoder: m3compile.Encoder, tmp_path: Path
) -> None:
    _, first, second, _ = items()
    assert first.rows is not None
    odd = Item("odd", torch.zeros(3, 1176), (1, 3, 1), None)
    batch = encoded(golden_artifact, tmp_path, [first, odd, second])
    errors = batch["errors"][0].as_py()
    assert errors[::2] == [None, None]
    assert "grid is [1, 3, 1]" in errors[1]
    (wanted,) = encoder.encode(first.rows, [first.grid])
    found = cell_tensor(batch["embeddings"], torch.float32)
    assert torch.equal(found[: wanted.numel()], wanted.view(-1))


def test_a_file_that_cannot_be_written(golden_artifact: Path, tmp_path: Path) -> None:
    batch = encoded(golden_artifact, tmp_path, list(items()))
    (tmp_path / "shard-0000003").write_bytes(b"")
    writer = BatchWriter(tmp_path, "float32", 96, pa.field("path", pa.string()), {})
    with pytest.raises(OperationError, match="cannot write"):
        writer(batch)


# The division of a cluster.


@pytest.mark.parametrize(
    ("concurrency", "device", "cpus", "gpus", "share"),
    [
        (None, "cpu", 1, 0, Share(1, 0, 0)),
        (None, "cpu", 2, 0, Share(1, 0, 1)),
        (None, "cpu", 16, 0, Share(1, 0, 12)),
        (3, "cpu", 16, 8, Share(3, 0, 4)),
        (15, "cpu", 16, 0, Share(15, 0, 1)),
        (None, "cuda", 64, 8, Share(8, 1, 1)),
        (2, "cuda", 64, 8, Share(2, 1, 1)),
        (None, "cuda", 1, 1, Share(1, 1, 0)),
    ],
)
def test_division(concurrency: int | None, device: str, cpus: int, gpus: int, share: Share) -> None:
    assert divide(concurrency, device, cpus, gpus) == share
    # Something must be left to decode with.
    assert share.encoders * share.cpus < cpus


@pytest.mark.parametrize(
    ("concurrency", "device", "cpus", "gpus", "says"),
    [
        (2, "cpu", 2, 0, "--concurrency 2: each encoder takes a CPU, and one decodes; Ray has 2"),
        (None, "cuda", 8, 0, "each encoder takes a GPU; Ray has 0"),
        (3, "cuda", 8, 2, "--concurrency 3: each encoder takes a GPU; Ray has 2"),
    ],
)
def test_divisions_that_are_refused(
    concurrency: int | None, device: str, cpus: int, gpus: int, says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        divide(concurrency, device, cpus, gpus)


def test_the_largest_budget_bounds_a_batch(folder: Path) -> None:
    """Bytes of a batch's pixels, which memory is planned by: four rows a token."""
    stage = decoder(folder, batch_tokens=max(BUDGETS), dtype=torch.bfloat16)
    assert stage.batch_bytes == max(BUDGETS) * 4 * 1176 * 2
