"""What the tests of attention share: inputs, and the plain attention they compare with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

HEADS, DIM = 2, 80
MIXED = [0, 4, 4, 40, 40, 104, 120, 120]


def inputs(num_rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, num_rows, HEADS, DIM, generator=generator).to(dtype).unbind()


def as_bounds(bounds: Sequence[int]) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def naive(q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int]) -> Tensor:
    """Softmax attention in float64, zero outside of the segments."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for start, end in itertools.pairwise(bounds):
        for head in range(q.shape[1]):
            queries, keys, values = (x[start:end, head].double() for x in (q, k, v))
            scores = queries @ keys.T / q.shape[2] ** 0.5
            weights = scores.exp() / scores.exp().sum(1, keepdim=True)
            out[start:end, head] = weights @ values
    return out


def largest_difference(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).abs().max())
