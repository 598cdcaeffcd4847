"""The Triton forms of the passes against the plain form, method by method, in float32.

Runs on a CUDA device; elsewhere under Triton's interpreter, where Triton is installed and
TRITON_INTERPRET=1 is set. Padding rows hold NaN wherever a pass promises not to read them.
"""

from __future__ import annotations

import pytest
import torch
from kernel_support import (
    DEVICE,
    FORMS,
    HAS_CUDA,
    HEADS,
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
from torch import nn

from m3compile.attention.reference import attend_segments
from m3compile.kernels import kernels

pytestmark = needs_triton


@pytest.mark.parametrize("form", FORMS)
def test_locate(form: str) -> None:
    got, expected = located(form), located("plain")
    assert torch.equal(got.cu_seqlens, expected.cu_seqlens)
    assert torch.equal(got.segment_of_row.long(), expected.segment_of_row.long())
    close(got.cos, expected.cos)
    close(got.sin, expected.sin)


@pytest.mark.parametrize("form", FORMS)
def test_enter_zeroes_padding_and_bad_rows_and_names_their_slots(form: str) -> None:
    x = with_nan_padding(randn(NUM_ROWS, SIZE))
    x[30, 7] = float("inf")
    x[31] = float("nan")
    got, flags = kernels(form).enter(x, norm(), located(form))
    expected, expected_flags = kernels("plain").enter(x, norm(), located("plain"))
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    assert flags.tolist() == expected_flags.tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inner", [SIZE, 2 * SIZE])
def test_residual_with_its_biases_and_norm(form: str, inner: int) -> None:
    passes, plain = kernels(form), kernels("plain")
    bounds = located(form).cu_seqlens
    x, y, layer = randn(NUM_ROWS, SIZE), with_nan_padding(randn(NUM_ROWS, inner)), linear(inner)
    offsets = passes.residual_offsets([layer])
    assert offsets is not None
    expected, expected_norm = plain.add_product_norm(x.clone(), y, layer, bounds, norm(), None)
    total, normed = passes.add_product_norm(x.clone(), y, layer, bounds, norm(), offsets[1])
    close(passes.add_offset(total, offsets[1]), expected)
    close(normed, expected_norm)
    assert normed[NUM_REAL:].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_rotation_and_attention(form: str) -> None:
    qkv, place = randn(NUM_ROWS, 3 * SIZE), located("plain")
    q, k, v = kernels("plain").rotate_heads(qkv, place.cos, place.sin, HEADS)
    for got, expected in zip(
        kernels(form).rotate_heads(qkv, place.cos, place.sin, HEADS), (q, k, v), strict=True
    ):
        close(got, expected)
    if form == "few_rows":
        got = kernels(form).attend(qkv, located(form), HEADS, "", None)
        # Its products take float32 at the matrix units' own precision on a GPU.
        tolerance = 2e-3 if HAS_CUDA else 2e-5
        expected = attend_segments(q, k, v, place.cu_seqlens).flatten(1)
        torch.testing.assert_close(
            got[:NUM_REAL], expected[:NUM_REAL], rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("form", FORMS)
def test_gelu_is_the_exact_one(form: str) -> None:
    x = torch.linspace(-12, 12, NUM_ROWS * 64, device=DEVICE).view(NUM_ROWS, 64)
    x[0, 0] = float("nan")
    got = kernels(form).gelu(x, located(form).cu_seqlens)[:NUM_REAL]
    expected = nn.functional.gelu(x.double())[:NUM_REAL].float()
    assert got[0, 0].isnan()
    torch.testing.assert_close(got.flatten()[1:], expected.flatten()[1:], rtol=0, atol=1e-6)
    negative = expected.flatten()[1:] < 0
    torch.testing.assert_close(
        got.flatten()[1:][negative], expected.flatten()[1:][negative], rtol=0, atol=2e-7
    )
    tanh = nn.functional.gelu(x, approximate="tanh")[:NUM_REAL]
    assert (tanh - expected).flatten()[1:].abs().max() > 1e-4
