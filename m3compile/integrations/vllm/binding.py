"""One host's artifact, from the path to a program that is ready. Nothing of it is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from m3compile.artifact import read_manifest
from m3compile.integrations.vllm.capture import CaptureBuffers
from m3compile.integrations.vllm.checks import check_host
from m3compile.integrations.vllm.options import BY_US
from m3compile.integrations.vllm.protocol import protocol_types
from m3compile.integrations.vllm.tensors import dtype_of, plain_tensors
from m3compile.integrations.vllm.weights import check_weights, share_weights, unshare_weights
from m3compile.loading import OpenedProgram, open_program
from m3compile.runtime import Encoder


class Binding:
    """An artifact in the hands of one host.

    Reads the manifest only; `open` and `check_weights` come once the host has its tower, and
    every use of the program comes after them.

    Args:
        folder: the artifact.
        captured_by: `vllm`, `m3compile` or `nobody`, see `options`.

    Raises:
        ArtifactError: missing, damaged or of another format.
    """

    def __init__(self, folder: Path, captured_by: str) -> None:
        self.folder = folder
        self.captured_by = captured_by
        self.manifest = read_manifest(folder)
        self.types = protocol_types()
        self.is_checked = False
        self._opened: OpenedProgram | None = None
        self._encoder: Encoder | None = None
        self._buffers: CaptureBuffers | None = None

    def check_host(self, config: Any, tower: Any, multimodal_config: Any) -> None:
        """Raises as `checks.check_host`."""
        check_host(self.folder, self.manifest, config, tower, multimodal_config)

    def open(self, device: torch.device | None) -> OpenedProgram:
        """The program and its weights, opened by the first call.

        Args:
            device: where the host is; None for the manifest's.

        Raises:
            ArtifactError: damaged, or not for this machine or device.
        """
        if self._opened is None:
            with plain_tensors():
                self._opened = open_program(self.folder, device)
        return self._opened

    def check_weights(self, tower: Any) -> None:
        """Compare the host's weights, then hold them once. A tower without any is not compared.

        Raises:
            ArtifactIncompatibleError: naming the tensor that differs.
        """
        opened = self.open(device_of(tower))
        if has_weights(tower):
            check_weights(self.folder, self.manifest, opened.weights, tower)
            share_weights(self.manifest, opened.weights, tower)
        self.is_checked = True

    def unshare_weights(self, tower: Any) -> None:
        """Before the host loads weights again; they are compared again after it."""
        if self.is_checked and has_weights(tower):
            unshare_weights(tower)
        self.is_checked = False

    @property
    def encoder(self) -> Encoder:
        """Made, and its graphs captured where that is ours to do, by the first use."""
        if self._encoder is None:
            opened = self.open(None)
            capture = None if self.captured_by == BY_US else "never"
            with plain_tensors():
                self._encoder = Encoder(
                    opened.manifest,
                    opened.program,
                    opened.weights,
                    opened.device,
                    capture=capture,
                )
        return self._encoder

    @property
    def buffers(self) -> CaptureBuffers:
        if self._buffers is None:
            self._buffers = CaptureBuffers(self.manifest, self.open(None).device)
        return self._buffers

    def run(self, pixel_values: Tensor, segments: Tensor) -> Tensor:
        """The bare program on buffers of ours, for a capture: (P / 4, width)."""
        return self.open(None).program(pixel_values, segments)[0]

    def encode(self, pixel_values: Tensor | list[Tensor], grid_thw: Any) -> list[Tensor]:
        """One (tokens, width) tensor an item, see `Encoder.encode`."""
        return self.encoder.encode(pixel_values, grid_thw)

    def join(self, embeddings: list[Tensor]) -> Tensor:
        """Items end to end, (tokens, width); also of no items."""
        if not embeddings:
            return torch.empty(
                (0, self.manifest.tower.output_size),
                dtype=dtype_of(self.manifest),
                device=self.open(None).device,
            )
        return embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings)


def has_weights(tower: Any) -> bool:
    """Whether a host's tower has parameters; one of another pipeline stage has none."""
    return isinstance(tower, nn.Module) and next(tower.parameters(), None) is not None


def device_of(tower: Any) -> torch.device | None:
    return next(tower.parameters()).device if has_weights(tower) else None
