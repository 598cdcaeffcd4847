"""`onnx_build`: the exported model itself, and its translation of attention.

Compared with: attention written out in NumPy, in float64; what the ONNX format says of a valid
model, by its own checker; the contract of inputs, output, sizes and metadata; and for bfloat16,
which ONNX Runtime's CPU provider cannot run, eager float32 of the rounded weights, after writing
bfloat16 as float32 throughout the file, and ONNX's own reference runtime.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxscript", reason="needs the extra onnx, which is not installed")
pytest.importorskip("onnxruntime", reason="needs the extra onnx, which is not installed")

import onnx
import onnxruntime
import torch
from helpers import Grid, eager, error_of, random_rows, segment_table
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_support import SMALL, golden_onnx, small_model, small_onnx, small_state, small_tower
from onnxscript import FLOAT, INT32

from m3compile.errors import OperationError
from m3compile.onnx_build.model import to_onnx_model
from m3compile.onnx_build.translations import TRANSLATIONS, segment_attention
from m3compile.onnx_format import OPSETS, OnnxMetadata, from_properties
from m3compile.tower import make_tower

# float32 has 24 bits; the sums here have up to some hundred terms of order 1.
ATTENTION_BOUND = 2e-6


# --- attention ---


def attention_session(heads: int, head_dim: int) -> onnxruntime.InferenceSession:
    tensors = [FLOAT["rows", heads, head_dim]] * 3
    model = segment_attention.to_model_proto(
        input_types=[*tensors, INT32["bounds"]], output_types=tensors[:1], ir_version=10
    )
    onnx.checker.check_model(model, full_check=True)
    return onnxruntime.InferenceSession(model.SerializeToString())


def attend(session: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, bounds: Any) -> np.ndarray:
    names = [entry.name for entry in session.get_inputs()]
    feeds = dict(zip(names, (q, k, v, np.array(bounds, np.int32)), strict=True))
    (result,) = session.run(None, feeds)
    return result  # type: ignore[no-any-return]


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, bounds: Any) -> np.ndarray:
    out = np.zeros(q.shape)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    for start, end in itertools.pairwise(bounds):
        if end > start:
            logits = np.einsum("qhd,khd->hqk", q[start:end], k[start:end]) / q.shape[2] ** 0.5
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[start:end] = np.einsum("hqk,khd->qhd", weights, v[start:end])
    return out


def error(got: np.ndarray, expected: np.ndarray) -> float:
    assert got.shape == expected.shape
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30))


TWO_HEADS = attention_session(2, 6)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    padding=st.integers(0, 20),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_attention_by_segment(lengths: list[int], padding: int, seed: int) -> None:
    """Empty segments anywhere, and padding rows of NaN, which become zero."""
    bounds = [0, *itertools.accumulate(lengths)]
    shape = (3, bounds[-1] + padding, 2, 6)
    q, k, v = np.random.default_rng(seed).standard_normal(shape, np.float32)
    for x in (q, k, v):
        x[bounds[-1] :] = np.nan
    got = attend(TWO_HEADS, q, k, v, bounds)
    assert not got[bounds[-1] :].any()
    assert error(got, plain_attention(q, k, v, bounds)) <= ATTENTION_BOUND


def test_attention_in_several_blocks_of_queries() -> None:
    """2,048 heads leave 64 queries to a block, so that the segments take three, one and two."""
    bounds = [0, 130, 134, 199]
    q, k, v = np.random.default_rng(0).standard_normal((3, 203, 2048, 2), np.float32)
    got = attend(attention_session(2048, 2), q, k, v, bounds)
    assert error(got, plain_attention(q, k, v, bounds)) <= ATTENTION_BOUND


def test_attention_that_sees_the_neighbour_would_be_found() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 24, 2, 6), np.float32)
    got = attend(TWO_HEADS, q, k, v, [0, 24])
    assert error(got, plain_attention(q, k, v, [0, 12, 24])) > 0.1


# --- the model ---


@pytest.mark.parametrize("path", [golden_onnx, small_onnx], ids=["golden", "small"])
def test_inputs_output_and_symbolic_sizes(path: Any) -> None:
    model = onnx.load(str(path()))
    width = 96 if path is golden_onnx else SMALL.output_size

    def described(value: onnx.ValueInfoProto) -> tuple[str, int, list[Any]]:
        tensor = value.type.tensor_type
        return value.name, tensor.elem_type, [d.dim_param or d.dim_value for d in tensor.shape.dim]

    assert [described(value) for value in model.graph.input] == [
        ("pixel_values", TensorProto.FLOAT, ["num_patches", 1176]),
        ("segments", TensorProto.INT64, ["num_segments", 3]),
    ]
    assert [described(value) for value in model.graph.output] == [
        ("embeddings", TensorProto.FLOAT, ["num_tokens", width])
    ]


def graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [graph, *(deeper for each in inner for deeper in graphs(each))]


def test_standard_operators_alone_and_no_size_of_the_trace() -> None:
    """The trace ran on 24 patches in 2 segments; 6 tokens."""
    model = onnx.load(str(golden_onnx()))
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 20)]
    assert not model.functions
    for graph in graphs(model.graph):
        assert {node.domain for node in graph.node} == {""}
        for node in graph.node:
            # A runtime need not know that an absent condition is true.
            assert node.op_type != "Loop" or all(node.input[:2])
        for value in graph.value_info:
            sizes = value.type.tensor_type.shape.dim
            assert all(size.dim_value not in (24, 6) for size in sizes), value.name
            assert all(size.dim_param not in ("None", "?") for size in sizes), value.name
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype.kind == "i" and values.size < 8:
            assert not {24, 6} & set(values.reshape(-1).tolist()), tensor.name


def test_attention_loops_over_segments_and_blocks() -> None:
    model = onnx.load(str(golden_onnx()))
    outer = [node for node in model.graph.node if node.op_type == "Loop"]
    assert len(outer) == 3
    for node in outer:
        (body,) = (a.g for a in node.attribute if a.HasField("g"))
        assert [inner.op_type for inner in body.node].count("Loop") == 1


def test_metadata() -> None:
    model = onnx.load(str(small_onnx()))
    found = {entry.key: entry.value for entry in model.metadata_props}
    assert (model.producer_name, model.producer_version) == ("m3compile", "1.2.3")
    metadata = from_properties({**found, "somebody.else": "x"})
    assert metadata == OnnxMetadata(
        version="1.2.3",
        source="checkpoint small",
        weights="random",
        weights_dtype="mixed",
        dtype="float32",
        opset=20,
        config=SMALL,
    )
    for broken in ({}, {**found, "m3compile.opset": "x"}, {**found, "m3compile.config": "{"}):
        with pytest.raises(ValueError, match=r"config|int|JSON|truncated"):
            from_properties(broken)
    del found["m3compile.dtype"]
    with pytest.raises(ValueError, match="dtype"):
        from_properties(found)


def test_nothing_of_the_builder_is_in_the_file() -> None:
    data = golden_onnx().read_bytes()
    for trace in (b"site-packages", b".py", b"stack_trace", str(Path.home()).encode()):
        assert trace not in data, trace


def test_the_same_weights_make_the_same_bytes(tmp_path: Path) -> None:
    import onnx_ir as ir

    again = small_model.__wrapped__()
    ir.save(again, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == small_onnx().read_bytes()


@pytest.mark.parametrize(
    ("dtype", "opset"),
    [
        ("float32", OPSETS[0]),
        ("float32", OPSETS[-1]),
        ("float16", OPSETS[0]),
        ("float16", 20),
        ("bfloat16", OPSETS[0]),
        ("bfloat16", 23),
    ],
)
def test_every_dtype_and_opset_passes_the_checker(dtype: str, opset: int) -> None:
    path = small_onnx(dtype, opset)
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(str(path))
    assert model.opset_import[0].version == opset
    rotary = next(t for t in model.graph.initializer if t.name.endswith("inverse_frequency"))
    assert rotary.data_type == TensorProto.FLOAT


@pytest.mark.parametrize("opset", [OPSETS[0], OPSETS[-1]])
def test_other_opsets_compute_the_same(opset: int) -> None:
    grids: list[Grid] = [(1, 4, 4), (1, 4, 6)]
    rows = random_rows(grids).numpy()
    feeds = {"pixel_values": rows, "segments": np.array(grids)}
    first, second = (
        onnxruntime.InferenceSession(str(path)).run(None, feeds)[0]
        for path in (small_onnx(), small_onnx("float32", opset))
    )
    assert error(second, first) <= 1e-6


def test_an_opset_that_the_exporter_does_not_reach() -> None:
    metadata = small_model().metadata_props
    wanted = from_properties({**metadata, "m3compile.opset": "17"})
    with pytest.raises(OperationError, match="choose another --opset"):
        to_onnx_model(small_tower(torch.float32), wanted)


def test_an_op_without_a_translation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TRANSLATIONS, torch.ops.m3compile.varlen_attention.default)
    with pytest.raises(OperationError, match="the ONNX exporter failed: "):
        to_onnx_model(small_tower(torch.float32), from_properties(small_model().metadata_props))


# --- bfloat16 ---


def as_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with float32 wherever it says bfloat16."""
    for graph in graphs(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for tensor_type in (
                value.type.tensor_type,
                value.type.sequence_type.elem_type.tensor_type,
            ):
                if tensor_type.elem_type == TensorProto.BFLOAT16:
                    tensor_type.elem_type = TensorProto.FLOAT
        for tensor in graph.initializer:
            if tensor.data_type == TensorProto.BFLOAT16:
                values = numpy_helper.to_array(tensor).astype(np.float32)
                tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        for node in graph.node:
            for attribute in node.attribute:
                if node.op_type == "Cast" and attribute.i == TensorProto.BFLOAT16:
                    attribute.i = TensorProto.FLOAT
                assert attribute.t.data_type != TensorProto.BFLOAT16
    return model


GRIDS: list[Grid] = [(1, 4, 4), (2, 4, 6)]


def test_bfloat16_written_as_float32_is_the_tower_of_the_rounded_weights() -> None:
    model = as_float32(onnx.load(str(small_onnx("bfloat16"))))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    rounded = {
        name: tensor if name == "inverse_frequency" else tensor.to(torch.bfloat16).float()
        for name, tensor in small_state().items()
    }
    rows = random_rows(GRIDS)
    with torch.no_grad():
        expected = make_tower(SMALL, rounded, "TORCH_SDPA")(rows, segment_table(GRIDS))[0]
    feeds = {"pixel_values": rows.numpy(), "segments": np.array(GRIDS)}
    (got,) = session.run(None, feeds)
    assert error_of(torch.from_numpy(got), expected) <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_runtime_computes_the_same(dtype: str) -> None:
    """ONNX's reference runtime. Its bfloat16 products sum in bfloat16: less exact than eager."""
    model = onnx.load(str(small_onnx(dtype)))
    rows = random_rows(GRIDS)
    values = rows.numpy().astype(
        helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    )
    (got,) = ReferenceEvaluator(model).run(
        None, {"pixel_values": values, "segments": np.array(GRIDS)}
    )
    parts = rows.split([16, 48])
    tower = small_tower(torch.float32)
    expected = torch.cat(
        [eager(tower, part, grid) for part, grid in zip(parts, GRIDS, strict=True)]
    )
    bound = {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    assert error_of(torch.from_numpy(got.astype(np.float32)), expected) <= bound
