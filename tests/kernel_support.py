"""What the tests of the kernels share: where they can run, inputs, and layers."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor, nn

from m3compile.config import TINY
from m3compile.geometry import inverse_frequencies
from m3compile.kernels import Located, kernels

HAS_CUDA = torch.cuda.is_available()
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (HAS_CUDA or INTERPRETS),
    reason="needs Triton with a CUDA device, or with its interpreter (TRITON_INTERPRET=1)",
)

DEVICE = "cuda" if HAS_CUDA else "cpu"
FORMS = ("triton", "few_rows")
# Segments with empty slots between and behind, and 24 rows of padding.
SEGMENTS = ((1, 4, 6), (0, 0, 0), (3, 2, 4), (1, 10, 8), (0, 0, 0))
NUM_REAL, NUM_ROWS = 128, 152
SIZE, HEADS = TINY.hidden_size, TINY.num_attention_heads
EPS = TINY.layer_norm_eps


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE)


def located(form: str) -> Located:
    table = torch.tensor(SEGMENTS, dtype=torch.int32, device=DEVICE)
    return kernels(form).locate(table, NUM_ROWS, inverse_frequencies(TINY).to(DEVICE))


def with_nan_padding(x: Tensor) -> Tensor:
    x = x.clone()
    x[NUM_REAL:] = float("nan")
    return x


def norm() -> nn.LayerNorm:
    layer = nn.LayerNorm(SIZE, EPS).to(DEVICE).requires_grad_(False)
    layer.weight.copy_(1 + 0.2 * randn(SIZE, seed=1))
    layer.bias.copy_(0.1 * randn(SIZE, seed=2))
    return layer


def linear(inner: int) -> nn.Linear:
    layer = nn.Linear(inner, SIZE).to(DEVICE).requires_grad_(False)
    layer.weight.copy_(randn(SIZE, inner, seed=3) * inner**-0.5)
    layer.bias.copy_(0.1 * randn(SIZE, seed=4))
    return layer


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got[:NUM_REAL], expected[:NUM_REAL], rtol=2e-5, atol=2e-5)
