"""The build config: a YAML file plus flags, checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from m3compile.config.backends import REFUSED_BACKENDS, attention_choices
from m3compile.errors import ConfigError, InputNotFoundError

DEVICES = ("cuda", "cpu")
DTYPES = ("float32", "bfloat16")
ENGINES = ("aoti", "reduce-overhead")
CAPTURES = ("load", "lazy", "never")
ATTENTION_NAMES = attention_choices()

# One run's limit: kernels index with 32 bits.
MAX_PATCHES = 65_536
MAX_TOKENS = MAX_PATCHES // 4
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
        specialize: budgets that also get a program of their own, with static shapes.
        attention_dtype: dtype of q, k and v inside attention; None for `dtype`.
        fp8_scales: file of static scales; needed for fp8.
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
    specialize: tuple[int, ...] = ()
    attention_dtype: str | None = None
    fp8_scales: str | None = None
    force: bool = False


def load_build_config(path: Path, overrides: Mapping[str, Any] | None = None) -> BuildConfig:
    """Read a build config file; `overrides` (from flags) win over its keys.

    Raises:
        ConfigError: the file is not YAML, has an unknown key or an impossible value.
        InputNotFoundError: there is no such file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputNotFoundError(f"build config {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"build config {path} cannot be read: {error}") from None
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"build config {path} is not valid YAML: {detail}") from None
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"build config {path} holds a {type(document).__name__}; expected keys with values"
        )
    return build_config_from_mapping({**document, **(overrides or {})}, str(path))


def build_config_from_mapping(values: Mapping[str, Any], source: str) -> BuildConfig:
    """Check a mapping of keys to values; `source` names it in messages.

    Raises:
        ConfigError: naming the key, the value found and what is allowed.
    """
    fields = BuildConfig.__struct_fields__
    for key in values:
        if key not in fields:
            raise ConfigError(
                f"{source}: unknown key {key!r} = {values[key]!r}; allowed: {', '.join(fields)}"
            )
    for key, allowed in (
        ("device", DEVICES),
        ("dtype", DTYPES),
        ("engine", ENGINES),
        ("capture", CAPTURES),
        ("attention_dtype", (*DTYPES, "fp8")),
    ):
        value = values.get(key)
        if value is not None and value not in allowed:
            raise ConfigError(f"{source}: {key} is {value!r}; allowed: {', '.join(allowed)}")
    for key in ("checkpoint", "out", "fp8_scales"):
        value = values.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{source}: {key} is {value!r}; allowed: a path")
    attention = values.get("attention", "auto")
    if attention not in ATTENTION_NAMES and attention not in REFUSED_BACKENDS:
        raise ConfigError(
            f"{source}: attention is {attention!r}; allowed: {', '.join(ATTENTION_NAMES)}"
        )
    if not isinstance(values.get("force", False), bool):
        raise ConfigError(f"{source}: force is {values['force']!r}; allowed: true, false")
    max_items = values.get("max_items", 128)
    if isinstance(max_items, bool) or not isinstance(max_items, int) or not 1 <= max_items <= MAX_ITEMS:
        raise ConfigError(
            f"{source}: max_items is {max_items!r}; allowed: a whole number from 1 to {MAX_ITEMS}"
        )
    checked = dict(values)
    if values.get("budgets") is not None:
        checked["budgets"] = _budgets(values["budgets"], "budgets", source)
    checked["specialize"] = _budgets(values.get("specialize") or (), "specialize", source, empty=True)
    budgets = checked.get("budgets")
    if budgets is not None:
        for budget in checked["specialize"]:
            if budget not in budgets:
                raise ConfigError(
                    f"{source}: specialize names {budget}; allowed: one of budgets {list(budgets)}"
                )
    config = BuildConfig(**checked)
    if config.attention_dtype == "fp8" and config.fp8_scales is None:
        raise ConfigError(
            f"{source}: attention_dtype is 'fp8' without fp8_scales; allowed: fp8 with "
            "fp8_scales: FILE (static scales; a scale found at run time would depend on the "
            "neighbours)"
        )
    return config


def _budgets(value: Any, key: str, source: str, *, empty: bool = False) -> tuple[int, ...]:
    allowed = f"increasing whole numbers from 1 to {MAX_TOKENS} (output tokens)"
    if not isinstance(value, (list, tuple)) or (not value and not empty):
        raise ConfigError(f"{source}: {key} is {value!r}; allowed: {allowed}")
    previous = 0
    for budget in value:
        if isinstance(budget, bool) or not isinstance(budget, int):
            raise ConfigError(f"{source}: {key} has {budget!r}; allowed: {allowed}")
        if budget < 1 or budget > MAX_TOKENS:
            raise ConfigError(f"{source}: {key} has {budget}; allowed: {allowed}")
        if budget <= previous:
            raise ConfigError(
                f"{source}: {key} has {budget} after {previous}; allowed: {allowed}"
            )
        previous = budget
    return tuple(value)
