"""The implementations behind the op. A backend's package is imported when it is first run."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from m3compile.attention.reference import attend_segments
from m3compile.config.backends import BACKENDS, attention_choices
from m3compile.errors import ConfigError, DependencyError

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]

# FlashAttention 3 writes three int32 words a segment, and one more.
SCHEDULE_WORDS = 3

# Rows from which FlashAttention 4 overtakes FlashAttention 3 also where a run is many segments;
# see docs/performance.md.
LARGE_ROWS = 9216


def run_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    backend: str,
    zero_padding: bool = True,
    schedule: Tensor | None = None,
) -> Tensor:
    """The op's CPU kernel: `TORCH_SDPA`, which always zeroes padding."""
    if backend != "TORCH_SDPA":
        raise ConfigError(f"attention backend {backend} does not run on cpu; use TORCH_SDPA")
    return attend_segments(q, k, v, cu_seqlens)


def run_on_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    backend: str,
    zero_padding: bool = True,
    schedule: Tensor | None = None,
) -> Tensor:
    """The op's CUDA kernel: the named implementation, then zeros past the last segment."""
    out = implementation(backend)(q, k, v, cu_seqlens, schedule)
    if zero_padding and backend != "TORCH_SDPA":
        rows = torch.arange(q.shape[0], device=q.device, dtype=cu_seqlens.dtype)
        # Not a product with the mask: what lies there may be NaN.
        out.masked_fill_((rows >= cu_seqlens[-1])[:, None, None], 0)
    return out


def make_schedule(
    cu_seqlens: Tensor,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    backend: str,
    fp8: bool = False,
) -> Tensor:
    """The schedule op's CUDA kernel, for FlashAttention 3 in bfloat16 or fp8."""
    assert BACKENDS[backend].has_schedule, backend
    forward = flash_attn_3_op()
    schedule: Tensor = forward.get_scheduler_metadata(
        cu_seqlens.shape[0] - 1,
        num_rows,
        num_rows,
        num_heads,
        num_heads,
        head_dim,
        head_dim,
        torch.float8_e4m3fn if fp8 else torch.bfloat16,
        cu_seqlens.diff(),
        cu_seqlens_q=cu_seqlens,
        num_splits=1,
    )
    return schedule


def _plain(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, schedule: Tensor | None) -> Tensor:
    return attend_segments(q, k, v, cu_seqlens)


@functools.cache
def implementation(backend: str) -> Attend:
    """Import the package of a backend and return its kernel call.

    Raises:
        ConfigError: there is no such backend.
        DependencyError: its package is not installed, or does not import.
    """
    if backend == "TORCH_SDPA":
        return _plain
    if backend == "FLASH_ATTN":
        return _first_installed("FLASH_ATTN")
    if backend not in _LOADERS:
        raise ConfigError(
            f"attention backend is {backend!r}; allowed: {', '.join(attention_choices()[1:])}"
        )
    try:
        return _LOADERS[backend]()
    # Also a package of the same import name that is another one.
    except (ImportError, AttributeError) as error:
        facts = BACKENDS[backend]
        packages = " or ".join(facts.distributions) or " and ".join(facts.parts)
        raise DependencyError(
            f"attention backend {backend} needs the package {packages}, which does not import "
            f"here: {error}"
        ) from error


def _first_installed(family: str) -> Attend:
    for facts in BACKENDS.values():
        if facts.family == family:
            try:
                return implementation(facts.name)
            except DependencyError:
                continue
    raise ConfigError(f"no implementation of attention {family} is installed")


def _load_flash_attn_4() -> Attend:
    interface = importlib.import_module("flash_attn.cute.interface")
    varlen = interface.flash_attn_varlen_func

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, schedule: Tensor | None
    ) -> Tensor:
        rows = q.shape[0]
        result = varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=rows,
            max_seqlen_k=rows,
            num_splits=1,
        )
        return result[0] if isinstance(result, tuple) else result

    return attend


def _load_flash_attn_3() -> Attend:
    forward = flash_attn_3_op().fwd

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, schedule: Tensor | None
    ) -> Tensor:
        rows = q.shape[0]
        # One split of the keys: with more, the result would depend on the whole batch.
        return forward(
            q,
            k,
            v,
            out=torch.empty(q.shape, dtype=q.dtype, device=q.device),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=rows,
            max_seqlen_k=rows,
            softmax_scale=q.shape[2] ** -0.5,
            scheduler_metadata=schedule,
            num_splits=1,
        )[0]

    return attend


@functools.cache
def flash_attn_3_op() -> Any:
    """The ops under FlashAttention 3's Python wrapper, which would copy the result."""
    for module, namespace in (
        ("fa3_fwd_interface", "fa3_fwd"),
        ("flash_attn_interface", "flash_attn_3"),
    ):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            continue
        return getattr(torch.ops, namespace)
    raise ImportError("neither fa3_fwd_interface nor flash_attn_interface is installed")


def _load_flash_attn_3_4() -> Attend:
    small = implementation("FLASH_ATTN_3")

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, schedule: Tensor | None
    ) -> Tensor:
        if q.shape[0] < LARGE_ROWS:
            return small(q, k, v, cu_seqlens, schedule)
        # Imported by the first run that pays for it: the package takes seconds to import.
        return implementation("FLASH_ATTN_4")(q, k, v, cu_seqlens, None)

    return attend


def _load_flash_attn_2() -> Attend:
    varlen = importlib.import_module("flash_attn").flash_attn_varlen_func

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, schedule: Tensor | None
    ) -> Tensor:
        rows = q.shape[0]
        return varlen(q, k, v, cu_seqlens, cu_seqlens, rows, rows)  # type: ignore[no-any-return]

    return attend


def _load_flash_attn_torch() -> Attend:
    forward = torch.ops.aten._flash_attention_forward.default

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, schedule: Tensor | None
    ) -> Tensor:
        rows = q.shape[0]
        return forward(  # type: ignore[no-any-return]
            q, k, v, cu_seqlens, cu_seqlens, rows, rows, 0.0, False, False, scale=q.shape[2] ** -0.5
        )[0]

    return attend


def _load_aiter() -> Attend:
    varlen = importlib.import_module("aiter").flash_attn_varlen_func

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, schedule: Tensor | None
    ) -> Tensor:
        rows = q.shape[0]
        return varlen(  # type: ignore[no-any-return]
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=rows,
            max_seqlen_k=rows,
            dropout_p=0.0,
            softmax_scale=q.shape[2] ** -0.5,
            causal=False,
        )

    return attend


_LOADERS: dict[str, Callable[[], Attend]] = {
    "FLASH_ATTN_4": _load_flash_attn_4,
    "FLASH_ATTN_3": _load_flash_attn_3,
    "FLASH_ATTN_3_4": _load_flash_attn_3_4,
    "FLASH_ATTN_2": _load_flash_attn_2,
    "FLASH_ATTN_TORCH": _load_flash_attn_torch,
    "ROCM_AITER_FA": _load_aiter,
}
