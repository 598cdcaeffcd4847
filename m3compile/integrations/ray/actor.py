"""The encoder for programs inside a Ray cluster, without HTTP."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from m3compile.loading import load


def as_rows(pixel_values: Any) -> Any:
    """Arrays as tensors that share their memory; anything else is passed on, to be checked."""
    if isinstance(pixel_values, np.ndarray):
        # Ray hands out arrays in shared memory, read-only; nothing here writes to them.
        return torch.from_numpy(
            pixel_values if pixel_values.flags.writeable else np.array(pixel_values)
        )
    if isinstance(pixel_values, (list, tuple)):
        return [as_rows(rows) for rows in pixel_values]
    return pixel_values


class EncoderActor:
    """An artifact in an actor of one's own: `ray.remote(num_gpus=1)(EncoderActor)`.

    Calls run one after another, each as it comes. A server batches across callers; its handle is
    `ray.serve.get_app_handle("m3compile")`, to be called as `handle.encode_rows.remote(...)`.

    Args:
        artifact: its folder, on the actor's machine.
        threads: computed with on the CPU; None for what Ray gives the actor.

    Raises:
        ArtifactError, OperationError: as `m3compile.load`.
    """

    def __init__(self, artifact: str, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._encoder = load(artifact)

    def encode(self, pixel_values: Any, grid_thw: Any) -> list[np.ndarray]:
        """Encode a batch.

        Args:
            pixel_values: (N, patch_dim) float array or tensor, or a list of one an item.
            grid_thw: (num_items, 3) integers.

        Returns:
            One float32 (t*h*w / 4, width) array an item; bfloat16 results are widened, exactly. A
            segment with a non-finite pixel is NaN throughout.

        Raises:
            InputError: as `Encoder.encode`.
        """
        results = self._encoder.encode(as_rows(pixel_values), grid_thw)
        return [rows.float().cpu().numpy() for rows in results]

    def stats(self) -> dict[str, Any]:
        """See `Encoder.stats`."""
        return self._encoder.stats()
