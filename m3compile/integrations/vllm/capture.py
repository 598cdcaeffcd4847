"""Input buffers of the graphs that vLLM captures, and what one replay writes to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m3compile.artifact import Manifest
from m3compile.config.build import MAX_TOKENS
from m3compile.errors import ArtifactIncompatibleError, InputError, RequestError
from m3compile.integrations.vllm.tensors import dtype_of, plain_tensors

ROWS, SEGMENTS = "pixel_values", "segments"
BUFFER_KEYS = (ROWS, SEGMENTS)


class CaptureBuffers:
    """The buffers of one host, for every budget.

    The rows of all budgets are prefixes of one tensor: a manager must write a graph's buffers and
    replay it before it writes those of another. vLLM's does.

    Args:
        manifest: of the artifact.
        device: where its program runs.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._patch_dim = manifest.tower.patch_dim
        self._dtype = dtype_of(manifest)
        self._max_segments = manifest.max_segments
        self._device = device
        self._rows: Tensor | None = None
        self._largest_budget = 0
        self._max_items = 0

    def inputs(
        self, token_budget: int, max_items: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The program's inputs at one budget: a table of small images, and rows of zeros.

        Returns:
            `pixel_values` (4 * token_budget, patch_dim) and `segments` (max_segments, 3) int32.

        Raises:
            RequestError: the budget or the number of items is more than the program takes.
            ArtifactIncompatibleError: vLLM runs the encoder on another device, or in another
                dtype.
        """
        self._check(token_budget, max_items, torch.device(device), dtype)
        self._largest_budget = max(self._largest_budget, token_budget)
        self._max_items = max(self._max_items, max_items)
        count = 4 * token_budget
        with plain_tensors():
            if self._rows is None or len(self._rows) < count:
                self._rows = torch.zeros(
                    (count, self._patch_dim), dtype=self._dtype, device=self._device
                )
            num_items = min(max_items, token_budget)
            images = [(1, 2, 2 * (token_budget // num_items))] * num_items
            return {ROWS: self._rows[:count], SEGMENTS: self.table(images).to(self._device)}

    def _check(
        self, token_budget: int, max_items: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        if token_budget > MAX_TOKENS:
            raise RequestError(
                f"encoder_cudagraph_token_budgets has {token_budget}, one run takes at most "
                f"{MAX_TOKENS} tokens; leave such a budget out, larger items run without a graph"
            )
        if max_items > self._max_segments:
            raise RequestError(
                f"encoder_cudagraph_max_vision_items_per_batch is {max_items}, the artifact's "
                f"segment table has {self._max_segments} slots; set it to {self._max_segments} "
                f"at most, or build with --max-items {max_items}"
            )
        if device.type != self._device.type:
            raise ArtifactIncompatibleError(
                f"vLLM captures on {device.type}, the artifact runs on {self._device.type}; "
                f"build with --device {device.type}"
            )
        if dtype != self._dtype:
            raise ArtifactIncompatibleError(
                f"vLLM captures in {dtype}, the artifact computes in {self._dtype}; build with "
                f"--dtype {str(dtype).removeprefix('torch.')}, or start vLLM with --dtype "
                f"{str(self._dtype).removeprefix('torch.')}"
            )

    def table(self, segments: Sequence[tuple[int, int, int]]) -> Tensor:
        """A segment table (max_segments, 3) int32 on the host; pinned where it has to travel.

        The copy that reads it may still run when it is freed: the allocator of pinned memory
        knows of the copy and waits with reuse.

        Raises:
            InputError: there are more segments than slots.
        """
        if len(segments) > self._max_segments:
            raise InputError(
                f"a batch has {len(segments)} segments, the artifact's table {self._max_segments} "
                "slots"
            )
        table = torch.zeros(
            (self._max_segments, 3), dtype=torch.int32, pin_memory=self._device.type == "cuda"
        )
        if segments:
            table[: len(segments)] = torch.tensor(segments, dtype=torch.int32)
        return table

    def budget_tokens(self, num_segments: int, tokens: int) -> int:
        """What an item counts against a budget: its tokens, or more.

        vLLM packs by tokens and items, and knows nothing of slots. Every item has one; the slots
        that are left go to the further segments of clips, each at the price of as many tokens as
        make the largest budget pay for all of them. So no batch that fits a budget needs more
        slots than there are. An item whose price no budget holds runs without a graph.
        """
        further = num_segments - 1
        if further == 0 or not self._largest_budget:
            return tokens
        spare = self._max_segments - self._max_items
        if spare == 0:
            return max(tokens, self._largest_budget + 1)
        return max(tokens, -(-further * self._largest_budget // spare))


def copy_rows(target: Tensor, rows: Tensor) -> None:
    """Padding logic of `pixel_values`: none, the program ignores rows past the last segment."""
    target[: len(rows)].copy_(rows, non_blocking=True)


def copy_table(target: Tensor, table: Tensor) -> None:
    """Padding logic of `segments`: unused slots are zero rows, and cost nothing."""
    target[: len(table)].copy_(table, non_blocking=True)
    target[len(table) :].zero_()
