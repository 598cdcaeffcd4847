"""One bucket of the ladder: its buffers, and the program at its shape.

On a CPU a replay is a call of the program at the bucket's size. On CUDA it is the replay of a
graph that was captured from the same program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3compile.program import Program


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


class CalledBucket:
    """A bucket that calls the program; every run's result is fresh memory."""

    def __init__(self, program: Program, pixel_values: Tensor, segments: Tensor) -> None:
        self._program = program
        self._inputs = (pixel_values, segments)

    def run(self) -> tuple[Tensor, Tensor]:
        """Embeddings (budget, O) and non-finite slots (S,) of what the input buffers hold."""
        return self._program(*self._inputs)


class CapturedBucket:
    """A bucket that replays a CUDA graph.

    Captured on the stream that is current, which must not be the default one, with the program
    warmed up there at the same shape. Largest budget first, so that smaller ones fit into the
    pool's blocks.

    Args:
        program: anything capturable at these shapes.
        pixel_values, segments: as in `RunBuffers`; must stay where they are.
        pool: the memory pool shared by all buckets of an encoder. Replays that share it must not
            overlap, on any stream.
    """

    def __init__(
        self, program: Program, pixel_values: Tensor, segments: Tensor, pool: tuple[int, int]
    ) -> None:
        stream = torch.cuda.current_stream()
        # Lazy set-up (cuBLAS workspaces, Triton modules, attention kernels) is not capturable.
        program(pixel_values, segments)
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        ):
            embeddings, is_nonfinite = program(pixel_values, segments)
        self.buffers = RunBuffers(pixel_values, segments, embeddings, is_nonfinite)

    def run(self) -> tuple[Tensor, Tensor]:
        """Replay on the current stream; the result is the bucket's own, see `RunBuffers`."""
        self._graph.replay()
        return self.buffers.embeddings, self.buffers.is_nonfinite
