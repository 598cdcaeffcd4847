"""The file of FP8 scales: what is written is compared with what vLLM's reader makes of it (its own
where M3COMPILE_VLLM_PATH names the wheel, else its rules restated here) and with what is read back;
what is refused with the layer that the message must name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import run_fresh
from vllm_manager import WHEEL, wheel_tool

from m3compile.config.scales import (
    Fp8Scales,
    LayerScales,
    linear_names,
    read_scales,
    write_scales,
)
from m3compile.errors import ConfigError, ExitCode, InputNotFoundError, OperationError

NAME = "vision_tower.vision_model.encoder.layers.{}.self_attn.attn"
ATTENTION = tuple(LayerScales(0.5 + index, 0.25, 3e-5 * (index + 1)) for index in range(3))
LINEARS = {name: 0.125 + index for index, name in enumerate(linear_names(3))}
VLLM_MADE = {NAME.format(i): {"q": s.q, "k": s.k, "v": s.v} for i, s in enumerate(ATTENTION)}

Reader = Callable[[str], dict[str, dict[str, float]]]


def vllms_rules(path: str) -> dict[str, dict[str, float]]:
    """What vLLM 0.33 reads: objects with q, k and v; it passes over all other entries."""
    data = json.loads(Path(path).read_text())
    data = data["layers"] if isinstance(data.get("layers"), dict) else data
    scales = {}
    for name, entry in data.items():
        if not isinstance(entry, dict):
            continue
        values = {part: entry.get(part, entry.get(f"{part}_scale")) for part in "qkv"}
        if None not in values.values():
            assert all(float(value) > 0 for value in values.values())
            scales[name] = {part: float(value) for part, value in values.items()}
    return scales


@pytest.fixture(params=["its rules", "vLLM's"])
def vllm_reads(request: pytest.FixtureRequest) -> Reader:
    if request.param == "its rules":
        return vllms_rules
    reader: Reader = wheel_tool().scale_reader(Path(str(WHEEL)))
    return reader


def stored(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[Any], str]:
    """The message that a file with this text, or document, is refused with."""

    def refuse(document: Any) -> str:
        path = stored(tmp_path / "scales.json", document)
        with pytest.raises(ConfigError) as caught:
            read_scales(path, 3)
        message = str(caught.value)
        assert caught.value.exit_code == ExitCode.REQUEST
        assert message.startswith(f"{path}: ")
        assert message.isprintable()
        assert len(message) < 800
        return message.removeprefix(f"{path}: ")

    return refuse


# One file for both.


def test_vllm_reads_what_is_written(vllm_reads: Reader, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    write_scales(path, Fp8Scales(ATTENTION, LINEARS), {"margin": 1.5, "items": 7})
    assert vllm_reads(str(path)) == VLLM_MADE


def test_vllms_layers_are_named_as_written() -> None:
    """The parts of the name, where vLLM's modules are given theirs."""
    tool, wheel = wheel_tool(), Path(str(WHEEL))
    tower = tool.read_module(wheel, "vllm.models.minimax_m3.common.vision_tower")
    for part in (".encoder", ".layers.{i}", ".self_attn", ".attn"):
        assert f'prefix=f"{{prefix}}{part}"' in tower
    assert 'maybe_prefix(prefix, "vision_model")' in tower
    model = tool.read_module(wheel, "vllm.models.minimax_m3.nvidia.model")
    assert 'maybe_prefix(prefix, "vision_tower")' in model


@pytest.mark.parametrize(
    "document",
    [
        VLLM_MADE,
        {"layers": VLLM_MADE},
        {"version": 1, "note": {"by": "hand"}, "layers_seen": [3], **VLLM_MADE},
        {
            NAME.format(i): {"q_scale": s.q, "k_scale": s.k, "v_scale": s.v}
            for i, s in enumerate(ATTENTION)
        },
    ],
)
def test_what_vllm_reads_is_read(vllm_reads: Reader, tmp_path: Path, document: Any) -> None:
    path = stored(tmp_path / "scales.json", document)
    assert vllm_reads(str(path)) == VLLM_MADE
    assert read_scales(path, 3) == Fp8Scales(ATTENTION, {})


@pytest.mark.parametrize(
    "name",
    [
        "vision_model.encoder.layers.{}.self_attn.attn",
        "model.vision_tower.vision_model.encoder.layers.{}.self_attn",
        "visual.encoder.layers.{}.attn",
        "layers.{}",
    ],
)
def test_a_layer_is_found_by_its_number(tmp_path: Path, name: str) -> None:
    document = {name.format(i): VLLM_MADE[NAME.format(i)] for i in (2, 0, 1)}
    path = stored(tmp_path / "scales.json", document)
    assert read_scales(path, 3).attention == ATTENTION
    both = stored(path, {**document, **VLLM_MADE})
    assert read_scales(both, 3).attention == ATTENTION


def test_read_back(tmp_path: Path) -> None:
    path, scales = tmp_path / "scales.json", Fp8Scales(ATTENTION, LINEARS)
    path.write_text("old")
    write_scales(path, scales, {"margin": 1.5})
    assert read_scales(path, 3) == scales
    assert list(read_scales(path, 3).linears) == list(linear_names(3))
    assert json.loads(path.read_text())["m3compile"]["margin"] == 1.5
    assert os.listdir(tmp_path) == ["scales.json"]


def test_whole_numbers_are_numbers(tmp_path: Path) -> None:
    document = {NAME.format(0): {"q": 1, "k": 2, "v": 3}}
    scales = read_scales(stored(tmp_path / "scales.json", document), 1).attention[0]
    assert scales == LayerScales(1.0, 2.0, 3.0)
    assert isinstance(scales.q, float)


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scales.json"
    path.write_text("old")
    real: Callable[..., int] = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        real(self, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OperationError, match="No space left on device"):
        write_scales(path, Fp8Scales(ATTENTION, LINEARS))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["scales.json"]


def test_without_torch() -> None:
    code = "import sys, m3compile.config.scales; print({'torch', 'numpy'} & set(sys.modules))"
    assert run_fresh(code) == "set()\n"


# What is refused, and by which name.


def changed(layer: int, **parts: Any) -> dict[str, Any]:
    """What vLLM made, with parts of one layer's scales replaced, or dropped (None)."""
    entry = {**VLLM_MADE[NAME.format(layer)], **parts}
    entry = {part: value for part, value in entry.items() if value is not None}
    return {**VLLM_MADE, NAME.format(layer): entry}


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "is missing; expected q, k and v"),
        (0, "is 0;"),
        (0.0, "is 0.0;"),
        (-1.5, "is -1.5;"),
        (float("nan"), "is nan;"),
        (float("inf"), "is inf;"),
        (1e39, "is 1e+39;"),
        (1e-39, "is 1e-39;"),
        (10**400, "bits>;"),
        (True, "is True;"),
        ("0.5", "is '0.5';"),
        ([0.5], "is [0.5];"),
    ],
)
def test_scales_that_are_none(
    refused: Callable[[Any], str], part: str, value: Any, says: str
) -> None:
    message = refused(changed(1, **{part: value}))
    assert message.startswith(f"'{NAME.format(1)}': {part} is ")
    assert says in message


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({}, f"layer 0 is missing; expected {NAME.format(0)}"),
        ({"m3compile": {"linears": LINEARS}}, "layer 0 is missing"),
        (
            {name: entry for name, entry in VLLM_MADE.items() if ".1." not in name},
            f"layer 1 is missing; expected {NAME.format(1)}",
        ),
        (
            {**VLLM_MADE, NAME.format(3): VLLM_MADE[NAME.format(0)]},
            f"'{NAME.format(3)}' is a layer too many; expected layers 0 to 2",
        ),
        (
            {**VLLM_MADE, "other.layers.2.attn": {"q": 1, "k": 1, "v": 1}},
            "'other.layers.2.attn' has other scales than another entry of layer 2",
        ),
        (
            {**VLLM_MADE, "visual.blocks.0.attn.attn": {"q": 1, "k": 1, "v": 1}},
            "'visual.blocks.0.attn.attn' names no layer",
        ),
        ({**VLLM_MADE, NAME.format(0): 0.5}, f"'{NAME.format(0)}' is 0.5; expected an object"),
        ({**VLLM_MADE, NAME.format(0): None}, f"'{NAME.format(0)}' is None; expected an object"),
        ({"layers": {}, **VLLM_MADE}, "layer 0 is missing"),
    ],
)
def test_layers_that_do_not_fit(
    refused: Callable[[Any], str], document: dict[str, Any], says: str
) -> None:
    assert says in refused(document)


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        (3, "m3compile is 3; expected an object with an object linears"),
        ({"linears": [1]}, "expected an object with an object linears"),
        (
            {"linears": {**LINEARS, "layers.3.qkv": 1.0}},
            "'layers.3.qkv' in linears is no linear of the tower, which has 3 layers",
        ),
        (
            {"linears": {k: v for k, v in LINEARS.items() if k != "layers.2.fc1"}},
            "layers.2.fc1 is missing in linears; expected all, or none",
        ),
        ({"linears": {**LINEARS, "merger.fc2": 0.0}}, "merger.fc2 is 0.0;"),
        ({"linears": {**LINEARS, "layers.0.out_proj": None}}, "layers.0.out_proj is None;"),
    ],
)
def test_linears_that_do_not_fit(refused: Callable[[Any], str], ours: Any, says: str) -> None:
    assert says in refused({**VLLM_MADE, "m3compile": ours})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not valid JSON: "),
        ("{", "not valid JSON: "),
        ("[1]", "holds a list; expected an object"),
        ("null", "holds a NoneType; expected an object"),
        ("[" * 100_000, "not valid JSON: "),
        ('{"a": 1' + "0" * 5000 + "}", "not valid JSON: "),
        ('{"layers.0": {"q": 1, "q": 2}}', "not valid JSON: key 'q' is given twice"),
        ('{"layers.0": {}, "layers.0": {}}', "not valid JSON: key 'layers.0' is given twice"),
        ('{"a\\n": 1, "a\\n": 1}', "is given twice"),
        (" " * (4 * 1024 * 1024 + 1), "found more than 4194304 bytes"),
    ],
    ids=range(10),
)
def test_files_that_are_none(refused: Callable[[Any], str], text: str, says: str) -> None:
    assert says in refused(text)


def test_what_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_bytes(b"\xff\x00{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_scales(path, 3)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputNotFoundError, match="gone do not exist"):
        read_scales(tmp_path / "gone", 3)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="not a regular file"):
            read_scales(path, 3)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_nothing_impossible_can_be_written(value: float) -> None:
    with pytest.raises(ValueError, match="k is "):
        LayerScales(1.0, value, 1.0)
    with pytest.raises(ValueError, match="patch_embed is "):
        Fp8Scales(ATTENTION, {**LINEARS, "patch_embed": value})
