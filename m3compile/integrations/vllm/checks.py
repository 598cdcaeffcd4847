"""Whether an artifact belongs to the host that named it, by the host's config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m3compile.artifact import Manifest
from m3compile.config import TowerConfig, tower_config_from_checkpoint
from m3compile.errors import ArtifactIncompatibleError
from m3compile.integrations.vllm.options import refuse_dynamic_scales
from m3compile.integrations.vllm.tensors import dtype_of

WAY_OUT = "build one from this checkpoint (python -m m3compile build), or unset M3COMPILE_ARTIFACT"


def check_host(
    folder: Path, manifest: Manifest, config: Any, tower: Any, multimodal_config: Any
) -> None:
    """Compare an artifact with its host's config and options; weights come later.

    Args:
        folder, manifest: the artifact.
        config: the host's parsed `config.json`, as a mapping or with `to_dict`; None to go by
            the tower alone.
        tower: the host's vision tower; what it says of itself is compared.
        multimodal_config: vLLM's, or None.

    Raises:
        ArtifactIncompatibleError: with every difference.
        CheckpointError: the host's config is none of this encoder.
        RequestError: the host wants attention in fp8 without static scales.
    """
    engine = manifest.build.engine
    if engine != "aoti":
        raise ArtifactIncompatibleError(
            f"{folder}: built with engine {engine}, vLLM needs a compiled program; build with "
            "--engine aoti"
        )
    if manifest.precision is not None and manifest.precision.linears:
        raise ArtifactIncompatibleError(
            f"{folder}: holds linear layers in fp8, vLLM those of the checkpoint; for vLLM, build "
            "an artifact without linear_dtype: fp8"
        )
    differences = [
        f"{name} is {found} in the host, {expected} in the artifact"
        for name, found, expected in _facts(manifest, config, tower)
        if found != expected
    ]
    refuse_dynamic_scales(multimodal_config)
    wanted = getattr(multimodal_config, "mm_encoder_attn_dtype", None)
    if wanted is not None and wanted != manifest.attention_dtype:
        differences.append(
            f"--mm-encoder-attn-dtype is {wanted}, attention in the artifact is in "
            f"{manifest.attention_dtype}"
        )
    if differences:
        raise ArtifactIncompatibleError(
            f"{folder}: not this host's encoder: {'; '.join(dict.fromkeys(differences))}; {WAY_OUT}"
        )


def _facts(manifest: Manifest, config: Any, tower: Any) -> list[tuple[str, Any, Any]]:
    """Name, the host's value and the artifact's of everything that both of them know."""
    expected = manifest.tower
    facts: list[tuple[str, Any, Any]] = []
    found = host_tower_config(config)
    if found is not None:
        for name in TowerConfig.__struct_fields__:
            facts.append((name, getattr(found, name), getattr(expected, name)))
    said = (
        ("spatial_merge_size", tower, "spatial_merge_size", expected.spatial_merge_size),
        ("output_size", tower, "out_hidden_size", expected.output_size),
        (
            "vision_segment_max_frames",
            getattr(tower, "vision_model", None),
            "vision_segment_max_frames",
            expected.vision_segment_max_frames,
        ),
        ("dtype", tower, "dtype", dtype_of(manifest)),
    )
    for name, owner, attribute, value in said:
        if hasattr(owner, attribute):
            facts.append((name, getattr(owner, attribute), value))
    return facts


def host_tower_config(config: Any) -> TowerConfig | None:
    """The tower's sizes in a host's config; None if it has no vision part.

    Raises:
        CheckpointError: it has one that this encoder does not implement.
    """
    document = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(document, Mapping) or not document.get("vision_config"):
        return None
    return tower_config_from_checkpoint(document, "the host's config")
