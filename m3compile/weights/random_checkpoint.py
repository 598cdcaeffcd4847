"""Random weights in the released layout: for tests, benchmarks and a first look."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from m3compile.config import PreprocessConfig, TowerConfig
from m3compile.errors import OperationError, RequestError
from m3compile.weights.files import (
    CONFIG_FILE,
    FLOAT_DTYPES,
    INDEX_FILE,
    PREPROCESSOR_FILE,
    RANDOM_KEY,
)
from m3compile.weights.table import CheckpointTensor, tower_tensors

SHARD_BYTES = 512 * 1024**2

# The released checkpoint keeps this one in fp32 whatever the rest is in.
_FP32_SUFFIX = "patch_embedding.weight"


def init_checkpoint(
    directory: Path | str,
    config: TowerConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[int, int], None] | None = None,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint with random weights, in the released layout and naming.

    Weights are normal with a standard deviation of `fan_in ** -0.5`, biases of 0.1, norm gains of
    0.2 around 1, so that attention and rotary matter. A tensor depends on `seed` and its name
    alone. The folder is written aside and renamed into place; one shard is in memory at a time.
    Its config says that the weights are random, and `Checkpoint.is_random` repeats it.

    Args:
        directory: the checkpoint's folder; made, with its parents, where it does not exist.
        config: sizes of the tower.
        dtype: of every tensor but `patch_embedding.weight`, which is fp32.
        progress: called with tensors written so far, and their number.
        force: replace a checkpoint that this function wrote; never anything else.
        shard_bytes: most bytes of tensors in a shard of several tensors.

    Returns:
        The folder.

    Raises:
        RequestError: `directory` is a file, or a folder that is not empty, or with `force` one that
            holds other files than such a checkpoint's; or `dtype` is not one that checkpoints have.
        OperationError: the files cannot be written.
    """
    if dtype not in FLOAT_DTYPES.values():
        raise RequestError(f"dtype is {dtype}; expected one of {list(FLOAT_DTYPES.values())}")
    target = Path(directory).resolve()
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    try:
        _refuse_occupied(target, force)
        partial.mkdir(parents=True)
        _write_json(partial / CONFIG_FILE, _config_document(config, dtype))
        _write_json(partial / PREPROCESSOR_FILE, _preprocessor_document(config))
        _write_shards(partial, config, seed, dtype, progress, shard_bytes)
        _refuse_occupied(target, force)
        _replace(target, partial)
    except (OSError, SafetensorError) as error:
        detail = " ".join(str(error).split())
        raise OperationError(f"checkpoint {target} cannot be written: {detail}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _refuse_occupied(target: Path, force: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise RequestError(f"{target} is a file; expected a folder, or nothing, under that name")
    held = sorted(entry.name for entry in target.iterdir())
    if held and not force:
        raise RequestError(
            f"{target} is not empty (it holds {held[0]}); expected a new or empty folder"
        )
    foreign = [name for name in held if not _is_ours(name)]
    if foreign:
        raise RequestError(
            f"{target} holds {foreign[0]}; expected only what a random checkpoint has, before it "
            "is replaced"
        )


def _is_ours(name: str) -> bool:
    return name in (CONFIG_FILE, INDEX_FILE, PREPROCESSOR_FILE) or (
        name.startswith("model-") and name.endswith(".safetensors")
    )


def _replace(target: Path, partial: Path) -> None:
    old = partial.with_suffix(".old")
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, old)
    try:
        os.rename(partial, target)
    except BaseException:
        if old.exists() and not target.exists():
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_shards(
    folder: Path,
    config: TowerConfig,
    seed: int,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None,
    shard_bytes: int,
) -> None:
    shards = list(_shards(config, dtype, shard_bytes))
    total = sum(len(shard) for shard in shards)
    done = 0
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for tensor in shard:
            tensors[tensor.name] = _random(tensor, seed).to(_dtype_of(tensor, dtype))
            weight_map[tensor.name] = file_name
            total_size += tensors[tensor.name].nbytes
            done += 1
            if progress is not None:
                progress(done, total)
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        # safetensors makes files that only their owner may read.
        os.chmod(folder / file_name, (folder / CONFIG_FILE).stat().st_mode)
    _write_json(
        folder / INDEX_FILE,
        {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _shards(
    config: TowerConfig, dtype: torch.dtype, shard_bytes: int
) -> Iterator[list[CheckpointTensor]]:
    shard: list[CheckpointTensor] = []
    held_bytes = 0
    for ours in tower_tensors(config):
        for tensor in ours.parts:
            tensor_bytes = tensor.fan_in * tensor.shape[0] * _dtype_of(tensor, dtype).itemsize
            if shard and held_bytes + tensor_bytes > shard_bytes:
                yield shard
                shard, held_bytes = [], 0
            shard.append(tensor)
            held_bytes += tensor_bytes
    yield shard


def _dtype_of(tensor: CheckpointTensor, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if tensor.name.endswith(_FP32_SUFFIX) else dtype


def _random(tensor: CheckpointTensor, seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed} {tensor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if tensor.name.endswith(".bias"):
        return values.mul_(0.1)
    if len(tensor.shape) == 1:
        return values.mul_(0.2).add_(1.0)
    return values.mul_(tensor.fan_in**-0.5)


def _config_document(config: TowerConfig, dtype: torch.dtype) -> dict[str, Any]:
    compression = {
        "image_token_compression_method": "patch_merge",
        "spatial_merge_size": config.spatial_merge_size,
        "temporal_patch_size": config.temporal_patch_size,
    }
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": {"hidden_size": config.output_size},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_hidden_layers,
            "intermediate_size": config.intermediate_size,
            "patch_size": config.patch_size,
            "num_channels": config.num_channels,
            "hidden_act": "gelu",
            "layer_norm_eps": config.layer_norm_eps,
            "position_embedding_type": "rope",
            "rope_mode": "3d",
            "rope_theta": config.rope_theta,
            "vision_segment_max_frames": config.vision_segment_max_frames,
            "img_token_compression_config": compression,
        },
        "img_token_compression_config": compression,
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": config.projector_hidden_size,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "torch_dtype": str(dtype).removeprefix("torch."),
        RANDOM_KEY: True,
    }


def _preprocessor_document(config: TowerConfig) -> dict[str, Any]:
    defaults = PreprocessConfig()
    return {
        "image_processor_type": "MiniMaxM3VLImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": defaults.rescale_factor,
        "image_mean": list(defaults.mean),
        "image_std": list(defaults.std),
        "patch_size": config.patch_size,
        "temporal_patch_size": config.temporal_patch_size,
        "merge_size": config.spatial_merge_size,
        "size": {"shortest_edge": defaults.min_pixels, "longest_edge": defaults.max_pixels},
    }


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
