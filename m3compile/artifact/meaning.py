"""What a manifest may say: the loader sizes buffers and calls native code by it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NoReturn

import msgspec

from m3compile.artifact.manifest import (
    ATTENTION_SCALES,
    MANIFEST,
    WEIGHT_SCALE,
    Manifest,
    TensorSpec,
)
from m3compile.artifact.seal import program_inputs, program_outputs
from m3compile.config import Bounds, build_config_from_mapping
from m3compile.config.build import MAX_FEW_ROWS_TOKENS, MAX_ITEMS, MAX_TOKENS
from m3compile.config.shown import one_line, shown
from m3compile.errors import ArtifactDamagedError, ArtifactIncompatibleError, ConfigError

_DTYPES = ("float32", "bfloat16")
_FP8 = "float8_e4m3fn"
_ENGINES = ("aoti", "reduce-overhead")


def check_meaning(manifest: Manifest, path: Path) -> None:
    """Refuse what parses but cannot be.

    Raises:
        ArtifactDamagedError: naming the field, what was found and what was expected.
        ArtifactIncompatibleError: the engine is one that this version lacks.
    """
    ladder, requirements = manifest.ladder, manifest.requirements
    increasing = all(low < high for low, high in itertools.pairwise((0, *ladder)))
    if not ladder or not increasing or ladder[-1] > MAX_TOKENS:
        _refuse(path, "ladder", list(ladder), f"increasing budgets from 1 to {MAX_TOKENS} tokens")
    if not 1 <= manifest.max_segments <= MAX_ITEMS:
        _refuse(path, "max_segments", manifest.max_segments, f"from 1 to {MAX_ITEMS}")
    if requirements.device not in ("cpu", "cuda"):
        _refuse(path, "requirements.device", requirements.device, "cpu or cuda")
    if manifest.dtype not in _DTYPES:
        _refuse(path, "dtype", manifest.dtype, " or ".join(_DTYPES))
    _check_build(manifest, path)
    _check_tensors(manifest, path)
    _check_precision(manifest, path)
    _check_names(manifest.files, manifest.needed_files, path)
    if not 0 <= manifest.few_rows_tokens <= MAX_FEW_ROWS_TOKENS:
        _refuse(
            path,
            "few_rows_tokens",
            manifest.few_rows_tokens,
            f"0 to {MAX_FEW_ROWS_TOKENS}",
        )


def _check_build(manifest: Manifest, path: Path) -> None:
    try:
        build_config_from_mapping(msgspec.to_builtins(manifest.build), "build")
    except ConfigError as error:
        raise ArtifactDamagedError(f"{path}: {one_line(error)}") from None
    if manifest.build.engine not in _ENGINES:
        raise ArtifactIncompatibleError(
            f"{path}: found engine {manifest.build.engine}, this m3compile runs "
            + " and ".join(_ENGINES)
        )


def _check_tensors(manifest: Manifest, path: Path) -> None:
    inputs = program_inputs(manifest.tower, manifest.dtype, manifest.max_segments)
    outputs = program_outputs(manifest.tower, manifest.dtype, manifest.max_segments)
    for field, found, expected in (
        ("inputs", manifest.inputs, inputs),
        ("outputs", manifest.outputs, outputs),
    ):
        if found != expected:
            _refuse(path, field, _described(found), f"{_described(expected)} by the other fields")
    seen: set[str] = set()
    for spec in manifest.weights:
        if spec.name in seen:
            _refuse(path, "weights", f"{spec.name} twice", "every name once")
        seen.add(spec.name)
        if not all(isinstance(size, int) and 0 < size < 2**40 for size in spec.shape):
            _refuse(path, f"shape of weight {spec.name}", list(spec.shape), "positive numbers")


def _check_precision(manifest: Manifest, path: Path) -> None:
    """What is said to be in fp8 has its weights and scales so, nothing else has, and a bound."""
    precision = manifest.precision
    owners: dict[str, set[str]] = {WEIGHT_SCALE: set(), ATTENTION_SCALES: set()}
    for spec in manifest.weights:
        owner, _, kind = spec.name.rpartition(".")
        owners.get(kind, set()).add(owner)
    linears = precision.linears if precision is not None else ()
    differing = sorted(set(linears) ^ owners[WEIGHT_SCALE])
    if differing or len(set(linears)) < len(linears):
        found = differing[:3] or list(linears)
        _refuse(path, "precision.linears", found, "the layers whose weights have scales, once")
    attention = precision is not None and precision.attention
    layers = {f"layers.{index}" for index in range(manifest.tower.num_hidden_layers)}
    if owners[ATTENTION_SCALES] != (layers if attention else set()):
        _refuse(path, "precision.attention", attention, "as all layers have scales of attention")
    _check_fp8_tensors(manifest, path)
    if precision is None:
        return
    if not linears and not attention:
        _refuse(path, "precision", precision, "null where nothing is in fp8")
    asked = manifest.build
    bounds = Bounds(relative_error=asked.fp8_max_error, cosine=asked.fp8_min_cosine)
    if manifest.bounds != bounds:
        _refuse(path, "bounds", manifest.bounds, f"those of its build, {shown(bounds)}")


def _check_fp8_tensors(manifest: Manifest, path: Path) -> None:
    """A weight is in e4m3 where it has a scale; scales have the sizes that kernels read."""
    specs = {spec.name: spec for spec in manifest.weights}
    for name, spec in specs.items():
        owner, _, kind = name.rpartition(".")
        expected = None
        if kind == WEIGHT_SCALE:
            weight = specs.get(f"{owner}.weight")
            if weight is None or weight.dtype != _FP8:
                _refuse(
                    path, f"weight {owner}.weight", _described([weight] if weight else []), _FP8
                )
            expected = TensorSpec(name=name, dtype="float32", shape=weight.shape[:1])
        elif kind == ATTENTION_SCALES:
            expected = TensorSpec(name=name, dtype="float32", shape=(3, 1))
        elif spec.dtype == _FP8 and f"{owner}.{WEIGHT_SCALE}" not in specs:
            _refuse(path, f"weight {name}", spec.dtype, "another dtype, it has no scale")
        if expected is not None and spec != expected:
            _refuse(path, f"weight {name}", _described([spec]), _described([expected]))


def _check_names(names: Iterable[str], needs: Iterable[str], path: Path) -> None:
    names = list(names)
    for needed in needs:
        if needed not in names:
            raise ArtifactDamagedError(f"{path}: files does not list {needed}")
    for name in names:
        inside = name.isprintable() and "\\" not in name and name == str(PurePosixPath(name))
        parts = PurePosixPath(name).parts
        if not inside or not parts or parts[0] == "/" or ".." in parts or name == MANIFEST:
            _refuse(path, "a file name", name, "that of another file inside the artifact")


def _described(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in specs)


def _refuse(path: Path, what: str, found: object, expected: str) -> NoReturn:
    text = found if isinstance(found, str) and " " in found else shown(found)
    raise ArtifactDamagedError(f"{path}: {what} is {text}, expected {expected}")
