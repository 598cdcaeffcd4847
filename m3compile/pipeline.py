"""The stages of a build, in order, inside a folder that is published only at the end."""

from __future__ import annotations

import datetime
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from m3compile import artifact
from m3compile.artifact import (
    Manifest,
    Precision,
    Provenance,
    Requirements,
    TensorSpec,
    program_inputs,
    program_outputs,
)
from m3compile.attention import Choice
from m3compile.build.aoti import compile_package, require_compiler
from m3compile.build.attention import choose_attention, settle_attention
from m3compile.build.export import export_tower
from m3compile.build.reduce_overhead import fill_cache, save_exported
from m3compile.build.resolve import is_captured, max_segments, resolve
from m3compile.config import (
    BOUNDS,
    TINY,
    Bounds,
    BuildConfig,
    TowerConfig,
)
from m3compile.config.backends import candidates
from m3compile.config.build import MAX_TOKENS
from m3compile.errors import (
    BuildError,
    M3CompileError,
    VerificationError,
)
from m3compile.host import Host, detect
from m3compile.loading import load
from m3compile.ops import OP_SCHEMA
from m3compile.precision import choose_precision, fp8_request
from m3compile.progress import Progress
from m3compile.routes import measure_routes
from m3compile.tower import make_tower
from m3compile.verify import VerifyReport, verify_encoder
from m3compile.version import VERSION
from m3compile.weights import (
    Checkpoint,
    checkpoint_preprocess,
    init_checkpoint,
    load_module_state,
    open_checkpoint,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class BuildReport:
    """What a build made.

    Attributes:
        path: the published artifact.
        manifest: as stored in it.
        verification: the report stored as `verify.json`.
        seconds: wall-clock time of every stage.
        warnings: about the checkpoint.
    """

    path: Path
    manifest: Manifest
    verification: VerifyReport
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def build(config: BuildConfig, progress: Progress | None = None) -> BuildReport:
    """Compile a checkpoint, verify the result against eager, and publish it.

    Args:
        config: what to build; without a checkpoint, the tiny encoder with random weights, whose
            embeddings mean nothing.
        progress: told of the stages.

    Raises:
        ConfigError: the config asks for something that cannot be.
        CheckpointError: the checkpoint is missing, damaged or unsupported.
        VerificationError: the compiled program differs from eager. Nothing is published.
        BuildError, OperationError: a step failed. Nothing is published.
    """
    progress = progress or Progress()
    seconds: dict[str, float] = {}
    config = resolve(config)
    assert config.device is not None
    assert config.dtype is not None
    assert config.out is not None
    out = Path(config.out)
    artifact.check_target(out, force=config.force)
    # Refused here, before a checkpoint is read, if no implementation can serve.
    for dtype in (config.dtype, config.attention_dtype or config.dtype):
        candidates(config.attention, config.device, dtype, captured=is_captured(config))
    require_compiler()
    with _checkpoint_folder(config, progress) as folder:
        with progress.stage("read checkpoint", seconds):
            checkpoint = open_checkpoint(folder)
            if checkpoint.preprocessor_config is not None:
                # Settings that `encode` could not honour later are refused now.
                checkpoint_preprocess(checkpoint)
            request = fp8_request(config, checkpoint.config)
            state = load_module_state(
                checkpoint, _DTYPES[config.dtype], config.device, progress.advance
            )
        tower = checkpoint.config
        with progress.stage("choose attention", seconds):
            whole, fp8 = choose_attention(config, tower)
            request = request if fp8 is not None else request._replace(scales=None)
        precision = None
        if request.linears or request.scales:
            with progress.stage("choose precision", seconds), _memory_told():
                fp8_name = fp8.name if fp8 is not None else None
                state, precision = choose_precision(
                    checkpoint, request, state, whole.name, fp8_name, progress
                )
        choice = settle_attention(whole, fp8, precision)
        with artifact.publishing(out, force=config.force) as staging, _one_line(staging):
            _compile(config, tower, state, choice.name, precision, staging, progress, seconds)
            with progress.stage("write weights", seconds):
                save_file(state, staging / artifact.WEIGHTS)
                # Written for this user alone; an artifact is served by other accounts too.
                mode = next(staging.glob("*.pt2")).stat().st_mode
                (staging / artifact.WEIGHTS).chmod(stat.S_IMODE(mode))
                if checkpoint.preprocessor_config is not None:
                    shutil.copyfile(checkpoint.preprocessor_config, staging / artifact.PREPROCESSOR)
                host = detect(config.device, OP_SCHEMA)
                bounds = BOUNDS[config.dtype] if precision is None else request.bounds
                manifest = _manifest(config, checkpoint, state, choice, precision, bounds, host)
                for name in manifest.programs:
                    artifact.seal(staging / name, manifest)
            if config.engine == "reduce-overhead":
                with progress.stage("fill compiler cache", seconds):
                    fill_cache(
                        staging / artifact.EXPORTED,
                        staging / artifact.WEIGHTS,
                        config.device,
                        staging / artifact.COMPILE_CACHE,
                    )
            manifest = _store(staging, manifest)
            del state
            manifest, verification = _prove(staging, manifest, checkpoint, progress, seconds)
    return BuildReport(out, manifest, verification, seconds, list(checkpoint.warnings))


def _compile(
    config: BuildConfig,
    tower: TowerConfig,
    state: dict[str, Tensor],
    backend: str,
    precision: Precision | None,
    staging: Path,
    progress: Progress,
    seconds: dict[str, float],
) -> None:
    """Export and compile the program, and the one for few rows where the config asks for it."""
    passes = "triton" if config.device == "cuda" else "plain"
    fast = precision is not None and precision.fast_accumulation
    if config.engine == "reduce-overhead":
        with progress.stage("export", seconds):
            module = make_tower(tower, state, backend, passes, fast)
            save_exported(export_tower(module, max_segments(config)), staging / artifact.EXPORTED)
        return
    programs = [("", passes, artifact.PROGRAM, MAX_TOKENS, state)]
    if config.specialize:
        most = config.specialize[-1]
        used = {name: tensor for name, tensor in state.items() if artifact.few_rows_uses(name)}
        programs.append((" for few rows", "few_rows", artifact.FEW_ROWS_PROGRAM, most, used))
    for suffix, form, name, max_tokens, weights in programs:
        with progress.stage(f"export{suffix}", seconds):
            module = make_tower(tower, weights, backend, form, fast)
            exported = export_tower(module, max_segments(config), max_tokens)
        with progress.stage(f"compile{suffix}", seconds):
            compile_package(exported, staging / name)


def _prove(
    staging: Path,
    manifest: Manifest,
    checkpoint: Checkpoint,
    progress: Progress,
    seconds: dict[str, float],
) -> tuple[Manifest, VerifyReport]:
    """Load what was written as a server would, and compare it with eager."""
    with progress.stage("load", seconds):
        encoder = load(staging, on_bucket=progress.advance)
    with encoder:
        with progress.stage("verify", seconds):
            report = verify_encoder(encoder, checkpoint, progress=progress)
        if not report.passed:
            # What fp8 may be off is the caller's to say; else the program is at fault.
            reason = "the compiled program differs from eager"
            if manifest.precision is not None:
                reason = "fp8 is too far from eager (fp8_max_error and fp8_min_cosine allow more)"
            raise VerificationError(f"{reason}, nothing was published: {report.summary}")
        if is_captured(manifest.build):
            with progress.stage("time routes", seconds):
                times = measure_routes(encoder, progress.advance)
            manifest = msgspec.structs.replace(manifest, times=times)
    (staging / artifact.VERIFY).write_bytes(
        msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
    )
    return _store(staging, manifest), report


def _store(staging: Path, manifest: Manifest) -> Manifest:
    manifest = msgspec.structs.replace(manifest, files=artifact.list_files(staging))
    artifact.write_manifest(staging, manifest)
    return manifest


@contextmanager
def _checkpoint_folder(config: BuildConfig, progress: Progress) -> Iterator[Path]:
    """The checkpoint's folder; without one, that of a tiny one with random weights."""
    if config.checkpoint is not None:
        yield Path(config.checkpoint)
        return
    with tempfile.TemporaryDirectory(prefix="m3compile-") as folder:
        path = Path(folder) / "tiny"
        with progress.stage("make tiny checkpoint"):
            init_checkpoint(path, TINY)
        yield path


@contextmanager
def _memory_told() -> Iterator[None]:
    """Turn a device that is full into an error of ours."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BuildError(f"out of device memory: {str(error).splitlines()[0]}") from error


@contextmanager
def _one_line(staging: Path) -> Iterator[None]:
    """Turn what the system throws into an error of ours."""
    try:
        with _memory_told():
            yield
    except M3CompileError:
        raise
    except SafetensorError as error:
        raise BuildError(f"cannot write to {staging.parent}: {error}") from error
    except OSError as error:
        raise BuildError(f"cannot write to {staging.parent}: {error.strerror or error}") from error


def _manifest(
    config: BuildConfig,
    checkpoint: Checkpoint,
    state: dict[str, Tensor],
    choice: Choice,
    precision: Precision | None,
    bounds: Bounds,
    host: Host,
) -> Manifest:
    assert config.device is not None
    assert config.dtype is not None
    assert config.budgets is not None
    tower: TowerConfig = checkpoint.config
    slots = max_segments(config)
    return Manifest(
        format_version=artifact.FORMAT_VERSION,
        tower=tower,
        build=config,
        bounds=bounds,
        precision=precision,
        ladder=config.budgets,
        few_rows_tokens=max(config.specialize or (0,)),
        max_segments=slots,
        dtype=config.dtype,
        inputs=program_inputs(tower, config.dtype, slots),
        outputs=program_outputs(tower, config.dtype, slots),
        weights=tuple(
            TensorSpec(
                name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape)
            )
            for name, tensor in sorted(state.items())
        ),
        requirements=Requirements(
            torch=host.torch,
            platform=host.platform,
            cpu_flags=host.cpu_flags,
            device=config.device,
            gpu_arch=host.gpu_arch if config.device == "cuda" else None,
            cuda=host.cuda if config.device == "cuda" else None,
            attention_backend=choice.name,
            attention_version=host.attention_versions[choice.name],
            op_schema=OP_SCHEMA,
        ),
        files={},
        provenance=Provenance(
            m3compile=VERSION,
            torch=host.torch_full,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            host=host.gpu_name or host.cpu_name,
            weights="random" if checkpoint.is_random else "checkpoint",
            # The tiny checkpoint that a build makes for itself is gone by now.
            checkpoint=str(checkpoint.path.resolve()) if config.checkpoint else None,
            checkpoint_files={path.name: path.stat().st_size for path in checkpoint.files},
            attention_reason=choice.reason,
        ),
    )
