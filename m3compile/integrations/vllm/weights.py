"""Whether a host's weights are the artifact's, and one copy of them for both.

vLLM fuses q, k and v, and with tensor parallelism a rank holds a part of most tensors; the same
part of ours is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from m3compile.artifact import Manifest
from m3compile.errors import ArtifactIncompatibleError
from m3compile.integrations.vllm.checks import WAY_OUT
from m3compile.weights.table import TowerTensor, tower_tensors


def check_weights(
    folder: Path, manifest: Manifest, weights: Mapping[str, Tensor], tower: nn.Module
) -> None:
    """Compare every parameter of a host's tower with the artifact's, bit by bit.

    Args:
        folder, manifest: the artifact.
        weights: its tensors, by the program's names.
        tower: with vLLM's names; each rank's own part.

    Raises:
        ArtifactIncompatibleError: naming the first tensor that differs, and how.
    """
    found = dict(tower.named_parameters())
    for name, ours in _pairs(manifest):
        parameter = found.pop(name, None)
        problem = "is missing from the host"
        if parameter is not None:
            expected = _part(weights[ours.name], ours, tower.get_submodule(_module_of(name)))
            problem = _difference(parameter.detach(), expected)
        if problem:
            raise ArtifactIncompatibleError(
                f"{folder}: not this host's weights: vision_tower.{name} {problem}; {WAY_OUT}"
            )
    if found:
        raise ArtifactIncompatibleError(
            f"{folder}: not this host's weights: the artifact has no vision_tower."
            f"{sorted(found)[0]}; {WAY_OUT}"
        )


def share_weights(manifest: Manifest, weights: Mapping[str, Tensor], tower: nn.Module) -> None:
    """Let the host's whole tensors be the artifact's, so that a device holds them once.

    Only after `check_weights`. Parts of tensors, and tensors elsewhere, stay the host's own.
    """
    found = dict(tower.named_parameters())
    for name, ours in _pairs(manifest):
        parameter, tensor = found[name], weights[ours.name]
        if parameter.numel() == tensor.numel() and parameter.device == tensor.device:
            parameter.data = tensor.view(parameter.shape)


def unshare_weights(tower: nn.Module) -> None:
    """Give the host tensors of its own, before it writes other weights into them."""
    for parameter in tower.parameters():
        parameter.data = parameter.data.clone()


def _pairs(manifest: Manifest) -> Iterator[tuple[str, TowerTensor]]:
    """vLLM's name within the tower, and our tensor."""
    for ours in tower_tensors(manifest.tower):
        name = ours.parts[0].name.removeprefix("vision_tower.").replace(".mlp.", ".")
        if len(ours.parts) == 3:
            name = name.replace("q_proj", "qkv_proj")
        yield name, ours


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _part(tensor: Tensor, ours: TowerTensor, module: nn.Module) -> Tensor:
    """What a rank holds of a tensor: rows of qkv and of each first linear, columns of the next."""
    size, rank = getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
    layer, _, kind = ours.name.rpartition(".")
    if size == 1:
        return tensor
    if layer.endswith("qkv"):
        return tensor.unflatten(0, (3, size, -1))[:, rank].flatten(0, 1)
    if layer.endswith("fc1"):
        return tensor.chunk(size)[rank]
    if layer.endswith(("out_proj", "fc2")) and kind == "weight":
        return tensor.chunk(size, 1)[rank]
    return tensor


def _difference(found: Tensor, expected: Tensor) -> str:
    """In words, or "". The host keeps a convolution's kernel unflattened."""
    if found.is_meta:
        return "has no values in the host yet"
    if found.dtype != expected.dtype:
        return f"is {found.dtype} in the host, {expected.dtype} in the artifact"
    if found.shape[:1] != expected.shape[:1] or found.numel() != expected.numel():
        return f"has shape {list(found.shape)} in the host, {list(expected.shape)} in the artifact"
    if not torch.equal(found.reshape(expected.shape), expected.to(found.device)):
        return "has other values in the host than in the artifact"
    return ""
