"""The compiled program: an AOTInductor package bound to the one copy of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

# Registers the ops that a package calls by name.
import m3compile.ops  # noqa: F401
from m3compile.errors import ArtifactDamagedError
from m3compile.graph import Bucket, CapturedBucket, Pool


class Program(Protocol):
    """What an encoder runs; one call at a time."""

    def __call__(self, pixel_values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """`(P, patch_dim)` and `(S, 3)` int32 to `(P / 4, O)` and `(S,)` bool, as the tower.

        On CUDA it runs uncaptured on the current stream; the result is fresh memory.
        """
        ...

    def capture(self, pixel_values: Tensor, segments: Tensor, pool: Pool) -> Bucket:
        """A bucket at these shapes as a CUDA graph; arguments as `CapturedBucket`."""
        ...


class CompiledProgram:
    """An AOTInductor package without constants of its own.

    It checks nothing about its inputs or weights, and crashes the process where they are wrong:
    weights are compared with the manifest before they come here, inputs before every call. It has
    no lock: one call at a time.

    Args:
        package: the `.pt2` file; its digest has been checked.
        weights: by the program's own names, contiguous, on `device`. The package keeps pointing at
            them, also after this object is gone.
        device: where it runs.

    Raises:
        ArtifactDamagedError: the package cannot be opened, or wants other weights.
    """

    def __init__(self, package: Path, weights: Mapping[str, Tensor], device: torch.device) -> None:
        # The class under torch._inductor.aoti_load_package, whose import alone takes seconds.
        # Single-threaded, since the other runner cannot be captured.
        try:
            self._loader = torch._C._aoti.AOTIModelPackageLoader(
                str(package), "model", True, 1, -1 if device.type == "cpu" else device.index
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ArtifactDamagedError(f"{package}: cannot be opened: {reason}") from error
        wanted = set(self._loader.get_constant_fqns())
        if wanted != set(weights):
            missing, extra = sorted(wanted - set(weights)), sorted(set(weights) - wanted)
            raise ArtifactDamagedError(
                f"{package}: the program's weights differ from the manifest's: "
                f"missing {missing[:3] or 'none'}, not wanted {extra[:3] or 'none'}"
            )
        # Positional: use_inactive, check_full_update, user_managed.
        self._loader.load_constants(dict(weights), False, True, True)

    def __call__(self, pixel_values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        embeddings, is_nonfinite = self._loader.boxed_run([pixel_values, segments])
        return embeddings, is_nonfinite

    def capture(self, pixel_values: Tensor, segments: Tensor, pool: Pool) -> Bucket:
        return CapturedBucket(self, pixel_values, segments, pool)


class SizedProgram:
    """Two programs over the same weights: one made for few rows, and one for every size.

    Args:
        few: serves runs of at most `few_rows` rows.
        every: serves the others.
    """

    def __init__(self, few: Program, few_rows: int, every: Program) -> None:
        self._few = few
        self._few_rows = few_rows
        self._every = every

    def _for(self, pixel_values: Tensor) -> Program:
        return self._few if pixel_values.shape[0] <= self._few_rows else self._every

    def __call__(self, pixel_values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        return self._for(pixel_values)(pixel_values, segments)

    def capture(self, pixel_values: Tensor, segments: Tensor, pool: Pool) -> Bucket:
        return self._for(pixel_values).capture(pixel_values, segments, pool)
