"""The encoder as a module: what is traced, and the eager reference.

Shape legend: P patch rows of a run (padding included), S slots of the segment table,
H hidden size, D head_dim, O output size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3compile.artifact import ATTENTION_SCALES, WEIGHT_SCALE
from m3compile.attention import attention_schedule
from m3compile.config import TowerConfig
from m3compile.kernels import Kernels, Located, kernels
from m3compile.kernels.fp8 import Fp8Linear, Rows, is_fp8


class Mlp(nn.Module):
    """The weights of `fc2(gelu(fc1(x)))`; `Tower.forward` says what happens between them."""

    def __init__(self, in_size: int, hidden_size: int, out_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_size, hidden_size)
        self.fc2 = nn.Linear(hidden_size, out_size)


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
        # (3, 1) float32, what q, k and v in fp8 are to be multiplied with.
        self.register_parameter(ATTENTION_SCALES, None)

    def attend(self, normed: Rows, located: Located, schedule: Tensor | None) -> Rows:
        """(P, H), `norm1` of the residual, to what `out_proj` takes."""
        attended = self.passes.attend(
            self.qkv(normed),
            located,
            self.num_heads,
            self.backend,
            schedule,
            self.attention_scales,
        )
        return self.passes.quantise(attended) if is_fp8(self.out_proj) else attended

    def expand(self, normed: Rows, cu_seqlens: Tensor) -> Rows:
        """(P, H), `norm2` of the residual, to what `fc2` takes."""
        return self.passes.gelu(self.fc1(normed), cu_seqlens, is_fp8(self.fc2))


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
        # Patches that become one token lie side by side.
        self._groups = (-1, config.patches_per_token)
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
        hidden, located, is_nonfinite = self._features(pixel_values, segments)
        token_segment = located.segment_of_row.unflatten(0, self._groups)[:, 0]
        poison = is_nonfinite[token_segment][:, None]
        return self._merge(self._project(hidden, located.cu_seqlens), poison), is_nonfinite

    def _project(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """(P, H) to (P, O)."""
        passes, fc1, fc2 = self.passes, self.projector.fc1, self.projector.fc2
        rows = passes.quantise(hidden) if is_fp8(fc1) else hidden
        projected: Tensor = fc2(passes.gelu(fc1(rows), cu_seqlens, is_fp8(fc2)))
        return projected

    def _merge(self, hidden: Tensor, poison: Tensor) -> Tensor:
        """(P, O) to (P / 4, O), NaN where `poison` (P / 4, 1) says so."""
        passes, fc1, fc2 = self.passes, self.merger.fc1, self.merger.fc2
        grouped = hidden.unflatten(0, self._groups).flatten(1)
        inner = functional.gelu(fc1(passes.quantise(grouped) if is_fp8(fc1) else grouped))
        # Poisoned before the last product, where the pass over GELU carries it for free: a NaN row
        # of the left operand makes that row of the product NaN, and no other.
        nan = float("nan")
        if is_fp8(fc2):
            rows = passes.quantise(inner)
            merged: Tensor = fc2(rows._replace(scales=rows.scales.masked_fill(poison, nan)))
        else:
            merged = fc2(inner.masked_fill(poison, nan))
        return merged

    def features(self, pixel_values: Tensor, segments: Tensor) -> Tensor:
        """The last hidden state, (P, H), before the projector; arguments as `forward`."""
        return self._features(pixel_values, segments)[0]

    def _features(self, pixel_values: Tensor, segments: Tensor) -> tuple[Tensor, Located, Tensor]:
        passes = self.passes
        located = passes.locate(segments, pixel_values.shape[0], self.inverse_frequency)
        # A non-finite pixel makes its own row of the product non-finite, and no other; so does a
        # finite one that overflows it.
        x, is_nonfinite = passes.enter(self.patch_embed(pixel_values), self.pre_norm, located)
        return self._blocks(x, located), located, is_nonfinite

    def _blocks(self, x: Tensor, located: Located) -> Tensor:
        """The residual (P, H) before the blocks, to the residual after them."""
        config, passes, last = self.config, self.passes, self.layers[-1]
        bounds = located.cu_seqlens
        schedule = attention_schedule(
            bounds,
            x.shape[0],
            config.num_attention_heads,
            config.head_dim,
            self.backend,
            last.attention_scales is not None,
        )
        linears = [linear for layer in self.layers for linear in (layer.out_proj, layer.fc2)]
        lacks = passes.residual_offsets(linears) or [None] * (len(linears) + 1)
        first = self.layers[0]
        normed = passes.norm(x, bounds, first.norm1, lacks[0], is_fp8(first.qkv))
        for index, layer in enumerate(self.layers):
            attended = layer.attend(normed, located, schedule)
            lack = lacks[2 * index + 1]
            x, normed = passes.add_product_norm(
                x, attended, layer.out_proj, bounds, layer.norm2, lack, is_fp8(layer.fc1)
            )
            hidden = layer.expand(normed, bounds)
            if layer is not last:
                after, lack = self.layers[index + 1], lacks[2 * index + 2]
                x, normed = passes.add_product_norm(
                    x, hidden, layer.fc2, bounds, after.norm1, lack, is_fp8(after.qkv)
                )
        return passes.add_offset(passes.add_product(x, hidden, last.fc2), lacks[-1])


def make_tower(
    config: TowerConfig,
    state: dict[str, Tensor],
    backend: str,
    passes: str = "plain",
    fast_accumulation: bool = False,
) -> Tower:
    """The tower with its weights, for tracing or as the eager reference.

    Args:
        state: every parameter by the tower's names. Shared with the module. A linear layer that
            has a `weight_scale` is an `Fp8Linear`; attention is in fp8 where a layer has
            `attention_scales`.
        backend, passes: as `Tower`.
        fast_accumulation: of every `Fp8Linear`.
    """
    with torch.device("meta"):
        tower = Tower(config, backend, passes)
        for name in state:
            owner, _, parameter = name.rpartition(".")
            if parameter == WEIGHT_SCALE:
                linear = tower.get_submodule(owner)
                sizes = linear.in_features, linear.out_features
                tower.set_submodule(owner, Fp8Linear(*sizes, fast_accumulation))
            elif parameter == ATTENTION_SCALES:
                tower.get_submodule(owner).attention_scales = nn.Parameter(torch.empty(3, 1), False)
    tower.load_state_dict(state, assign=True)
    return tower.eval().requires_grad_(False)
