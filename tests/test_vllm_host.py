"""A host and its artifact: bound, compared, refused.

Weights are compared with a tower that was loaded from the golden checkpoint as vLLM loads it;
messages with the names of what differs and of what to change.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm_support import (
    CONFIG,
    Eager,
    Host,
    VllmTower,
    assert_same,
    double,
    golden_tensors,
    images,
    make_rows,
    multimodal_config,
    vllm_config,
    with_manifest,
)

from m3compile.artifact import Precision, read_manifest
from m3compile.errors import (
    ArtifactIncompatibleError,
    ArtifactNotFoundError,
    CheckpointError,
    RequestError,
)
from m3compile.integrations.vllm import binding
from m3compile.integrations.vllm.checks import check_host
from m3compile.integrations.vllm.options import captured_by, fill_budgets
from m3compile.integrations.vllm.plugin import ARTIFACT_VARIABLE
from m3compile.runtime import Encoder


def changed_config(section: str | None, **values: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    (config[section] if section else config).update(values)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed_config("vision_config", num_attention_heads=4), "num_attention_heads is 4 in"),
        (changed_config("vision_config", layer_norm_eps=1e-6), "layer_norm_eps is 1e-06 in the h"),
        (changed_config("vision_config", vision_segment_max_frames=8), "max_frames is 8 in the"),
        (changed_config("text_config", hidden_size=128), "output_size is 128 in the host, 96 in"),
        (changed_config(None, projector_hidden_size=64), "projector_hidden_size is 64 in the host"),
    ],
)
def test_another_config(golden_artifact: Path, config: Any, message: str) -> None:
    """As a mapping and as an object of transformers."""
    for form in (config, SimpleNamespace(to_dict=lambda: config)):
        with pytest.raises(ArtifactIncompatibleError, match=message) as raised:
            Host(golden_artifact, vllm_config(), hf_config=form)
        assert "m3compile build" in str(raised.value)


def test_a_config_of_another_model(golden_artifact: Path) -> None:
    config = changed_config("vision_config", hidden_act="gelu_pytorch_tanh")
    with pytest.raises(CheckpointError, match="hidden_act"):
        Host(golden_artifact, vllm_config(), hf_config=config)


def test_a_tower_that_says_otherwise(golden_artifact: Path) -> None:
    """Also for a host without a config."""
    tower = VllmTower()
    tower.dtype = torch.bfloat16
    tower.vision_model.vision_segment_max_frames = None
    with pytest.raises(ArtifactIncompatibleError) as raised:
        Host(golden_artifact, vllm_config(), tower=tower, hf_config=None)
    assert "vision_segment_max_frames is None in the host, 4 in" in str(raised.value)
    assert "dtype is torch.bfloat16 in the host, torch.float32 in" in str(raised.value)


def test_another_engine(golden_artifact: Path, tmp_path: Path) -> None:
    import msgspec

    build = msgspec.structs.replace(read_manifest(golden_artifact).build, engine="reduce-overhead")
    entry = next(iter(read_manifest(golden_artifact).files.values()))
    files = dict.fromkeys(
        ("encoder.exported.pt2", "compile_cache.zip", "weights.safetensors"), entry
    )
    artifact = with_manifest(golden_artifact, tmp_path / "other", build=build, files=files)
    with pytest.raises(ArtifactIncompatibleError, match="engine reduce-overhead"):
        Host(artifact, vllm_config())


def test_no_artifact(golden_artifact: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ArtifactNotFoundError):
        Host(tmp_path / "none", vllm_config())
    monkeypatch.delenv(ARTIFACT_VARIABLE, raising=False)
    host = Host(golden_artifact)
    host.m3compile_artifact = None
    with pytest.raises(RequestError, match=ARTIFACT_VARIABLE):
        host.get_encoder_cudagraph_config()
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(golden_artifact))
    assert host.get_encoder_cudagraph_config().out_hidden_size == 96


def change(tower: VllmTower, what: str) -> str:
    """Make one tensor differ; its name."""
    layer = tower.vision_model.encoder.layers[1]
    if what == "value":
        layer.self_attn.qkv_proj.bias[200] += 1e-6
        return "layers.1.self_attn.qkv_proj.bias has other values"
    if what == "dtype":
        tower.patch_merge_mlp.linear_1.to(torch.bfloat16)
        return "patch_merge_mlp.linear_1.weight is torch.bfloat16 in the host, torch.float32"
    if what == "shape":
        layer.fc1 = nn.Linear(160, 64)
        return r"layers.1.fc1.weight has shape \[64, 160\] in the host, \[320, 160\]"
    if what == "missing":
        del tower.multi_modal_projector.linear_2
        return "multi_modal_projector.linear_2.weight is missing from the host"
    if what == "meta":
        layer.fc2.to("meta")
        return "layers.1.fc2.weight has no values"
    assert what == "extra"
    tower.vision_model.post_layernorm = nn.LayerNorm(160)
    return "the artifact has no vision_tower.vision_model.post_layernorm.bias"


@pytest.mark.parametrize("what", ["value", "dtype", "shape", "missing", "extra", "meta"])
def test_other_weights_are_never_served(golden_artifact: Path, what: str) -> None:
    host = Host(golden_artifact, vllm_config())
    message = change(host.vision_tower, what)
    with pytest.raises(ArtifactIncompatibleError, match=message):
        host.m3compile_check_weights()
    for use in (
        host.get_encoder_cudagraph_config,
        lambda: host.embed_multimodal(**images([(1, 4, 4)])),
        lambda: host.encoder_eager_forward(images([(1, 4, 4)])),
        lambda: host.prepare_encoder_cudagraph_capture_inputs(
            64, 8, 8, torch.device("cpu"), torch.float32
        ),
    ):
        with pytest.raises(ArtifactIncompatibleError, match=message):
            use()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_has_its_part(golden_artifact: Path, rank: int) -> None:
    tower = VllmTower(tp_size=2, tp_rank=rank)
    host = Host(golden_artifact, vllm_config(), tower=tower)
    host.m3compile_check_weights()
    for linear in tower.modules():
        if isinstance(linear, nn.Linear):
            linear.tp_rank = 1 - rank
    with pytest.raises(ArtifactIncompatibleError, match=r"qkv_proj\.weight has other values"):
        host.m3compile_check_weights()


def test_weights_are_held_once(golden_artifact: Path, tmp_path: Path) -> None:
    """Also across a reload, which writes the host's own tensors and is compared again."""
    host = Host(golden_artifact, vllm_config(capture=False))
    host.m3compile_check_weights()
    bound = host._m3compile
    assert bound is not None
    ours = {tensor.data_ptr() for tensor in bound.open(None).weights.values()}
    assert all(parameter.data_ptr() in ours for parameter in host.vision_tower.parameters())
    before = host.embed_multimodal(**images([(1, 4, 4)]))

    host.m3compile_release_weights()
    assert not any(parameter.data_ptr() in ours for parameter in host.vision_tower.parameters())
    host.vision_tower.load(golden_tensors())
    host.m3compile_check_weights()
    assert torch.equal(before[0], host.embed_multimodal(**images([(1, 4, 4)]))[0])

    host.m3compile_release_weights()
    host.vision_tower.load(double(golden_artifact, tmp_path / "doubled")[1])
    with pytest.raises(ArtifactIncompatibleError, match=r"patch_merge_mlp\.linear_2"):
        host.embed_multimodal(**images([(1, 4, 4)]))


def test_a_stage_without_a_tower(golden_artifact: Path) -> None:
    """A rank of a later pipeline stage opens nothing."""
    host = Host(golden_artifact, vllm_config(), tower=nn.Module())
    assert host._m3compile is not None
    assert host._m3compile._opened is None


def test_under_a_default_device_and_inference_mode(golden_artifact: Path) -> None:
    """vLLM builds a host with the accelerator as default device, and runs it in inference mode."""
    grids = [(1, 4, 4), (1, 8, 8)]
    tower = VllmTower()
    with torch.inference_mode(), torch.device("meta"):
        host = Host(golden_artifact, vllm_config([64], 8), tower=tower)
        host.m3compile_check_weights()
        values = host.prepare_encoder_cudagraph_capture_inputs(
            64, 8, 8, torch.device("cpu"), torch.float32
        ).values
    with torch.inference_mode():
        inside = host.embed_multimodal(**images(grids))
    # What was made above can be written to here.
    values["pixel_values"].zero_()
    values["segments"].zero_()
    outside = host.embed_multimodal(**images(grids))
    assert_same(outside, inside, 0)
    assert_same(outside, Eager(golden_artifact)(make_rows(grids), grids))


# Options of vLLM.


@pytest.mark.parametrize(
    ("options", "backend", "words"),
    [
        ({"image": 0}, "FLASH_ATTN", ("image limit is 0", "--limit-mm-per-prompt")),
        (
            {"mm_encoder_attn_dtype": "fp8"},
            "FLASH_ATTN",
            ("static scales", "--mm-encoder-fp8-scale-path", "--mm-encoder-attn-dtype"),
        ),
        ({}, "FLASHINFER", ("FLASHINFER", "max_seqlen", "--mm-encoder-attn-backend FLASH_ATTN")),
        ({}, "TORCH_SDPA", ("TORCH_SDPA", ".tolist()", "ROCM_AITER_FA", "cudagraph_mm_encoder")),
        ({}, "TRITON_ATTN", ("TRITON_ATTN", "--mm-encoder-attn-backend FLASH_ATTN")),
    ],
)
def test_refusals(
    golden_artifact: Path, options: dict[str, Any], backend: str, words: tuple[str, ...]
) -> None:
    config = vllm_config(mm=multimodal_config(**options))
    with pytest.raises(RequestError) as raised:
        Host(golden_artifact, config, tower=VllmTower(backend)).get_encoder_cudagraph_config()
    assert isinstance(raised.value, ValueError)
    assert all(word in str(raised.value) for word in words)


def test_what_is_not_refused(golden_artifact: Path) -> None:
    for backend in ("FLASH_ATTN", "ROCM_AITER_FA"):
        Host(
            golden_artifact, vllm_config(), tower=VllmTower(backend)
        ).get_encoder_cudagraph_config()
    # Without vLLM's capture its attention backend plays no part.
    host = Host(golden_artifact, vllm_config(capture=False), tower=VllmTower("FLASHINFER"))
    assert len(host.embed_multimodal(**images([(1, 4, 4)]))) == 1


def test_fp8_attention_that_the_artifact_lacks(golden_artifact: Path) -> None:
    mm = multimodal_config(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path="scales.json")
    with pytest.raises(
        ArtifactIncompatibleError, match="--mm-encoder-attn-dtype is fp8, attention"
    ):
        Host(golden_artifact, vllm_config(mm=mm))


def test_linear_layers_in_fp8(golden_artifact: Path) -> None:
    """Their weights are none of the host's."""
    import msgspec

    precision = Precision(
        linears=("layers.0.qkv",),
        attention=False,
        fast_accumulation=False,
        kept=(),
        inputs="random",
        max_error=0.1,
        min_cosine=0.99,
    )
    manifest = msgspec.structs.replace(read_manifest(golden_artifact), precision=precision)
    with pytest.raises(ArtifactIncompatibleError, match=r"linear layers in fp8.*for vLLM, build"):
        check_host(golden_artifact, manifest, None, None, None)


def test_an_artifact_that_cannot_be_captured(golden_artifact: Path, tmp_path: Path) -> None:
    import msgspec

    required = msgspec.structs.replace(
        read_manifest(golden_artifact).requirements, device="cuda", cuda="13.0", gpu_arch="sm_90"
    )
    artifact = with_manifest(golden_artifact, tmp_path / "cuda", requirements=required)
    host = Host(artifact, tower=nn.Module())
    with pytest.raises(
        RequestError, match=r"artifact's attention is TORCH_SDPA.*--attention FLASH"
    ):
        host.get_encoder_cudagraph_config()


def test_who_captures() -> None:
    assert captured_by(vllm_config()) == "vllm"
    assert captured_by(vllm_config(capture=False)) == "m3compile"
    assert captured_by(vllm_config(enforce_eager=True)) == "nobody"
    assert captured_by(None) == "m3compile"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (vllm_config(), "never"),
        (vllm_config(capture=False), None),
        (vllm_config(enforce_eager=True), "never"),
    ],
)
def test_the_encoder_captures_where_vllm_does_not(
    golden_artifact: Path, monkeypatch: Any, config: Any, expected: str | None
) -> None:
    """None is what the build said."""
    asked: list[str | None] = []

    def make(*args: Any, capture: str | None) -> Encoder:
        asked.append(capture)
        return Encoder(*args, capture=capture)

    monkeypatch.setattr(binding, "Encoder", make)
    host = Host(golden_artifact, config)
    for _ in range(2):
        host.embed_multimodal(**images([(1, 4, 4)]))
    assert asked == [expected]


@pytest.mark.parametrize(
    ("given", "limits", "video", "expected"),
    [
        # Ladder 16, 64, 256, 576; 32 slots.
        (([], 0), (8192, 8192), 999, ([16, 64, 256, 576], 16)),
        (([], 0), (8192, 300), 999, ([16, 64, 256], 16)),
        (([], 0), (10, 8192), 999, ([10], 10)),
        (([], 20), (8192, 8192), 999, ([64, 256, 576], 20)),
        (([100, 50], 0), (8192, 8192), 999, ([100, 50], 16)),
        (([100, 50], 0), (8192, 8192), 0, ([100, 50], 32)),
        (([100], 7), (8192, 8192), 999, ([100], 7)),
    ],
)
def test_budgets(
    golden_artifact: Path,
    given: tuple[list[int], int],
    limits: tuple[int, int],
    video: int,
    expected: tuple[list[int], int],
) -> None:
    config = vllm_config(*given, *limits, mm=multimodal_config(video=video))
    fill_budgets(config, read_manifest(golden_artifact))
    options = config.compilation_config
    assert options.encoder_cudagraph_token_budgets == expected[0]
    assert options.encoder_cudagraph_max_vision_items_per_batch == expected[1]
