"""m3compile: ahead-of-time compiler and loader for the MiniMax-M3 vision encoder.

    encoder = m3compile.load("exported/m3")
    embeddings = encoder.encode(pixel_values, grid_thw)

Importing this package imports neither torch nor CUDA; `load` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from m3compile.errors import M3CompileError
from m3compile.version import VERSION as __version__

if TYPE_CHECKING:
    from m3compile.loading import load
    from m3compile.runtime import Encoder

__all__ = ["Encoder", "M3CompileError", "__version__", "load"]

_LAZY = {"load": "m3compile.loading", "Encoder": "m3compile.runtime"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'm3compile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
