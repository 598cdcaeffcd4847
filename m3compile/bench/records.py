"""What a bench found: plain records, written as JSON and read back by `read_report`.

Times are milliseconds, sizes bytes, errors `||a - b|| / ||b||` of an item with `b` eager float32.
A number that does not exist on a device, or is not finite, is None.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from m3compile.artifact import Precision
from m3compile.bench.floor import Floor
from m3compile.config import BuildConfig, TowerConfig
from m3compile.errors import InputError, InputNotFoundError

Grid = tuple[int, int, int]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Repeated measurements of one thing: the median, the 10th and the 90th percentile."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    samples: int


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """What the device showed before anything of ours ran.

    Attributes:
        matrix_size: sides of the square matrices, random data, in `dtype`.
        flops_per_s: rate of their product.
        copy_bytes: size of the copied block.
        bytes_per_s: read and written bytes of the copy.
    """

    dtype: str
    matrix_size: int
    flops_per_s: float
    copy_bytes: int
    bytes_per_s: float


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the timed path against eager float32.

    Attributes:
        error: largest of an item.
        eager_error: largest of eager in the artifact's dtype, None for float32.
        min_cosine: of any token.
        passed: whether every item held the artifact's bounds.
        reason: the first bound that was broken, in words, or "".
    """

    error: float | None
    eager_error: float | None
    min_cosine: float | None
    passed: bool
    reason: str


class PeerResult(msgspec.Struct, frozen=True, kw_only=True):
    """The same items through another runner, with the same weights and attention.

    Attributes:
        bucket: tokens of the peer's bucket, or None where it runs at the exact shape.
        device: the device work alone.
        end_to_end: wall clock of a call, synchronised after it; None where the bucket was forced.
        error: as in `Check`.
    """

    name: str
    bucket: int | None
    device: Timing
    end_to_end: Timing | None
    error: float | None


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One batch through one bucket.

    Attributes:
        name: the tokens of the image that fills a bucket, or in words.
        kind: `full` (one image fills the bucket), `batch` (several do), `padded` (a small image
            alone in a large bucket).
        tokens: of the items together.
        budget: tokens of the bucket.
        padding: share of the bucket that the items leave unused.
        worst_padding: the largest share the bucket can be left unused by what belongs in it.
        replay: device time of the bucket's graph; on a CPU of a call of the program.
        end_to_end: wall clock of `Encoder.encode`, pixels on the device, synchronised after it.
        route: what `encode` chose: `replay`, `exact`, or several runs as `N runs`.
        share_of_floor: floor over replay: the share of what the device could do.
    """

    name: str
    kind: str
    grids: tuple[Grid, ...]
    tokens: int
    budget: int
    padding: float
    worst_padding: float
    floor: Floor
    replay: Timing
    end_to_end: Timing
    route: str
    share_of_floor: float
    check: Check
    peers: tuple[PeerResult, ...]


class FirstCall(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket's first call after the load, and the median of the calls after it."""

    budget: int
    first_ms: float
    next_ms: float
    next_calls: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory of a loaded encoder.

    Attributes:
        weights_bytes: the one copy of the weights.
        pool_bytes: what the graphs share for their intermediate results.
        buffers_bytes: input buffers, workspaces and the allocator's rounding.
        graphs_bytes: outside the allocator: the graphs themselves, and loaded kernels.
    """

    weights_bytes: int
    pool_bytes: int
    buffers_bytes: int
    graphs_bytes: int

    @property
    def above_weights_bytes(self) -> int:
        return self.pool_bytes + self.buffers_bytes + self.graphs_bytes


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """A fresh process, after its imports, with the artifact's files in the page cache.

    Attributes:
        load_ms: `load`, which returns ready; `capture_ms` is a part of it.
        first_embedding_ms: from the imports to the end of the first call.
        num_graphs: captured by `load`.
        graphs_after: held after all calls; more would mean a capture that `load` left undone.
    """

    load_ms: float
    capture_ms: float
    first_embedding_ms: float
    num_graphs: int
    graphs_after: int
    first_calls: tuple[FirstCall, ...]


class TrafficRun(msgspec.Struct, frozen=True, kw_only=True):
    """A trace through one runner.

    Attributes:
        passes: how often the trace ran each way; rates are the median pass.
        calls_per_s, tokens_per_s: one call at a time, synchronised after each.
        slowest_calls_per_s, fastest_calls_per_s: of the passes.
        p50_ms, p90_ms, p99_ms: latency of a call then.
        back_to_back_calls_per_s, back_to_back_tokens_per_s: synchronised at the end only.
        padded_share: tokens of padding among all that were computed.
        checked_calls: how many calls' results were compared with eager.
        error: the largest of an item of those.
    """

    name: str
    passes: int
    calls_per_s: float
    tokens_per_s: float
    slowest_calls_per_s: float
    fastest_calls_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    back_to_back_calls_per_s: float
    back_to_back_tokens_per_s: float
    padded_share: float
    checked_calls: int
    error: float | None


class TrafficResult(msgspec.Struct, frozen=True, kw_only=True):
    """A trace and what each runner made of it.

    Attributes:
        file, sha256: the trace.
        calls, items, tokens: in it, as far as it was run.
        check: of our results.
        runs: ours first.
    """

    file: str
    sha256: str
    calls: int
    items: int
    tokens: int
    check: Check
    runs: tuple[TrafficRun, ...]


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """On what, with what and when.

    Attributes:
        device: name of the GPU, or of the processor for a CPU artifact.
        attention: backend and package.
        weights: `checkpoint` or `random`.
        commit: of the source tree, None where that is not known.
        clean: whether the tree held nothing but that commit.
        date: UTC, ISO 8601.
    """

    device: str
    driver: str | None
    cpu: str
    platform: str
    python: str
    torch: str
    cuda: str | None
    triton: str | None
    attention: str
    m3compile: str
    engine: str
    dtype: str
    weights: str
    commit: str | None
    clean: bool | None
    date: str


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The artifact that was measured; of paths the names alone.

    Attributes:
        digests: SHA-256 by file, `manifest.json` included.
        precision: of an artifact in fp8.
    """

    name: str
    tower: TowerConfig
    build: BuildConfig
    ladder: tuple[int, ...]
    max_segments: int
    digests: dict[str, str]
    precision: Precision | None = None


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one run of `bench` found.

    Attributes:
        title: for a heading.
        circumstances: in short.
        rows: the summary for README: flat objects whose keys are columns.
        traffic_rows: likewise, of the trace; empty without one.
        quick: whether few budgets were measured few times; not for comparisons.
        passed: whether everything that was timed was also right.
        notes: what was left out, and why.
    """

    title: str
    circumstances: Circumstances
    rows: tuple[dict[str, str | float | int | None], ...]
    traffic_rows: tuple[dict[str, str | float | int | None], ...]
    quick: bool
    passed: bool
    notes: tuple[str, ...]
    subject: Subject
    ceilings: Ceilings
    cases: tuple[CaseResult, ...]
    startup: Startup
    memory: Memory | None
    traffic: TrafficResult | None


def encode_report(report: BenchReport, *, indent: int = 0) -> str:
    """A report as JSON: one line, or indented by so many spaces."""
    data = msgspec.json.encode(report)
    return (msgspec.json.format(data, indent=indent) if indent else data).decode()


def read_report(path: str | Path) -> BenchReport:
    """A report that `bench --json` wrote.

    Raises:
        InputNotFoundError: there is no such file.
        InputError: it is something else.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=BenchReport)
    except FileNotFoundError:
        raise InputNotFoundError(f"{path}: no such file") from None
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{path}: not a report of bench: {error}") from None
