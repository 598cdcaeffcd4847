"""The tower's sizes, read from a checkpoint's `config.json`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from m3compile.config.shown import shown
from m3compile.config.tower import TowerConfig
from m3compile.errors import CheckpointError

# Keys of `vision_config` that change nothing at inference, or that only transformers reads.
_IGNORED_VISION_KEYS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attention_dropout",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dropout",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "image_size",
        "initializer_factor",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "projection_dim",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
        "vocab_size",
    ]
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
    vision = _object(config, "vision_config", source)
    text = _object(config, "text_config", source)
    _require_fixed(vision, _FIXED_VISION_KEYS, source, "vision_config.")
    _require_fixed(config, _FIXED_TOP_KEYS, source, "")

    fields = {*TowerConfig.__struct_fields__} - {"output_size"}
    known = {*fields, *_FIXED_VISION_KEYS, "img_token_compression_config", "rope_parameters"}
    _refuse_unknown(vision, known, _IGNORED_VISION_KEYS, source, "vision_config")

    values: dict[str, Any] = {name: vision[name] for name in fields if name in vision}
    _merge_compression(values, config, source, "img_token_compression_config")
    _merge_compression(values, vision, source, "vision_config.img_token_compression_config")
    _merge_rope(values, vision, source)
    if "projector_hidden_size" in config:
        _merge(values, "projector_hidden_size", config["projector_hidden_size"], source)
    _merge(values, "output_size", _need(text, "hidden_size", source, "text_config."), source)
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"):
        _need(vision, name, source, "vision_config.")
    if "projector_hidden_size" not in values:
        _need(config, "projector_hidden_size", source, "")

    for name, value in values.items():
        kinds = (int, float) if TowerConfig.__annotations__[name] == "float" else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise CheckpointError(
                f"{source}: {name} is {shown(value)}; allowed: a positive "
                + ("number" if float in kinds else "whole number")
            )
    try:
        return TowerConfig(**values)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _object(config: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{source}: holds a {type(config).__name__}; allowed: an object")
    section = _need(config, key, source, "")
    if not isinstance(section, Mapping):
        raise CheckpointError(f"{source}: {key} is {shown(section)}; allowed: an object")
    return section


def _refuse_unknown(
    section: Mapping[str, Any],
    known: Collection[str],
    ignored: Collection[str],
    source: str,
    name: str,
) -> None:
    for key, value in section.items():
        if key not in known and key not in ignored:
            raise CheckpointError(
                f"{source}: {name} has unknown key {shown(key)} = {shown(value)}; allowed: "
                + ", ".join(sorted(known))
            )


def _require_fixed(
    section: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], source: str, prefix: str
) -> None:
    for key, allowed in fixed.items():
        if key in section and section[key] not in allowed:
            choices = ", ".join(str(value) for value in allowed)
            raise CheckpointError(
                f"{source}: {prefix}{key} is {shown(section[key])}; allowed: {choices}"
            )


def _merge_compression(
    values: dict[str, Any], section: Mapping[str, Any], source: str, name: str
) -> None:
    """The nested sizes, which stand at the top level, in `vision_config` or in both."""
    nested = section.get("img_token_compression_config")
    if nested is None:
        return
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"{source}: {name} is {shown(nested)}; allowed: an object")
    _refuse_unknown(nested, _COMPRESSION_KEYS, (), source, name)
    method = nested.get("image_token_compression_method", "patch_merge")
    if method != "patch_merge":
        raise CheckpointError(
            f"{source}: {name}.image_token_compression_method is {shown(method)}; "
            "allowed: patch_merge"
        )
    for key in ("spatial_merge_size", "temporal_patch_size"):
        if key in nested:
            _merge(values, key, nested[key], source)


def _merge_rope(values: dict[str, Any], vision: Mapping[str, Any], source: str) -> None:
    rope = vision.get("rope_parameters")
    if rope is None:
        return
    name = "vision_config.rope_parameters"
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{source}: {name} is {shown(rope)}; allowed: an object")
    # A scaled rotary embedding (`factor` and the like) is another model.
    _refuse_unknown(rope, ("rope_type", "rope_theta"), (), source, name)
    _require_fixed(rope, {"rope_type": ("axial", "default")}, source, f"{name}.")
    if "rope_theta" in rope:
        _merge(values, "rope_theta", rope["rope_theta"], source)


def _merge(values: dict[str, Any], name: str, value: Any, source: str) -> None:
    if name in values and values[name] != value:
        raise CheckpointError(
            f"{source}: {name} is given twice, as {shown(values[name])} and as {shown(value)}; "
            "allowed: one value"
        )
    values[name] = value


def _need(section: Mapping[str, Any], key: str, source: str, prefix: str) -> Any:
    if key not in section:
        raise CheckpointError(f"{source}: {prefix}{key} is missing; it has no default")
    return section[key]
