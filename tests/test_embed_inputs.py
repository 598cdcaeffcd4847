"""What `embed` reads and keeps: listings against folders made here, the list of inputs and the
state of a job against what was written, and refusals by their message.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3compile.errors import InputError, InputNotFoundError, OperationError, RequestError
from m3compile.integrations.ray.data.find import Listing, list_inputs, resolve_inputs
from m3compile.integrations.ray.data.inputs import SHARD_ROWS, Inputs, Source, write_list
from m3compile.integrations.ray.data.job import (
    FOLDER,
    Settings,
    Work,
    attempt,
    file_of,
    locked,
    open_inputs,
    open_job,
    remaining,
)


def touch(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return [str(folder / name) for name in names]


def listed(*inputs: object) -> tuple[list[str], Listing]:
    listing = Listing()
    return list(list_inputs(resolve_inputs([str(name) for name in inputs]), listing)), listing


# Listings.


def test_a_folder_is_listed_with_all_below_it(tmp_path: Path) -> None:
    expected = touch(tmp_path, "a/2.PNG", "a/b/1.jpeg", "c.jpg", "d/e/f/g.webp")
    touch(tmp_path, "a/notes.txt", "jpg", "d/.hidden")
    found, listing = listed(tmp_path)
    assert found == expected
    assert (listing.images, listing.parquets, listing.others) == (4, 0, 3)


def test_links_and_pipes(tmp_path: Path) -> None:
    """A link to a folder could lead round in circles; one that leads nowhere must not get lost."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/gone.jpg").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "in/pipe.jpg")
    assert listed(tmp_path / "in")[0] == [
        str(tmp_path / "in/gone.jpg"),
        str(tmp_path / "in/pipe.jpg"),
    ]


def test_files_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = touch(tmp_path, "1.jpg", "2.jpg", "[3].jpg")
    monkeypatch.chdir(tmp_path)
    assert listed("1.jpg", "2.jpg", "1.jpg")[0] == [one, two]
    assert sorted(listed("*.jpg")[0]) == sorted([one, two, three])
    # A name that is there is no pattern.
    assert listed("[3].jpg")[0] == [three]


@pytest.mark.parametrize(
    ("names", "inputs", "says"),
    [
        (["a.jpg", "b.parquet"], ["."], "give one kind a job"),
        (["a.txt"], ["a.txt"], "neither an image nor a Parquet file"),
        (["d/a.jpg"], ["d", "d/a.jpg"], "lies in"),
    ],
)
def test_inputs_that_do_not_go_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    inputs: list[str],
    says: str,
) -> None:
    touch(tmp_path, *names)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=says):
        listed(*inputs)


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    for name in ("gone", "*.jpg"):
        with pytest.raises(InputNotFoundError, match="no such file or folder"):
            listed(tmp_path / name)


# The list of inputs.


def make_list(tmp_path: Path, *inputs: object) -> Inputs:
    target = tmp_path / "list.arrow"
    found = write_list(resolve_inputs([str(name) for name in inputs]), target)
    inputs_read = Inputs(target, found.kind, found.name_type)
    assert sum(inputs_read.shard_rows()) == found.rows
    return inputs_read


def test_files_come_back_shard_by_shard(tmp_path: Path) -> None:
    names = touch(tmp_path / "in", *(f"{index:04}.jpg" for index in range(2 * SHARD_ROWS + 5)))
    inputs = make_list(tmp_path, tmp_path / "in")
    assert list(inputs.shard_rows()) == [SHARD_ROWS, SHARD_ROWS, 5]
    found = [source for shard in range(3) for source in inputs.read(shard, 0, SHARD_ROWS)]
    assert found == [Source(name, name) for name in names]
    assert [source.name for source in inputs.read(1, 3, 5)] == names[SHARD_ROWS + 3 :][:2]


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/in/\xff.jpg"
    (tmp_path / "in").mkdir()
    Path(os.fsdecode(raw)).write_bytes(b"x")
    ((name, image),) = make_list(tmp_path, tmp_path / "in").read(0, 0, 1)
    assert name == f"{tmp_path}/in/\\xff.jpg"
    assert isinstance(image, str)
    assert os.fsencode(image) == raw


def parquet(path: Path, columns: dict[str, Any], rows_per_group: int = 100) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=rows_per_group)
    return path


@pytest.mark.parametrize("ids", [[f"id {index}" for index in range(25)], list(range(25))])
def test_images_in_parquet(tmp_path: Path, ids: list[Any]) -> None:
    images = [bytes([index]) * index if index % 7 else None for index in range(25)]
    extra = {"image": pa.array(images, pa.binary()), "more": ids, "id": ids}
    inputs = make_list(tmp_path, parquet(tmp_path / "in.parquet", extra, rows_per_group=10))
    assert inputs.name_field == pa.field("id", pa.string() if ids[0] == "id 0" else pa.int64())
    assert list(inputs.shard_rows()) == [10, 10, 5]
    found = [source for shard in range(3) for source in inputs.read(shard, 0, 10)]
    assert [source.name for source in found] == ids
    assert [None if each.image is None else bytes(each.image) for each in found] == images
    assert [source.name for source in inputs.read(1, 3, 9)] == ids[13:19]


def test_paths_in_parquet(tmp_path: Path) -> None:
    """Relative ones are meant from the list's own folder; a path that is null has no image."""
    (tmp_path / "in").mkdir()
    paths = ["a.jpg", "/b.jpg", None, "c/d.jpg"]
    inputs = make_list(tmp_path, parquet(tmp_path / "in/list.parquet", {"path": paths}))
    found = list(inputs.read(0, 0, 4))
    assert [source.name for source in found] == paths
    folder = tmp_path / "in"
    images = [source.image for source in found]
    assert images == [f"{folder}/a.jpg", "/b.jpg", None, f"{folder}/c/d.jpg"]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"image": [b"x"]}, "has columns image: binary; expected id"),
        ({"id": [1.5], "image": [b"x"]}, "has columns id: double, image: binary"),
        ({"id": [1], "image": ["x"]}, "image: string"),
        ({"url": ["x"]}, "has columns url: string"),
        ({"path": [1]}, "has columns path: int64"),
    ],
)
def test_columns_that_are_refused(tmp_path: Path, columns: dict[str, Any], says: str) -> None:
    path = parquet(tmp_path / "in.parquet", columns)
    with pytest.raises(InputError, match=says):
        make_list(tmp_path, path)


def test_parquet_files_of_two_kinds(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"path": ["x"]})
    parquet(tmp_path / "b.parquet", {"id": [1], "image": [b"x"]})
    with pytest.raises(InputError, match=r"b\.parquet: has images by int64; .*a\.parquet has"):
        make_list(tmp_path, tmp_path / "*.parquet")


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        make_list(tmp_path, tmp_path / "a.parquet")


def test_nothing_to_embed(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.txt")
    with pytest.raises(InputError, match=r"no images and no Parquet files \(1 other files\)"):
        make_list(tmp_path, tmp_path / "in")


def test_a_parquet_file_that_changed(tmp_path: Path) -> None:
    path = parquet(tmp_path / "in.parquet", {"path": ["a"]})
    inputs = make_list(tmp_path, path)
    parquet(path, {"path": ["a", "b"]})
    with pytest.raises(InputError, match="changed since the job began"):
        list(inputs.read(0, 0, 1))


# A job's state.


def settings(folder: Path, **changes: Any) -> Settings:
    values = {
        "artifact": "0" * 64,
        "inputs": (str(folder),),
        "batch_tokens": 64,
        "dtype": "float32",
    }
    return Settings(**{**values, **changes})


def begin(tmp_path: Path, rows: int = 700, **changes: Any) -> tuple[Path, Inputs]:
    if not (tmp_path / "in").exists():
        touch(tmp_path / "in", *(f"{index:04}.jpg" for index in range(rows)))
    output = tmp_path / "out"
    with locked(output):
        job = open_job(output, settings(tmp_path / "in", **changes))
    return output, open_inputs(output, job)


def write(output: Path, *ranges: tuple[int, int, int]) -> None:
    for each in ranges:
        path = file_of(output, *each)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")


def test_what_remains(tmp_path: Path) -> None:
    output, inputs = begin(tmp_path)
    assert list(remaining(output, inputs)) == [Work(0, [(0, 512)]), Work(1, [(0, 188)])]
    write(output, (0, 0, 10), (0, 10, 50), (0, 400, 512), (1, 1, 188))
    assert list(remaining(output, inputs)) == [Work(0, [(50, 400)]), Work(1, [(0, 1)])]
    write(output, (0, 50, 400), (1, 0, 1))
    assert list(remaining(output, inputs)) == []


def test_half_files_go_and_strangers_stay(tmp_path: Path) -> None:
    output, inputs = begin(tmp_path)
    write(output, (0, 0, 512))
    folder = output / "shard-0000000"
    touch(folder, ".000000000-000000009-ab.partial", "notes.txt")
    assert list(remaining(output, inputs)) == [Work(1, [(0, 188)])]
    assert sorted(os.listdir(folder)) == ["000000000-000000511.parquet", "notes.txt"]


def test_files_that_overlap_are_done_again(tmp_path: Path) -> None:
    output, inputs = begin(tmp_path)
    write(output, (0, 0, 10), (0, 10, 30), (0, 20, 40), (0, 40, 512), (1, 0, 188))
    assert list(remaining(output, inputs)) == [Work(0, [(10, 40)])]
    assert not file_of(output, 0, 10, 30).exists()
    assert not file_of(output, 0, 20, 40).exists()


def test_the_list_is_taken_once(tmp_path: Path) -> None:
    _, before = begin(tmp_path, rows=3)
    touch(tmp_path / "in", "0000a.jpg")
    (tmp_path / "in/0001.jpg").unlink()
    _, after = begin(tmp_path)
    assert list(after.read(0, 0, 9)) == list(before.read(0, 0, 9))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"artifact": "1" * 64}, "artifact is 0000000000000000 there, 1111111111111111 here"),
        ({"inputs": ("/a", "/b")}, "inputs is .* here"),
        ({"batch_tokens": 65}, "batch_tokens is 64 there, 65 here"),
        ({"dtype": "float16"}, "dtype is float32 there, float16 here"),
    ],
)
def test_another_job_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    begin(tmp_path, rows=3)
    with pytest.raises(RequestError, match=f"holds another job: {says}; give another folder"):
        begin(tmp_path, **changes)


def test_a_run_that_ended_while_listing_left_no_job(tmp_path: Path) -> None:
    output = tmp_path / "out"
    touch(output / FOLDER, "inputs.arrow", "lock")
    assert sum(begin(tmp_path, rows=3)[1].shard_rows()) == 3


def test_outputs_that_are_refused(tmp_path: Path) -> None:
    touch(tmp_path, "file", "full/other.parquet", "bad/_m3compile/job.json")
    for name in ("file", "full"):
        with pytest.raises(RequestError, match="not empty, and no output of embed"):
            locked(tmp_path / name).__enter__()
    with pytest.raises(OperationError, match="--output /proc/none"):
        locked(Path("/proc/none")).__enter__()
    with pytest.raises(RequestError, match="not a job of this version"):
        open_job(tmp_path / "bad", settings(tmp_path))


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "out"),
        pytest.raises(RequestError, match="another run is writing there"),
    ):
        locked(tmp_path / "out").__enter__()
    with locked(tmp_path / "out"):
        pass


def test_deaths_are_counted_and_bounded(tmp_path: Path) -> None:
    (output, _) = begin(tmp_path, rows=3)
    for _ in range(2):
        with attempt(output, "decode-7") as deaths:
            assert deaths == 0
    for expected in range(3):
        # Left as a process leaves it that dies.
        assert attempt(output, "decode-7").__enter__() == expected
    with pytest.raises(OperationError, match="3 processes died at decode-7"):
        attempt(output, "decode-7").__enter__()
    begin(tmp_path)
    assert attempt(output, "decode-7").__enter__() == 0
