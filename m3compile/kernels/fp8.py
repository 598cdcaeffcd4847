"""Linear layers in fp8: the weights' form, the rows' form, and the product as an op.

Numbers are e4m3 with float32 scales beside them: one an output channel of a weight, one a row of
what it multiplies. A row's scale comes from that row alone, in the pass that writes it, so neither
neighbours nor padding change a result.

Shape legend: P rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from m3compile.config.scales import FP8_MAX, SMALLEST_SCALE

FP8 = torch.float8_e4m3fn

_FEWEST_FAST_ROWS = 32

FP8_PRODUCT_SCHEMA = (
    "fp8_product(Tensor values, Tensor scales, Tensor weight, Tensor weight_scale, Tensor bias, "
    "bool fast_accumulation) -> Tensor"
)
FP8_SUMS_SCHEMA = (
    "fp8_sums(Tensor values, Tensor weight, Tensor bias, bool fast_accumulation) -> Tensor"
)


class Fp8Rows(NamedTuple):
    """(P, K) rows in e4m3, and the (P, 1) float32 that each is to be multiplied with."""

    values: Tensor
    scales: Tensor


Rows: TypeAlias = Tensor | Fp8Rows


class Fp8Linear(nn.Module):
    """A linear layer with an e4m3 weight and a scale per output channel.

    Args:
        in_features, out_features: K and N, multiples of 16 on CUDA.
        fast_accumulation: whether sums may be kept in fewer bits, which is faster.
    """

    def __init__(self, in_features: int, out_features: int, fast_accumulation: bool) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.fast_accumulation = fast_accumulation
        # Made from a checkpoint's weight: there is nothing to initialise.
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=FP8), False)
        self.weight_scale = nn.Parameter(torch.empty(out_features, dtype=torch.float32), False)
        self.bias = nn.Parameter(torch.empty(out_features), False)

    def forward(self, rows: Fp8Rows) -> Tensor:
        """(P, K) to (P, N), in the dtype of the bias."""
        product: Tensor = torch.ops.m3compile.fp8_product(
            rows.values,
            rows.scales,
            self.weight,
            self.weight_scale,
            self.bias,
            self.fast_accumulation,
        )
        return product

    def sums(self, rows: Fp8Rows) -> Tensor:
        """(P, N) in the dtype of the bias: what is left of the product without scales and bias.

        For a pass that reads it anyway and can apply them: up to a few thousand rows a product
        without scales a row is faster (docs/fp8.md).
        """
        sums: Tensor = torch.ops.m3compile.fp8_sums(
            rows.values, self.weight, self.bias, self.fast_accumulation
        )
        return sums


def is_fp8(linear: nn.Module) -> TypeGuard[Fp8Linear]:
    """Whether a layer takes `Fp8Rows`."""
    return isinstance(linear, Fp8Linear)


def quantise_rows(x: Tensor) -> Fp8Rows:
    """(P, K) in any float dtype to fp8, each row by its own largest magnitude.

    A row with a non-finite number gets a non-finite scale, and makes its own row of a product NaN.
    """
    scales = _scale(x.to(torch.float32).abs().amax(1, keepdim=True))
    return Fp8Rows(to_fp8(x, scales), scales)


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) in any float dtype to e4m3 and (N,) float32, each channel by its own magnitude."""
    rows = quantise_rows(weight)
    return rows.values, rows.scales.squeeze(1)


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """`x / scale` in e4m3; what lies beyond its range becomes its largest number, not NaN."""
    return (x.to(torch.float32) / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _scale(largest: Tensor) -> Tensor:
    """The scale that a largest magnitude asks for; NaN stays NaN."""
    # A row of zeros, or of next to nothing, would be divided by zero.
    return (largest / FP8_MAX).clamp_min(SMALLEST_SCALE)


def _product_cpu(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    fast_accumulation: bool,
) -> Tensor:
    sums = values.to(torch.float32) @ weight.to(torch.float32).t()
    return (sums * scales * weight_scale + bias.to(torch.float32)).to(bias.dtype)


def _product_cuda(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    fast_accumulation: bool,
) -> Tensor:
    return torch._scaled_mm(
        values,
        weight.t(),
        scale_a=scales,
        scale_b=weight_scale[None],
        bias=bias,
        out_dtype=bias.dtype,
        # cuBLAS has no such product for fewer rows where K is large.
        use_fast_accum=fast_accumulation and values.shape[0] >= _FEWEST_FAST_ROWS,
    )


def _sums_cpu(values: Tensor, weight: Tensor, bias: Tensor, fast_accumulation: bool) -> Tensor:
    return (values.to(torch.float32) @ weight.to(torch.float32).t()).to(bias.dtype)


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def _sums_cuda(values: Tensor, weight: Tensor, bias: Tensor, fast_accumulation: bool) -> Tensor:
    one = _one(values.device)
    return torch._scaled_mm(
        values,
        weight.t(),
        scale_a=one,
        scale_b=one,
        out_dtype=bias.dtype,
        use_fast_accum=fast_accumulation,
    )


_LIBRARY = torch.library.Library("m3compile", "FRAGMENT")
_LIBRARY.define(FP8_PRODUCT_SCHEMA)
_LIBRARY.impl("fp8_product", _product_cpu, "CPU")
_LIBRARY.impl("fp8_product", _product_cuda, "CUDA")
_LIBRARY.define(FP8_SUMS_SCHEMA)
_LIBRARY.impl("fp8_sums", _sums_cpu, "CPU")
_LIBRARY.impl("fp8_sums", _sums_cuda, "CUDA")


@torch.library.register_fake("m3compile::fp8_product", lib=_LIBRARY)
def _fake_product(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    fast_accumulation: bool,
) -> Tensor:
    return bias.new_empty(values.shape[0], weight.shape[0])


@torch.library.register_fake("m3compile::fp8_sums", lib=_LIBRARY)
def _fake_sums(values: Tensor, weight: Tensor, bias: Tensor, fast_accumulation: bool) -> Tensor:
    return bias.new_empty(values.shape[0], weight.shape[0])
