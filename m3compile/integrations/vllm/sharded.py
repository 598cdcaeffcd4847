"""Items shared out over tensor-parallel ranks, as vLLM's `--mm-encoder-tp-mode data` does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from m3compile.integrations.vllm.binding import Binding
from m3compile.integrations.vllm.tensors import dtype_of


def is_sharded(host: Any) -> bool:
    """Whether a host runs data parallel over more than one rank."""
    if not getattr(host, "use_data_parallel", False):
        return False
    from vllm.distributed import get_tensor_model_parallel_world_size

    return bool(get_tensor_model_parallel_world_size() > 1)


def encode_sharded(binding: Binding, rows: Tensor, grids: Sequence[Sequence[int]]) -> list[Tensor]:
    """Encode this rank's items and gather the other ranks'. Every rank calls it.

    Args:
        rows: (N, patch_dim), the same on every rank.
        grids: t, h, w of every item.

    Returns:
        One (tokens, width) tensor an item, in input order.
    """
    from vllm.model_executor.models.vision import run_dp_sharded_mrope_vision_model

    outputs = run_dp_sharded_mrope_vision_model(
        _ShardTower(binding), rows, [list(grid) for grid in grids], rope_type="rope_3d"
    )
    return list(outputs)


class _ShardTower:
    """What vLLM's helper asks of a vision tower."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self.spatial_merge_size = binding.manifest.tower.spatial_merge_size
        self.out_hidden_size = binding.manifest.tower.output_size

    def parameters(self) -> Iterator[Tensor]:
        """One, whose dtype is the embeddings'."""
        yield torch.empty(0, dtype=dtype_of(self._binding.manifest))

    def __call__(self, pixel_values: Tensor, grid_thw: list[list[int]]) -> Tensor:
        return self._binding.join(self._binding.encode(pixel_values, grid_thw))
