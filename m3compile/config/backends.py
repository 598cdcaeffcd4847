"""Facts about the attention backends: where each runs, what package brings it, what it lacks."""

from __future__ import annotations

import msgspec

from m3compile.config.shown import shown
from m3compile.errors import ConfigError


class BackendFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One backend of `torch.ops.m3compile.varlen_attention`.

    Attributes:
        name: what the op's `backend` argument says; it names one implementation.
        family: the name a user chooses by; several implementations may share it.
        devices: device kinds it runs on.
        dtypes: dtypes of q, k and v it computes in; `fp8` is e4m3 with static scales.
        capture_refusal: why a CUDA graph cannot capture it, or None if it can.
        distributions: packages that bring it, any of them; empty if torch itself does.
        parts: implementations that it calls, by the size of the run.
        has_schedule: whether its scheduling kernel can be run once for all layers.
    """

    name: str
    family: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    capture_refusal: str | None = None
    distributions: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    has_schedule: bool = False


_HALF = ("bfloat16", "float16")

# In order of preference within a family; `auto` measures, and breaks ties by this order.
BACKENDS: dict[str, BackendFacts] = {
    facts.name: facts
    for facts in (
        BackendFacts(
            name="FLASH_ATTN_4",
            family="FLASH_ATTN",
            devices=("cuda",),
            dtypes=_HALF,
            distributions=("flash-attn-4",),
        ),
        BackendFacts(
            name="FLASH_ATTN_3",
            family="FLASH_ATTN",
            devices=("cuda",),
            dtypes=(*_HALF, "fp8"),
            distributions=("fa3-fwd", "flash-attn-3"),
            has_schedule=True,
        ),
        BackendFacts(
            name="FLASH_ATTN_2",
            family="FLASH_ATTN",
            devices=("cuda",),
            dtypes=_HALF,
            distributions=("flash-attn",),
        ),
        BackendFacts(name="FLASH_ATTN_TORCH", family="FLASH_ATTN", devices=("cuda",), dtypes=_HALF),
        # FlashAttention 4 has the faster kernel and the slower set-up: it pays for large runs.
        BackendFacts(
            name="FLASH_ATTN_3_4",
            family="FLASH_ATTN",
            devices=("cuda",),
            dtypes=_HALF,
            parts=("FLASH_ATTN_3", "FLASH_ATTN_4"),
            has_schedule=True,
        ),
        BackendFacts(
            name="ROCM_AITER_FA",
            family="ROCM_AITER_FA",
            devices=("cuda",),
            dtypes=_HALF,
            distributions=("aiter", "amd-aiter"),
        ),
        BackendFacts(
            name="TORCH_SDPA",
            family="TORCH_SDPA",
            devices=("cpu", "cuda"),
            dtypes=("float32", "bfloat16", "float16", "fp8"),
            capture_refusal="it loops over the segments and reads their bounds on the host "
            "(.tolist()), which a CUDA graph cannot capture",
        ),
    )
}

# Known to users of other runners, and not offered: each with what makes it unfit.
REFUSED_BACKENDS: dict[str, str] = {
    "FLASHINFER": "it reads max_seqlen on the host, which a CUDA graph cannot capture",
    "FLASHINFER_CUDNN": "it rebuilds its plan on the host at every call, which a CUDA graph "
    "cannot capture",
    "XFORMERS": "it builds its block mask on the host, which a CUDA graph cannot capture",
    "TRITON_ATTN": "its variable-length path reads the segment lengths on the host, which a CUDA "
    "graph cannot capture",
}

_WAY_OUT = {
    "cuda": "use auto, FLASH_ATTN or ROCM_AITER_FA",
    "cpu": "use auto or TORCH_SDPA",
}
_FP8_WAY_OUT = "use auto or FLASH_ATTN_3, or leave attention_dtype out"


def attention_choices() -> tuple[str, ...]:
    """Every name that `--attention` takes: auto, the families, then single implementations."""
    families = dict.fromkeys(facts.family for facts in BACKENDS.values())
    return ("auto", *dict.fromkeys((*families, *BACKENDS)))


def candidates(name: str, device: str, dtype: str, *, captured: bool) -> tuple[BackendFacts, ...]:
    """The implementations that `name` may stand for on a device, best first.

    Args:
        name: one of `attention_choices()`.
        device: "cuda" or "cpu".
        dtype: dtype of q, k and v.
        captured: whether CUDA graphs will be captured.

    Raises:
        ConfigError: `name` is unknown, or cannot serve there; with the reason and the way out.
    """
    if device not in tuple(_WAY_OUT):
        raise ConfigError(f"device is {shown(device)}; allowed: {', '.join(_WAY_OUT)}")
    known = attention_choices()
    if name not in known and name not in tuple(REFUSED_BACKENDS):
        raise ConfigError(f"attention is {shown(name)}; allowed: {', '.join(known)}")
    way_out = _WAY_OUT[device]
    if name in REFUSED_BACKENDS:
        raise ConfigError(f"attention {name} is refused: {REFUSED_BACKENDS[name]}; {way_out}")
    accepted = []
    refusals: list[str] = []
    for facts in BACKENDS.values():
        if name not in ("auto", facts.family, facts.name):
            continue
        if device not in facts.devices:
            refusals.append(f"it does not run on {device}; {way_out}")
        elif dtype not in facts.dtypes:
            # Said first: for `auto` it is the one refusal that another choice of dtype lifts.
            other = ", or TORCH_SDPA with capture: never" if device == "cuda" else ""
            use = _FP8_WAY_OUT if dtype == "fp8" else f"use dtype bfloat16{other}"
            refusals.insert(
                0, f"it does not compute in {shown(dtype)} (only {', '.join(facts.dtypes)}); {use}"
            )
        elif device == "cuda" and captured and facts.capture_refusal:
            refusals.append(f"{facts.capture_refusal}; {way_out}, or capture: never")
        else:
            accepted.append(facts)
    if not accepted:
        raise ConfigError(f"attention {name} is refused: {refusals[0]}")
    return tuple(accepted)
