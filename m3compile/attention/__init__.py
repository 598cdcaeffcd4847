"""The attention op, `torch.ops.m3compile.varlen_attention`, and its backends."""

from m3compile.attention.op import attention_schedule, varlen_attention
from m3compile.attention.select import choose_backend

__all__ = ["attention_schedule", "choose_backend", "varlen_attention"]
