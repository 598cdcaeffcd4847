"""The one table of tensors: our name, the checkpoint tensors it is made of, their shapes.

Both checkpoint namings and our own shapes derive from it. Legend: H hidden, I intermediate,
P projector hidden, O output width, L layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from m3compile.config import TowerConfig

VISION_PREFIX = "vision_tower.vision_model."


class CheckpointTensor(NamedTuple):
    """One tensor of a checkpoint: its released name and its shape there."""

    name: str
    shape: tuple[int, ...]

    @property
    def fan_in(self) -> int:
        """Inputs that one output sums over; 1 for a vector."""
        return math.prod(self.shape[1:])


class TowerTensor(NamedTuple):
    """One tensor of ours: the rows of its parts, one part below the other."""

    name: str
    parts: tuple[CheckpointTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """`(rows,)` for a vector; else `(rows, fan_in)`, a convolution's kernel flattened."""
        rows = sum(part.shape[0] for part in self.parts)
        first = self.parts[0]
        return (rows,) if len(first.shape) == 1 else (rows, first.fan_in)


def tower_tensors(config: TowerConfig) -> Iterator[TowerTensor]:
    """Every tensor of the tower, in the order of the forward pass."""
    hidden, inner = config.hidden_size, config.intermediate_size
    wide, output = config.projector_hidden_size, config.output_size
    kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
    patch_shape = (hidden, config.num_channels, *kernel)

    yield from _module(
        "patch_embed", [f"{VISION_PREFIX}embeddings.patch_embedding"], patch_shape, bias=False
    )
    yield from _module("pre_norm", [f"{VISION_PREFIX}pre_layrnorm"], (hidden,))
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"layers.{layer}", f"{VISION_PREFIX}encoder.layers.{layer}"
        yield from _module(f"{ours}.norm1", [f"{theirs}.layer_norm1"], (hidden,))
        yield from _module(
            f"{ours}.qkv", [f"{theirs}.self_attn.{part}_proj" for part in "qkv"], (hidden, hidden)
        )
        yield from _module(f"{ours}.out_proj", [f"{theirs}.self_attn.out_proj"], (hidden, hidden))
        yield from _module(f"{ours}.norm2", [f"{theirs}.layer_norm2"], (hidden,))
        yield from _module(f"{ours}.fc1", [f"{theirs}.mlp.fc1"], (inner, hidden))
        yield from _module(f"{ours}.fc2", [f"{theirs}.mlp.fc2"], (hidden, inner))
    yield from _module("projector.fc1", ["multi_modal_projector.linear_1"], (wide, hidden))
    yield from _module("projector.fc2", ["multi_modal_projector.linear_2"], (output, wide))
    yield from _module("merger.fc1", ["patch_merge_mlp.linear_1"], (wide, config.merged_size))
    yield from _module("merger.fc2", ["patch_merge_mlp.linear_2"], (output, wide))


def tower_tensor_shapes(config: TowerConfig) -> dict[str, tuple[int, ...]]:
    """Our names and shapes, in the order of the forward pass.

    `patch_embed.weight` `(H, 1176)`; `pre_norm` and `layers.L.norm{1,2}` `(H,)`;
    `layers.L.qkv.weight` `(3H, H)`, rows of q, then k, then v; `layers.L.out_proj.weight` `(H, H)`;
    `layers.L.fc1.weight` `(I, H)`, `layers.L.fc2.weight` `(H, I)`; `projector.fc1.weight` `(P, H)`,
    `projector.fc2.weight` `(O, P)`; `merger.fc1.weight` `(P, 4*O)`, `merger.fc2.weight` `(O, P)`;
    each but the first with a `bias` of as many rows.
    """
    return {tensor.name: tensor.shape for tensor in tower_tensors(config)}


def _module(
    ours: str, theirs: Iterable[str], shape: tuple[int, ...], bias: bool = True
) -> Iterator[TowerTensor]:
    names = tuple(theirs)
    yield TowerTensor(
        f"{ours}.weight", tuple(CheckpointTensor(f"{name}.weight", shape) for name in names)
    )
    if bias:
        yield TowerTensor(
            f"{ours}.bias", tuple(CheckpointTensor(f"{name}.bias", shape[:1]) for name in names)
        )
