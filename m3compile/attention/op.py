"""Registration of the attention op. Importing this module is all a loader needs."""

from __future__ import annotations

import torch
from torch import Tensor

from m3compile.attention.backends import run_on_cpu, run_on_cuda

# Stored in every manifest: a program calls the op by this schema, so a loader whose schema
# differs must not run it.
OP_SCHEMA = (
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, str backend, "
    "bool zero_padding=True) -> Tensor"
)

_LIBRARY = torch.library.Library("m3compile", "DEF")
_LIBRARY.define(OP_SCHEMA)
_LIBRARY.impl("varlen_attention", run_on_cpu, "CPU")
_LIBRARY.impl("varlen_attention", run_on_cuda, "CUDA")


@torch.library.register_fake("m3compile::varlen_attention", lib=_LIBRARY)
def _fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, backend: str, zero_padding: bool = True
) -> Tensor:
    return q.new_empty(q.shape)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, backend: str, zero_padding: bool = True
) -> Tensor:
    """Full attention within each segment, none across.

    Softmax scale is `head_dim ** -0.5`.

    Args:
        q, k, v: (P, heads, head_dim), the last dim contiguous, of one dtype.
        cu_seqlens: (S + 1,) int32, from 0, non-decreasing, at most P. Empty segments are allowed.
        backend: name of one implementation, `m3compile.config.backends.BACKENDS`, or of a family.
        zero_padding: whether rows past `cu_seqlens[-1]` are written. A caller that never reads
            them saves the pass.

    Returns:
        (P, heads, head_dim), contiguous. Rows past `cu_seqlens[-1]` cost no attention work; they
        are zero, or unspecified without `zero_padding`.

    Raises:
        ConfigError: the backend is unknown or does not run where the tensors are.
    """
    return torch.ops.m3compile.varlen_attention(q, k, v, cu_seqlens, backend, zero_padding)
