"""`EncoderMixin`: vLLM's encoder CUDA-graph protocol, served from an artifact."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from m3compile.errors import RequestError
from m3compile.integrations.vllm import options
from m3compile.integrations.vllm.binding import Binding, device_of, has_weights
from m3compile.integrations.vllm.capture import (
    BUFFER_KEYS,
    ROWS,
    SEGMENTS,
    copy_rows,
    copy_table,
)
from m3compile.integrations.vllm.items import (
    modalities_in,
    modality_of,
    read_items,
    select_items,
)
from m3compile.integrations.vllm.plugin import ARTIFACT_VARIABLE
from m3compile.integrations.vllm.protocol import DEFAULT_PATH
from m3compile.integrations.vllm.sharded import encode_sharded, is_sharded

# Under vLLM's own logger, which has the handlers.
_log = logging.getLogger("vllm.m3compile")


class EncoderMixin:
    """For a host with `vision_tower` and `multimodal_config`; the first of its bases.

    The host's own tower is never run. vLLM's manager captures the artifact's program once per
    budget, its inputs being the rows of patches and one table of segments; what it does not
    capture, and everything where it captures nothing, goes through an `Encoder` over the same
    program and weights.

    `m3compile_artifact` is the artifact's folder; None for the environment's M3COMPILE_ARTIFACT.
    A host calls `m3compile_bind` at the end of its `__init__` and `m3compile_check_weights` after
    loading weights, so that a mismatch stops the start; else the first use does both.
    """

    supports_encoder_cudagraph: ClassVar[Literal[True]] = True

    vision_tower: Any
    multimodal_config: Any
    m3compile_artifact: str | Path | None = None
    _m3compile: Binding | None = None

    def m3compile_bind(self, vllm_config: Any = None) -> None:
        """Read the artifact, compare it with the host's config, and open it.

        Args:
            vllm_config: vLLM's; says who captures, and is given the artifact's budgets where the
                user set none. None leaves the capture to the adapter.

        Raises:
            RequestError: no artifact is named.
            ArtifactError: missing, damaged, not for this machine, or not this host's.
        """
        folder = self.m3compile_artifact or os.environ.get(ARTIFACT_VARIABLE)
        if not folder:
            raise RequestError(f"no artifact is named; set {ARTIFACT_VARIABLE} to its folder")
        binding = Binding(Path(folder), options.captured_by(vllm_config))
        binding.check_host(getattr(self, "config", None), self.vision_tower, self.multimodal_config)
        if binding.captured_by == options.BY_VLLM:
            options.fill_budgets(vllm_config, binding.manifest)
        if has_weights(self.vision_tower):
            binding.open(device_of(self.vision_tower))
        self._m3compile = binding
        _log.info("vision encoder from %s, captured by %s", folder, binding.captured_by)

    def m3compile_check_weights(self) -> None:
        """Compare the host's weights with the artifact's, and hold them once from then on.

        Raises:
            ArtifactIncompatibleError: naming the tensor that differs.
        """
        self._bound().check_weights(self.vision_tower)

    def m3compile_release_weights(self) -> None:
        """Give the host tensors of its own, before it loads weights into them again."""
        self._bound().unshare_weights(self.vision_tower)

    def _bound(self) -> Binding:
        if self._m3compile is None:
            self.m3compile_bind()
        assert self._m3compile is not None
        return self._m3compile

    def _ready(self) -> Binding:
        binding = self._bound()
        if not binding.is_checked:
            self.m3compile_check_weights()
        return binding

    # What vLLM's manager asks once.

    def get_encoder_cudagraph_config(self) -> Any:
        """What can be captured, see `protocol.GraphConfig`.

        Raises:
            RequestError: an option of vLLM rules a capture out; names it.
            ArtifactError: as `m3compile_bind` and `m3compile_check_weights`.
        """
        binding = self._bound()
        options.refuse_uncapturable(self.multimodal_config, self.vision_tower, binding.manifest)
        binding.captured_by = options.BY_VLLM
        self._ready()
        modalities = options.modalities(self.multimodal_config)
        return binding.types.graph_config(
            modalities=modalities,
            buffer_keys=list(BUFFER_KEYS),
            out_hidden_size=binding.manifest.tower.output_size,
            padding_logics={ROWS: copy_rows, SEGMENTS: copy_table},
            max_frames_per_video=self.get_max_frames_per_video() if len(modalities) > 1 else 1,
        )

    def get_max_frames_per_video(self) -> int:
        """Frames, along time in patches, of the longest clip that one segment table holds."""
        manifest = self._bound().manifest
        return manifest.max_segments * manifest.tower.vision_segment_max_frames

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        """64, and the smaller of vLLM's tokens a batch and a sequence."""
        return options.budget_range(vllm_config)

    # What it asks of a batch; `mm_kwargs` are vLLM's keyword arguments of one modality.

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        """`image` or `video`."""
        return modality_of(mm_kwargs)

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        """Patches and tokens of every item; a clip of many small segments counts for more."""
        binding = self._ready()
        batch = read_items(mm_kwargs, modality_of(mm_kwargs), binding.manifest.tower)
        specs = []
        for (t, h, w), parts in zip(batch.grids, batch.segment_tokens, strict=True):
            tokens = sum(parts)
            price = binding.buffers.budget_tokens(len(parts), tokens)
            specs.append(
                binding.types.item_spec(
                    input_size=t * h * w,
                    output_tokens=tokens,
                    path_output_tokens={} if price == tokens else {DEFAULT_PATH: price},
                )
            )
        return specs

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        """Some items of a batch, in the order of `indices`, which may be empty."""
        return select_items(mm_kwargs, indices, self._bound().manifest.tower)

    # Capture, replay, and the way without a graph.

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = DEFAULT_PATH,
        axis_keys: tuple[Hashable, ...] | None = None,
    ) -> Any:
        """The input buffers of one budget.

        Raises:
            RequestError, ArtifactIncompatibleError: as `CaptureBuffers.inputs`.
        """
        binding = self._ready()
        values = binding.buffers.inputs(token_budget, max_batch_size, device, dtype)
        return binding.types.capture_inputs(values=values)

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        path: str = DEFAULT_PATH,
    ) -> Any:
        """A batch's rows as they are, and the table of its segments.

        Raises:
            InputError: the batch breaks a rule, or has more segments than the table has slots.
        """
        binding = self._ready()
        batch = read_items(mm_kwargs, modality_of(mm_kwargs), binding.manifest.tower)
        segments = [segment for parts in batch.segments for segment in parts]
        table = binding.buffers.table(segments)
        return binding.types.replay_buffers(values={ROWS: batch.rows, SEGMENTS: table})

    def encoder_cudagraph_forward(
        self, inputs: dict[str, Tensor], path: str = DEFAULT_PATH
    ) -> Tensor:
        """The program on capture buffers: (token_budget, width). Leaves `inputs` as it is."""
        return self._ready().run(inputs[ROWS], inputs[SEGMENTS])

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = DEFAULT_PATH) -> Tensor:
        """A batch that no budget holds, through the encoder: (tokens, width), items end to end."""
        binding = self._ready()
        batch = read_items(mm_kwargs, modality_of(mm_kwargs), binding.manifest.tower)
        return binding.join(binding.encode(batch.rows, batch.grids))

    def postprocess_encoder_output(
        self,
        outputs: dict[str, Tensor],
        indices: Sequence[int],
        per_item_out_tokens: Sequence[int],
        dest: MutableMapping[int, Tensor] | list[Tensor | None],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Cut a batch's output into items; `clone` for what the next replay overwrites."""
        counts = [per_item_out_tokens[index] for index in indices]
        rows = outputs[DEFAULT_PATH][: sum(counts)]
        for index, part in zip(indices, rows.split(counts), strict=True):
            dest[index] = part.clone() if clone else part

    # The way of a host whose encoder vLLM does not capture.

    def embed_multimodal(self, **kwargs: Any) -> tuple[Tensor, ...]:
        """The embeddings of every item, (tokens, width) each, by modality in the order given."""
        binding = self._ready()
        embeddings: list[Tensor] = []
        for modality in modalities_in(kwargs):
            batch = read_items(kwargs, modality, binding.manifest.tower)
            if is_sharded(self):
                assert isinstance(batch.rows, Tensor)
                embeddings += encode_sharded(binding, batch.rows, batch.grids)
            else:
                embeddings += binding.encode(batch.rows, batch.grids)
        return tuple(embeddings)
