"""`manifest.json`: what it holds."""

from __future__ import annotations

import msgspec

from m3compile.buckets import RouteTimes
from m3compile.config import Bounds, BuildConfig, TowerConfig

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PROGRAM = "encoder.pt2"
FEW_ROWS_PROGRAM = "few_rows.pt2"
EXPORTED = "encoder.exported.pt2"
COMPILE_CACHE = "compile_cache.zip"
WEIGHTS = "weights.safetensors"
VERIFY = "verify.json"
PREPROCESSOR = "preprocessor_config.json"

# How the weights end that fp8 adds: scales of a linear layer's channels, and of q, k and v.
WEIGHT_SCALE = "weight_scale"
ATTENTION_SCALES = "attention_scales"


def few_rows_uses(name: str) -> bool:
    """Whether the program for few rows has a weight; its attention is never in fp8."""
    return not name.endswith(f".{ATTENTION_SCALES}")


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tensor by name; a size is a number or the name of a symbolic one."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    size: int
    sha256: str


class Requirements(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a machine must have to run the program.

    Attributes:
        torch: its public version; compiled code calls that version's internals.
        platform: operating system and processor, such as `linux-x86_64`.
        cpu_flags: instruction set extensions that the compiler was allowed to use.
        device: `cpu` or `cuda`.
        gpu_arch, cuda: architecture such as `sm_90` and CUDA version; None for `cpu`.
        attention_backend: the implementation that the program calls by name.
        attention_version: package and version that it was built and verified with.
        op_schema: schema of the attention op.
    """

    torch: str
    platform: str
    cpu_flags: tuple[str, ...]
    device: str
    gpu_arch: str | None
    cuda: str | None
    attention_backend: str
    attention_version: str
    op_schema: str


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the artifact comes from; informs, and decides nothing.

    Attributes:
        weights: `checkpoint`, or `random` where the embeddings mean nothing.
        checkpoint: its folder; None for the tiny one that a build makes for itself.
        checkpoint_files: names and sizes of the files that were read.
        attention_reason: why the backend was chosen.
        created: UTC time, ISO 8601.
    """

    m3compile: str
    torch: str
    created: str
    host: str
    weights: str
    checkpoint: str | None
    checkpoint_files: dict[str, int]
    attention_reason: str


class KeptLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What stayed in the artifact's dtype, because fp8 broke the bound.

    Attributes:
        name: of a linear layer, or `attention`.
        error: largest error of an item with this alone in fp8.
    """

    name: str
    error: float


class Precision(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What runs in fp8, and how that was decided.

    Attributes:
        linears: the linear layers in fp8, by the tower's own names.
        attention: whether q, k and v are in fp8 inside attention.
        fast_accumulation: whether the products' sums are kept in fewer bits.
        kept: what was asked for in fp8 and is not: first what breaks the bound alone, in each part
            the largest error for its work first.
        inputs: what it was measured on, `random` or a file, whose items count beside random ones.
        max_error, min_cosine: of the eager tower in this precision there, against eager float32.
    """

    linears: tuple[str, ...]
    attention: bool
    fast_accumulation: bool
    kept: tuple[KeptLayer, ...]
    inputs: str
    max_error: float
    min_cosine: float


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an artifact says of itself.

    Attributes:
        bounds: what `verify` holds it to.
        max_segments: slots of the segment table.
        inputs, outputs, weights: of the program, by name.
        few_rows_tokens: runs of at most that many tokens use the program for few rows; 0 if there
            is none.
        files: every file but this one.
        times: measured on the machine of the build, for routing; None on a CPU.
        precision: of an artifact in fp8; None where everything is in its dtype.
    """

    format_version: int
    tower: TowerConfig
    build: BuildConfig
    bounds: Bounds
    ladder: tuple[int, ...]
    max_segments: int
    dtype: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[TensorSpec, ...]
    requirements: Requirements
    files: dict[str, FileEntry]
    provenance: Provenance
    few_rows_tokens: int = 0
    times: RouteTimes | None = None
    precision: Precision | None = None

    @property
    def attention_dtype(self) -> str:
        """What q, k and v are in, `fp8` or `dtype`."""
        return "fp8" if self.precision is not None and self.precision.attention else self.dtype

    @property
    def programs(self) -> tuple[str, ...]:
        """File names of the programs."""
        if self.build.engine == "reduce-overhead":
            return (EXPORTED,)
        return (PROGRAM, FEW_ROWS_PROGRAM) if self.few_rows_tokens else (PROGRAM,)

    @property
    def needed_files(self) -> tuple[str, ...]:
        """Names of the files that a loader reads."""
        cache = (COMPILE_CACHE,) if self.build.engine == "reduce-overhead" else ()
        return (*self.programs, *cache, WEIGHTS)
