"""The tower's tensors in fp8: which may be, and the way there and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from m3compile.artifact import ATTENTION_SCALES, WEIGHT_SCALE
from m3compile.config import TowerConfig
from m3compile.config.scales import LayerScales
from m3compile.kernels.fp8 import quantise_weight
from m3compile.weights.table import tower_tensor_shapes

# Products in fp8 take inputs and outputs by this many.
_MULTIPLE = 16


def fp8_linears(config: TowerConfig) -> tuple[str, ...]:
    """The linear layers that can be in fp8, in the order of the forward pass.

    All but those whose sizes are no multiple of 16, and `patch_embed`, which a pixel enters as it
    is: what is not finite there must stay so.
    """
    return tuple(
        name.removesuffix(".weight")
        for name, shape in tower_tensor_shapes(config).items()
        if len(shape) == 2
        and name != "patch_embed.weight"
        and all(size % _MULTIPLE == 0 for size in shape)
    )


def quantised_weights(state: Mapping[str, Tensor], linears: Collection[str]) -> dict[str, Tensor]:
    """`NAME.weight` (N, K) in e4m3 and `NAME.weight_scale` (N,) float32 of the given layers."""
    result = {}
    for name in linears:
        weight, scale = quantise_weight(state[f"{name}.weight"])
        result[f"{name}.weight"], result[f"{name}.{WEIGHT_SCALE}"] = weight, scale
    return result


def attention_scales(
    layers: tuple[LayerScales, ...], device: torch.device | str
) -> dict[str, Tensor]:
    """`layers.L.attention_scales` (3, 1) float32 of every layer: of q, k and v.

    Two dims, since the compiler would write a short vector into the program.
    """
    return {
        f"layers.{index}.{ATTENTION_SCALES}": torch.tensor(
            [[scales.q], [scales.k], [scales.v]], dtype=torch.float32, device=device
        )
        for index, scales in enumerate(layers)
    }


def whole_state(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a tower without fp8: what is quantised as the numbers that it stands for.

    Args:
        state: by the names that `make_tower` takes.
        dtype: of every tensor of the result but `inverse_frequency`.
    """
    whole = {}
    for name, tensor in state.items():
        owner, _, parameter = name.rpartition(".")
        if parameter in (WEIGHT_SCALE, ATTENTION_SCALES):
            continue
        scale = state.get(f"{owner}.{WEIGHT_SCALE}") if parameter == "weight" else None
        if scale is not None:
            tensor = tensor.to(torch.float32) * scale[:, None]
        whole[name] = tensor if name == "inverse_frequency" else tensor.to(dtype)
    return whole
