"""The attention op: its CPU kernel, its registration, and which backends it refuses where.

Compared with: a softmax in float64, written out per segment and head.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_support import DIM, HEADS, MIXED, as_bounds, inputs, largest_difference, naive
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from m3compile.attention import choose_backend, varlen_attention
from m3compile.config.backends import BACKENDS, REFUSED_BACKENDS, candidates
from m3compile.errors import ConfigError, ExitCode

NAN = float("nan")


# --- the op on the CPU ---


@pytest.mark.parametrize(
    ("bounds", "num_rows"),
    [
        ([0, 16], 16),
        ([0, 1, 2, 3], 3),
        (MIXED, 120),
        (MIXED, 160),
        ([0, 0, 0, 24], 24),
        ([0, 24, 24, 24], 64),
        ([0, 0, 0], 16),
        ([0], 8),
    ],
)
def test_attention_stays_within_segments(bounds: list[int], num_rows: int) -> None:
    q, k, v = inputs(num_rows)
    out = torch.ops.m3compile.varlen_attention(q, k, v, as_bounds(bounds), "TORCH_SDPA")
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    assert largest_difference(out, naive(q, k, v, bounds)) < 1e-5
    # Not nearly zero: zero.
    assert not bool(out[bounds[-1] :].any())


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 12), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_any_bounds(lengths: list[int], num_padding: int, seed: int) -> None:
    bounds = list(itertools.accumulate(lengths, initial=0))
    q, k, v = inputs(bounds[-1] + num_padding, seed)
    out = varlen_attention(q, k, v, as_bounds(bounds), "TORCH_SDPA")
    assert out.shape == q.shape
    assert torch.allclose(out.double(), naive(q, k, v, bounds), rtol=0, atol=1e-5)


def test_bfloat16() -> None:
    q, k, v = inputs(120, dtype=torch.bfloat16)
    out = varlen_attention(q, k, v, as_bounds(MIXED), "TORCH_SDPA")
    assert out.dtype == torch.bfloat16
    assert largest_difference(out, naive(q, k, v, MIXED)) < 2e-2


def test_slices_of_a_fused_product() -> None:
    fused = torch.randn(120, 3, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    q, k, v = fused.unbind(1)
    out = varlen_attention(q, k, v, as_bounds(MIXED), "TORCH_SDPA")
    assert out.is_contiguous()
    assert largest_difference(out, naive(q, k, v, MIXED)) < 1e-5


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_what_lies_in_padding_stays_there(bad: float) -> None:
    q, k, v = inputs(160)
    clean = varlen_attention(q, k, v, as_bounds(MIXED), "TORCH_SDPA")
    for x in (q, k, v):
        x[MIXED[-1] :] = bad
    assert torch.equal(varlen_attention(q, k, v, as_bounds(MIXED), "TORCH_SDPA"), clean)
    spared = varlen_attention(q, k, v, as_bounds(MIXED), "TORCH_SDPA", zero_padding=False)
    assert torch.equal(spared[: MIXED[-1]], clean[: MIXED[-1]])


def test_a_callers_autocast_does_not_round() -> None:
    q, k, v = inputs(120)
    plain = varlen_attention(q, k, v, as_bounds(MIXED), "TORCH_SDPA")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(varlen_attention(q, k, v, as_bounds(MIXED), "TORCH_SDPA"), plain)


# --- the op as torch sees it ---


@pytest.mark.parametrize("bounds", [MIXED, [0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_registration(bounds: list[int], dtype: torch.dtype) -> None:
    op = torch.ops.m3compile.varlen_attention.default
    arguments = (*inputs(160, dtype=dtype), as_bounds(bounds), "TORCH_SDPA", True)
    assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}


def test_the_fake_needs_no_backend() -> None:
    """Tracing for a GPU happens on any machine: only shapes, dtype and device come out."""
    with FakeTensorMode():
        q = torch.empty(64, 3, HEADS, DIM, dtype=torch.bfloat16, device="cuda").unbind(1)[0]
        bounds = torch.empty(9, dtype=torch.int32, device="cuda")
        out = varlen_attention(q, q, q, bounds, "FLASH_ATTN_4")
        assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "cuda")
        assert out.is_contiguous()


def test_a_trace_holds_the_op_and_the_backends_name() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, bounds: Tensor) -> Tensor:
            return varlen_attention(q, q, q, bounds, "TORCH_SDPA")

    rows = torch.export.Dim("rows", min=2, max=1024)
    exported = torch.export.export(
        Module(), (inputs(16)[0], as_bounds([0, 16, 16])), dynamic_shapes=({0: rows}, None)
    )
    calls = [node for node in exported.graph.nodes if "varlen_attention" in str(node.target)]
    assert len(calls) == 1
    assert "TORCH_SDPA" in calls[0].args


@pytest.mark.parametrize(
    "name", ["FLASH_ATTN", *BACKENDS, *REFUSED_BACKENDS, "NO_SUCH", "", "auto"]
)
def test_other_backends_are_refused_on_the_cpu(name: str) -> None:
    if name == "TORCH_SDPA":
        return
    with pytest.raises(ConfigError, match=f"{name} does not run on cpu; use TORCH_SDPA") as caught:
        varlen_attention(*inputs(16), as_bounds([0, 16]), name)
    assert caught.value.exit_code == ExitCode.REQUEST


# --- what may serve where ---


@pytest.mark.parametrize(
    ("name", "device", "dtype", "reason"),
    [
        ("FLASHINFER", "cuda", "bfloat16", "reads max_seqlen on the host.*use auto"),
        ("FLASHINFER", "cpu", "float32", "reads max_seqlen on the host.*TORCH_SDPA"),
        ("TORCH_SDPA", "cuda", "bfloat16", r"\.tolist\(\).*capture: never"),
        ("TORCH_SDPA", "cuda", "float32", r"\.tolist\(\).*capture: never"),
        ("FLASH_ATTN", "cpu", "bfloat16", "does not run on cpu; use auto or TORCH_SDPA"),
        ("FLASH_ATTN_4", "cpu", "float32", "does not run on cpu"),
        ("ROCM_AITER_FA", "cpu", "bfloat16", "does not run on cpu"),
        ("FLASH_ATTN", "cuda", "float32", "does not compute in 'float32'.*bfloat16"),
        ("auto", "cuda", "float32", "does not compute in 'float32'.*bfloat16"),
        ("flash_attn", "cuda", "bfloat16", "allowed: auto, FLASH_ATTN"),
    ],
)
def test_refusals_have_a_reason_and_a_way_out(
    name: str, device: str, dtype: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        candidates(name, device, dtype, captured=True)
    assert "\n" not in str(caught.value)


def test_a_loop_over_segments_serves_where_nothing_is_captured() -> None:
    names = [facts.name for facts in candidates("TORCH_SDPA", "cuda", "float32", captured=False)]
    assert names == ["TORCH_SDPA"]


def test_the_choice_on_a_cpu() -> None:
    chosen, reason, _ = choose_backend(
        "auto", "cpu", "float32", captured=False, num_heads=HEADS, head_dim=DIM
    )
    assert chosen == "TORCH_SDPA"
    assert reason
