"""Engine `reduce-overhead`: `torch.compile(mode="reduce-overhead")` of the stored exported program.

Compiled once, with a symbolic number of patches, for every budget; torch records a CUDA graph a
budget. The caches of the compiler travel in the artifact, so that a server starts warm. They are
pickles: nothing here is to be read before its digests were compared.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import threading
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Registers the ops that the program calls by name.
import m3compile.ops  # noqa: F401
from m3compile.errors import ArtifactDamagedError, OperationError
from m3compile.graph import Bucket, Call, Pool

_CACHE_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "", "TRITON_CACHE_DIR": "triton"}
# What is compiled with a symbolic size holds from 2 tokens up: 1 would be a size of its own.
_FEWEST_ROWS = 8
_EXAMPLE_ROWS = 24
# One warms up, one records, and one shows that it replays.
_RUNS_OF_A_CAPTURE = 3


class ReducedProgram:
    """An exported program, compiled by torch in this process.

    On CUDA, uncaptured runs use a second compilation, without graphs: else every size would become
    a graph. One call at a time, from any thread; torch keeps its graphs by thread, so one thread of
    our own runs them all.

    Args:
        exported: the `.pt2` file of the program, without weights.
        cache: the compiler's caches as a zip; None to compile from nothing.
        weights: by the program's own names, on `device`; shared, not copied.
        device: where it runs.
        keep_cache: a folder to leave the compiler's caches in.

    Raises:
        ArtifactDamagedError: the program cannot be opened, or wants other weights.
        OperationError: the compiler failed.
    """

    def __init__(
        self,
        exported: Path,
        cache: Path | None,
        weights: Mapping[str, Tensor],
        device: torch.device,
        keep_cache: Path | None = None,
    ) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        if is_cuda:
            # Registers the Triton kernels; a compiled package would carry them.
            importlib.import_module("m3compile.kernels.triton_form")
        module, example = _open(exported, weights, device)
        with _compiler_caches(cache, keep_cache), _one_line(exported):
            self._exact: Call = torch.compile(module)
            self._compile(self._exact, example)
            if is_cuda:
                self._replayed: Call = torch.compile(module, mode="reduce-overhead")
                self._thread = graph_thread()
                self._in_thread(self._compile, self._replayed, example)

    def __call__(self, pixel_values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        return self._run(self._exact, pixel_values, segments)

    def capture(self, pixel_values: Tensor, segments: Tensor, pool: Pool) -> Bucket:
        """As `Program.capture`; torch has a pool of its own for all of its graphs."""
        bucket = _ReplayedBucket(self._replay, pixel_values, segments)
        for _ in range(_RUNS_OF_A_CAPTURE):
            bucket.run()
        return bucket

    def _replay(self, pixel_values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        return self._in_thread(self._run, self._replayed, pixel_values, segments)

    def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run in the thread of the graphs, on the current stream of this one."""
        stream = torch.cuda.current_stream(self._device)

        def on_stream() -> Any:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                return work(*arguments)

        return self._thread.submit(on_stream).result()

    def _run(self, call: Call, pixel_values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = pixel_values.shape[0]
        if num_rows < _FEWEST_ROWS:
            pixel_values = functional.pad(pixel_values, (0, 0, 0, _FEWEST_ROWS - num_rows))
        # Another mode of the caller's would compile anew.
        with torch.inference_mode(False), torch.no_grad():
            # Each run's result is dead when the next one starts.
            torch.compiler.cudagraph_mark_step_begin()
            embeddings, is_nonfinite = call(pixel_values, segments)
        return embeddings[: num_rows // 4], is_nonfinite

    def _compile(self, call: Call, example: tuple[Tensor, Tensor]) -> None:
        pixel_values, segments = (tensor.clone() for tensor in example)
        torch._dynamo.mark_dynamic(pixel_values, 0)
        self._run(call, pixel_values, segments)


class _ReplayedBucket:
    is_graph = True

    def __init__(self, replay: Call, pixel_values: Tensor, segments: Tensor) -> None:
        self._replay = replay
        self._inputs = (pixel_values, segments)

    def run(self) -> tuple[Tensor, Tensor]:
        return self._replay(*self._inputs)


def graph_thread() -> ThreadPoolExecutor:
    """One thread that may record and replay graphs with torch's trees of them.

    torch keeps the trees by thread, and makes a place for them only where it first imports their
    module, and in threads of autograd.
    """
    trees = importlib.import_module("torch._inductor.cudagraph_trees").local

    def make_place() -> None:
        trees.tree_manager_containers = {}
        trees.tree_manager_locks = defaultdict(threading.Lock)

    return ThreadPoolExecutor(1, "m3compile-graphs", make_place)


@contextmanager
def _one_line(exported: Path) -> Iterator[None]:
    from torch._inductor.exc import InductorError

    try:
        yield
    except (InductorError, RuntimeError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OperationError(f"{exported}: torch.compile failed: {reason}") from error


def _open(
    exported: Path, weights: Mapping[str, Tensor], device: torch.device
) -> tuple[torch.nn.Module, tuple[Tensor, Tensor]]:
    """The program as a module with its weights, and inputs to compile it with."""
    try:
        program = torch.export.load(exported)
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArtifactDamagedError(f"{exported}: cannot be opened: {reason}") from error
    state = program.state_dict
    if state.keys() != weights.keys():
        missing, extra = sorted(state.keys() - weights), sorted(weights.keys() - state.keys())
        raise ArtifactDamagedError(
            f"{exported}: the program's weights differ from the manifest's: "
            f"missing {missing[:3] or 'none'}, not wanted {extra[:3] or 'none'}"
        )
    for name, tensor in weights.items():
        state[name] = torch.nn.Parameter(tensor, requires_grad=False)
    shapes = [argument.shape for argument in program.example_inputs[0]]
    example = (
        torch.zeros(_EXAMPLE_ROWS, shapes[0][1], dtype=weights["patch_embed.weight"].dtype),
        torch.zeros(shapes[1], dtype=torch.int32),
    )
    # Inputs are checked before every run; and torch.compile cannot trace those checks.
    module = program.module(check_guards=False)
    return module, (example[0].to(device), example[1].to(device))


@contextmanager
def _compiler_caches(cache: Path | None, keep: Path | None) -> Iterator[None]:
    """Let the compiler use caches of our own, instead of the user's."""
    before = {name: os.environ.get(name) for name in _CACHE_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="m3compile-cache-") as temporary:
        folder = keep or Path(temporary)
        if cache is not None:
            with zipfile.ZipFile(cache) as archive:
                archive.extractall(folder)
        for name, part in _CACHE_VARIABLES.items():
            os.environ[name] = str(folder / part)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
