"""Attention in fp8: against float64 arithmetic over what its numbers stand for.

FlashAttention 3 is a stand-in that keeps what it is called with; the real one is in
`tests/test_gpu_fp8.py`.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import m3compile.attention.fp8 as module
from m3compile.attention import attention_schedule, fp8_attention
from m3compile.attention.backends import make_schedule
from m3compile.config.backends import candidates
from m3compile.errors import ConfigError

BOUNDS = [0, 4, 4, 40, 60, 60]
ROWS, HEADS, DIM = 72, 2, 80
SCALES = torch.tensor([[0.011], [0.012], [0.013]])


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in e4m3, out of one fused tensor as the program has them."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(ROWS, 3, HEADS, DIM, generator=generator) / SCALES[None, :, None]
    q, k, v = fused.to(torch.float8_e4m3fn).unbind(1)
    return q, k, v


def expected() -> Tensor:
    """(60, heads, dim) float64."""
    q, k, v = (x.double() * s.double() for x, s in zip(inputs(), SCALES, strict=True))
    out = torch.zeros(BOUNDS[-1], HEADS, DIM, dtype=torch.float64)
    for start, end in itertools.pairwise(BOUNDS):
        for head in range(HEADS):
            scores = q[start:end, head] @ k[start:end, head].T * DIM**-0.5
            out[start:end, head] = scores.softmax(1) @ v[start:end, head]
    return out


def bounds() -> Tensor:
    return torch.tensor(BOUNDS, dtype=torch.int32)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def fwd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor]:
        found.append({"q": q, "k": k, "v": v, **options})
        options["out"].fill_(7)
        return (options["out"],)

    monkeypatch.setattr(module, "flash_attn_3_op", lambda: SimpleNamespace(fwd=fwd))
    return found


def test_on_the_cpu() -> None:
    got = fp8_attention(*inputs(), SCALES, bounds(), "TORCH_SDPA")
    assert got.dtype == torch.float32
    assert got.shape == (ROWS, HEADS, DIM)
    torch.testing.assert_close(got[: BOUNDS[-1]].double(), expected(), rtol=1e-4, atol=1e-5)


def test_plain_attention_stands_in_on_cuda_too() -> None:
    got = module._run_on_cuda(*inputs(), SCALES, bounds(), "TORCH_SDPA", None)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got[: BOUNDS[-1]].double(), expected(), rtol=2e-2, atol=2e-3)


def test_what_flash_attention_3_is_called_with(calls: list[dict[str, Any]]) -> None:
    schedule = torch.zeros(16, dtype=torch.int32)
    got = module._run_on_cuda(*inputs(), SCALES, bounds(), "FLASH_ATTN_3", schedule)
    assert bool((got == 7).all())
    assert got.dtype == torch.bfloat16
    (call,) = calls
    for name, scale in zip("qkv", SCALES.flatten().tolist(), strict=True):
        assert call[name].dtype == torch.float8_e4m3fn
        # One a segment and head, as its kernel reads them.
        descale = call[f"{name}_descale"]
        assert descale.shape == (len(BOUNDS) - 1, HEADS)
        assert descale.dtype == torch.float32
        assert descale.unique().tolist() == pytest.approx([scale])
    assert call["scheduler_metadata"] is schedule
    assert call["num_splits"] == 1
    assert call["max_seqlen_q"] == call["max_seqlen_k"] == ROWS
    assert call["softmax_scale"] == pytest.approx(DIM**-0.5)
    assert torch.equal(call["cu_seqlens_q"], bounds())
    assert call["cu_seqlens_k"] is call["cu_seqlens_q"]


def test_other_backends_have_no_fp8() -> None:
    with pytest.raises(ConfigError, match="FLASH_ATTN_4 has no fp8; use FLASH_ATTN_3"):
        module._run_on_cuda(*inputs(), SCALES, bounds(), "FLASH_ATTN_4", None)
    names = [facts.name for facts in candidates("auto", "cuda", "fp8", captured=True)]
    assert names == ["FLASH_ATTN_3"]
    assert [facts.name for facts in candidates("auto", "cpu", "fp8", captured=False)] == [
        "TORCH_SDPA"
    ]


@pytest.mark.parametrize(("fp8", "dtype"), [(False, torch.bfloat16), (True, torch.float8_e4m3fn)])
def test_the_schedule_is_made_for_the_dtype(
    fp8: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tiles, and with them the schedule, depend on it."""
    seen: list[Any] = []

    def schedule(*arguments: Any, **_: Any) -> Tensor:
        seen.extend(arguments)
        return torch.zeros(16, dtype=torch.int32)

    monkeypatch.setattr(
        "m3compile.attention.backends.flash_attn_3_op",
        lambda: SimpleNamespace(get_scheduler_metadata=schedule),
    )
    make_schedule(bounds(), ROWS, HEADS, DIM, "FLASH_ATTN_3", fp8)
    assert dtype in seen
    assert attention_schedule(bounds(), ROWS, HEADS, DIM, "TORCH_SDPA", fp8) is None
