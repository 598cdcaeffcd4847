"""vLLM's MiniMax-M3 host with the mixin in front. Imported by vLLM alone, see `plugin`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.models import minimax_m3

from m3compile.integrations.vllm.mixin import EncoderMixin


# The same name as its base: vLLM tells by it whether a model is its own implementation.
class MiniMaxM3SparseForConditionalGeneration(
    EncoderMixin, minimax_m3.MiniMaxM3SparseForConditionalGeneration
):
    """Text as in vLLM, images and clips from the artifact."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Before hundreds of gigabytes of weights are read for nothing.
        self.m3compile_bind(vllm_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """vLLM's; then the vision weights are compared with the artifact's.

        Raises:
            ArtifactIncompatibleError: naming the tensor that differs.
        """
        self.m3compile_release_weights()
        loaded: set[str] = super().load_weights(weights)
        self.m3compile_check_weights()
        return loaded
