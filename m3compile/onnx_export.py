"""The stages of `export-onnx`: read, translate, write, check; in place only if all of it held."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from m3compile.artifact import MANIFEST, WEIGHTS, check_files, read_manifest
from m3compile.config import TowerConfig
from m3compile.errors import (
    ArtifactIncompatibleError,
    CheckpointNotFoundError,
    DependencyError,
    RequestError,
    VerificationError,
)
from m3compile.loading import load_weights
from m3compile.onnx_check import CheckReport, check_file
from m3compile.onnx_format import DEFAULT_OPSET, DTYPES, OPSETS, OnnxMetadata
from m3compile.progress import Progress
from m3compile.tower import make_tower
from m3compile.version import VERSION
from m3compile.weights import load_module_state, open_checkpoint
from m3compile.weights.files import CONFIG_FILE

_TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPES}


@dataclass(frozen=True)
class OnnxReport:
    """What an export made.

    Attributes:
        files: the model, and its weights file if they are outside of it; sizes in bytes.
        metadata: as stored in the model.
        check: what `check` found; None if it was not asked for.
        seconds: wall-clock time of every stage.
        warnings: about the source.
    """

    files: dict[Path, int]
    metadata: OnnxMetadata
    check: CheckReport | None
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class OnnxCheckError(VerificationError):
    """The file differs from eager by more than its bound; nothing was written."""

    def __init__(self, report: CheckReport) -> None:
        super().__init__(f"the file differs from eager, nothing was written: {report.summary}")
        self.report = report


class _Source(NamedTuple):
    """Where weights come from; `read` gives the tower's state in a dtype."""

    name: str
    config: TowerConfig
    weights: str
    weights_dtype: str
    read: Callable[[torch.dtype], dict[str, Tensor]]
    warnings: tuple[str, ...]


def export_onnx(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str = "float32",
    opset: int = DEFAULT_OPSET,
    check: bool = False,
    external: bool = False,
    progress: Progress | None = None,
) -> OnnxReport:
    """Write a checkpoint, or an artifact's encoder, as one ONNX file.

    What was under the name is replaced, whole or not at all.

    Args:
        source: a checkpoint's folder or an artifact's.
        out: the file.
        dtype: one of `DTYPES`, of weights and of what goes in and out. Rotary angles, logits,
            softmax and norms are float32 in all of them.
        opset: one of `OPSETS`.
        check: compare the file with eager; it is put in place only if it holds its bounds.
        external: weights in a second file beside it, whatever their size.
        progress: told of the stages.

    Raises:
        RequestError: an argument is impossible, or the check cannot be made here.
        DependencyError: onnx, onnxscript or (for the check) onnxruntime is not installed.
        CheckpointError, ArtifactError: the source is missing, damaged or unsupported.
        OnnxCheckError: the file differs from eager.
        OperationError: the exporter failed, or the file cannot be written.
    """
    progress = progress or Progress()
    seconds: dict[str, float] = {}
    _check_request(dtype, opset, check)
    out = Path(out)
    from m3compile.onnx_build.files import check_out, replacing, weights_file, write_model
    from m3compile.onnx_build.model import to_onnx_model

    check_out(out)
    with progress.stage("read weights", seconds):
        opened = _open(Path(source), progress)
        state = opened.read(_TORCH_DTYPES[dtype])
    metadata = OnnxMetadata(
        version=VERSION,
        source=opened.name,
        weights=opened.weights,
        weights_dtype=opened.weights_dtype,
        dtype=dtype,
        opset=opset,
        config=opened.config,
    )
    with replacing(out) as path:
        with progress.stage("export", seconds):
            model = to_onnx_model(make_tower(opened.config, state, "TORCH_SDPA"), metadata)
        with progress.stage("write", seconds):
            write_model(model, path, external=external)
        report = None
        if check:
            del model
            with progress.stage("check", seconds):
                report = _check(path, opened, state, dtype, progress)
        written = [file for file in (path, weights_file(path)) if file.exists()]
        files = {out.with_name(file.name): file.stat().st_size for file in written}
    return OnnxReport(files, metadata, report, seconds, opened.warnings)


def _check_request(dtype: str, opset: int, check: bool) -> None:
    if dtype not in DTYPES:
        raise RequestError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    if opset not in OPSETS:
        raise RequestError(f"opset is {opset}; allowed: {OPSETS[0]} to {OPSETS[-1]}")
    needed = ["onnx", "onnxscript", *(["onnxruntime"] if check else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"export-onnx needs {' and '.join(missing)}: pip install 'm3compile[onnx]'"
        )


def _open(folder: Path, progress: Progress) -> _Source:
    if os.path.lexists(folder / MANIFEST):
        return _open_artifact(folder)
    if os.path.isdir(folder) and not os.path.lexists(folder / CONFIG_FILE):
        raise CheckpointNotFoundError(
            f"{folder} is neither a checkpoint (it has no {CONFIG_FILE}) nor an artifact (it has "
            f"no {MANIFEST})"
        )
    checkpoint = open_checkpoint(folder)

    def read(dtype: torch.dtype) -> dict[str, Tensor]:
        return load_module_state(checkpoint, dtype, progress=progress.advance)

    return _Source(
        f"checkpoint {folder.resolve().name}",
        checkpoint.config,
        "random" if checkpoint.is_random else "checkpoint",
        "mixed",
        read,
        checkpoint.warnings,
    )


def _open_artifact(folder: Path) -> _Source:
    """Weights of an artifact of any device: no machine is asked, since no code is loaded."""
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    if manifest.precision is not None:
        raise RequestError(
            f"{folder}: its weights are in fp8; export from the checkpoint that it was built from"
        )

    def read(dtype: torch.dtype) -> dict[str, Tensor]:
        state = load_weights(folder, manifest, torch.device("cpu"))
        for name, tensor in state.items():
            if name != "inverse_frequency":
                state[name] = tensor.to(dtype)
                if not bool(state[name].isfinite().all()):
                    raise RequestError(
                        f"{folder / WEIGHTS}: {name} reaches {float(tensor.abs().max()):.3g}, more "
                        f"than {dtype} holds; export another --dtype"
                    )
        return state

    return _Source(
        f"artifact {folder.resolve().name}",
        manifest.tower,
        manifest.provenance.weights,
        manifest.dtype,
        read,
        (),
    )


def _check(
    path: Path, source: _Source, state: dict[str, Tensor], dtype: str, progress: Progress
) -> CheckReport:
    is_exact = dtype == "float32"
    exact = state if is_exact else source.read(torch.float32)
    try:
        report = check_file(path, source.config, exact, None if is_exact else state, progress)
    except ArtifactIncompatibleError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise RequestError(
            f"a {dtype} file cannot be checked here: {reason}; nothing was written; export it "
            "without --check, or with another --dtype or --opset"
        ) from error
    if not report.passed:
        raise OnnxCheckError(report)
    return report
