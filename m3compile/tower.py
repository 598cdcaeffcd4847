"""The encoder as a module: what is traced, and the eager reference.

Shape legend: P patch rows of a run (padding included), S slots of the segment table,
H hidden size, D head_dim, O output size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3compile.attention import attention_schedule
from m3compile.config import TowerConfig
from m3compile.geometry import Geometry, locate_rows, rotary_tables
from m3compile.kernels import Kernels, kernels

Rotary = tuple[Tensor, Tensor]


class Mlp(nn.Module):
    """`fc2(gelu(fc1(x)))` with the exact (erf) GELU."""

    def __init__(self, in_size: int, hidden_size: int, out_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_size, hidden_size)
        self.fc2 = nn.Linear(hidden_size, out_size)

    def forward(self, x: Tensor, poison: Tensor | None = None) -> Tensor:
        """(..., in_size) to (..., out_size); rows where `poison` (..., 1) is true become NaN."""
        hidden = functional.gelu(self.fc1(x))
        if poison is not None:
            # Before the product, where the pass over GELU carries it for free: a NaN row of the
            # left operand makes that row of the product NaN, and no other.
            hidden = hidden.masked_fill(poison, float("nan"))
        return self.fc2(hidden)


class Block(nn.Module):
    """One pre-norm transformer block, from its first product to its last."""

    def __init__(self, config: TowerConfig, backend: str, passes: Kernels) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.backend = backend
        self.passes = passes
        self.norm1 = nn.LayerNorm(size, config.layer_norm_eps)
        self.qkv = nn.Linear(size, 3 * size)
        self.out_proj = nn.Linear(size, size)
        self.norm2 = nn.LayerNorm(size, config.layer_norm_eps)
        self.fc1 = nn.Linear(size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, size)

    def attend(
        self, normed: Tensor, cu_seqlens: Tensor, rotary: Rotary, schedule: Tensor | None
    ) -> Tensor:
        """(P, H), `norm1` of the residual, to what `out_proj` takes."""
        q, k, v = self.passes.rotate_heads(self.qkv(normed), *rotary, self.num_heads)
        return self.passes.attend(q, k, v, cu_seqlens, self.backend, schedule).flatten(1)

    def expand(self, normed: Tensor, cu_seqlens: Tensor) -> Tensor:
        """(P, H), `norm2` of the residual, to what `fc2` takes."""
        return self.passes.gelu(self.fc1(normed), cu_seqlens)


class Tower(nn.Module):
    """Vision tower, projector and patch merge, with the geometry inside.

    Args:
        config: sizes.
        backend: the attention op's backend.
        passes: one of `m3compile.kernels.KERNELS`.
    """

    def __init__(self, config: TowerConfig, backend: str, passes: str = "plain") -> None:
        super().__init__()
        self.config = config
        self.patch_embed = nn.Linear(config.patch_dim, config.hidden_size, bias=False)
        self.pre_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.backend = backend
        self.passes = kernels(passes)
        self.layers = nn.ModuleList(
            Block(config, backend, self.passes) for _ in range(config.num_hidden_layers)
        )
        projector, output = config.projector_hidden_size, config.output_size
        self.projector = Mlp(config.hidden_size, projector, output)
        self.merger = Mlp(config.merged_size, projector, output)
        # A parameter, not a buffer: a compiled package that lacks a buffer crashes at its first
        # call instead of refusing to load.
        self.inverse_frequency = nn.Parameter(
            torch.empty(config.axis_dim // 2, dtype=torch.float32), requires_grad=False
        )

    def forward(self, pixel_values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Encode one run.

        Args:
            pixel_values: (P, patch_dim) in the weights' dtype; P a multiple of 4. Rows past the
                last segment may hold anything.
            segments: (S, 3) int32 `t, h, w`; zero rows are unused.

        Returns:
            embeddings: (P / 4, O) in the weights' dtype. A segment with a non-finite pixel is NaN
                throughout; rows past the last segment are unspecified.
            is_nonfinite: (S,) bool, the segments that had a non-finite pixel.
        """
        hidden, segment_of_row, is_nonfinite = self.features(pixel_values, segments)
        groups = (-1, self.config.patches_per_token)
        token_segment = segment_of_row.unflatten(0, groups)[:, 0]
        poison = is_nonfinite[token_segment][:, None]
        merged = self.projector(hidden).unflatten(0, groups).flatten(1)
        return self.merger(merged, poison), is_nonfinite

    def features(self, pixel_values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The last hidden state (P, H), each row's slot (P,) and the non-finite slots (S,)."""
        geometry = locate_rows(segments, pixel_values.shape[0])
        x, is_nonfinite = self._enter(pixel_values, geometry, segments.shape[0])
        return self._blocks(x, geometry), geometry.segment_of_row, is_nonfinite

    def _enter(
        self, pixel_values: Tensor, geometry: Geometry, num_slots: int
    ) -> tuple[Tensor, Tensor]:
        """The residual (P, H) before the blocks, and the non-finite slots (S,)."""
        x = self.pre_norm(self.patch_embed(pixel_values))
        # A non-finite pixel makes its own row of the product non-finite, and no other; so does a
        # finite one that overflows it. Zeroed before attention, where rows would meet.
        is_finite = x.isfinite().all(1)
        x = x.masked_fill(~(geometry.is_real & is_finite)[:, None], 0)
        is_bad_row = geometry.is_real & ~is_finite
        return x, self.passes.segments_with(is_bad_row, geometry.segment_of_row, num_slots)

    def _blocks(self, x: Tensor, geometry: Geometry) -> Tensor:
        """The residual (P, H) before the blocks, to the residual after them."""
        config, passes, last = self.config, self.passes, self.layers[-1]
        bounds = geometry.cu_seqlens
        rotary = rotary_tables(geometry.positions, self.inverse_frequency)
        schedule = attention_schedule(
            bounds, x.shape[0], config.num_attention_heads, config.head_dim, self.backend
        )
        biases = [b for layer in self.layers for b in (layer.out_proj.bias, layer.fc2.bias)]
        offsets = passes.residual_offsets(biases)
        lacks = offsets or [None] * (len(biases) + 1)
        normed = passes.norm(x, bounds, self.layers[0].norm1, lacks[0])
        for index, layer in enumerate(self.layers):
            attended = layer.attend(normed, bounds, rotary, schedule)
            x, normed = passes.add_product_norm(
                x, attended, layer.out_proj, bounds, layer.norm2, lacks[2 * index + 1]
            )
            hidden = layer.expand(normed, bounds)
            if layer is not last:
                x, normed = passes.add_product_norm(
                    x, hidden, layer.fc2, bounds, self.layers[index + 1].norm1, lacks[2 * index + 2]
                )
        x = passes.add_product(x, hidden, last.fc2)
        return x if offsets is None else (x + offsets[-1]).to(x.dtype)


def make_tower(
    config: TowerConfig, state: dict[str, Tensor], backend: str, passes: str = "plain"
) -> Tower:
    """The tower with its weights, for tracing or as the eager reference.

    Args:
        state: every parameter by the tower's names. Shared with the module.
        backend, passes: as `Tower`.
    """
    with torch.device("meta"):
        tower = Tower(config, backend, passes)
    tower.load_state_dict(state, assign=True)
    return tower.eval().requires_grad_(False)
