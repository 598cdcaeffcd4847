"""The adapter under a manager, on the CPU with the compiled program.

Results are compared with the eager tower in float32, item by item, and hits and misses with what
vLLM counts. The managers: ours that follows the protocol, without vLLM and with its classes
importable; and vLLM's own, unchanged, where M3COMPILE_VLLM_PATH names its wheel (or an unpacked
one). Graphs are stand-ins that run again what was captured.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import GOLDEN_CHECKPOINT
from vllm_manager import Manager, OwnManager, own_vllm
from vllm_support import (
    Eager,
    Grid,
    Host,
    VllmTower,
    assert_same,
    double,
    images,
    make_rows,
    multimodal_config,
    videos,
    vllm_config,
)

from m3compile.config import BuildConfig
from m3compile.integrations.vllm import protocol
from m3compile.pipeline import build

BUDGETS = (64, 256, 512)


MakeManager = Callable[[Host, Any], Any]


OURS, OURS_WITH_VLLM, VLLMS = "ours", "ours, vLLM importable", "vLLM's"


@pytest.fixture(params=[OURS, VLLMS])
def make_manager(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeManager]:
    if request.param == OURS:
        # Not importable, also where it is installed.
        monkeypatch.setitem(sys.modules, "vllm", None)
        yield Manager
    elif request.param == OURS_WITH_VLLM:
        defs = ModuleType("vllm.v1.worker.encoder_cudagraph_defs")
        defs.EncoderCudaGraphConfig = type("A", (protocol.GraphConfig,), {})  # type: ignore
        defs.EncoderItemSpec = type("B", (protocol.ItemSpec,), {})  # type: ignore
        defs.EncoderCudaGraphCaptureInputs = type("C", (protocol.CaptureInputs,), {})  # type: ignore
        defs.EncoderCudaGraphReplayBuffers = type("D", (protocol.ReplayBuffers,), {})  # type: ignore
        worker = ModuleType("vllm.v1.worker")
        worker.encoder_cudagraph_defs = defs  # type: ignore[attr-defined]
        for module in (ModuleType("vllm"), ModuleType("vllm.v1"), worker, defs):
            monkeypatch.setitem(sys.modules, module.__name__, module)

        def checked(host: Host, config: Any) -> Manager:
            manager = Manager(host, config)
            assert type(manager.config) is defs.EncoderCudaGraphConfig
            assert type(host.get_encoder_cudagraph_item_specs(images([(1, 4, 4)]))[0]) is (
                defs.EncoderItemSpec
            )
            return manager

        yield checked
    else:
        with own_vllm() as own:

            def make_own(host: Host, config: Any) -> OwnManager:
                assert isinstance(host, own.protocol)
                return OwnManager(own.manager, host, config)

            yield make_own


@pytest.fixture(scope="module")
def eager(golden_artifact: Path) -> Eager:
    return Eager(golden_artifact)


@pytest.fixture(scope="module")
def doubled(golden_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return double(golden_artifact, tmp_path_factory.mktemp("vllm") / "doubled")


def captured(
    make_manager: MakeManager, artifact: Path, config: Any, **options: Any
) -> tuple[Any, Host]:
    host = Host(artifact, config, **options)
    manager = make_manager(host, config)
    manager.capture()
    return manager, host


IMAGES: list[Grid] = [(1, 16, 16), (1, 4, 4), (1, 20, 20), (1, 46, 46), (1, 8, 12), (1, 24, 24)]
CLIPS: list[Grid] = [(2, 8, 8), (12, 8, 8)]


@pytest.mark.parametrize("make_manager", [OURS, OURS_WITH_VLLM, VLLMS], indirect=True)
def test_mixed_images_and_clips(
    make_manager: MakeManager, golden_artifact: Path, eager: Eager
) -> None:
    manager, _ = captured(make_manager, golden_artifact, vllm_config(BUDGETS, 16))
    # 46 x 46 patches are 529 tokens, over the largest budget.
    assert_same(manager.execute(images(IMAGES)), eager(make_rows(IMAGES), IMAGES))
    assert (manager.hits, manager.misses) == (5, 1)
    assert_same(manager.execute(videos(CLIPS, 1)), eager(make_rows(CLIPS, 1), CLIPS))
    assert (manager.hits, manager.misses) == (7, 1)


def test_a_small_image_in_a_large_budget(
    make_manager: MakeManager, golden_artifact: Path, eager: Eager
) -> None:
    """Padding reaches nothing, whatever the buffers held: a full batch goes before, NaN too."""
    manager, _ = captured(make_manager, golden_artifact, vllm_config([512], 16))
    small: list[Grid] = [(1, 4, 4)]
    alone = manager.execute(images(small))
    assert_same(alone, eager(make_rows(small), small))
    full = images([(1, 32, 64)], 2)
    full["pixel_values"][5, 7] = float("nan")
    assert manager.execute(full)[0].isnan().all()
    again = manager.execute(images(small))
    assert torch.equal(again[0], alone[0])
    assert (manager.hits, manager.misses) == (3, 0)


def test_same_rows_other_grids(
    make_manager: MakeManager, golden_artifact: Path, eager: Eager
) -> None:
    manager, _ = captured(make_manager, golden_artifact, vllm_config([64], 16))
    rows = make_rows([(1, 6, 12)])
    batches: list[list[Grid]] = [
        [(1, 4, 4), (1, 4, 6), (1, 4, 8)],
        [(1, 4, 4), (1, 4, 4), (1, 4, 10)],
        [(1, 2, 36)],
        [(1, 6, 12)],
    ]
    for grids in batches:
        got = manager.execute({"pixel_values": rows, "image_grid_thw": torch.tensor(grids)})
        assert_same(got, eager(rows, grids))


def test_many_items_need_many_runs(
    make_manager: MakeManager, golden_artifact: Path, eager: Eager
) -> None:
    manager, _ = captured(make_manager, golden_artifact, vllm_config(BUDGETS, 4))
    grids: list[Grid] = [(1, 2, 2 * (n % 7 + 1)) for n in range(19)]
    assert_same(manager.execute(images(grids)), eager(make_rows(grids), grids))
    assert (manager.hits, manager.misses) == (19, 0)


def test_clips_never_overflow_the_segment_table(
    make_manager: MakeManager, golden_artifact: Path, eager: Eager
) -> None:
    """32 slots: clips of 10 and of 40 segments, 4 tokens each, beside each other."""
    manager, _ = captured(make_manager, golden_artifact, vllm_config(BUDGETS, 16))
    grids: list[Grid] = [(40, 2, 2)] * 5 + [(160, 2, 2), (4, 2, 2)]
    assert_same(manager.execute(videos(grids)), eager(make_rows(grids), grids))
    assert (manager.hits, manager.misses) == (6, 1)


def test_no_slot_to_spare(make_manager: MakeManager, golden_artifact: Path, eager: Eager) -> None:
    manager, _ = captured(make_manager, golden_artifact, vllm_config(BUDGETS, 32))
    grids: list[Grid] = [(4, 4, 4), (5, 4, 4)]
    assert_same(manager.execute(videos(grids)), eager(make_rows(grids), grids))
    assert (manager.hits, manager.misses) == (1, 1)


def test_the_artifacts_budgets_where_the_user_set_none(
    make_manager: MakeManager, golden_artifact: Path, eager: Eager
) -> None:
    manager, _ = captured(make_manager, golden_artifact, vllm_config(max_tokens=300))
    assert (list(manager.budgets), manager.max_items) == ([16, 64, 256], 16)
    grids: list[Grid] = [(1, 16, 16), (1, 32, 34)]
    assert_same(manager.execute(images(grids)), eager(make_rows(grids), grids))
    assert (manager.hits, manager.misses) == (1, 1)


def test_both_modes_agree(make_manager: MakeManager, golden_artifact: Path) -> None:
    """Captured by vLLM, captured by us, and by nobody; images and clips in one call."""
    manager, host = captured(make_manager, golden_artifact, vllm_config(BUDGETS, 16))
    theirs = [*manager.execute(images(IMAGES)), *manager.execute(videos(CLIPS, 1))]
    both = {**images(IMAGES), **videos(CLIPS, 1)}
    for config in (vllm_config(capture=False), vllm_config(enforce_eager=True)):
        other = Host(golden_artifact, config)
        assert_same(other.embed_multimodal(**both), theirs)
    assert_same(host.embed_multimodal(**both), theirs)


def test_two_artifacts_in_one_process(
    make_manager: MakeManager, golden_artifact: Path, doubled: Any
) -> None:
    """The second artifact's embeddings are twice the first's, bit for bit."""
    second, tensors = doubled
    one, host = captured(make_manager, golden_artifact, vllm_config(BUDGETS, 16))
    alone = one.execute(images(IMAGES))
    two, other = captured(make_manager, second, vllm_config([256, 576], 8), tensors=tensors)
    for _ in range(2):
        assert_same(two.execute(images(IMAGES)), [2 * item for item in alone])
        got = one.execute(images(IMAGES))
        assert all(map(torch.equal, got, alone))
    for mine, theirs in zip(
        host.embed_multimodal(**videos(CLIPS)), other.embed_multimodal(**videos(CLIPS)), strict=True
    ):
        assert torch.equal(2 * mine, theirs)
    assert (one.hits, one.misses) == (15, 3)


def test_data_parallel_ranks(golden_artifact: Path, eager: Eager) -> None:
    """vLLM's own sharding over two ranks, each a thread with a host: every rank has every item."""
    with own_vllm(ranks=2) as own:
        mm = multimodal_config(mm_encoder_tp_mode="data")
        hosts = [Host(golden_artifact, vllm_config(BUDGETS, 16, mm=mm)) for _ in range(2)]
        managers = [
            OwnManager(own.manager, host, vllm_config(BUDGETS, 16, tp_size=2, mm=mm))
            for host in hosts
        ]
        for manager in managers:
            manager.capture()
        results: list[Any] = [None, None]

        def serve(rank: int) -> None:
            own.ranks.here.rank = rank
            results[rank] = (
                managers[rank].execute(images(IMAGES)),
                # One item: the other rank has nothing to do, and still gathers.
                managers[rank].execute(images(IMAGES[:1])),
                hosts[rank].embed_multimodal(**videos(CLIPS)),
            )

        threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for captured_items, one_item, embedded in results:
        expected = eager(make_rows(IMAGES), IMAGES)
        assert_same(captured_items, expected)
        assert_same(one_item, expected[:1])
        assert_same(embedded, eager(make_rows(CLIPS), CLIPS))
    assert sum(manager.misses for manager in managers) == 1
    # The oversize image, and two clips: each was encoded by one rank.
    encoders = [host._m3compile.encoder for host in hosts if host._m3compile]
    assert sum(encoder.stats()["items"] for encoder in encoders) == 3


@pytest.mark.gpu
def test_cuda_graphs(tmp_path: Path) -> None:
    """A bfloat16 artifact, captured by a manager and by us: within bounds of eager float32."""
    config = BuildConfig(
        checkpoint=str(GOLDEN_CHECKPOINT), out=str(tmp_path / "cuda"), device="cuda",
        budgets=BUDGETS, max_items=32,
    )  # fmt: skip
    artifact = build(config).path
    pool = torch.cuda.graph_pool_handle()
    options = vllm_config(BUDGETS, 16)
    towers = [VllmTower().place("cuda", torch.bfloat16) for _ in range(2)]
    host = Host(artifact, options, tower=towers[0])
    manager = Manager(
        host, options, "cuda", torch.bfloat16, torch.cuda.CUDAGraph,
        partial(torch.cuda.graph, pool=pool),
    )  # fmt: skip
    manager.capture()
    ours = Host(artifact, vllm_config(capture=False), tower=towers[1])
    expected = Eager(artifact)(make_rows(IMAGES), IMAGES)
    batch = images(IMAGES)
    batch["pixel_values"] = batch["pixel_values"].cuda()
    for got in (manager.execute(batch), manager.execute(batch), ours.embed_multimodal(**batch)):
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.cosine_similarity(mine.float().cpu(), theirs, dim=1).min() >= 0.999
    assert (manager.hits, manager.misses) == (10, 2)
