"""The Triton passes that end in fp8 against the plain form, method by method.

Rows are compared as the numbers that they stand for. Two passes round the same number to
neighbours of e4m3 where their float32 differs in a last bit, so a few may differ by one step.
Runs where `tests/test_kernels.py` does; Triton's interpreter rounds to e4m3 wrongly where a carry
reaches the exponent, so there the kernels write float32, and PyTorch rounds.
"""

from __future__ import annotations

import pytest
import torch
from kernel_support import (
    DEVICE,
    FORMS,
    HAS_CUDA,
    HEADS,
    INTERPRETS,
    NUM_REAL,
    NUM_ROWS,
    SIZE,
    close,
    linear,
    located,
    needs_triton,
    norm,
    randn,
    with_nan_padding,
)
from torch import Tensor

from m3compile.kernels import kernels
from m3compile.kernels.fp8 import FP8, Fp8Linear, Fp8Rows, quantise_weight, to_fp8

pytestmark = needs_triton

ONE = torch.ones((), device=DEVICE)

# One step of e4m3 is an eighth of a number at most; in rows, of the largest one.
STEP = 1 / 8


@pytest.fixture(autouse=True)
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETS:
        monkeypatch.setattr("m3compile.kernels.fp8_passes.FP8", torch.float32)


def rounded(rows: Fp8Rows) -> Fp8Rows:
    """As the kernel would have written it."""
    return rows._replace(values=to_fp8(rows.values, ONE)) if INTERPRETS else rows


def fp8_linear(inner: int) -> Fp8Linear:
    """The layer of `linear`, quantised."""
    whole = linear(inner)
    layer = Fp8Linear(inner, SIZE, False).to(DEVICE)
    layer.weight.data, layer.weight_scale.data = quantise_weight(whole.weight)
    # A GPU's product with scales a row is in bfloat16, or not at all.
    layer.bias.data = whole.bias.to(torch.bfloat16) if HAS_CUDA else whole.bias
    return layer


def same_rows(got: Fp8Rows, expected: Fp8Rows, num_rows: int = NUM_REAL) -> None:
    """Equal scales, and numbers that are equal but for few of one step."""
    got = rounded(got)
    assert got.values.dtype == expected.values.dtype == FP8
    assert got.scales.shape == expected.scales.shape == (NUM_ROWS, 1)
    torch.testing.assert_close(
        got.scales[:num_rows], expected.scales[:num_rows], rtol=2e-5, atol=1e-9
    )
    a, b = got.values[:num_rows].float(), expected.values[:num_rows].float()
    same_values(a, b)


def same_values(a: Tensor, b: Tensor) -> None:
    assert bool(a.isfinite().all())
    differs = a != b
    assert float(differs.float().mean()) < 0.01
    assert bool(((a - b).abs() <= STEP * torch.maximum(a.abs(), b.abs()) + 2**-9).all())


@pytest.mark.parametrize("form", FORMS)
def test_norm(form: str) -> None:
    x, bounds = with_nan_padding(randn(NUM_ROWS, SIZE)), located(form).cu_seqlens
    offset = torch.zeros(SIZE, device=DEVICE)
    got = kernels(form).norm(x, bounds, norm(), offset, True)
    expected = kernels("plain").norm(x, bounds, norm(), None, True)
    assert isinstance(got, Fp8Rows)
    assert isinstance(expected, Fp8Rows)
    same_rows(got, expected, NUM_ROWS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inner", [SIZE, 2 * SIZE])
@pytest.mark.parametrize(
    ("fp8_product", "fp8_consumer"), [(False, True), (True, False), (True, True)]
)
def test_residual_and_norm(form: str, inner: int, fp8_product: bool, fp8_consumer: bool) -> None:
    passes, plain = kernels(form), kernels("plain")
    bounds = located(form).cu_seqlens
    x, y = randn(NUM_ROWS, SIZE), with_nan_padding(randn(NUM_ROWS, inner))
    layer = fp8_linear(inner) if fp8_product else linear(inner)
    rows = plain.quantise(y) if fp8_product else y
    offsets = passes.residual_offsets([layer])
    assert offsets is not None
    expected, expected_norm = plain.add_product_norm(
        x.clone(), rows, layer, bounds, norm(), None, fp8_consumer
    )
    total, normed = passes.add_product_norm(
        x.clone(), rows, layer, bounds, norm(), offsets[1], fp8_consumer
    )
    if fp8_product and HAS_CUDA:
        # Each form rounds its product to bfloat16 before it adds, one of them without the scales.
        torch.testing.assert_close(
            passes.add_offset(total, offsets[1])[:NUM_REAL], expected[:NUM_REAL], rtol=0, atol=0.03
        )
        return
    close(passes.add_offset(total, offsets[1]), expected)
    if fp8_consumer:
        same_rows(normed, expected_norm)
        assert normed.values[NUM_REAL:].float().isfinite().all()
    else:
        close(normed, expected_norm)


@pytest.mark.parametrize("form", FORMS)
def test_rotation_scales_and_bounds(form: str) -> None:
    qkv, place = randn(NUM_ROWS, 3 * SIZE), located("plain")
    qkv[5, 7] = 1000.0
    qkv[6, 2 * SIZE + 3] = -1000.0
    scales = torch.tensor([[0.01], [0.02], [0.005]], device=DEVICE)
    arguments = (qkv, place.cos, place.sin, HEADS, scales)
    got = kernels(form).rotate_heads_fp8(*arguments)
    expected = kernels("plain").rotate_heads_fp8(*arguments)
    for ours, theirs, scale in zip(got, expected, scales.flatten().tolist(), strict=True):
        assert ours.shape == theirs.shape == (NUM_ROWS, HEADS, SIZE // HEADS)
        assert ours.float().abs().max() <= 448
        same_values(to_fp8(ours.float(), ONE).float(), theirs.float())
        # The scale is a divisor: most numbers are of order 1 / scale.
        assert float(ours.float().std()) == pytest.approx(1 / scale, rel=0.25)


@pytest.mark.parametrize("form", FORMS)
def test_gelu(form: str) -> None:
    x, bounds = with_nan_padding(2 * randn(NUM_ROWS, 320)), located(form).cu_seqlens
    got = kernels(form).gelu(x, bounds, True)
    expected = kernels("plain").gelu(x, bounds, True)
    assert isinstance(got, Fp8Rows)
    assert isinstance(expected, Fp8Rows)
    same_rows(got, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [16, SIZE, 5008])
def test_quantise(form: str, width: int) -> None:
    x = randn(NUM_ROWS, width) * torch.logspace(-6, 6, NUM_ROWS, device=DEVICE)[:, None]
    x[3] = 0
    x[4, 1:] = 0
    x[5] = torch.where(torch.arange(width, device=DEVICE) % 2 == 0, 1e-44, 0)
    got, expected = rounded(kernels(form).quantise(x)), kernels("plain").quantise(x)
    same_rows(got, expected, NUM_ROWS)
    assert not got.values[3].float().any()
    whole = got.values.float() * got.scales
    torch.testing.assert_close(whole[4, 0], x[4, 0])
    assert float((whole - x).norm(dim=1).div(x.norm(dim=1) + 1e-30).max()) < 0.04


@pytest.mark.parametrize("form", ["plain", *FORMS])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_number_makes_its_own_row_of_a_product_nan(form: str, bad: float) -> None:
    x = randn(NUM_ROWS, SIZE)
    x[9, 3] = bad
    product = fp8_linear(SIZE)(rounded(kernels(form).quantise(x)))
    assert product[9].isnan().all()
    rest = torch.arange(NUM_ROWS, device=DEVICE) != 9
    assert product[rest].isfinite().all()
