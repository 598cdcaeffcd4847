"""From what a build is asked for to what it will do: the machine fills in the rest."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from m3compile.buckets import default_ladder
from m3compile.config import BuildConfig
from m3compile.config.build import DEFAULT_FEW_ROWS_TOKENS, MAX_FEW_ROWS_TOKENS, check_fp8
from m3compile.errors import ConfigError, OperationError


def resolve(config: BuildConfig) -> BuildConfig:
    """Fill in what the config leaves to the machine."""
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise OperationError(
            "device is cuda, and this machine has no usable CUDA device; use --device cpu"
        )
    name = Path(config.checkpoint).resolve().name if config.checkpoint else "tiny"
    resolved = msgspec.structs.replace(
        config,
        device=device,
        dtype=config.dtype or ("bfloat16" if device == "cuda" else "float32"),
        out=config.out or str(Path("exported") / name),
        budgets=config.budgets or _default_budgets(config.engine),
    )
    check_fp8(config, "build")
    for key in ("attention_dtype", "linear_dtype"):
        if getattr(resolved, key) not in (None, resolved.dtype, "fp8"):
            raise ConfigError(
                f"{key} is {getattr(resolved, key)!r}; allowed: {resolved.dtype} (the dtype of the "
                "build) and fp8"
            )
    if device == "cuda" and resolved.is_fp8 and resolved.dtype != "bfloat16":
        raise ConfigError(
            f"dtype is {resolved.dtype!r} with fp8 on cuda; allowed: bfloat16, in which its "
            "products and attention return"
        )
    if device == "cuda" and resolved.is_fp8 and not _multiplies_fp8():
        raise ConfigError(
            f"fp8 is asked for on {torch.cuda.get_device_name()}; allowed: NVIDIA from compute "
            "capability 8.9 on, which multiply e4m3"
        )
    return msgspec.structs.replace(resolved, specialize=_specialize(resolved))


def _multiplies_fp8() -> bool:
    # AMD's have another e4m3 before MI350.
    return torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)


def _default_budgets(engine: str) -> tuple[int, ...]:
    # torch records each in several runs, at every load.
    return default_ladder() if engine == "aoti" else (64, 256, 1024, 4096)


def _specialize(config: BuildConfig) -> tuple[int, ...]:
    """The budgets that the program for few rows serves; () for none."""
    is_supported = (
        config.device == "cuda" and config.dtype == "bfloat16" and config.engine == "aoti"
    )
    assert config.budgets is not None
    if config.specialize is None:
        smallest = tuple(budget for budget in config.budgets if budget <= DEFAULT_FEW_ROWS_TOKENS)
        return smallest if is_supported else ()
    if config.specialize and not is_supported:
        raise ConfigError(
            f"specialize is {list(config.specialize)}; allowed: [] (only engine aoti in bfloat16 "
            "on cuda has a program for few rows)"
        )
    if any(budget > MAX_FEW_ROWS_TOKENS for budget in config.specialize):
        raise ConfigError(
            f"specialize has {config.specialize[-1]}; allowed: budgets of at most "
            f"{MAX_FEW_ROWS_TOKENS} tokens"
        )
    return config.specialize


def is_captured(config: BuildConfig) -> bool:
    return config.device == "cuda" and config.capture != "never"


def max_segments(config: BuildConfig) -> int:
    assert config.budgets
    # A segment has at least one token, so no bucket can hold more than the largest has tokens.
    return max(2, min(config.max_items, config.budgets[-1]))
