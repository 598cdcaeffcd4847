"""Attention over q, k and v in fp8, with static scales, as an op."""

from __future__ import annotations

import torch
from torch import Tensor

from m3compile.attention.backends import flash_attn_3_op
from m3compile.attention.reference import attend_segments
from m3compile.errors import ConfigError

FP8_ATTENTION_SCHEMA = (
    "fp8_attention(Tensor q, Tensor k, Tensor v, Tensor scales, Tensor cu_seqlens, str backend, "
    "Tensor? schedule) -> Tensor"
)

# What the op returns, by device kind: FlashAttention has no other for fp8.
_RESULTS = {"cuda": torch.bfloat16}


def _run_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Tensor,
    cu_seqlens: Tensor,
    backend: str,
    schedule: Tensor | None,
) -> Tensor:
    """Plain attention over what the numbers stand for."""
    q, k, v = (x.to(torch.float32) * scale for x, scale in zip((q, k, v), scales, strict=True))
    return attend_segments(q, k, v, cu_seqlens)


def _run_on_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Tensor,
    cu_seqlens: Tensor,
    backend: str,
    schedule: Tensor | None,
) -> Tensor:
    if backend == "TORCH_SDPA":
        plain = _run_on_cpu(q, k, v, scales, cu_seqlens, backend, schedule)
        return plain.to(_RESULTS["cuda"])
    if backend != "FLASH_ATTN_3":
        raise ConfigError(f"attention backend {backend} has no fp8; use FLASH_ATTN_3")
    rows, num_heads = q.shape[:2]
    # One scale a segment and head: the same number, read again and again.
    q_scale, k_scale, v_scale = scales[:, :, None].expand(3, cu_seqlens.shape[0] - 1, num_heads)
    out: Tensor = flash_attn_3_op().fwd(
        q,
        k,
        v,
        out=torch.empty(q.shape, dtype=_RESULTS["cuda"], device=q.device),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=rows,
        max_seqlen_k=rows,
        q_descale=q_scale,
        k_descale=k_scale,
        v_descale=v_scale,
        softmax_scale=q.shape[2] ** -0.5,
        scheduler_metadata=schedule,
        num_splits=1,
    )[0]
    return out


_LIBRARY = torch.library.Library("m3compile", "FRAGMENT")
_LIBRARY.define(FP8_ATTENTION_SCHEMA)
_LIBRARY.impl("fp8_attention", _run_on_cpu, "CPU")
_LIBRARY.impl("fp8_attention", _run_on_cuda, "CUDA")


@torch.library.register_fake("m3compile::fp8_attention", lib=_LIBRARY)
def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Tensor,
    cu_seqlens: Tensor,
    backend: str,
    schedule: Tensor | None,
) -> Tensor:
    return torch.empty(q.shape, dtype=_RESULTS.get(q.device.type, torch.float32), device=q.device)


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Tensor,
    cu_seqlens: Tensor,
    backend: str,
    schedule: Tensor | None = None,
) -> Tensor:
    """As `varlen_attention`, over q, k and v in e4m3.

    Args:
        q, k, v: (P, heads, head_dim) e4m3, the last dim contiguous.
        scales: (3, 1) float32, what q, k and v are to be multiplied with.
        cu_seqlens, backend: as `varlen_attention`.
        schedule: of `attention_schedule` for fp8.

    Returns:
        (P, heads, head_dim), contiguous: bfloat16 on CUDA, float32 on the CPU, which computes with
        the numbers that q, k and v stand for. Rows past `cu_seqlens[-1]` are unspecified.
    """
    attended: Tensor = torch.ops.m3compile.fp8_attention(
        q, k, v, scales, cu_seqlens, backend, schedule
    )
    return attended
