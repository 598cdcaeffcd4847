"""Registration of the attention op. Importing this module is all a loader needs."""

from __future__ import annotations

import torch
from torch import Tensor

from m3compile.attention.backends import (
    SCHEDULE_WORDS,
    make_schedule,
    run_on_cpu,
    run_on_cuda,
)
from m3compile.config.backends import BACKENDS

_ATTENTION = (
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, str backend, "
    "bool zero_padding=True, Tensor? schedule=None) -> Tensor"
)
_SCHEDULE = (
    "attention_schedule(Tensor cu_seqlens, SymInt num_rows, int num_heads, int head_dim, "
    "str backend, bool fp8=False) -> Tensor"
)
ATTENTION_SCHEMA = f"{_ATTENTION}; {_SCHEDULE}"

_LIBRARY = torch.library.Library("m3compile", "DEF")
_LIBRARY.define(_ATTENTION)
_LIBRARY.impl("varlen_attention", run_on_cpu, "CPU")
_LIBRARY.impl("varlen_attention", run_on_cuda, "CUDA")
_LIBRARY.define(_SCHEDULE)
_LIBRARY.impl("attention_schedule", make_schedule, "CUDA")


@torch.library.register_fake("m3compile::varlen_attention", lib=_LIBRARY)
def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    backend: str,
    zero_padding: bool = True,
    schedule: Tensor | None = None,
) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.register_fake("m3compile::attention_schedule", lib=_LIBRARY)
def _fake_schedule(
    cu_seqlens: Tensor,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    backend: str,
    fp8: bool = False,
) -> Tensor:
    return cu_seqlens.new_empty(SCHEDULE_WORDS * (cu_seqlens.shape[0] - 1) + 1)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    backend: str,
    zero_padding: bool = True,
    schedule: Tensor | None = None,
) -> Tensor:
    """Full attention within each segment, none across.

    Softmax scale is `head_dim ** -0.5`.

    Args:
        q, k, v: (P, heads, head_dim), the last dim contiguous, of one dtype.
        cu_seqlens: (S + 1,) int32, from 0, non-decreasing, at most P. Empty segments are allowed.
        backend: name of one implementation, `m3compile.config.backends.BACKENDS`, or of a family.
        zero_padding: whether rows past `cu_seqlens[-1]` are written. A caller that never reads
            them saves the pass.
        schedule: of `attention_schedule` for the same bounds and sizes; None to let the backend
            compute it again.

    Returns:
        (P, heads, head_dim), contiguous. Rows past `cu_seqlens[-1]` cost no attention work; they
        are zero, or unspecified without `zero_padding`.

    Raises:
        ConfigError: the backend is unknown or does not run where the tensors are.
    """
    return torch.ops.m3compile.varlen_attention(
        q, k, v, cu_seqlens, backend, zero_padding, schedule
    )


def attention_schedule(
    cu_seqlens: Tensor,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    backend: str,
    fp8: bool = False,
) -> Tensor | None:
    """What a backend's scheduling kernel computes from the bounds, once for all layers.

    Args:
        num_rows, num_heads, head_dim: sizes of q.
        fp8: whether q, k and v will be in fp8.

    Returns:
        int32 words for `varlen_attention`, or None where the backend has no schedule.
    """
    if not BACKENDS[backend].has_schedule:
        return None
    return torch.ops.m3compile.attention_schedule(
        cu_seqlens, num_rows, num_heads, head_dim, backend, fp8
    )
