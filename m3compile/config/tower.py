"""The tower's config, read from a checkpoint's `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from m3compile.errors import CheckpointError

# Keys of `vision_config` that change nothing at inference, or that only transformers reads.
_IGNORED_VISION_KEYS = frozenset(
    """_attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention
    architectures attention_dropout bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dropout dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label image_size initializer_factor initializer_range is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    problem_type projection_dim pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p use_bfloat16 use_cache vocab_size""".split()
)

# Keys that have one value this encoder implements; anything else would be silently wrong.
_FIXED_VISION_KEYS: dict[str, tuple[Any, ...]] = {
    "model_type": ("clip_vision_model", "minimax_m3_vl_vision"),
    "hidden_act": ("gelu",),
    "rope_mode": ("3d",),
    "position_embedding_type": ("rope",),
}

_FIXED_TOP_KEYS: dict[str, tuple[Any, ...]] = {
    "projector_hidden_act": ("gelu",),
    "multimodal_projector_bias": (True,),
    "vision_feature_layer": (-1,),
    "vision_feature_select_strategy": ("full",),
}

_COMPRESSION_KEYS = frozenset(
    {"image_token_compression_method", "spatial_merge_size", "temporal_patch_size"}
)


class TowerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of the MiniMax-M3 vision encoder; the defaults are the released model's.

    Raises:
        ValueError: from the constructor, for sizes no such encoder can have.
    """

    hidden_size: int = 1280
    num_attention_heads: int = 16
    num_hidden_layers: int = 32
    intermediate_size: int = 5120
    patch_size: int = 14
    num_channels: int = 3
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    layer_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    vision_segment_max_frames: int = 4
    projector_hidden_size: int = 6144
    output_size: int = 6144

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; allowed: a positive number")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}; allowed: a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim (hidden_size {self.hidden_size} / num_attention_heads "
                f"{self.num_attention_heads}) is {self.head_dim}; allowed: an even number"
            )
        if self.head_dim < 6:
            raise ValueError(f"head_dim is {self.head_dim}; allowed: at least 6 (three rotary axes)")
        if self.spatial_merge_size != 2:
            raise ValueError(f"spatial_merge_size is {self.spatial_merge_size}; allowed: 2")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def axis_dim(self) -> int:
        """Rotary dims of a head that one axis (time, height or width) rotates."""
        return 2 * ((self.head_dim // 3) // 2)

    @property
    def patch_dim(self) -> int:
        """Columns of `pixel_values`."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.spatial_merge_size**2

    @property
    def merged_size(self) -> int:
        """Width of a token before the merge MLP: its patches side by side."""
        return self.patches_per_token * self.output_size


TINY = TowerConfig(
    hidden_size=160,
    num_attention_heads=2,
    num_hidden_layers=3,
    intermediate_size=320,
    projector_hidden_size=128,
    output_size=96,
)


def tower_config_from_checkpoint(config: Mapping[str, Any], source: str) -> TowerConfig:
    """Read the tower's config out of a parsed `config.json`.

    Both released forms are read: sizes nested in `img_token_compression_config`, or flattened into
    `vision_config` with `rope_parameters.rope_theta`.

    Args:
        config: the parsed file.
        source: its path, for error messages.

    Raises:
        CheckpointError: a key is missing, unknown or has a value this encoder does not implement;
            the message has the key, the value and what is allowed.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise CheckpointError(f"{source}: vision_config is missing; expected an object")
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{source}: text_config is missing; expected an object")

    _require_fixed(vision, _FIXED_VISION_KEYS, source, "vision_config.")
    _require_fixed(config, _FIXED_TOP_KEYS, source, "")
    nested = _compression(config, vision, source)
    rope = vision.get("rope_parameters")
    if rope is not None and not isinstance(rope, Mapping):
        raise CheckpointError(f"{source}: vision_config.rope_parameters is {rope!r}; allowed: an object")

    own = {name for name in TowerConfig.__struct_fields__ if name in vision} - {"output_size"}
    known = own | set(_FIXED_VISION_KEYS) | {"img_token_compression_config", "rope_parameters"}
    unknown = sorted(set(vision) - known - _IGNORED_VISION_KEYS)
    if unknown:
        raise CheckpointError(
            f"{source}: unknown key vision_config.{unknown[0]} = {vision[unknown[0]]!r}; allowed: "
            + ", ".join(sorted({*TowerConfig.__struct_fields__, *known} - {"output_size"}))
        )

    values: dict[str, Any] = {name: vision[name] for name in own}
    for name, value in nested.items():
        _merge(values, name, value, source)
    if rope is not None:
        if rope.get("rope_type", "axial") not in ("axial", "default"):
            raise CheckpointError(
                f"{source}: vision_config.rope_parameters.rope_type is {rope['rope_type']!r}; "
                "allowed: axial, default"
            )
        if "rope_theta" in rope:
            _merge(values, "rope_theta", rope["rope_theta"], source)
    if "projector_hidden_size" in config:
        _merge(values, "projector_hidden_size", config["projector_hidden_size"], source)
    _merge(values, "output_size", _need(text, "hidden_size", source, "text_config."), source)
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"):
        _need(vision, name, source, "vision_config.")
    if "projector_hidden_size" not in values:
        _need(config, "projector_hidden_size", source, "")

    for name, value in values.items():
        expected = float if TowerConfig.__annotations__[name] == "float" else int
        if isinstance(value, bool) or not isinstance(value, (int, expected)):
            raise CheckpointError(
                f"{source}: {name} is {value!r}; allowed: a positive "
                + ("number" if expected is float else "whole number")
            )
    try:
        return TowerConfig(**values)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _require_fixed(
    section: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], source: str, prefix: str
) -> None:
    for key, allowed in fixed.items():
        if key in section and section[key] not in allowed:
            choices = ", ".join(str(value) for value in allowed)
            raise CheckpointError(
                f"{source}: {prefix}{key} is {section[key]!r}; allowed: {choices}"
            )


def _compression(
    config: Mapping[str, Any], vision: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """The nested sizes; `vision_config`'s own copy of them wins, and the two may not disagree."""
    merged: dict[str, Any] = {}
    for prefix, section in (("", config), ("vision_config.", vision)):
        key = f"{prefix}img_token_compression_config"
        nested = section.get("img_token_compression_config")
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"{source}: {key} is {nested!r}; allowed: an object")
        unknown = sorted(set(nested) - _COMPRESSION_KEYS)
        if unknown:
            raise CheckpointError(
                f"{source}: unknown key {key}.{unknown[0]} = {nested[unknown[0]]!r}; allowed: "
                + ", ".join(sorted(_COMPRESSION_KEYS))
            )
        method = nested.get("image_token_compression_method", "patch_merge")
        if method != "patch_merge":
            raise CheckpointError(
                f"{source}: {key}.image_token_compression_method is {method!r}; allowed: patch_merge"
            )
        for name in ("spatial_merge_size", "temporal_patch_size"):
            if name in nested:
                _merge(merged, name, nested[name], source)
    return merged


def _merge(values: dict[str, Any], name: str, value: Any, source: str) -> None:
    if name in values and values[name] != value:
        raise CheckpointError(
            f"{source}: {name} is given twice, as {values[name]!r} and as {value!r}; "
            "allowed: one value"
        )
    values[name] = value


def _need(section: Mapping[str, Any], key: str, source: str, prefix: str) -> Any:
    if key not in section:
        raise CheckpointError(f"{source}: {prefix}{key} is missing")
    return section[key]
