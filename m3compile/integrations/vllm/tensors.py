"""Tensor facts shared by the adapter's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from m3compile.artifact import Manifest


def dtype_of(manifest: Manifest) -> torch.dtype:
    """What the program computes in; its inputs and outputs have it too."""
    dtype: torch.dtype = getattr(torch, manifest.dtype)
    return dtype


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Make ordinary tensors on the host, whatever surrounds the call.

    vLLM builds a model with the accelerator as default device, where pinned memory cannot be
    made, and runs it in inference mode, whose tensors cannot be written to outside of it.
    """
    with torch.inference_mode(False), torch.device("cpu"):
        yield
