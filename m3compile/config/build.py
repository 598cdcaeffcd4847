"""The build config: a YAML file plus flags, checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from m3compile.config.backends import REFUSED_BACKENDS, attention_choices
from m3compile.config.bounds import FP8_MAX_ERROR, FP8_MIN_COSINE
from m3compile.config.shown import shown
from m3compile.config.yaml_file import read_yaml_mapping
from m3compile.errors import ConfigError

DEVICES = ("cuda", "cpu")
DTYPES = ("float32", "bfloat16")
ENGINES = ("aoti", "reduce-overhead")
CAPTURES = ("load", "lazy", "never")
ATTENTION_NAMES = attention_choices()

# Per key the values it may have; None where the machine may decide.
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "device": (None, *DEVICES),
    "dtype": (None, *DTYPES),
    "engine": ENGINES,
    "capture": CAPTURES,
    # The refused ones pass here: the reason, and the way out for the device, come later.
    "attention": (*ATTENTION_NAMES, *REFUSED_BACKENDS),
    "attention_dtype": (None, *DTYPES, "fp8"),
    "linear_dtype": (None, *DTYPES, "fp8"),
}

# One run's limit: kernels index with 32 bits.
MAX_PATCHES = 65_536
MAX_TOKENS = MAX_PATCHES // 4
# The program for few rows: the most it is made for, and where it measured faster by default.
MAX_FEW_ROWS_TOKENS = 256
DEFAULT_FEW_ROWS_TOKENS = 176
MAX_ITEMS = 4096


class BuildConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `build` is asked for. `None` means: decide from the machine.

    Attributes:
        checkpoint: folder of the checkpoint; None builds the tiny random-weights encoder.
        out: folder of the artifact; None for `exported/` plus the checkpoint folder's name.
        device, dtype: what the program is compiled for.
        budgets: output tokens per bucket, increasing; None for the default ladder.
        max_items: most segments that share one run.
        attention: `auto`, a family or one implementation of the attention op.
        engine: `aoti`, or `reduce-overhead` for torch.compile with CUDA graphs.
        capture: when a CUDA graph is made: at `load`, at first use (`lazy`) or `never`.
        specialize: the smallest budgets, which get a second program that is made for few rows;
            None for those where it measured faster, on CUDA.
        attention_dtype: dtype of q, k and v inside attention; None for `dtype`.
        fp8_scales: file of static scales; needed for attention in fp8.
        linear_dtype: dtype of the linear layers' weights and inputs; None for `dtype`.
        fp8_inputs: file of real items, by which the build decides what may be in fp8; None for
            random ones.
        fp8_max_error, fp8_min_cosine: what an artifact in fp8 is held to, see `Bounds`.
        force: replace an artifact of the same name.
    """

    checkpoint: str | None = None
    out: str | None = None
    device: str | None = None
    dtype: str | None = None
    budgets: tuple[int, ...] | None = None
    max_items: int = 128
    attention: str = "auto"
    engine: str = "aoti"
    capture: str = "load"
    specialize: tuple[int, ...] | None = None
    attention_dtype: str | None = None
    fp8_scales: str | None = None
    linear_dtype: str | None = None
    fp8_inputs: str | None = None
    fp8_max_error: float = FP8_MAX_ERROR
    fp8_min_cosine: float = FP8_MIN_COSINE
    force: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether anything is asked for in fp8."""
        return "fp8" in (self.attention_dtype, self.linear_dtype)


def load_build_config(path: Path, overrides: Mapping[str, Any] | None = None) -> BuildConfig:
    """Read a build config file; `overrides` win over its keys.

    Args:
        path: the YAML file.
        overrides: values of flags by key; None is a flag that was not given.

    Raises:
        ConfigError: the file is not YAML, has an unknown key or an impossible value.
        InputNotFoundError: there is no such file.
    """
    document = read_yaml_mapping(path)
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    # By themselves first: the file is not to blame for a flag.
    _check_values(given, "flags")
    return build_config_from_mapping({**document, **given}, str(path))


def build_config_from_mapping(values: Mapping[str, Any], source: str) -> BuildConfig:
    """Check a mapping of keys to values; `source` names it in messages.

    Raises:
        ConfigError: naming the key, the value found and what is allowed.
    """
    checked = _check_values(values, source)
    if "specialize" in values:
        checked["specialize"] = _specialize(values["specialize"], checked.get("budgets"), source)
    config = BuildConfig(**checked)
    check_fp8(config, source)
    return config


def _check_values(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Check every value by itself; the values, as `BuildConfig` takes them."""
    fields = BuildConfig.__struct_fields__
    for key in values:
        if key not in fields:
            raise ConfigError(
                f"{source}: unknown key {shown(key)} = {shown(values[key])}; allowed: "
                + ", ".join(fields)
            )
    for key, allowed in _CHOICES.items():
        # A key that is left out, or null where null says so, is decided from the machine.
        if key in values and values[key] not in allowed:
            names = [name for name in allowed if name and name not in REFUSED_BACKENDS]
            raise ConfigError(
                f"{source}: {key} is {shown(values[key])}; allowed: {', '.join(names)}"
            )
    for key in ("checkpoint", "out", "fp8_scales", "fp8_inputs"):
        value = values.get(key)
        if value is not None and (not isinstance(value, str) or not value or "\0" in value):
            raise ConfigError(f"{source}: {key} is {shown(value)}; allowed: a path")
    if not isinstance(values.get("force", False), bool):
        raise ConfigError(f"{source}: force is {shown(values['force'])}; allowed: true, false")
    max_items = values.get("max_items", 128)
    if not _is_whole(max_items) or not 1 <= max_items <= MAX_ITEMS:
        raise ConfigError(
            f"{source}: max_items is {shown(max_items)}; allowed: a whole number from 1 to "
            f"{MAX_ITEMS}"
        )
    checked = {**values}
    if values.get("budgets") is not None:
        checked["budgets"] = _budgets(values["budgets"], "budgets", source)
    for key in ("fp8_max_error", "fp8_min_cosine"):
        if key in values:
            checked[key] = _share(values[key], key, source)
    return checked


def check_fp8(config: BuildConfig, source: str) -> None:
    """Refuse keys of fp8 that lack another one, or have no use.

    Raises:
        ConfigError: naming the key, the value found and what is allowed.
    """
    if config.attention_dtype == "fp8" and config.fp8_scales is None:
        raise ConfigError(
            f"{source}: attention_dtype is 'fp8' without fp8_scales; allowed: fp8 with "
            "fp8_scales: FILE (static scales; a scale found at run time would depend on the "
            "neighbours)"
        )
    if config.attention_dtype != "fp8" and config.fp8_scales is not None:
        raise ConfigError(
            f"{source}: fp8_scales is {shown(config.fp8_scales)} without attention_dtype: fp8; "
            "allowed: null (linear layers find their scales row by row)"
        )
    if config.fp8_inputs is not None and not config.is_fp8:
        raise ConfigError(
            f"{source}: fp8_inputs is {shown(config.fp8_inputs)} without linear_dtype or "
            "attention_dtype: fp8; allowed: null"
        )
    for key, default in (("fp8_max_error", FP8_MAX_ERROR), ("fp8_min_cosine", FP8_MIN_COSINE)):
        if getattr(config, key) != default and not config.is_fp8:
            raise ConfigError(
                f"{source}: {key} is {getattr(config, key)} without linear_dtype or "
                "attention_dtype: fp8, and bounds nothing there; leave it out"
            )


def _share(value: Any, key: str, source: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < 1:
        raise ConfigError(f"{source}: {key} is {shown(value)}; allowed: a number between 0 and 1")
    return float(value)


def _budgets(value: Any, key: str, source: str) -> tuple[int, ...]:
    allowed = f"a list of increasing whole numbers from 1 to {MAX_TOKENS} (output tokens)"
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(f"{source}: {key} is {shown(value)}; allowed: {allowed}")
    previous = 0
    for budget in value:
        if not _is_whole(budget) or not 1 <= budget <= MAX_TOKENS:
            raise ConfigError(f"{source}: {key} has {shown(budget)}; allowed: {allowed}")
        if budget <= previous:
            raise ConfigError(f"{source}: {key} has {budget} after {previous}; allowed: {allowed}")
        previous = budget
    return tuple(value)


def _specialize(value: Any, budgets: tuple[int, ...] | None, source: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if value in ([], ()):
        return ()
    specialized = _budgets(value, "specialize", source)
    for budget in specialized:
        if budgets is not None and budget not in budgets:
            raise ConfigError(
                f"{source}: specialize has {budget}; allowed: one of budgets {shown(list(budgets))}"
            )
    return specialized


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
