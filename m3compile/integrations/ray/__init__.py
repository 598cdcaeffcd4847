"""Serving and embedding on Ray: an engine that schedules, routes and restarts.

`app` is what a Serve config file names: `m3compile.integrations.ray:app`. Importing this package
imports none of Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m3compile.integrations.ray.actor import EncoderActor
    from m3compile.integrations.ray.application import app

__all__ = ["EncoderActor", "app"]

_LAZY = {
    "EncoderActor": "m3compile.integrations.ray.actor",
    "app": "m3compile.integrations.ray.application",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
