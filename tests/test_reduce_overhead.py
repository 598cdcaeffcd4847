"""The engine `reduce-overhead` on a CPU, against the goldens and in a fresh process.

One artifact, compiled once. On a CPU there are no graphs; the program and its caches are the same.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN_CHECKPOINT, GOLDENS
from crafted import copy, edited
from gpu_support import run_python
from safetensors.torch import load_file

from m3compile.artifact import read_manifest
from m3compile.config import BuildConfig
from m3compile.errors import ArtifactDamagedError
from m3compile.loading import load, load_weights
from m3compile.pipeline import build
from m3compile.verify import relative_error

BUDGETS = (16, 64)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "reduced"
    config = BuildConfig(
        checkpoint=str(GOLDEN_CHECKPOINT),
        out=str(out),
        device="cpu",
        budgets=BUDGETS,
        max_items=8,
        engine="reduce-overhead",
    )
    return build(config).path


def test_a_fresh_process_starts_warm_and_gives_the_goldens(artifact: Path) -> None:
    code = """
import json, sys
from safetensors.torch import load_file
import m3compile
encoder = m3compile.load(sys.argv[1])
from torch._dynamo.utils import counters
compiled = dict(counters["stats"]), dict(counters["inductor"])
cases, errors = load_file(sys.argv[2]), {}
for name in sorted({key.split(".")[0] for key in cases}):
    pixels, grids = cases[name + ".pixel_values"], cases[name + ".grid_thw"]
    got = m3compile.runtime.torch.cat(encoder.encode(pixels, grids))
    expected = cases[name + ".output"]
    errors[name] = float((got - expected).norm() / expected.norm())
print(json.dumps({
    "errors": errors,
    "misses": compiled[1].get("fxgraph_cache_miss", 0),
    "hits": compiled[1].get("fxgraph_cache_hit", 0),
    "later": counters["stats"]["unique_graphs"] - compiled[0]["unique_graphs"],
    "builder": [name for name in ("tower", "build") if "m3compile." + name in sys.modules],
    "exact_runs": encoder.stats()["exact_runs"],
}))
"""
    done = run_python(code, artifact, GOLDENS / "tiny-m3" / "cases.safetensors")
    found = json.loads((done.stdout.splitlines() or ["{}"])[-1] or "{}")
    assert found, done.stderr
    assert max(found["errors"].values()) < 1e-5, found["errors"]
    assert found["exact_runs"] > 0
    assert found["hits"] > 0, found
    assert (found["misses"], found["later"], found["builder"]) == (0, 0, [])


def test_weights_lie_in_one_file_alone(artifact: Path) -> None:
    with zipfile.ZipFile(artifact / "encoder.exported.pt2") as archive:
        stored = [info for info in archive.infolist() if "/data/weights/weight" in info.filename]
        assert sum(info.file_size for info in stored) == 0
    held = sum(tensor.nbytes for tensor in load_file(artifact / "weights.safetensors").values())
    assert (artifact / "weights.safetensors").stat().st_size < 1.1 * held


def test_an_item_of_one_token_and_neighbours_in_a_bucket(artifact: Path) -> None:
    a, b = torch.randn(64, 1176), torch.randn(96, 1176)
    one = torch.randn(4, 1176)
    with load(artifact) as encoder:
        alone = encoder.encode_at(a, [(1, 8, 8)], 64)[0]
        assert torch.equal(encoder.encode_at([b, a], [(1, 8, 12), (1, 8, 8)], 64)[1], alone)
        exact = encoder.encode_at(one, [(1, 2, 2)], None)[0]
        assert exact.shape == (1, encoder.manifest.tower.output_size)
        assert relative_error(exact, encoder.encode_at(one, [(1, 2, 2)], 16)[0]) < 1e-5


def test_a_changed_cache_is_refused_before_it_is_read(artifact: Path, tmp_path: Path) -> None:
    folder = copy(artifact, tmp_path / "changed")
    path = folder / "compile_cache.zip"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactDamagedError, match=r"compile_cache\.zip: found SHA-256"):
        load(folder)


def test_an_artifact_without_its_cache_is_refused(artifact: Path, tmp_path: Path) -> None:
    folder = copy(artifact, tmp_path / "less")
    with edited(folder) as manifest:
        del manifest["files"]["compile_cache.zip"]
    with pytest.raises(ArtifactDamagedError, match=r"files does not list compile_cache\.zip"):
        load(folder)


def test_other_weights_are_refused_by_name(artifact: Path) -> None:
    from m3compile.reduce_overhead import ReducedProgram

    weights = load_weights(artifact, read_manifest(artifact), torch.device("cpu"))
    removed = weights.pop("layers.0.fc1.bias")
    exported = artifact / "encoder.exported.pt2"
    with pytest.raises(ArtifactDamagedError, match=r"missing \['layers.0.fc1.bias'\]"):
        ReducedProgram(exported, None, weights, torch.device("cpu"))
    weights |= {"layers.0.fc1.bias": removed, "other": removed}
    with pytest.raises(ArtifactDamagedError, match="'other'"):
        ReducedProgram(exported, None, weights, torch.device("cpu"))


def test_the_users_own_compiler_caches_are_left_alone(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    load(artifact).close()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    assert "TRITON_CACHE_DIR" not in os.environ
    assert not list(tmp_path.rglob("*.so"))


def test_the_thread_of_the_graphs_has_trees_of_its_own() -> None:
    # Needs no CUDA: a place for trees, not a graph.
    from torch._inductor.cudagraph_trees import get_container

    from m3compile.reduce_overhead import graph_thread

    with graph_thread() as one, graph_thread() as other:
        mine = one.submit(get_container, 0).result()
        assert one.submit(get_container, 0).result() is mine
        assert other.submit(get_container, 0).result() is not mine
        assert get_container(0) is not mine
