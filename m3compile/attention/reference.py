"""Plain attention, segment by segment, with PyTorch's own kernels."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional


def attend_segments(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`TORCH_SDPA`: one scaled_dot_product_attention per segment; padding rows are zero.

    Shapes as `varlen_attention`. Reads the bounds on the host, so it cannot be captured.
    """
    out = q.new_zeros(q.shape)
    bounds = cu_seqlens.tolist()
    # A caller's autocast would compute in another dtype than the program was compiled for.
    with torch.autocast(q.device.type, enabled=False):
        for start, end in itertools.pairwise(bounds):
            if end > start:
                # (1, heads, length, head_dim): the layout the kernels take.
                parts = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
                out[start:end] = functional.scaled_dot_product_attention(*parts)[0].transpose(0, 1)
    return out
