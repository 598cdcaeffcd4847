"""Each method of the protocol by itself: what it returns for every form of its arguments.

Values are compared with the golden artifact's sizes and with the batch that was given; names of
methods and arguments with vLLM's own protocol, where M3COMPILE_VLLM_PATH names its wheel.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from vllm_manager import own_vllm
from vllm_support import Host, images, make_rows, multimodal_config, videos, vllm_config

from m3compile.artifact import read_manifest
from m3compile.config import TowerConfig
from m3compile.errors import ArtifactIncompatibleError, InputError, RequestError
from m3compile.integrations.vllm import EncoderMixin
from m3compile.integrations.vllm.capture import CaptureBuffers
from m3compile.integrations.vllm.items import select_items

CPU = torch.device("cpu")
GRIDS = [(1, 4, 4), (3, 2, 4), (1, 6, 2), (1, 2, 2)]


@pytest.fixture(scope="module")
def host(golden_artifact: Path) -> Host:
    return Host(golden_artifact, vllm_config())


def test_signatures_are_vllms() -> None:
    with own_vllm() as own:
        names = [name for name in vars(own.protocol) if name.startswith(("get_", "prepare_"))]
        names += [name for name in vars(own.protocol) if name.startswith(("encoder_", "select_"))]
        names += ["postprocess_encoder_output"]
        assert len(names) == 11
        for name in names:
            theirs = inspect.signature(getattr(own.protocol, name)).parameters
            mine = inspect.signature(getattr(EncoderMixin, name)).parameters
            assert list(mine) == list(theirs), name
            assert [p.default for p in mine.values()] == [p.default for p in theirs.values()]


def test_config(host: Host, golden_artifact: Path) -> None:
    config = host.get_encoder_cudagraph_config()
    assert config.modalities == ["image", "video"]
    assert config.buffer_keys == ["pixel_values", "segments"]
    assert set(config.padding_logics) == set(config.buffer_keys)
    assert config.out_hidden_size == 96
    assert config.max_frames_per_video == host.get_max_frames_per_video() == 32 * 4
    assert list(config.paths) == ["default"]
    assert config.capture_axes == ()
    still = Host(golden_artifact, vllm_config(mm=multimodal_config(video=0)))
    assert still.get_encoder_cudagraph_config().modalities == ["image"]


@pytest.mark.parametrize(
    ("tokens", "length", "expected"),
    [(8192, 4096, 4096), (2048, 4096, 2048), (99999, 99999, 16384)],
)
def test_budget_range(host: Host, tokens: int, length: int, expected: int) -> None:
    config = vllm_config(max_tokens=tokens, max_model_len=length)
    assert host.get_encoder_cudagraph_budget_range(config) == (64, expected)


def forms(grids: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """The same batch, as vLLM may hand it over."""
    batch = images(grids)
    rows = batch["pixel_values"]
    parts = list(rows.split([t * h * w for t, h, w in grids]))
    return [
        batch,
        {**batch, "image_grid_thw": [list(grid) for grid in grids]},
        {**batch, "image_grid_thw": batch["image_grid_thw"].to(torch.int32)},
        {**batch, "pixel_values": parts},
        {"pixel_values_videos": rows, "video_grid_thw": batch["image_grid_thw"]},
    ]


def test_item_specs(host: Host) -> None:
    for batch in forms(GRIDS):
        specs = host.get_encoder_cudagraph_item_specs(batch)
        assert [spec.input_size for spec in specs] == [16, 24, 12, 4]
        assert [spec.output_tokens for spec in specs] == [4, 6, 3, 1]
        assert [spec.get_path_output_tokens("default") for spec in specs] == [4, 6, 3, 1]
    assert host.get_encoder_cudagraph_item_specs(forms([(1, 2, 2)])[0])[0].input_size == 4


def test_modality(host: Host) -> None:
    assert host.get_input_modality(images([(1, 2, 2)])) == "image"
    assert host.get_input_modality(videos([(1, 2, 2)])) == "video"
    for batch in ({}, {**images([(1, 2, 2)]), **videos([(1, 2, 2)])}):
        with pytest.raises(InputError, match="expected pixel_values with image_grid_thw or"):
            host.get_input_modality(batch)
    with pytest.raises(InputError, match="needs both pixel_values and image_grid_thw"):
        host.get_encoder_cudagraph_item_specs({"pixel_values": torch.zeros(4, 1176)})


@given(st.lists(st.integers(0, len(GRIDS) - 1), max_size=6), st.integers(0, 4))
def test_selection(indices: list[int], form: int) -> None:
    """Any order, repeats, none; the selection of a selection is one too."""
    batch = forms(GRIDS)[form]
    whole = make_rows(GRIDS).split([t * h * w for t, h, w in GRIDS])
    picked = select_items(batch, indices, TowerConfig())
    rows_key, grids_key = picked
    expected = torch.cat([whole[index] for index in indices]) if indices else whole[0][:0]
    assert torch.equal(picked[rows_key], expected)
    assert isinstance(picked[grids_key], type(batch[grids_key]))
    grids = torch.as_tensor(picked[grids_key], dtype=torch.long).reshape(-1, 3)
    assert grids.tolist() == [list(GRIDS[index]) for index in indices]
    again = select_items(picked, range(len(indices)), TowerConfig())
    assert torch.equal(again[rows_key], expected)


def test_neighbours_are_not_copied() -> None:
    batch = images(GRIDS)
    picked = select_items(batch, [1, 2], TowerConfig())["pixel_values"]
    assert picked.data_ptr() == batch["pixel_values"][16:].data_ptr()


def capture(host: Host, budget: int, items: int = 8) -> dict[str, Tensor]:
    values: dict[str, Tensor] = host.prepare_encoder_cudagraph_capture_inputs(
        budget, items, 8, CPU, torch.float32, "default", ()
    ).values
    return values


def test_capture_inputs(golden_artifact: Path) -> None:
    host, other = (Host(golden_artifact, vllm_config()) for _ in range(2))
    large, small = capture(host, 256), capture(host, 64)
    assert large["pixel_values"].shape == (1024, 1176)
    assert small["pixel_values"].shape == (256, 1176)
    for values, budget in ((large, 256), (small, 64), (capture(host, 5), 5)):
        table = values["segments"]
        assert (table.shape, table.dtype) == ((32, 3), torch.int32)
        tokens = int(table.prod(1).sum()) // 4
        assert 0 < tokens <= budget
        assert host.encoder_cudagraph_forward(values).shape == (budget, 96)
        assert set(values) == {"pixel_values", "segments"}
    # One tensor holds the rows of all budgets of a host, none those of two.
    assert small["pixel_values"].data_ptr() == large["pixel_values"].data_ptr()
    assert capture(other, 64)["pixel_values"].data_ptr() != large["pixel_values"].data_ptr()


def test_captures_that_are_refused(host: Host) -> None:
    with pytest.raises(RequestError, match=r"max_vision_items_per_batch is 33.*32 slots.*--max-i"):
        capture(host, 64, 33)
    with pytest.raises(RequestError, match=r"encoder_cudagraph_token_budgets has 16385.*16384"):
        capture(host, 16385)
    for device, dtype, message in (
        ("cpu", torch.bfloat16, "in torch.bfloat16, the artifact computes in torch.float32"),
        ("cuda", torch.float32, "captures on cuda, the artifact runs on cpu"),
    ):
        with pytest.raises(ArtifactIncompatibleError, match=message):
            host.prepare_encoder_cudagraph_capture_inputs(64, 8, 8, torch.device(device), dtype)


def test_replay_buffers(host: Host) -> None:
    """Pixels as they came, and one table; a clip of nine frames is three segments."""
    batch = videos([(9, 2, 4), (1, 4, 4)])
    values = host.prepare_encoder_cudagraph_replay_buffers(batch, 8, 8).values
    assert list(values) == ["pixel_values", "segments"]
    assert values["pixel_values"].data_ptr() == batch["pixel_values_videos"].data_ptr()
    table = values["segments"].tolist()
    assert table[:4] == [[4, 2, 4], [4, 2, 4], [1, 2, 4], [1, 4, 4]]
    assert table[4:] == [[0, 0, 0]] * 28
    with pytest.raises(InputError, match="33 segments, the artifact's table 32 slots"):
        host.prepare_encoder_cudagraph_replay_buffers(videos([(129, 2, 2)]), 8, 8)
    with pytest.raises(InputError, match="rows"):
        host.prepare_encoder_cudagraph_replay_buffers(
            {**batch, "video_grid_thw": torch.tensor([(9, 2, 4)])}, 8, 8
        )


def test_padding_logics(host: Host) -> None:
    """Rows past a batch's stay as they were, slots past it become zero; dtypes are converted."""
    logics = host.get_encoder_cudagraph_config().padding_logics
    rows = torch.ones(6, 1176)
    logics["pixel_values"](rows, torch.full((2, 1176), 3, dtype=torch.float64))
    assert rows[:, 0].tolist() == [3, 3, 1, 1, 1, 1]
    table = torch.ones((3, 3), dtype=torch.int32)
    logics["segments"](table, torch.tensor([[4, 2, 2]]))
    assert table.tolist() == [[4, 2, 2], [0, 0, 0], [0, 0, 0]]


@given(
    st.integers(1, 32),
    st.sampled_from([64, 256, 512]),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=32),
)
def test_no_batch_that_fits_needs_more_slots(
    golden_artifact: Path, max_items: int, largest: int, clips: list[tuple[int, int]]
) -> None:
    buffers = CaptureBuffers(read_manifest(golden_artifact), CPU)
    buffers.inputs(largest, max_items, CPU, torch.float32)
    used = slots = 0
    for segments, tokens_each in clips[:max_items]:
        price = buffers.budget_tokens(segments, segments * tokens_each)
        assert price >= segments * tokens_each
        if used + price <= largest:
            used, slots = used + price, slots + segments
    assert slots <= 32


@pytest.mark.parametrize("clone", [True, False])
def test_postprocessing(host: Host, clone: bool) -> None:
    output = torch.arange(10.0).reshape(10, 1)
    found: list[Tensor | None] = [None] * 4
    host.postprocess_encoder_output({"default": output}, [2, 0], [3, 9, 4, 9], found, clone)
    assert found[2] is not None
    assert found[0] is not None
    assert (found[1], found[3]) == (None, None)
    assert (found[2].flatten().tolist(), found[0].flatten().tolist()) == ([0, 1, 2, 3], [4, 5, 6])
    output.zero_()
    assert bool(found[0].any()) is clone


def test_no_items(host: Host) -> None:
    none = host.select_encoder_cudagraph_items(images(GRIDS), [])
    assert host.get_encoder_cudagraph_item_specs(none) == []
    assert host.encoder_eager_forward(none).shape == (0, 96)
    assert host.embed_multimodal(**none) == ()
    assert host.embed_multimodal() == ()
