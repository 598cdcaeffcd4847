"""`embed` as a command, on one Ray cluster: its output against the inputs, every one of them once,
and against `Encoder.encode` of the same image; killed and resumed, and with a decoder that crashes;
refusals against the exit codes of the contract.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import torch
from conftest import GOLDENS
from crafted import copy
from helpers import BOUND, error_of
from terminal import Refused, Run, Terminal

import m3compile
from m3compile.config import PreprocessConfig
from m3compile.images import load_images

GOOD = tuple(GOLDENS / "images" / name for name in ("tiny.png", "gray.png", "wide.png"))
ROWS = 40
BROKEN = (5, 23)
# Two or three images a batch, so that forty fill a good many.
SMALL = ("--batch-tokens", "64")

# A Pillow that dies of some files, as a codec with a fault would; workers of the cluster have it.
CRASHING_PILLOW = """
import os, signal, PIL.Image

pillows_own = PIL.Image.open

def open_or_die(file, *args, **settings):
    if file.read(5) == b"CRASH":
        os.kill(os.getpid(), signal.SIGKILL)
    file.seek(0)
    return pillows_own(file, *args, **settings)

PIL.Image.open = open_or_die
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Terminal(capsys).run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Terminal(capsys).refused


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two CPUs, to which this process is connected."""
    import ray

    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        (Path(folder) / "sitecustomize.py").write_text(CRASHING_PILLOW)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [folder, str(GOLDENS.parents[1]), *([before] if before else [])]
        )
        try:
            context = ray.init(
                "local",
                num_cpus=2,
                object_store_memory=256 << 20,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=folder,
            )
            yield context.address_info["gcs_address"]
        finally:
            ray.shutdown()
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def make_images(folder: Path, rows: int = ROWS, broken: tuple[int, ...] = BROKEN) -> list[str]:
    folder.mkdir()
    for index in range(rows):
        data = b"broken" if index in broken else GOOD[index % len(GOOD)].read_bytes()
        (folder / f"{index:03}.png").write_bytes(data)
    return sorted(str(path) for path in folder.iterdir())


def read(output: Path) -> dict[Any, dict[str, Any]]:
    """The rows of an output by path or id; each may be there once."""
    table = pads.dataset(output, format="parquet").to_table()
    name, *rest = table.schema.names
    assert rest == ["token_count", "embeddings", "error"]
    rows = {row[name]: row for row in table.to_pylist()}
    assert len(rows) == len(table)
    return rows


def assert_embedded(row: dict[str, Any], encoder: m3compile.Encoder, image: Path) -> None:
    assert row["error"] is None
    flat = torch.tensor(np.array(row["embeddings"], np.float32))
    (wanted,) = encoder.encode(*load_images([image], PreprocessConfig()))
    assert row["token_count"] == len(wanted)
    assert error_of(flat.view(row["token_count"], -1), wanted) <= BOUND


def test_a_folder_killed_and_resumed(
    run: Run,
    cluster: str,
    golden_artifact: Path,
    encoder: m3compile.Encoder,
    tmp_path: Path,
) -> None:
    paths = make_images(tmp_path / "in")
    (tmp_path / "in/notes.txt").write_bytes(b"")
    output = tmp_path / "out"
    words = ["embed", golden_artifact, "--input", tmp_path / "in", "--output", output, *SMALL]
    command = [sys.executable, "-m", "m3compile", *map(str, words), "--address", cluster]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(output.glob("shard-*/*.parquet")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    written = len(list(output.glob("shard-*/*.parquet")))

    code, out, err = run(*words, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["rows"] == ROWS
    assert report["skipped"] == 1
    assert 0 < report["rows_before"] == ROWS - report["rows_written"]
    assert "1 files are not images, left out" in err
    rows = read(output)
    assert sorted(rows) == paths
    for index, path in enumerate(paths):
        if index in BROKEN:
            assert "not recognised as an image" in rows[path]["error"]
            assert (rows[path]["token_count"], rows[path]["embeddings"]) == (0, None)
        else:
            assert_embedded(rows[path], encoder, GOOD[index % len(GOOD)])
    # A third run has nothing to do, and leaves everything as it was.
    files = {path: path.stat().st_mtime_ns for path in output.glob("shard-*/*")}
    assert len(files) > written
    code, out, _ = run(*words)
    assert code == 0
    assert out.startswith(f"Wrote {output}: 0 rows (40 were there), 0 with an error, 0 tokens")
    assert files == {path: path.stat().st_mtime_ns for path in output.glob("shard-*/*")}


def test_parquet_with_an_image_that_crashes_the_decoder(
    run: Run,
    cluster: str,
    golden_artifact: Path,
    encoder: m3compile.Encoder,
    tmp_path: Path,
) -> None:
    images: list[bytes | None] = [path.read_bytes() for path in (*GOOD, *GOOD)]
    images[1], images[4] = None, b"CRASH"
    table = pa.table({"id": range(10, 16), "image": pa.array(images, pa.binary())})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=3)
    words = ("--input", tmp_path / "*.parquet", "--output", tmp_path / "out")
    code, out, err = run("embed", golden_artifact, *words)
    assert code == 0
    assert out.startswith(f"Wrote {tmp_path}/out: 6 rows, 2 with an error, ")
    assert "warning: 2 rows have no embeddings; column error says why" in err
    rows = read(tmp_path / "out")
    assert sorted(rows) == list(range(10, 16))
    assert rows[11]["error"] == "no image: the input is null"
    assert "the process that decoded it crashed" in rows[14]["error"]
    for index in (0, 2, 3, 5):
        assert_embedded(rows[10 + index], encoder, GOOD[index % len(GOOD)])


def test_what_stops_a_job_loses_nothing(
    run: Run, refused: Refused, cluster: str, golden_artifact: Path, tmp_path: Path
) -> None:
    paths = make_images(tmp_path / "in", 12, broken=(0, 1))
    (tmp_path / "list").mkdir()
    pq.write_table(pa.table({"path": paths[:6]}), tmp_path / "list/a.parquet")
    pq.write_table(pa.table({"path": paths[6:]}), tmp_path / "list/b.parquet")
    output = tmp_path / "out"
    words = ("embed", golden_artifact, "--input", tmp_path / "list", "--output", output)
    assert "2 rows have an error, --max-errors is 1" in refused(4, *words, "--max-errors", 1)
    # A list that changed no longer says which rows are done.
    shutil.rmtree(output / "shard-0000001", ignore_errors=True)
    (tmp_path / "list/b.parquet").rename(tmp_path / "kept")
    pq.write_table(pa.table({"path": paths[:2]}), tmp_path / "list/b.parquet")
    assert "list/b.parquet changed since the job began" in refused(2, *words)
    (tmp_path / "kept").rename(tmp_path / "list/b.parquet")
    (output / "shard-0000001").write_bytes(b"")
    assert f"{output}/shard-0000001: cannot be read: Not a directory" in refused(4, *words)
    (output / "shard-0000001").unlink()
    assert run(*words)[0] == 0
    assert sorted(read(output)) == paths


def test_an_encoder_that_cannot_start(
    refused: Refused,
    cluster: str,
    golden_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fine where the command looked at it, damaged where the encoder opens it."""
    from m3compile.integrations.ray.data import run as run_module

    copy(golden_artifact, tmp_path / "artifact")
    make_images(tmp_path / "in", 2)
    real = run_module.divide_cluster

    def damage(concurrency: int | None, device: str) -> Any:
        (tmp_path / "artifact/weights.safetensors").unlink()
        return real(concurrency, device)

    monkeypatch.setattr(run_module, "divide_cluster", damage)
    words = ("--input", tmp_path / "in", "--output", tmp_path / "out")
    line = refused(3, "embed", tmp_path / "artifact", *words)
    assert "weights.safetensors: missing" in line


# Refusals; no Ray is started.


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def never(*args: object, **settings: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", never)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--input", "gone"], "--input gone: no such file or folder"),
        (["--input", "in", "--concurrency", "0"], "--concurrency"),
        (["--input", "in", "--dtype", "bfloat16"], "--dtype"),
        (["--input", "in", "--batch-tokens", "65537"], "allowed: at most 16384"),
        (["--input", "in", "--max-errors", "-1"], "--max-errors"),
        (["--input", "in", "--output", "in/out"], "one lies in the other"),
        (["--input", "in", "--output", "."], "one lies in the other"),
        (["--input", "in", "--output", "link/out"], "one lies in the other"),
        (["--input", "link", "--output", "in/out"], "one lies in the other"),
        (["--input", "in", "in/a.png"], "lies in"),
        ([], "--input"),
    ],
)
def test_requests_that_are_wrong(
    refused: Refused,
    golden_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    says: str,
) -> None:
    (tmp_path / "in").mkdir()
    shutil.copy(GOOD[0], tmp_path / "in/a.png")
    (tmp_path / "link").symlink_to("in")
    monkeypatch.chdir(tmp_path)
    options = words if "--output" in words else [*words, "--output", "out"]
    assert says in refused(2, "embed", golden_artifact, *options)
    assert sorted(os.listdir(tmp_path)) == ["in", "link"]
    assert os.listdir(tmp_path / "in") == ["a.png"]


@pytest.mark.usefixtures("no_ray")
def test_no_artifact(refused: Refused, tmp_path: Path) -> None:
    words = ("--input", tmp_path, "--output", tmp_path / "out")
    assert "no such artifact folder" in refused(3, "embed", tmp_path / "gone", *words)


@pytest.mark.parametrize("package", ["ray", "pyarrow", "PIL"])
def test_a_missing_package_is_named(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else real(name)
    )
    line = refused(2, "embed", "artifact", "--input", tmp_path, "--output", tmp_path / "out")
    assert "pip install 'm3compile[serve]'" in line
