"""Configs: what is read, and that every refusal names the key, the value and what is allowed.

Compared with: the released layout as written in the golden checkpoint's `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3compile.config import (
    BOUNDS,
    TINY,
    BuildConfig,
    PreprocessConfig,
    TowerConfig,
    build_config_from_mapping,
    load_build_config,
    preprocess_config_from_mapping,
    tower_config_from_checkpoint,
)
from m3compile.config.backends import BACKENDS, REFUSED_BACKENDS, attention_choices, candidates
from m3compile.config.build import MAX_ITEMS, MAX_TOKENS
from m3compile.errors import (
    CheckpointError,
    ConfigError,
    ExitCode,
    InputNotFoundError,
    M3CompileError,
)

GOLDEN = Path(__file__).parent / "goldens" / "tiny-m3" / "config.json"
DELETE = object()


def released() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(GOLDEN.read_text())
    return document


def changed(path: str, value: Any) -> dict[str, Any]:
    """The golden config with one key set, or deleted."""
    document = released()
    *sections, key = path.split(".")
    section = document
    for name in sections:
        section = section.setdefault(name, {})
    if value is DELETE:
        del section[key]
    else:
        section[key] = value
    return document


def labels(cases: Sequence[tuple[Any, ...]]) -> list[str]:
    """Test ids: pytest itself would print the values, some of which cannot be."""
    return [f"{index}-{case[-1][0]}" for index, case in enumerate(cases)]


def assert_refusal(error: M3CompileError, *parts: str) -> None:
    message = str(error)
    assert "\n" not in message
    assert len(message) < 1500
    for part in parts:
        assert part in message


# --- tower ---


def test_golden_checkpoint_is_the_tiny_tower() -> None:
    assert tower_config_from_checkpoint(released(), "config.json") == TINY


def test_defaults_are_the_released_model() -> None:
    config = TowerConfig()
    assert (config.head_dim, config.axis_dim, config.patch_dim) == (80, 26, 1176)
    assert (config.patches_per_token, config.merged_size) == (4, 24576)


def flattened() -> dict[str, Any]:
    document = released()
    vision = document["vision_config"]
    del document["img_token_compression_config"], vision["img_token_compression_config"]
    vision["spatial_merge_size"] = vision["temporal_patch_size"] = 2
    vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")}
    vision["model_type"] = "minimax_m3_vl_vision"
    return document


def test_flattened_form_reads_the_same() -> None:
    assert tower_config_from_checkpoint(flattened(), "config.json") == TINY


def test_values_come_from_the_file() -> None:
    document = changed("vision_config.rope_theta", 5000)
    document["vision_config"]["vision_segment_max_frames"] = 7
    document["text_config"]["hidden_size"] = 64
    config = tower_config_from_checkpoint(document, "config.json")
    assert (config.rope_theta, config.vision_segment_max_frames) == (5000, 7)
    assert config.output_size == 64


def test_nested_sizes_may_stand_in_either_place_only() -> None:
    for path in ("img_token_compression_config", "vision_config.img_token_compression_config"):
        assert tower_config_from_checkpoint(changed(path, DELETE), "c") == TINY


TOWER_REFUSALS = [
    ("vision_config", DELETE, ("vision_config", "missing")),
    ("vision_config", [1], ("vision_config", "[1]", "an object")),
    ("text_config", None, ("text_config", "None", "an object")),
    ("text_config.hidden_size", DELETE, ("text_config.hidden_size", "missing")),
    ("vision_config.hidden_size", DELETE, ("vision_config.hidden_size", "missing")),
    ("vision_config.num_hidden_layers", DELETE, ("num_hidden_layers", "missing")),
    ("projector_hidden_size", DELETE, ("projector_hidden_size", "missing")),
    ("vision_config.hidden_act", "gelu_pytorch_tanh", ("hidden_act", "tanh", "gelu")),
    ("vision_config.hidden_act", None, ("hidden_act", "None", "gelu")),
    ("vision_config.hidden_act", ["gelu"], ("hidden_act", "['gelu']", "gelu")),
    ("vision_config.rope_mode", "2d", ("rope_mode", "'2d'", "3d")),
    ("vision_config.model_type", "siglip", ("model_type", "'siglip'", "clip_vision_model")),
    ("vision_config.position_embedding_type", "learned", ("position_embedding_type", "rope")),
    ("projector_hidden_act", "relu", ("projector_hidden_act", "'relu'", "gelu")),
    ("multimodal_projector_bias", False, ("multimodal_projector_bias", "False", "True")),
    ("vision_feature_layer", -2, ("vision_feature_layer", "-2", "-1")),
    ("vision_feature_select_strategy", "default", ("select_strategy", "'default'", "full")),
    ("vision_config.hidden_size", 161, ("hidden_size", "161", "multiple", "2")),
    ("vision_config.hidden_size", 162, ("head_dim", "81", "even")),
    ("vision_config.hidden_size", 8, ("head_dim", "4", "at least 6")),
    ("vision_config.hidden_size", 0, ("hidden_size", "0", "positive")),
    ("vision_config.hidden_size", -160, ("hidden_size", "-160", "positive")),
    ("vision_config.hidden_size", 160.0, ("hidden_size", "160.0", "whole number")),
    ("vision_config.hidden_size", True, ("hidden_size", "True", "whole number")),
    ("vision_config.hidden_size", None, ("hidden_size", "None", "whole number")),
    ("vision_config.hidden_size", [160], ("hidden_size", "[160]", "whole number")),
    ("vision_config.hidden_size", 10**400, ("hidden_size", "up to")),
    ("vision_config.hidden_size", 10**5000, ("hidden_size", "bits>", "up to")),
    ("vision_config.num_hidden_layers", 10**9, ("num_hidden_layers", "1000000000", "1024")),
    ("vision_config.layer_norm_eps", float("nan"), ("layer_norm_eps", "nan", "positive")),
    ("vision_config.layer_norm_eps", "1e-5", ("layer_norm_eps", "'1e-5'", "number")),
    ("vision_config.rope_theta", float("inf"), ("rope_theta", "inf", "positive")),
    ("vision_config.rope_theta", 10**400, ("rope_theta", "positive")),
    ("vision_config.qk_norm", True, ("vision_config", "'qk_norm'", "True", "hidden_size")),
    ("vision_config.new\nline", {"a": "b\nc"}, ("unknown key", "allowed")),
    ("vision_config.rope_parameters", "x", ("rope_parameters", "'x'", "an object")),
    ("vision_config.rope_parameters", {"rope_type": ["yarn"]}, ("rope_type", "yarn", "axial")),
    ("vision_config.rope_parameters", {"factor": 2.0}, ("'factor'", "2.0", "rope_theta")),
    ("vision_config.rope_parameters", {"rope_theta": 7}, ("rope_theta", "twice", "7")),
    ("vision_config.spatial_merge_size", 4, ("spatial_merge_size", "twice", "4", "2")),
    ("img_token_compression_config", 3, ("img_token_compression_config", "3", "an object")),
    ("img_token_compression_config.mode", 1, ("'mode'", "1", "spatial_merge_size")),
    (
        "img_token_compression_config.image_token_compression_method",
        "pool",
        ("image_token_compression_method", "'pool'", "patch_merge"),
    ),
]


@pytest.mark.parametrize(("path", "value", "parts"), TOWER_REFUSALS, ids=labels(TOWER_REFUSALS))
def test_tower_refusal(path: str, value: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        tower_config_from_checkpoint(changed(path, value), "some/config.json")
    assert_refusal(caught.value, "some/config.json", *parts)
    assert caught.value.exit_code is ExitCode.ARTIFACT
    assert isinstance(caught.value, ValueError)


def test_merge_size_other_than_two_is_refused() -> None:
    document = flattened()
    document["vision_config"]["spatial_merge_size"] = 4
    with pytest.raises(CheckpointError, match=r"spatial_merge_size is 4; allowed: 2"):
        tower_config_from_checkpoint(document, "c")


@pytest.mark.parametrize("document", [None, [], "x", 3])
def test_config_that_is_no_object_is_refused(document: Any) -> None:
    with pytest.raises(CheckpointError, match="allowed: an object"):
        tower_config_from_checkpoint(document, "c")
    with pytest.raises(CheckpointError, match="allowed: an object"):
        preprocess_config_from_mapping(document, "c")


# --- build ---


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "build.yaml"
    path.write_text(text)
    return path


def test_yaml_and_overrides(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "checkpoint: some/folder\nbudgets: [64, 128, 256]\nmax_items: 8\ndevice: cpu\n"
        "specialize: [64]\nengine: reduce-overhead\ncapture: lazy\n",
    )
    config = load_build_config(path, {"max_items": 16, "force": True, "device": None})
    assert config == BuildConfig(
        checkpoint="some/folder",
        budgets=(64, 128, 256),
        max_items=16,
        device="cpu",
        specialize=(64,),
        engine="reduce-overhead",
        capture="lazy",
        force=True,
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "\ufeff", "device: null\n"])
def test_empty_file_is_the_default(tmp_path: Path, text: str) -> None:
    assert load_build_config(write(tmp_path, text)) == BuildConfig()


def test_null_means_default_where_it_may() -> None:
    keys = ("checkpoint", "out", "device", "dtype", "budgets", "specialize", "fp8_scales")
    assert build_config_from_mapping(dict.fromkeys(keys), "flags") == BuildConfig()


def test_every_field_has_a_key() -> None:
    values = {name: getattr(BuildConfig(), name) for name in BuildConfig.__struct_fields__}
    assert build_config_from_mapping(values, "flags") == BuildConfig()


BUILD_REFUSALS: list[tuple[dict[Any, Any], tuple[str, ...]]] = [
    ({"budget": [64]}, ("unknown key 'budget'", "[64]", "budgets")),
    ({3: 4}, ("unknown key 3", "4", "budgets")),
    ({"device": "tpu"}, ("device", "'tpu'", "cuda, cpu")),
    ({"device": ["cpu"]}, ("device", "['cpu']", "cuda, cpu")),
    ({"device": {}}, ("device", "{}", "cuda, cpu")),
    ({"device": False}, ("device", "False", "cuda, cpu")),
    ({"dtype": "float16"}, ("dtype", "'float16'", "float32, bfloat16")),
    ({"engine": "tensorrt"}, ("engine", "'tensorrt'", "aoti, reduce-overhead")),
    ({"engine": None}, ("engine", "None", "aoti")),
    ({"capture": None}, ("capture", "None", "load, lazy, never")),
    ({"capture": "eager"}, ("capture", "'eager'", "load, lazy, never")),
    ({"attention": "FLASH"}, ("attention", "'FLASH'", "auto, FLASH_ATTN", "TORCH_SDPA")),
    ({"attention": None}, ("attention", "None", "auto")),
    ({"attention": ["auto"]}, ("attention", "['auto']", "auto")),
    ({"attention": {"auto": 1}}, ("attention", "auto")),
    ({"attention_dtype": "int8"}, ("attention_dtype", "'int8'", "fp8")),
    ({"attention_dtype": "fp8"}, ("attention_dtype", "'fp8'", "fp8_scales")),
    ({"checkpoint": 3}, ("checkpoint", "3", "a path")),
    ({"checkpoint": ""}, ("checkpoint", "''", "a path")),
    ({"out": ["a"]}, ("out", "['a']", "a path")),
    ({"out": "a\0b"}, ("out", "a\\x00b", "a path")),
    ({"fp8_scales": True}, ("fp8_scales", "True", "a path")),
    ({"force": 1}, ("force", "1", "true, false")),
    ({"force": "yes"}, ("force", "'yes'", "true, false")),
    ({"force": None}, ("force", "None", "true, false")),
    ({"max_items": 0}, ("max_items", "0", str(MAX_ITEMS))),
    ({"max_items": MAX_ITEMS + 1}, ("max_items", str(MAX_ITEMS + 1))),
    ({"max_items": True}, ("max_items", "True", "whole number")),
    ({"max_items": 8.0}, ("max_items", "8.0", "whole number")),
    ({"max_items": None}, ("max_items", "None", "whole number")),
    ({"max_items": [8]}, ("max_items", "[8]", "whole number")),
    ({"max_items": 1 << 20000}, ("max_items", "bits>", "whole number")),
    ({"budgets": []}, ("budgets", "[]", "increasing")),
    ({"budgets": 64}, ("budgets", "64", "a list of increasing")),
    ({"budgets": "64,128"}, ("budgets", "'64,128'", "a list of increasing")),
    ({"budgets": {64: 128}}, ("budgets", "{64: 128}", "a list of increasing")),
    ({"budgets": [64, 64]}, ("budgets", "64 after 64", "increasing")),
    ({"budgets": [128, 64]}, ("budgets", "64 after 128", "increasing")),
    ({"budgets": [0, 64]}, ("budgets", "has 0", "from 1")),
    ({"budgets": [-64]}, ("budgets", "has -64", "from 1")),
    ({"budgets": [True, 64]}, ("budgets", "has True", "whole numbers")),
    ({"budgets": [64.0]}, ("budgets", "has 64.0", "whole numbers")),
    ({"budgets": [float("nan")]}, ("budgets", "has nan", "whole numbers")),
    ({"budgets": [None]}, ("budgets", "has None", "whole numbers")),
    ({"budgets": [[64]]}, ("budgets", "has [64]", "whole numbers")),
    ({"budgets": [64, MAX_TOKENS + 1]}, ("budgets", str(MAX_TOKENS + 1), str(MAX_TOKENS))),
    ({"budgets": [1 << 20000]}, ("budgets", "bits>", str(MAX_TOKENS))),
    ({"specialize": 0}, ("specialize", "0", "increasing")),
    ({"specialize": False}, ("specialize", "False", "increasing")),
    ({"specialize": ""}, ("specialize", "''", "increasing")),
    ({"specialize": [128, 64]}, ("specialize", "64 after 128", "increasing")),
    ({"specialize": [96], "budgets": [64]}, ("specialize", "96", "one of budgets [64]")),
]


@pytest.mark.parametrize(("values", "parts"), BUILD_REFUSALS, ids=labels(BUILD_REFUSALS))
def test_build_refusal(values: dict[Any, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config_from_mapping(values, "build.yaml")
    assert_refusal(caught.value, "build.yaml", *parts)
    assert caught.value.exit_code is ExitCode.REQUEST
    assert isinstance(caught.value, ValueError)


YAML_REFUSALS = [
    ("- 64\n- 128\n", "holds a list"),
    ("just words\n", "holds a str"),
    ("3\n", "holds a int"),
    ("budgets: [64\n", "not valid YAML"),
    ("a: b: c\n", "not valid YAML"),
    ("---\na: 1\n---\nb: 2\n", "not valid YAML"),
    ("!!python/object:os.system x\n", "not valid YAML"),
    ("{[1]: 2}\n", "not valid YAML"),
    ("{{}: 1}\n", "not valid YAML"),
    ("<<: 3\n", "not valid YAML"),
    ("out: *nowhere\n", "not valid YAML"),
    ("max_items: 2026-13-45\n", "not valid YAML"),
    ("max_items: !!int x\n", "not valid YAML"),
    ("max_items: !!int ''\n", "not valid YAML"),
    ("force: !!bool x\n", "not valid YAML"),
    ("max_items: !!float ''\n", "not valid YAML"),
    ("max_items: !!timestamp x\n", "not valid YAML"),
    (f"max_items: {'9' * 5000}\n", "not valid YAML"),
    ("out: '\x01'\n", "not valid YAML"),
    ("out: a\nmax_items: 3\nout: b\n", "'out' is given twice"),
    ("out: " + "[" * 5000 + "\n", "nested too deeply"),
    ("max_items: 0x" + "f" * 5000 + "\n", "bits>"),
    ("budgets: &a [*a]\n", "budgets has [[["),
    ("budgets: !!set {64, 128}\n", "budgets is {64, 128}"),
    ("budgets: !!binary aGk=\n", "budgets is b'hi'"),
    ("budgets: 2026-12-01\n", "budgets is datetime.date(2026, 12, 1)"),
    ("max_items: .nan\n", "max_items is nan"),
    ("max_items: .inf\n", "max_items is inf"),
    ("force: 'true'\n", "force is 'true'"),
    ("null: 3\n", "unknown key None"),
    (".nan: 3\n", "unknown key nan"),
    ("true: 3\n", "unknown key True"),
    ('"a\\nb": "c\\nd"\n', "unknown key 'a\\nb' = 'c\\nd'"),
]


@pytest.mark.parametrize(("text", "part"), YAML_REFUSALS, ids=range(len(YAML_REFUSALS)))
def test_yaml_refusal(tmp_path: Path, text: str, part: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_build_config(path)
    assert_refusal(caught.value, str(path), part)


def test_aliases_that_expand_to_billions_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(ConfigError) as caught:
        load_build_config(write(tmp_path, "\n".join([*lines, "budgets: *a11"])))
    assert_refusal(caught.value, "unknown key 'a0'")
    nested: list[Any] = ["x"] * 99
    for _ in range(12):
        nested = [nested] * 99
    with pytest.raises(ConfigError) as caught:
        build_config_from_mapping({"budgets": nested}, "build.yaml")
    assert_refusal(caught.value, "budgets has [[[")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputNotFoundError, match="does not exist") as missing:
        load_build_config(tmp_path / "absent.yaml")
    assert missing.value.exit_code is ExitCode.REQUEST
    assert isinstance(missing.value, FileNotFoundError)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_build_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"out: caf\xe9\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_build_config(tmp_path / "latin.yaml")


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, "auto", "cuda", "fp8", "gelu", 64, 128]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(BuildConfig.__struct_fields__), ANYTHING, max_size=4))
def test_any_build_value_is_taken_or_refused_in_one_line(values: dict[str, Any]) -> None:
    try:
        config = build_config_from_mapping(values, "build.yaml")
    except ConfigError as error:
        assert_refusal(error, "build.yaml")
    else:
        assert isinstance(config.engine, str)
        assert all(isinstance(budget, int) for budget in config.budgets or ())


TOWER_PATHS = [
    *(f"vision_config.{name}" for name in (*TowerConfig.__struct_fields__, "rope_parameters")),
    *("vision_config.hidden_act", "vision_config.model_type", "vision_config.anything"),
    *("vision_config.rope_parameters.rope_type", "vision_config.rope_parameters.rope_theta"),
    *("img_token_compression_config", "img_token_compression_config.spatial_merge_size"),
    *("text_config", "text_config.hidden_size", "vision_config", "projector_hidden_size"),
    *("vision_feature_layer", "multimodal_projector_bias"),
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TOWER_PATHS), ANYTHING)
def test_any_tower_value_is_taken_or_refused_in_one_line(path: str, value: Any) -> None:
    try:
        config = tower_config_from_checkpoint(changed(path, value), "config.json")
    except CheckpointError as error:
        assert_refusal(error, "config.json")
    else:
        assert config.head_dim > 0


# --- attention names ---


def test_candidates_in_order_of_preference() -> None:
    names = [facts.name for facts in candidates("auto", "cuda", "bfloat16", captured=True)]
    assert names == [
        "FLASH_ATTN_4",
        "FLASH_ATTN_3",
        "FLASH_ATTN_2",
        "FLASH_ATTN_TORCH",
        "FLASH_ATTN_3_4",
        "ROCM_AITER_FA",
    ]
    (sdpa,) = candidates("auto", "cpu", "float32", captured=False)
    assert sdpa.name == "TORCH_SDPA"
    (single,) = candidates("FLASH_ATTN_3", "cuda", "bfloat16", captured=True)
    assert single is BACKENDS["FLASH_ATTN_3"]
    uncaptured = candidates("TORCH_SDPA", "cuda", "float32", captured=False)
    assert [facts.name for facts in uncaptured] == ["TORCH_SDPA"]


@pytest.mark.parametrize("name", sorted(REFUSED_BACKENDS))
@pytest.mark.parametrize(("device", "way_out"), [("cuda", "FLASH_ATTN"), ("cpu", "TORCH_SDPA")])
def test_refused_backend_gives_reason_and_way_out(name: str, device: str, way_out: str) -> None:
    # The build config lets the name pass: the way out depends on the device.
    assert build_config_from_mapping({"attention": name}, "flags").attention == name
    with pytest.raises(ConfigError) as caught:
        candidates(name, device, "bfloat16", captured=True)
    reason = REFUSED_BACKENDS[name]
    assert_refusal(caught.value, name, "refused", reason, "; use auto", way_out)
    assert "host" in reason


@pytest.mark.parametrize(
    ("name", "device", "dtype", "captured", "parts"),
    [
        ("TORCH_SDPA", "cuda", "bfloat16", True, ("tolist", "use auto", "capture: never")),
        ("FLASH_ATTN", "cpu", "float32", False, ("does not run on cpu", "TORCH_SDPA")),
        ("ROCM_AITER_FA", "cpu", "bfloat16", False, ("does not run on cpu", "TORCH_SDPA")),
        ("FLASH_ATTN_3", "cuda", "float32", True, ("float32", "bfloat16", "capture: never")),
        ("auto", "cuda", "float32", True, ("float32", "use dtype bfloat16", "TORCH_SDPA")),
        ("FLASH_ATTN_4", "cuda", "fp8", True, ("fp8", "auto or FLASH_ATTN_3", "attention_dtype")),
        ("NOPE", "cuda", "bfloat16", True, ("'NOPE'", "auto, FLASH_ATTN", "TORCH_SDPA")),
        (["auto"], "cuda", "bfloat16", True, ("['auto']", "auto, FLASH_ATTN")),
        ("auto", "tpu", "bfloat16", True, ("device", "'tpu'", "cuda, cpu")),
        ("auto", ["cpu"], "bfloat16", True, ("device", "['cpu']", "cuda, cpu")),
        ("auto", "cuda", ["bfloat16"], True, ("['bfloat16']", "use dtype bfloat16")),
    ],
)
def test_backend_refusal(
    name: Any, device: Any, dtype: Any, captured: bool, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        candidates(name, device, dtype, captured=captured)
    assert_refusal(caught.value, *parts)
    assert caught.value.exit_code is ExitCode.REQUEST


def test_choices_are_auto_families_and_implementations() -> None:
    choices = attention_choices()
    assert choices[:4] == ("auto", "FLASH_ATTN", "ROCM_AITER_FA", "TORCH_SDPA")
    assert set(choices) == {"auto", "FLASH_ATTN", *BACKENDS}
    assert len(set(choices)) == len(choices)


# --- preprocess and bounds ---


def test_preprocess_defaults_and_values() -> None:
    assert preprocess_config_from_mapping({}, "p") == PreprocessConfig()
    assert PreprocessConfig().factor == 28
    config = preprocess_config_from_mapping(
        {
            "size": {"shortest_edge": 4000, "longest_edge": 100000, "height": None},
            "max_pixels": 200000,
            "image_mean": [0, 0.5, 1],
            "image_std": [1, 2, 3],
            "rescale_factor": 0.5,
            "resample": "bicubic",
            "do_resize": True,
            "patch_size": 16,
            "unrelated": [1, {}],
        },
        "p",
    )
    assert (config.min_pixels, config.max_pixels, config.factor) == (4000, 200000, 32)
    assert (config.mean, config.std) == ((0.0, 0.5, 1.0), (1.0, 2.0, 3.0))
    assert config.rescale_factor == 0.5


def test_released_size_is_ignored() -> None:
    assert preprocess_config_from_mapping({"size": [672, 672]}, "p") == PreprocessConfig()
    assert preprocess_config_from_mapping({"size": None}, "p") == PreprocessConfig()


PREPROCESS_REFUSALS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"size": [224, 224]}, ("size", "[224, 224]", "shortest_edge")),
    ({"size": 672}, ("size", "672", "shortest_edge")),
    ({"size": {"height": 224, "width": 224}}, ("size", "'height'", "224", "shortest_edge")),
    ({"size": {"longest_edge": "big"}}, ("size.longest_edge", "'big'", "whole number")),
    ({"min_pixels": 0}, ("min_pixels", "0", "from 1")),
    ({"min_pixels": True}, ("min_pixels", "True", "whole number")),
    ({"min_pixels": 10}, ("min_pixels is 10", "784 <= min_pixels")),
    ({"min_pixels": 5000, "max_pixels": 4000}, ("max_pixels is 4000", "min_pixels <=")),
    ({"max_pixels": 1 << 20000}, ("max_pixels", "bits>", "whole number")),
    ({"patch_size": {"height": 14}}, ("patch_size", "{'height': 14}", "whole number")),
    ({"merge_size": None}, ("merge_size", "None", "whole number")),
    ({"do_resize": False}, ("do_resize", "False", "true")),
    ({"do_normalize": 1}, ("do_normalize", "1", "true")),
    ({"resample": 2}, ("resample", "2", "3 (bicubic)")),
    ({"resample": ["bicubic"]}, ("resample", "['bicubic']", "bicubic")),
    ({"rescale_factor": float("nan")}, ("rescale_factor", "nan", "finite")),
    ({"rescale_factor": 10**400}, ("rescale_factor", "finite")),
    ({"rescale_factor": 0}, ("rescale_factor", "0.0", "above 0")),
    ({"rescale_factor": "1/255"}, ("rescale_factor", "'1/255'", "finite number")),
    ({"image_mean": 0.5}, ("image_mean", "0.5", "three numbers")),
    ({"image_mean": [0.5, 0.5]}, ("image_mean", "[0.5, 0.5]", "three numbers")),
    ({"image_mean": [0.5, None, 0.5]}, ("image_mean", "None", "finite number")),
    ({"image_std": [0.5, 0.0, 0.5]}, ("image_std", "0.0", "above 0")),
    ({"image_std": [0.5, float("inf"), 0.5]}, ("image_std", "inf", "finite number")),
]


@pytest.mark.parametrize(("values", "parts"), PREPROCESS_REFUSALS, ids=labels(PREPROCESS_REFUSALS))
def test_preprocess_refusal(values: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        preprocess_config_from_mapping(values, "preprocessor_config.json")
    assert_refusal(caught.value, "preprocessor_config.json", *parts)
    assert caught.value.exit_code is ExitCode.ARTIFACT


PREPROCESS_KEYS = [
    *("size", "min_pixels", "max_pixels", "patch_size", "merge_size", "temporal_patch_size"),
    *("do_resize", "resample", "rescale_factor", "image_mean", "image_std", "do_convert_rgb"),
]


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(PREPROCESS_KEYS), ANYTHING, max_size=3))
def test_any_preprocess_value_is_taken_or_refused_in_one_line(values: dict[str, Any]) -> None:
    try:
        preprocess_config_from_mapping(values, "p.json")
    except CheckpointError as error:
        assert_refusal(error, "p.json")


def test_bounds_of_verify() -> None:
    assert BOUNDS["float32"].relative_error == 1e-5
    assert (BOUNDS["bfloat16"].eager_ratio, BOUNDS["bfloat16"].cosine) == (1.25, 0.999)
