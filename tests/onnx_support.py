"""ONNX files for tests: exported once a run, from the golden checkpoint or a smaller tower."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("onnxscript", reason="needs the extra onnx, which is not installed")
pytest.importorskip("onnxruntime", reason="needs the extra onnx, which is not installed")

import onnx_ir as ir
import torch
from conftest import GOLDEN_CHECKPOINT
from torch import Tensor

from m3compile.config import TINY, TowerConfig
from m3compile.geometry import inverse_frequencies
from m3compile.onnx_build.model import to_onnx_model
from m3compile.onnx_export import export_onnx
from m3compile.onnx_format import DEFAULT_OPSET, OnnxMetadata
from m3compile.tower import Tower, make_tower
from m3compile.weights import tower_tensor_shapes

_FOLDER = tempfile.TemporaryDirectory(prefix="m3compile-test-")

# One layer, since an export takes its time by the layer.
SMALL: TowerConfig = msgspec.structs.replace(
    TINY, num_hidden_layers=1, intermediate_size=96, projector_hidden_size=64, output_size=48
)


@cache
def golden_onnx() -> Path:
    """The golden checkpoint as float32 with the defaults. Do not alter it."""
    path = Path(_FOLDER.name) / "golden.onnx"
    export_onnx(GOLDEN_CHECKPOINT, path)
    return path


@cache
def small_state() -> dict[str, Tensor]:
    """Random float32 weights that keep activations of order 1."""
    generator = torch.Generator().manual_seed(5)
    state = {}
    for name, shape in tower_tensor_shapes(SMALL).items():
        values = torch.randn(shape, generator=generator)
        state[name] = values / shape[1] ** 0.5 if len(shape) == 2 else 1 + 0.1 * values
    return {**state, "inverse_frequency": inverse_frequencies(SMALL)}


def small_tower(dtype: torch.dtype) -> Tower:
    state = {
        name: tensor if name == "inverse_frequency" else tensor.to(dtype)
        for name, tensor in small_state().items()
    }
    return make_tower(SMALL, state, "TORCH_SDPA")


@cache
def small_model(dtype: str = "float32", opset: int = DEFAULT_OPSET) -> ir.Model:
    """The small tower, in memory. Do not alter it."""
    metadata = OnnxMetadata(
        version="1.2.3",
        source="checkpoint small",
        weights="random",
        weights_dtype="mixed",
        dtype=dtype,
        opset=opset,
        config=SMALL,
    )
    return to_onnx_model(small_tower(getattr(torch, dtype)), metadata)


@cache
def small_onnx(dtype: str = "float32", opset: int = DEFAULT_OPSET) -> Path:
    """The small tower as a file. Do not alter it."""
    path = Path(_FOLDER.name) / f"small-{dtype}-{opset}.onnx"
    ir.save(small_model(dtype, opset), path)
    return path
