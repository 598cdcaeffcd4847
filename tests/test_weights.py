"""Checkpoint folders in, tower tensors out.

Values and names are compared with what the safetensors library reads from the same files, and with
names and shapes written out here by hand; the golden checkpoint was made by another implementation.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from m3compile.config import (
    TINY,
    PreprocessConfig,
    TowerConfig,
    preprocess_config_from_mapping,
    tower_config_from_checkpoint,
)
from m3compile.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ExitCode,
    OperationError,
    RequestError,
)
from m3compile.weights import (
    init_checkpoint,
    load_tower_state,
    open_checkpoint,
    tower_tensor_shapes,
)
from m3compile.weights import load as load_module

GOLDEN = Path(__file__).parent / "goldens" / "tiny-m3"
VISION = "vision_tower.vision_model."
LAYER = f"{VISION}encoder.layers.1."
PATCH = f"{VISION}embeddings.patch_embedding.weight"
TEXT = "language_model.lm_head.weight"
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"

opened: list[str] = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """Every vision tensor of the golden checkpoint, by its released name."""
    held: dict[str, torch.Tensor] = {}
    for path in GOLDEN.glob("model-*.safetensors"):
        held |= load_file(path)
    return {name: held[name] for name in sorted(held) if not name.startswith("language_model.")}


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 2) -> Path:
    """A checkpoint of the golden config: vision shards, one text shard, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(GOLDEN / "config.json", folder)
    weight_map = {TEXT: "model-text.safetensors"}
    save_file({TEXT: torch.zeros(4)}, folder / weight_map[TEXT])
    names = list(tensors)
    for number in range(shards):
        file_name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        held = {name: tensors[name] for name in names[number::shards]}
        save_file(held, folder / file_name)
        weight_map |= dict.fromkeys(held, file_name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def write_raw(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def refusal(path: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        load_tower_state(open_checkpoint(path), torch.float32)
    assert caught.value.exit_code is ExitCode.ARTIFACT
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1200
    return message


def to_transformers(name: str) -> str:
    for old, new in (
        ("vision_tower.vision_model.embeddings.patch_embedding.", "vision_tower.embeddings.proj."),
        ("vision_tower.vision_model.pre_layrnorm.", "vision_tower.pre_layrnorm."),
        ("vision_tower.vision_model.encoder.layers.", "vision_tower.layers."),
        ("patch_merge_mlp.linear_1.", "multi_modal_projector.merge_linear_1."),
        ("patch_merge_mlp.linear_2.", "multi_modal_projector.merge_linear_2."),
    ):
        name = name.replace(old, new)
    return name


# What is read


def test_shapes_are_those_of_the_model() -> None:
    shapes = tower_tensor_shapes(TowerConfig(num_hidden_layers=1))
    assert shapes == {
        "patch_embed.weight": (1280, 1176),
        "pre_norm.weight": (1280,),
        "pre_norm.bias": (1280,),
        "layers.0.norm1.weight": (1280,),
        "layers.0.norm1.bias": (1280,),
        "layers.0.qkv.weight": (3840, 1280),
        "layers.0.qkv.bias": (3840,),
        "layers.0.out_proj.weight": (1280, 1280),
        "layers.0.out_proj.bias": (1280,),
        "layers.0.norm2.weight": (1280,),
        "layers.0.norm2.bias": (1280,),
        "layers.0.fc1.weight": (5120, 1280),
        "layers.0.fc1.bias": (5120,),
        "layers.0.fc2.weight": (1280, 5120),
        "layers.0.fc2.bias": (1280,),
        "projector.fc1.weight": (6144, 1280),
        "projector.fc1.bias": (6144,),
        "projector.fc2.weight": (6144, 6144),
        "projector.fc2.bias": (6144,),
        "merger.fc1.weight": (6144, 24576),
        "merger.fc1.bias": (6144,),
        "merger.fc2.weight": (6144, 6144),
        "merger.fc2.bias": (6144,),
    }
    parameters = sum(math.prod(shape) for shape in tower_tensor_shapes(TowerConfig()).values())
    assert round(parameters / 1e6) == 866


def test_golden_checkpoint_loads(tensors: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(GOLDEN)
    assert checkpoint.config == TINY
    assert checkpoint.naming == "released"
    assert checkpoint.warnings == ()
    assert checkpoint.preprocessor_config is None
    assert [file.name[:11] for file in checkpoint.files] == [f"model-0000{n}" for n in (1, 2, 3)]

    steps: list[tuple[int, int]] = []
    state = load_tower_state(
        checkpoint, torch.float32, progress=lambda done, total: steps.append((done, total))
    )
    assert steps == [(n, len(tensors)) for n in range(1, len(tensors) + 1)]
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == tower_tensor_shapes(
        TINY
    )
    assert list(state) == list(tower_tensor_shapes(TINY))
    assert all(t.is_contiguous() and t.dtype is torch.float32 for t in state.values())

    expected = {
        "patch_embed.weight": tensors[PATCH].flatten(1),
        "pre_norm.bias": tensors[f"{VISION}pre_layrnorm.bias"],
        "layers.1.norm1.weight": tensors[f"{LAYER}layer_norm1.weight"],
        "layers.1.norm2.bias": tensors[f"{LAYER}layer_norm2.bias"],
        "layers.1.out_proj.weight": tensors[f"{LAYER}self_attn.out_proj.weight"],
        "layers.1.fc1.weight": tensors[f"{LAYER}mlp.fc1.weight"],
        "layers.1.fc2.weight": tensors[f"{LAYER}mlp.fc2.weight"],
        "projector.fc1.weight": tensors["multi_modal_projector.linear_1.weight"],
        "projector.fc2.bias": tensors["multi_modal_projector.linear_2.bias"],
        "merger.fc1.weight": tensors["patch_merge_mlp.linear_1.weight"],
        "merger.fc2.weight": tensors["patch_merge_mlp.linear_2.weight"],
    }
    for kind in ("weight", "bias"):
        parts = [tensors[f"{LAYER}self_attn.{part}_proj.{kind}"] for part in "qkv"]
        expected[f"layers.1.qkv.{kind}"] = torch.cat(parts)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor.float()), name


def test_dtype_is_the_one_asked_for(tensors: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(GOLDEN)
    state = load_tower_state(checkpoint, torch.bfloat16)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert torch.equal(state["patch_embed.weight"], tensors[PATCH].bfloat16().flatten(1))
    with pytest.raises(RequestError, match=r"torch\.int8"):
        load_tower_state(checkpoint, torch.int8)


@pytest.mark.parametrize("naming", ["released", "transformers", "transformers-bare"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_naming_gives_the_same_state(
    tmp_path: Path, tensors: dict[str, torch.Tensor], naming: str, shards: int
) -> None:
    prefix = "model." if naming == "transformers" else ""
    if naming != "released":
        tensors = {prefix + to_transformers(name): tensors[name] for name in tensors}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, shards))
    assert checkpoint.naming == naming
    state = load_tower_state(checkpoint, torch.float32)
    for name, tensor in load_tower_state(open_checkpoint(GOLDEN), torch.float32).items():
        assert torch.equal(state[name], tensor), name


def test_single_file_without_an_index(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    shutil.copy(GOLDEN / "config.json", tmp_path)
    save_file({**tensors, TEXT: torch.zeros(4)}, tmp_path / "model.safetensors")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.files == (tmp_path / "model.safetensors",)
    assert checkpoint.preprocessor_config == tmp_path / "preprocessor_config.json"
    state = load_tower_state(checkpoint, torch.float32)
    assert torch.equal(state["patch_embed.weight"], tensors[PATCH].flatten(1))


def test_one_source_tensor_in_memory_and_each_read_once(
    monkeypatch: pytest.MonkeyPatch, tensors: dict[str, torch.Tensor]
) -> None:
    alive: list[Any] = []
    read: list[Any] = []
    original = load_module.read_tensor

    def watched(path: Path, tensor: Any) -> torch.Tensor:
        assert not [reference for reference in alive if reference() is not None]
        found = original(path, tensor)
        alive.append(weakref.ref(found))
        read.append((path, tensor.start))
        return found

    monkeypatch.setattr(load_module, "read_tensor", watched)
    load_tower_state(open_checkpoint(GOLDEN), torch.bfloat16)
    assert len(read) == len(set(read)) == len(tensors)


# What is left alone


@pytest.mark.parametrize("single_file", [False, True])
def test_terabyte_of_text_is_never_touched(
    tmp_path: Path, tensors: dict[str, torch.Tensor], single_file: bool
) -> None:
    terabyte = 1 << 40
    write_checkpoint(tmp_path, tensors)
    text = tmp_path / "model-text.safetensors"
    if single_file:
        # The vision tensors come first, then a text tensor of which the disk holds nothing.
        (tmp_path / INDEX).unlink()
        text = tmp_path / "model.safetensors"
        save_file(tensors, text)
        raw = text.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        data = raw[8 + length :]
        stop = len(data) + terabyte
        header[TEXT] = {"dtype": "F4_NEW", "shape": [7], "data_offsets": [len(data), stop]}
        write_raw(text, json.dumps(header).encode(), data)
        terabyte += text.stat().st_size
    try:
        with open(text, "r+b") as file:
            file.truncate(terabyte)
    except OSError as error:
        pytest.skip(f"the file system has no file of a terabyte: {error}")
    opened.clear()
    state = load_tower_state(open_checkpoint(tmp_path), torch.float32)
    assert torch.equal(state["patch_embed.weight"], tensors[PATCH].flatten(1))
    assert (str(text) in opened) == single_file
    text.unlink()


def test_missing_text_shard_does_not_matter(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    write_checkpoint(tmp_path, tensors)
    (tmp_path / "model-text.safetensors").unlink()
    assert open_checkpoint(tmp_path).warnings == ()


def test_stray_single_file_is_named_and_never_opened(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    write_checkpoint(tmp_path, tensors)
    stray = tmp_path / "model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, stray)
    opened.clear()
    checkpoint = open_checkpoint(tmp_path)
    state = load_tower_state(checkpoint, torch.float32)
    assert str(tmp_path / SHARD) in opened
    assert str(stray) not in opened
    assert len(checkpoint.warnings) == 1
    assert str(stray) in checkpoint.warnings[0]
    assert torch.equal(state["patch_embed.weight"], tensors[PATCH].flatten(1))


def test_copy_in_another_shard_is_named_and_not_read(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    write_checkpoint(tmp_path, tensors)
    shard_of = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    other = next(s for s in sorted(set(shard_of.values())) if s != shard_of[PATCH] and "of" in s)
    held = load_file(tmp_path / other)
    save_file({**held, PATCH: torch.zeros_like(tensors[PATCH])}, tmp_path / other)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.warnings) == 1
    assert other in checkpoint.warnings[0]
    assert PATCH in checkpoint.warnings[0]
    state = load_tower_state(checkpoint, torch.float32)
    assert torch.equal(state["patch_embed.weight"], tensors[PATCH].flatten(1))


# What is refused: the folder and its JSON


def test_absent_folder_config_or_weights(tmp_path: Path) -> None:
    assert "nowhere does not exist" in refusal(tmp_path / "nowhere", CheckpointNotFoundError)
    (tmp_path / "file").touch()
    assert "is a file; expected a folder" in refusal(tmp_path / "file")
    folder = tmp_path / "empty"
    folder.mkdir()
    assert "config.json does not exist" in refusal(folder, CheckpointNotFoundError)
    shutil.copy(GOLDEN / "config.json", folder)
    assert f"expected {INDEX}" in refusal(folder, CheckpointNotFoundError)
    (folder / INDEX).symlink_to(folder / "blob")
    (folder / "model.safetensors").touch()
    assert f"{INDEX} does not exist" in refusal(folder, CheckpointNotFoundError)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (b"", "not valid JSON"),
        (b'{"vision_config": ', "not valid JSON"),
        (b'{"a": 1, "a": 2}', "key 'a' twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[1, 2]", "holds a list; expected an object"),
        (b"{}", "vision_config is missing"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_malformed_json(
    tmp_path: Path, tensors: dict[str, torch.Tensor], name: str, text: bytes, fragment: str
) -> None:
    write_checkpoint(tmp_path, tensors)
    (tmp_path / name).write_bytes(text)
    message = refusal(tmp_path)
    assert str(tmp_path / name) in message
    if name == INDEX and text == b"{}":
        fragment = "weight_map is NoneType; expected an object"
    assert fragment in message


def test_oversized_config(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_checkpoint(tmp_path, tensors)
    with open(tmp_path / "config.json", "r+b") as file:
        file.truncate(100_000_001)
    assert "100000001 bytes; expected at most" in refusal(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "a/b.safetensors", "/x", "a\\b", "C:x", "..", ".", "", "a\n", 3, None],
)
@pytest.mark.parametrize("name", [PATCH, TEXT])
def test_shard_names_stay_in_the_folder(
    tmp_path: Path, tensors: dict[str, torch.Tensor], name: str, shard: object
) -> None:
    write_checkpoint(tmp_path, tensors)
    edit_json(tmp_path / INDEX, lambda index: index["weight_map"].update({name: shard}))
    message = refusal(tmp_path)
    assert repr(shard) in message
    assert name in message
    assert INDEX in message


# What is refused: names, shapes, dtypes


def test_absent_shards_are_named_with_their_tensors(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, tensors, shards=3)
    held = sorted(load_file(tmp_path / "model-00002-of-00003.safetensors"))
    for number in (2, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    monkeypatch.setattr(load_module, "read_tensor", lambda *_: pytest.fail("nothing is loaded"))
    message = refusal(tmp_path, CheckpointNotFoundError)
    assert "model-00001-of-00003" not in message
    assert "model-00003-of-00003.safetensors, which holds" in message
    names = ", ".join(held[:5])
    assert (
        f"model-00002-of-00003.safetensors, which holds {names} and {len(held) - 5} more"
    ) in message


def test_shard_lacks_what_the_index_places_there(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    write_checkpoint(tmp_path, tensors)
    held = load_file(tmp_path / SHARD)
    lost = sorted(held)[:2]
    save_file({name: held[name] for name in held if name not in lost}, tmp_path / SHARD)
    assert f"{tmp_path / SHARD} lacks {lost[0]}, {lost[1]}; expected there by" in refusal(tmp_path)


def test_missing_tensors(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    name = f"{LAYER}self_attn.k_proj.bias"
    write_checkpoint(tmp_path, {n: tensors[n] for n in tensors if n != name})
    assert f"{INDEX}: missing vision tensors (1): {name}; expected 59 by" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        f"{VISION}post_layernorm.weight",
        f"{VISION}encoder.layers.3.layer_norm1.weight",
        "patch_merge_mlp.linear_3.weight",
        "model.vision_tower.anything",
    ],
)
@pytest.mark.parametrize("indexed", [True, False])
def test_unexpected_tensors(
    tmp_path: Path, tensors: dict[str, torch.Tensor], name: str, indexed: bool
) -> None:
    write_checkpoint(tmp_path, {**tensors, name: torch.ones(160)})
    if not indexed:
        edit_json(tmp_path / INDEX, lambda index: index["weight_map"].pop(name))
    message = refusal(tmp_path)
    assert f"unexpected vision tensors (1): {name}; expected" in message
    assert (f"{INDEX}: unexpected" in message) == indexed


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_mixed_namings(tmp_path: Path, tensors: dict[str, torch.Tensor], prefix: str) -> None:
    name = f"{VISION}pre_layrnorm.bias"
    renamed = {prefix + to_transformers(name) if n == name else n: tensors[n] for n in tensors}
    message = refusal(write_checkpoint(tmp_path, renamed))
    assert f"named in 2 ways: {PATCH}, {prefix}vision_tower.pre_layrnorm.bias" in message


def test_unknown_naming(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    strange = {name.replace("vision_tower", "patch_merge_mlp") for name in tensors}
    strange = {name.replace("linear_", "dense_") for name in strange}
    message = refusal(write_checkpoint(tmp_path, {n: torch.zeros(2) for n in strange}))
    assert "vision tensors have unknown names: multi_modal_projector.dense_1.bias" in message
    assert PATCH in message
    assert "model.vision_tower.embeddings.proj.weight" in message


def test_half_known_naming(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    message = refusal(write_checkpoint(tmp_path, {f"model.{n}": tensors[n] for n in tensors}))
    assert "missing vision tensors (55): model.vision_tower.embeddings.proj.weight" in message
    assert "unexpected vision tensors (55): model.patch_merge_mlp.linear_1.bias" in message
    assert "named as in transformers checkpoints" in message


def test_no_vision_tensors(tmp_path: Path) -> None:
    assert "no vision tensors; expected 59 by" in refusal(
        write_checkpoint(tmp_path, {"language_model.a": torch.zeros(2)})
    )


def test_layer_count_beyond_the_checkpoint(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    write_checkpoint(tmp_path, tensors)
    for count, fragment in ((4, "missing vision tensors (16)"), (10**400, "num_hidden_layers")):
        edit_json(
            tmp_path / "config.json",
            lambda config, count=count: config["vision_config"].update(num_hidden_layers=count),
        )
        assert fragment in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        (PATCH, [160, 1176], [160, 3, 2, 14, 14]),
        (f"{LAYER}mlp.fc1.weight", [160, 320], [320, 160]),
        (f"{VISION}pre_layrnorm.weight", [161], [160]),
        ("patch_merge_mlp.linear_1.weight", [96, 384], [128, 384]),
    ],
)
def test_wrong_shape(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    name: str,
    found: list[int],
    expected: list[int],
) -> None:
    write_checkpoint(tmp_path, {**tensors, name: torch.zeros(found)})
    assert f"{name} has shape {found}; expected {expected}" in refusal(tmp_path)


def test_every_wrong_shape_is_counted(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_checkpoint(tmp_path, tensors)
    edit_json(tmp_path / "config.json", lambda config: config["text_config"].update(hidden_size=98))
    message = refusal(tmp_path)
    assert "multi_modal_projector.linear_2.weight has shape [96, 128]" in message
    # linear_2 of the projector and of the merger, with biases, and the merger's linear_1.
    assert "(and 4 more tensors)" in message


@pytest.mark.parametrize(
    ("dtype", "code"),
    [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.bool, "BOOL")],
)
def test_dtype_that_is_not_float(
    tmp_path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype, code: str
) -> None:
    write_checkpoint(tmp_path, {**tensors, PATCH: tensors[PATCH].to(dtype)})
    assert f"{PATCH} is {code}; expected one of F64, F32, F16, BF16" in refusal(tmp_path)


# What is refused: values


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [PATCH, f"{LAYER}self_attn.v_proj.bias"])
def test_values_that_are_not_finite(
    tmp_path: Path, tensors: dict[str, torch.Tensor], name: str, value: float
) -> None:
    bad = tensors[name].clone()
    bad.view(-1)[[3, -1]] = value
    write_checkpoint(tmp_path, {**tensors, name: bad})
    assert f"{name} holds 2 values that are not finite, of {bad.numel()}" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("source", "value", "target"),
    [
        (torch.float64, 1e39, torch.float32),
        (torch.float32, 1e38, torch.float16),
        (torch.float32, 3.4e38, torch.bfloat16),
        (torch.bfloat16, -1e5, torch.float16),
    ],
)
def test_values_that_the_cast_makes_infinite(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    source: torch.dtype,
    value: float,
    target: torch.dtype,
) -> None:
    name = f"{LAYER}self_attn.k_proj.weight"
    bad = tensors[name].to(source)
    bad[5, 7] = value
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, {**tensors, name: bad}))
    load_tower_state(checkpoint, source)
    with pytest.raises(CheckpointError) as caught:
        load_tower_state(checkpoint, target)
    assert f"{name} reaches {float(bad.abs().max()):.3g}; expected at most" in str(caught.value)


# What is refused: bytes


def one(dtype: str, shape: list[Any], offsets: list[Any]) -> bytes:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


BROKEN_SHARDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "0 bytes; expected a safetensors file"),
    "seven bytes": (lambda p: p.write_bytes(b"1234567"), "7 bytes; expected a safetensors file"),
    "garbage": (lambda p: p.write_bytes(b"\xa7" * 4096), "header of"),
    "huge header": (lambda p: p.write_bytes(b"\xff" * 8 + b"{}"), "header of 18446744073709551615"),
    "page not found": (lambda p: p.write_bytes(b"<!doctype html><html></html>"), "header of"),
    "header not JSON": (lambda p: write_raw(p, b"{,}"), "not valid JSON"),
    "header nested": (lambda p: write_raw(p, b'{"a":' * 100_000), "not valid JSON"),
    "header a list": (lambda p: write_raw(p, b"[]"), "expected an object"),
    "header twice": (lambda p: write_raw(p, b'{"a": 1, "a": 1}'), "key 'a' twice"),
    "entry not an object": (lambda p: write_raw(p, b'{"a": 1}'), "entry of a is 1;"),
    "shape negative": (lambda p: write_raw(p, one("F32", [-1], [0, 4])), "entry of a"),
    "shape of bools": (lambda p: write_raw(p, one("F32", [True], [0, 4])), "entry of a"),
    "shape of 4001 digits": (
        lambda p: write_raw(p, one("F32", [10**4000] * 2, [0, 4])),
        "entry of a",
    ),
    "offsets backwards": (lambda p: write_raw(p, one("F32", [1], [4, 0])), "entry of a"),
    "size and shape": (
        lambda p: write_raw(p, one("F32", [2], [0, 4]), b"0000"),
        "a has 4 bytes; expected 8",
    ),
    "shape overflows": (
        lambda p: write_raw(p, one("F32", [1 << 62, 1 << 62], [0, 4]), b"0000"),
        "a has 4 bytes; expected",
    ),
    "gap": (lambda p: write_raw(p, one("F32", [1], [4, 8]), b"00000000"), "a starts at byte"),
    "trailing bytes": (lambda p: write_raw(p, one("F32", [1], [0, 4]), b"00000"), "expected"),
    "beyond the end": (
        lambda p: write_raw(p, one("F32", [1 << 61], [0, 1 << 63])),
        "(truncated, or damaged)",
    ),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "(truncated, or damaged)"),
    "header truncated": (lambda p: p.write_bytes(p.read_bytes()[:100]), "header of"),
    "folder": (lambda p: (p.unlink(), p.mkdir()), "is not a regular file"),
}


@pytest.mark.parametrize("case", BROKEN_SHARDS)
@pytest.mark.parametrize("single_file", [False, True])
def test_broken_shard(
    tmp_path: Path, tensors: dict[str, torch.Tensor], case: str, single_file: bool
) -> None:
    write_checkpoint(tmp_path, tensors)
    path = tmp_path / SHARD
    if single_file:
        (tmp_path / INDEX).unlink()
        path = path.rename(tmp_path / "model.safetensors")
    damage, fragment = BROKEN_SHARDS[case]
    damage(path)
    message = refusal(tmp_path)
    assert str(path) in message
    assert fragment in message


def test_files_that_change_after_opening(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    save_file({"x": torch.zeros(9), **load_file(tmp_path / SHARD)}, tmp_path / SHARD)
    with pytest.raises(CheckpointError, match="changed since"):
        load_tower_state(checkpoint, torch.float32)

    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "cut", tensors))

    def cut(done: int, total: int) -> None:
        with open(checkpoint.path / SHARD, "r+b") as file:
            file.truncate(2000)

    with pytest.raises(CheckpointError, match=r"ends at byte \d+; expected"):
        load_tower_state(checkpoint, torch.float32, progress=cut)


# Random checkpoints


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        held |= load_file(path)
    return held


def test_random_checkpoint_has_the_released_layout(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    steps: list[tuple[int, int]] = []
    folder = init_checkpoint(
        tmp_path / "new" / "tiny",
        TINY,
        progress=lambda done, total: steps.append((done, total)),
        shard_bytes=1 << 20,
    )
    assert folder == (tmp_path / "new" / "tiny").resolve()
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    assert steps == [(n, 59) for n in range(1, 60)]

    written = all_tensors(folder)
    facts = {name: (tensor.shape, tensor.dtype) for name, tensor in written.items()}
    assert facts == {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    assert written[PATCH].dtype is torch.float32

    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in written.values())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for shard in shards:
        assert sum(t.nbytes for t in load_file(folder / shard).values()) <= 1 << 20
        assert (folder / shard).stat().st_mode == (folder / INDEX).stat().st_mode

    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == TINY
    assert checkpoint.warnings == ()
    assert checkpoint.preprocessor_config == folder / "preprocessor_config.json"
    load_tower_state(checkpoint, torch.bfloat16)
    preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
    assert preprocess_config_from_mapping(preprocessor, "x") == PreprocessConfig()


def test_random_config_keeps_every_size(tmp_path: Path) -> None:
    config = TowerConfig(
        hidden_size=24,
        num_attention_heads=3,
        num_hidden_layers=1,
        intermediate_size=20,
        patch_size=4,
        num_channels=1,
        temporal_patch_size=1,
        layer_norm_eps=1e-6,
        rope_theta=500.0,
        vision_segment_max_frames=7,
        projector_hidden_size=12,
        output_size=8,
    )
    folder = init_checkpoint(tmp_path / "odd", config, dtype=torch.float32)
    document = json.loads((folder / "config.json").read_text())
    assert tower_config_from_checkpoint(document, "x") == config
    assert open_checkpoint(folder).config == config
    assert {tensor.dtype for tensor in all_tensors(folder).values()} == {torch.float32}


def test_random_weights_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    first = all_tensors(init_checkpoint(tmp_path / "a", TINY, seed=7))
    again = all_tensors(init_checkpoint(tmp_path / "b", TINY, seed=7, shard_bytes=1))
    other = all_tensors(init_checkpoint(tmp_path / "c", TINY, seed=8))
    assert first.keys() == again.keys()
    for name in first:
        assert torch.equal(first[name], again[name]), name
        assert not torch.equal(first[name], other[name]), name
    assert not torch.equal(
        first[f"{LAYER}self_attn.q_proj.weight"], first[f"{LAYER}self_attn.k_proj.weight"]
    )


def test_random_weights_have_the_scale_that_matters(tmp_path: Path) -> None:
    held = all_tensors(init_checkpoint(tmp_path / "a", TINY))
    for name, fan_in in (
        (PATCH, 1176),
        (f"{LAYER}mlp.fc2.weight", 320),
        ("patch_merge_mlp.linear_1.weight", 384),
    ):
        assert float(held[name].float().std()) == pytest.approx(fan_in**-0.5, rel=0.03)
        assert abs(float(held[name].float().mean())) < 0.03 * fan_in**-0.5
    gains = torch.cat([t for n, t in held.items() if "norm" in n and n.endswith("weight")]).float()
    biases = torch.cat([t for n, t in held.items() if n.endswith("bias")]).float()
    assert float(gains.mean()) == pytest.approx(1.0, abs=0.03)
    assert float(gains.std()) == pytest.approx(0.2, rel=0.1)
    assert float(biases.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(biases.std()) == pytest.approx(0.1, rel=0.1)


def test_random_checkpoint_never_replaces_other_files(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    init_checkpoint(target, TINY)
    kept = all_tensors(target)
    with pytest.raises(RequestError, match="is not empty") as caught:
        init_checkpoint(target, TINY, seed=1)
    assert caught.value.exit_code is ExitCode.REQUEST
    assert torch.equal(all_tensors(target)[PATCH], kept[PATCH])

    init_checkpoint(target, TINY, seed=1, force=True)
    assert not torch.equal(all_tensors(target)[PATCH], kept[PATCH])

    (target / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match=r"holds notes\.txt"):
        init_checkpoint(target, TINY, force=True)
    assert (target / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]

    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="is a file"):
        init_checkpoint(tmp_path / "file", TINY)
    with pytest.raises(RequestError, match="is not empty"):
        init_checkpoint("/", TINY)
    with pytest.raises(RequestError, match="int8"):
        init_checkpoint(tmp_path / "x", TINY, dtype=torch.int8)


def test_interrupted_random_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    old = init_checkpoint(tmp_path / "old", TINY)
    kept = all_tensors(old)

    def interrupt(done: int, total: int) -> None:
        if done == 40:
            raise KeyboardInterrupt

    for target in (tmp_path / "new", old):
        with pytest.raises(KeyboardInterrupt):
            init_checkpoint(
                target, TINY, seed=1, progress=interrupt, force=True, shard_bytes=1 << 18
            )
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert torch.equal(all_tensors(old)[PATCH], kept[PATCH])


def test_random_checkpoint_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OperationError, match="cannot be written") as caught:
        init_checkpoint(tmp_path / "file" / "below", TINY)
    assert caught.value.exit_code is ExitCode.FAILED
    assert "\n" not in str(caught.value)
