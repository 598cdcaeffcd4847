"""What ops of the traced tower become in ONNX, standard domain only.

Attention is a loop over the segments, and inside it one over blocks of queries, so that nothing of
the size of a segment squared is ever held. Masks over the whole batch would be quadratic, and they
let NaN through (`0 * NaN`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, Union

import torch
from onnxscript import BFLOAT16, FLOAT, FLOAT16, INT32, script
from onnxscript import opset18 as op

import m3compile.ops  # noqa: F401 (registers what is translated)
from m3compile.onnx_format import BLOCK_LOGITS

# Read by the script converter as an annotation: every float dtype a tower can have.
T = TypeVar("T", bound=Union[FLOAT, FLOAT16, BFLOAT16])  # noqa: UP007

_FLOAT, _INT64 = 1, 7


@script(default_opset=op)
def segment_attention(q: T, k: T, v: T, cu_seqlens: INT32) -> T:
    """Full attention within each segment, none across; rows past the last segment become zero.

    q, k, v: (P, heads, head_dim); cu_seqlens: (S + 1,); returns (P, heads, head_dim). Logits and
    softmax are float32. The parts are gathered in float32 too: a sequence of bfloat16 tensors is
    not standard.
    """
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    last_axis = op.Constant(value_ints=[2])
    bounds = op.Cast(cu_seqlens, to=_INT64)
    scale = op.Sqrt(op.Cast(op.Shape(q, start=2, end=3), to=_FLOAT))
    queries = op.Transpose(op.Cast(q, to=_FLOAT) / scale, perm=[1, 0, 2])
    keys = op.Transpose(op.Cast(k, to=_FLOAT), perm=[1, 2, 0])
    values = op.Transpose(v, perm=[1, 0, 2])
    block_logits = op.Constant(value_ints=[BLOCK_LOGITS]) / op.Shape(q, start=1, end=2)
    parts = op.SequenceConstruct(op.Cast(op.Slice(q, zero, zero, zero), to=_FLOAT))
    for segment in range(op.Squeeze(op.Shape(cu_seqlens) - one)):
        start = op.Gather(bounds, op.Reshape(segment, one))
        end = op.Gather(bounds, op.Reshape(segment, one) + one)
        length = end - start
        segment_keys = op.Slice(keys, start, end, last_axis)
        segment_values = op.Slice(values, start, end, one)
        block = op.Max(block_logits / op.Max(length, one), op.Constant(value_ints=[64]))
        for index in range(op.Squeeze((length + block - one) / block)):
            first = start + block * op.Reshape(index, one)
            block_queries = op.Slice(queries, first, op.Min(first + block, end), one)
            weights = op.Softmax(op.MatMul(block_queries, segment_keys), axis=-1)
            attended = op.MatMul(op.CastLike(weights, v), segment_values)
            part = op.Cast(op.Transpose(attended, perm=[1, 0, 2]), to=_FLOAT)
            parts = op.SequenceInsert(parts, part)
    padding_rows = op.Shape(q, start=0, end=1) - op.Gather(bounds, op.Constant(value_ints=[-1]))
    padding_shape = op.Concat(padding_rows, op.Shape(q, start=1, end=3), axis=0)
    padding = op.Expand(op.Constant(value_float=0.0), padding_shape)
    return op.CastLike(op.ConcatFromSequence(op.SequenceInsert(parts, padding), axis=0), q)


def _attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    backend: str,
    zero_padding: bool = True,
    schedule: Any = None,
) -> Any:
    """`m3compile::varlen_attention`; the backend is a matter of PyTorch's programs only."""
    assert schedule is None
    return segment_attention(q, k, v, cu_seqlens)


def _floor_divide(self: Any, other: Any) -> Any:
    """`aten::floor_divide` of the geometry, whose numbers are never negative: one node, not six."""
    return op.Div(self, other)


def _isfinite(self: Any) -> Any:
    """`aten::isfinite`: NaN compares false, and half floats widen to float32 exactly."""
    return op.Less(op.Abs(op.Cast(self, to=_FLOAT)), op.Constant(value_float=float("inf")))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.m3compile.varlen_attention.default: _attention,
    torch.ops.aten.floor_divide.default: _floor_divide,
    torch.ops.aten.isfinite.default: _isfinite,
}
