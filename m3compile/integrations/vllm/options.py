"""vLLM's options: who captures, which budgets, and what is refused with the option to change."""

from __future__ import annotations

from typing import Any

from m3compile.artifact import Manifest
from m3compile.config.backends import BACKENDS, REFUSED_BACKENDS
from m3compile.config.build import MAX_TOKENS
from m3compile.errors import RequestError
from m3compile.integrations.vllm.items import IMAGE, VIDEO

# What vLLM's encoders may run on to be captured; its host of this model holds to the same two.
_CAPTURABLE = ("FLASH_ATTN", "ROCM_AITER_FA")

# Who makes the CUDA graphs.
BY_VLLM, BY_US, BY_NOBODY = "vllm", "m3compile", "nobody"

_SWITCH = "cudagraph_mm_encoder in --compilation-config"


def captured_by(vllm_config: Any) -> str:
    """Who captures: vLLM where it was asked to, else the adapter; nobody in eager mode."""
    if vllm_config is None:
        return BY_US
    if getattr(vllm_config.model_config, "enforce_eager", False):
        return BY_NOBODY
    return BY_VLLM if vllm_config.compilation_config.cudagraph_mm_encoder else BY_US


def budget_range(vllm_config: Any) -> tuple[int, int]:
    """Smallest and largest budget worth a capture, in tokens; the program takes no larger run."""
    highest = min(
        vllm_config.scheduler_config.max_num_batched_tokens,
        vllm_config.model_config.max_model_len,
        MAX_TOKENS,
    )
    return 64, highest


def fill_budgets(vllm_config: Any, manifest: Manifest) -> None:
    """Set vLLM's budgets from the artifact's ladder, and items a batch, where the user set none.

    vLLM's own budgets double from one to the next. Budgets beyond its range are left out, as are
    those below a number of items that the user did set, which vLLM would refuse.
    """
    config = vllm_config.compilation_config
    max_items = config.encoder_cudagraph_max_vision_items_per_batch
    if not config.encoder_cudagraph_token_budgets:
        highest = budget_range(vllm_config)[1]
        fitting = [budget for budget in manifest.ladder if max_items <= budget <= highest]
        config.encoder_cudagraph_token_budgets = fitting or [highest]
    if not max_items:
        slots = manifest.max_segments
        if VIDEO in modalities(vllm_config.model_config.multimodal_config):
            # Clips need slots for their further segments.
            slots = max(1, slots // 2)
        smallest = min(config.encoder_cudagraph_token_budgets)
        config.encoder_cudagraph_max_vision_items_per_batch = min(slots, smallest)


def modalities(multimodal_config: Any) -> list[str]:
    """What may be captured: images, and videos unless vLLM takes none."""
    limit = _limit(multimodal_config, VIDEO)
    return [IMAGE] if limit == 0 else [IMAGE, VIDEO]


def refuse_uncapturable(multimodal_config: Any, tower: Any, manifest: Manifest) -> None:
    """Refuse what vLLM's manager cannot capture.

    Raises:
        RequestError: naming the option to change.
    """
    if _limit(multimodal_config, IMAGE) == 0:
        raise RequestError(
            "the image limit is 0, so there is no vision encoder to capture; raise "
            f"--limit-mm-per-prompt, or turn off {_SWITCH}"
        )
    backend = getattr(getattr(tower, "vision_model", None), "attn_backend", None)
    name = getattr(backend, "name", backend)
    if name is not None and name not in _CAPTURABLE:
        raise RequestError(
            f"vLLM's vision attention backend is {name}, which a CUDA graph cannot capture"
            f"{_reason(str(name))}; set --mm-encoder-attn-backend FLASH_ATTN (on ROCm "
            f"ROCM_AITER_FA), or turn off {_SWITCH}"
        )
    required = manifest.requirements
    refusal = BACKENDS[required.attention_backend].capture_refusal
    if required.device == "cuda" and refusal:
        raise RequestError(
            f"the artifact's attention is {required.attention_backend}: {refusal}; build with "
            f"--attention FLASH_ATTN, or turn off {_SWITCH}"
        )


def refuse_dynamic_scales(multimodal_config: Any) -> None:
    """Refuse fp8 attention whose scales would be found while running.

    Raises:
        RequestError: naming the option to change.
    """
    if getattr(multimodal_config, "mm_encoder_attn_dtype", None) != "fp8":
        return
    if getattr(multimodal_config, "mm_encoder_fp8_scale_path", None) is None:
        raise RequestError(
            "--mm-encoder-attn-dtype is fp8 without static scales; set "
            "--mm-encoder-fp8-scale-path FILE, or drop --mm-encoder-attn-dtype"
        )


def _reason(name: str) -> str:
    facts = BACKENDS.get(name)
    reason = REFUSED_BACKENDS.get(name) or (facts.capture_refusal if facts else None)
    return f" ({reason})" if reason else ""


def _limit(multimodal_config: Any, modality: str) -> int | None:
    if multimodal_config is None:
        return None
    limit: int = multimodal_config.get_limit_per_prompt(modality)
    return limit
