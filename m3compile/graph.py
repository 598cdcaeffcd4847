"""One bucket of the ladder: its buffers, and the program at its shape.

On a CPU a run is a call of the program at the bucket's size. On CUDA it is the replay of a graph
that was captured from the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# `(P, patch_dim)` and `(S, 3)` int32 to `(P / 4, O)` and `(S,)` bool.
Call = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Pool = tuple[int, int]


@dataclass(frozen=True)
class RunBuffers:
    """The tensors a bucket reads and writes, and who owns them.

    `pixel_values` and `segments` are prefixes of tensors that every bucket of an encoder shares;
    the runtime writes them before a run. Rows of `pixel_values` past the run's segments may hold
    anything. `embeddings` and `is_nonfinite` belong to the bucket: the next run of any bucket of
    the encoder overwrites them, so a caller is handed copies only.

    Attributes:
        pixel_values: (4 * budget, patch_dim), the program's dtype.
        segments: (max_segments, 3) int32.
        embeddings: (budget, O), the program's dtype.
        is_nonfinite: (max_segments,) bool.
    """

    pixel_values: Tensor
    segments: Tensor
    embeddings: Tensor
    is_nonfinite: Tensor


class Bucket(Protocol):
    """What runs a bucket.

    Attributes:
        is_graph: whether a run is a replay, whose result is the bucket's own memory.
    """

    is_graph: bool

    def run(self) -> tuple[Tensor, Tensor]:
        """Embeddings (budget, O) and non-finite slots (S,) of what the input buffers hold."""
        ...


class CalledBucket:
    """A bucket that calls the program; every run's result is fresh memory."""

    is_graph = False

    def __init__(self, call: Call, pixel_values: Tensor, segments: Tensor) -> None:
        self._call = call
        self._inputs = (pixel_values, segments)

    def run(self) -> tuple[Tensor, Tensor]:
        return self._call(*self._inputs)


class CapturedBucket:
    """A bucket that replays a CUDA graph.

    Captured on the stream that is current, which must not be the default one and must be the same
    for all that share the pool, once the program has been warmed up at the same shape. Largest
    budget first, so that smaller ones fit into the pool's blocks.

    Args:
        call: anything capturable at these shapes.
        pixel_values, segments: as in `RunBuffers`; must stay where they are.
        pool: the memory pool shared by all buckets of an encoder. Replays that share it must not
            overlap, on any stream.
    """

    is_graph = True

    def __init__(self, call: Call, pixel_values: Tensor, segments: Tensor, pool: Pool) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self._graph,
            pool=pool,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            embeddings, is_nonfinite = call(pixel_values, segments)
        self.buffers = RunBuffers(pixel_values, segments, embeddings, is_nonfinite)

    def run(self) -> tuple[Tensor, Tensor]:
        """Replay on the current stream; the result is the bucket's own, see `RunBuffers`."""
        self._graph.replay()
        return self.buffers.embeddings, self.buffers.is_nonfinite
