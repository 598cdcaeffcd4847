"""Hosts for the vLLM tests: a tower with vLLM's names and shapes, its options, and items."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from conftest import GOLDEN_CHECKPOINT
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from m3compile.artifact import WEIGHTS, list_files, read_manifest, write_manifest
from m3compile.integrations.vllm import EncoderMixin
from m3compile.tower import make_tower
from m3compile.verify import eager, relative_error

Grid = tuple[int, int, int]

CONFIG = json.loads((GOLDEN_CHECKPOINT / "config.json").read_text())
MERGER_OUT = "patch_merge_mlp.linear_2."


def golden_tensors() -> dict[str, Tensor]:
    """Every tensor of the golden checkpoint, in its own dtype."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(GOLDEN_CHECKPOINT.glob("model-*.safetensors")):
        tensors |= load_file(shard)
    return tensors


class Layer(nn.Module):
    """A block's parameters as vLLM fuses and shards them."""

    def __init__(self, size: int, inner: int, tp_size: int, tp_rank: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(size)
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = nn.Linear(size, 3 * size // tp_size)
        self.self_attn.out_proj = nn.Linear(size // tp_size, size)
        self.layer_norm2 = nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, inner // tp_size)
        self.fc2 = nn.Linear(inner // tp_size, size)
        _mark(self, tp_size, tp_rank)


class Perceptron(nn.Module):
    def __init__(self, in_size: int, inner: int, out: int, tp_size: int, tp_rank: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_size, inner // tp_size)
        self.linear_2 = nn.Linear(inner // tp_size, out)
        _mark(self, tp_size, tp_rank)


def _mark(module: nn.Module, tp_size: int, tp_rank: int) -> None:
    for linear in module.modules():
        if isinstance(linear, nn.Linear):
            linear.tp_size, linear.tp_rank = tp_size, tp_rank


class VllmTower(nn.Module):
    """What vLLM's host holds as `vision_tower`, without its forward pass, which must not run."""

    def __init__(self, backend: str = "FLASH_ATTN", tp_size: int = 1, tp_rank: int = 0) -> None:
        super().__init__()
        vision, text = CONFIG["vision_config"], CONFIG["text_config"]["hidden_size"]
        size, mid = vision["hidden_size"], CONFIG["projector_hidden_size"]
        model = self.vision_model = nn.Module()
        model.attn_backend = SimpleNamespace(name=backend)
        model.vision_segment_max_frames = vision["vision_segment_max_frames"]
        model.embeddings = nn.Module()
        model.embeddings.patch_embedding = nn.Conv3d(3, size, (2, 14, 14), bias=False)
        model.pre_layrnorm = nn.LayerNorm(size)
        model.encoder = nn.Module()
        model.encoder.layers = nn.ModuleList(
            Layer(size, vision["intermediate_size"], tp_size, tp_rank)
            for _ in range(vision["num_hidden_layers"])
        )
        self.multi_modal_projector = Perceptron(size, mid, text, tp_size, tp_rank)
        self.patch_merge_mlp = Perceptron(4 * text, mid, text, tp_size, tp_rank)
        self.tp_size, self.tp_rank = tp_size, tp_rank
        self.spatial_merge_size = 2
        self.out_hidden_size = text
        self.dtype = torch.float32
        self.requires_grad_(False)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load checkpoint tensors the way vLLM's loaders do, each rank its own part."""
        parameters = dict(self.named_parameters())
        for checkpoint_name, tensor in tensors.items():
            if checkpoint_name.startswith("language_model."):
                continue
            name = checkpoint_name.removeprefix("vision_tower.").replace(".mlp.fc", ".fc")
            owner, _, kind = name.rpartition(".")
            column = owner.endswith(("q_proj", "k_proj", "v_proj", "fc1", "linear_1"))
            row = owner.endswith(("out_proj", "fc2", "linear_2")) and kind == "weight"
            if column or row:
                tensor = tensor.chunk(self.tp_size, 0 if column else 1)[self.tp_rank]
            for place, part in enumerate("qkv"):
                if owner.endswith(f"{part}_proj"):
                    fused = parameters[name.replace(f"{part}_proj", "qkv_proj")]
                    fused.chunk(3)[place].copy_(tensor)
                    break
            else:
                parameters[name].copy_(tensor)

    def place(self, device: str, dtype: torch.dtype) -> VllmTower:
        """Move it, as vLLM would have made it there."""
        self.dtype = dtype
        return self.to(device, dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("the host's own tower ran")


def multimodal_config(image: int = 999, video: int = 999, **options: Any) -> SimpleNamespace:
    limits = {"image": image, "video": video}
    values = {
        "mm_encoder_attn_dtype": None,
        "mm_encoder_fp8_scale_path": None,
        "mm_encoder_tp_mode": "weights",
        **options,
    }
    return SimpleNamespace(get_limit_per_prompt=limits.__getitem__, **values)


def vllm_config(
    budgets: Sequence[int] = (),
    max_items: int = 0,
    max_tokens: int = 8192,
    max_model_len: int = 8192,
    capture: bool = True,
    enforce_eager: bool = False,
    tp_size: int = 1,
    mm: SimpleNamespace | None = None,
) -> SimpleNamespace:
    """The parts of vLLM's config that the manager and the adapter read."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mm_encoder=capture,
            encoder_cudagraph_token_budgets=list(budgets),
            encoder_cudagraph_max_vision_items_per_batch=max_items,
            encoder_cudagraph_max_frames_per_batch=None,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens),
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            enforce_eager=enforce_eager,
            multimodal_config=mm or multimodal_config(),
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
    )


class Host(EncoderMixin, nn.Module):
    """A host as vLLM's, reduced to what the mixin may rely on."""

    def __init__(
        self,
        artifact: Path,
        config: SimpleNamespace | None = None,
        *,
        tensors: dict[str, Tensor] | None = None,
        tower: nn.Module | None = None,
        hf_config: Any = CONFIG,
    ) -> None:
        super().__init__()
        self.config = hf_config
        self.vision_tower = VllmTower() if tower is None else tower
        self.multimodal_config = (config or vllm_config()).model_config.multimodal_config
        self.use_data_parallel = self.multimodal_config.mm_encoder_tp_mode == "data"
        self.m3compile_artifact = artifact
        if isinstance(self.vision_tower, VllmTower):
            self.vision_tower.load(golden_tensors() if tensors is None else tensors)
        if config is not None:
            self.m3compile_bind(config)


def double(artifact: Path, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A second artifact with its checkpoint: the last linear's weights, so every output, twice."""
    shutil.copytree(artifact, folder)
    weights = load_file(folder / WEIGHTS)
    for name in ("merger.fc2.weight", "merger.fc2.bias"):
        weights[name] = 2 * weights[name]
    save_file(weights, folder / WEIGHTS)
    write_manifest(folder, msgspec.structs.replace(read_manifest(folder), files=list_files(folder)))
    tensors = golden_tensors()
    for name in (f"{MERGER_OUT}weight", f"{MERGER_OUT}bias"):
        tensors[name] = 2 * tensors[name]
    return folder, tensors


def with_manifest(artifact: Path, folder: Path, **changes: Any) -> Path:
    """A copy whose manifest says something else."""
    shutil.copytree(artifact, folder)
    write_manifest(folder, msgspec.structs.replace(read_manifest(folder), **changes))
    return folder


def make_rows(grids: Sequence[Grid], seed: int = 0) -> Tensor:
    """(N, 1176) float32 pixels of all items, end to end."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(math.prod(grid) for grid in grids), 1176, generator=generator)


def images(grids: Sequence[Grid], seed: int = 0) -> dict[str, Any]:
    """vLLM's keyword arguments of a batch of images."""
    return {"pixel_values": make_rows(grids, seed), "image_grid_thw": torch.tensor(grids)}


def videos(grids: Sequence[Grid], seed: int = 0) -> dict[str, Any]:
    """vLLM's keyword arguments of a batch of clips."""
    return {"pixel_values_videos": make_rows(grids, seed), "video_grid_thw": torch.tensor(grids)}


class Eager:
    """The eager tower in float32, one item at a time, with an artifact's weights."""

    def __init__(self, artifact: Path) -> None:
        weights = {name: tensor.float() for name, tensor in load_file(artifact / WEIGHTS).items()}
        self._tower = make_tower(read_manifest(artifact).tower, weights, "TORCH_SDPA")

    def __call__(self, rows: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        parts = rows.split([math.prod(grid) for grid in grids])
        return [eager(self._tower, *pair) for pair in zip(parts, grids, strict=True)]


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor], bound: float = 1e-5) -> None:
    """Item by item, `||a - b|| / ||b||`; NaN never passes."""
    assert len(got) == len(expected)
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine.shape == theirs.shape
        error = relative_error(mine, theirs)
        assert error <= bound, f"item {index}: {error}"
