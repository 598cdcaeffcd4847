"""Opening an artifact: bytes, then meaning, then code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from m3compile.artifact import (
    COMPILE_CACHE,
    EXPORTED,
    FEW_ROWS_PROGRAM,
    PROGRAM,
    WEIGHTS,
    Manifest,
    check_files,
    check_seal,
    few_rows_uses,
    read_manifest,
)
from m3compile.config import build_config_from_mapping
from m3compile.errors import (
    ArtifactDamagedError,
    ArtifactIncompatibleError,
    OperationError,
    RequestError,
)
from m3compile.host import decide, detect
from m3compile.ops import OP_SCHEMA
from m3compile.program import CompiledProgram, Program, SizedProgram
from m3compile.runtime import Encoder
from m3compile.traffic import TrafficRecorder

# Dtype names of the safetensors format.
_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}


def load(
    path: str | Path,
    device: str | torch.device | None = None,
    *,
    budgets: Sequence[int] | None = None,
    max_items: int | None = None,
    capture: str | None = None,
    on_bucket: Callable[[int, int], None] | None = None,
    record_traffic: str | Path | None = None,
) -> Encoder:
    """Open an artifact and return an encoder that is ready: weights bound, budgets captured.

    Args:
        path: the artifact's folder.
        device: `cpu`, `cuda` or `cuda:N`; None for the manifest's. Another kind than the
            manifest's is an incompatibility.
        budgets: token budgets to serve with instead of the artifact's ladder; the program takes
            any size, so nothing is compiled.
        max_items: most segments in one run, at most the artifact's.
        capture: `load` (all graphs before this returns), `lazy` (each at its first use) or
            `never`; None for what the build said.
        on_bucket: told how many buckets are ready, and of how many.
        record_traffic: a trace to which the sizes of what is encoded are appended, for `plan`; see
            `TrafficRecorder`.

    Raises:
        RequestError: an argument is not one of these.
        ArtifactError: missing, damaged or incompatible, with file, found and expected.
        OperationError: the device failed, or has too little memory.
    """
    config = build_config_from_mapping(
        {
            **({"budgets": list(budgets)} if budgets is not None else {}),
            **({"max_items": max_items} if max_items is not None else {}),
            **({"capture": capture} if capture is not None else {}),
        },
        "load",
    )
    recorder = TrafficRecorder(record_traffic) if record_traffic is not None else None
    opened = open_program(path, device)
    return Encoder(
        opened.manifest,
        opened.program,
        opened.weights,
        opened.device,
        ladder=config.budgets,
        max_items=config.max_items if max_items is not None else None,
        capture=config.capture if capture is not None else None,
        on_bucket=on_bucket,
        recorder=recorder,
    )


class OpenedProgram(NamedTuple):
    """An artifact's program, bound to the one copy of the weights; nothing is captured.

    The program checks nothing about its inputs and takes one call at a time, see
    `CompiledProgram`.
    """

    manifest: Manifest
    program: Program
    weights: dict[str, Tensor]
    device: torch.device


def open_program(path: str | Path, device: str | torch.device | None = None) -> OpenedProgram:
    """Open an artifact without an encoder, for a runner that has its own buffers and graphs.

    Arguments and errors as `load`.
    """
    folder = Path(path)
    where = _device(device) if device is not None else None
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    where = check_machine(folder, manifest, where)
    for name in manifest.programs:
        check_seal(folder / name, manifest)
    weights = load_weights(folder, manifest, where)
    return OpenedProgram(manifest, _bind(folder, manifest, weights, where), weights, where)


def _bind(
    folder: Path, manifest: Manifest, weights: dict[str, Tensor], device: torch.device
) -> Program:
    if manifest.build.engine == "reduce-overhead":
        # Imported here: it brings the compiler, which takes seconds.
        from m3compile.reduce_overhead import ReducedProgram

        cache = folder / COMPILE_CACHE
        return ReducedProgram(folder / EXPORTED, cache, weights, device)
    every = CompiledProgram(folder / PROGRAM, weights, device)
    if not manifest.few_rows_tokens:
        return every
    used = {name: tensor for name, tensor in weights.items() if few_rows_uses(name)}
    few = CompiledProgram(folder / FEW_ROWS_PROGRAM, used, device)
    return SizedProgram(few, 4 * manifest.few_rows_tokens, every)


def _device(device: str | torch.device) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise RequestError(f"device is {device!r}; allowed: cpu, cuda, cuda:N") from None
    if parsed.type not in ("cpu", "cuda"):
        raise RequestError(f"device is {str(device)!r}; allowed: cpu, cuda, cuda:N")
    return parsed


def check_machine(folder: Path, manifest: Manifest, device: torch.device | None) -> torch.device:
    """Compare the manifest with this machine; the device with its index, where it accepts.

    Raises:
        ArtifactIncompatibleError: with every reason.
    """
    kind = device.type if device is not None else manifest.requirements.device
    index = 0
    if kind == "cuda" and torch.cuda.is_available():
        wanted = device.index if device is not None else None
        index = torch.cuda.current_device() if wanted is None else wanted
        if index >= torch.cuda.device_count():
            raise RequestError(
                f"device is cuda:{index}; this machine has {torch.cuda.device_count()} CUDA devices"
            )
    decision = decide(manifest.requirements, detect(kind, OP_SCHEMA, index), kind)
    if not decision.accepted:
        raise ArtifactIncompatibleError(f"{folder}: " + "; ".join(decision.reasons))
    return torch.device("cuda", index) if kind == "cuda" else torch.device("cpu")


def load_weights(folder: Path, manifest: Manifest, device: torch.device) -> dict[str, Tensor]:
    """The one copy of the weights on a device; on the CPU a mapping of the file.

    Names, dtypes and shapes are compared with the manifest first: the compiled program checks
    none of them, and would crash or be silently wrong.

    Raises:
        ArtifactDamagedError: naming the tensor, what was found and what was expected.
        OperationError: the device has too little memory.
    """
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            found = {}
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(name)
                found[name] = (
                    _DTYPE_NAMES.get(part.get_dtype(), part.get_dtype()),
                    tuple(part.get_shape()),
                )
            expected = {spec.name: (spec.dtype, spec.shape) for spec in manifest.weights}
            for name in sorted(expected.keys() | found.keys()):
                if found.get(name) != expected.get(name):
                    raise ArtifactDamagedError(
                        f"{path}: tensor {name}: found {_describe(found.get(name))}, expected "
                        f"{_describe(expected.get(name))}"
                    )
            return {name: file.get_tensor(name) for name in found}
    except (SafetensorError, OSError) as error:
        raise ArtifactDamagedError(f"{path}: cannot be read: {error}") from error
    except torch.OutOfMemoryError as error:
        raise OperationError(
            f"out of device memory while loading {path}: {str(error).splitlines()[0]}"
        ) from error


def _describe(spec: tuple[str, tuple[int | str, ...]] | None) -> str:
    if spec is None:
        return "no such tensor"
    dtype, shape = spec
    return f"{dtype} {list(shape)}"
