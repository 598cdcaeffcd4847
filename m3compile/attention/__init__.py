"""The attention op, `torch.ops.m3compile.varlen_attention`, its form in fp8, and the backends."""

from m3compile.attention.fp8 import fp8_attention
from m3compile.attention.op import attention_schedule, varlen_attention
from m3compile.attention.select import Choice, choose_backend

__all__ = ["Choice", "attention_schedule", "choose_backend", "fp8_attention", "varlen_attention"]
