"""Compiled programs inside vLLM: its encoder CUDA-graph protocol, served from an artifact.

    M3COMPILE_ARTIFACT=exported/m3 vllm serve ...

does it without code: the plugin `m3compile` swaps `EncoderMixin` into the MiniMax-M3 host. A host
of one's own takes the mixin as its first base. Importing this package imports neither vLLM nor
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m3compile.integrations.vllm.mixin import EncoderMixin

__all__ = ["EncoderMixin"]


def __getattr__(name: str) -> Any:
    if name == "EncoderMixin":
        return importlib.import_module("m3compile.integrations.vllm.mixin").EncoderMixin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
