"""The attention of a build: in its dtype, or in fp8 where that is asked for and pays."""

from __future__ import annotations

from m3compile.artifact import Precision
from m3compile.attention import Choice, choose_backend
from m3compile.build.resolve import is_captured
from m3compile.config import BuildConfig, TowerConfig


def choose_attention(config: BuildConfig, tower: TowerConfig) -> tuple[Choice, Choice | None]:
    """The backend in the build's dtype, and that in fp8: None where not asked for, or no faster."""
    assert config.device is not None
    assert config.dtype is not None

    def choose(dtype: str) -> Choice:
        assert config.device is not None
        return choose_backend(
            config.attention,
            config.device,
            dtype,
            captured=is_captured(config),
            num_heads=tower.num_attention_heads,
            head_dim=tower.head_dim,
        )

    whole = choose(config.dtype)
    if config.attention_dtype != "fp8":
        return whole, None
    fp8 = choose("fp8")
    if config.device == "cpu":
        # There is nothing to gain: it is asked for to see what fp8 computes.
        return whole, fp8._replace(reason=f"in fp8, {fp8.reason}")
    if fp8.is_faster_than(whole):
        reason = f"in fp8, {fp8.reason}; in {config.dtype}, {whole.reason}"
        return whole, fp8._replace(reason=reason)
    reason = f"{whole.reason}; fp8 is not faster: {fp8.reason}"
    return whole._replace(reason=reason), None


def settle_attention(whole: Choice, fp8: Choice | None, precision: Precision | None) -> Choice:
    """The backend of what the artifact will hold: attention that broke the bound is not in fp8."""
    if fp8 is None or precision is None:
        return whole
    if precision.attention:
        return fp8
    return whole._replace(reason=f"{whole.reason}; fp8 breaks the bound")
