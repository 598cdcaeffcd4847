"""The strongest peer there is without a compiler: eager modules in CUDA graphs.

Written as vLLM's encoder runner works: graphs at powers of two, up to 16 items packed smallest
first, the angles and bounds computed for every call outside the graph and copied into its buffers,
padding as one trailing sequence, results copied out item by item. The rotary pass is one Triton
kernel, as it is there; products, norms and GELU are PyTorch's own.

Shape legend: P patch rows of a bucket, R rotary pairs of a head, O output size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from m3compile.attention import varlen_attention
from m3compile.bench.packing import PEER_BUDGETS, PEER_MAX_ITEMS, pack_ascending, sequence_ends
from m3compile.bench.runners import item_rows, segments_of_items
from m3compile.buckets import segments_of
from m3compile.config import TowerConfig
from m3compile.geometry import locate_rows, rotary_tables
from m3compile.kernels import kernels

Grid = tuple[int, int, int]

_MAX_SEQUENCES = 128


class PeerModel:
    """The tower's forward over its weights, with geometry given from outside.

    Args:
        state: weights by the tower's names.
        backend: of the attention op.
        passes: whose rotary pass is used, see `m3compile.kernels`.
    """

    def __init__(
        self, config: TowerConfig, state: Mapping[str, Tensor], backend: str, passes: str
    ) -> None:
        self._config = config
        self._state = state
        self._backend = backend
        self._rotate_heads = kernels(passes).rotate_heads

    def __call__(self, pixels: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
        """(P, patch_dim), (P, R) float32 twice and (sequences + 1,) int32 to (P / 4, O)."""
        config = self._config
        x = self._norm(self._linear(pixels, "patch_embed"), "pre_norm")
        for index in range(config.num_hidden_layers):
            layer = f"layers.{index}"
            qkv = self._linear(self._norm(x, f"{layer}.norm1"), f"{layer}.qkv")
            q, k, v = self._rotate_heads(qkv, cos, sin, config.num_attention_heads)
            attended = varlen_attention(q, k, v, cu_seqlens, self._backend, False)
            x = x + self._linear(attended.flatten(1), f"{layer}.out_proj")
            x = x + self._mlp(self._norm(x, f"{layer}.norm2"), layer)
        merged = self._mlp(x, "projector").unflatten(0, (-1, config.patches_per_token))
        return self._mlp(merged.flatten(1), "merger")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._state[f"{name}.weight"], self._state.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._state[f"{name}.weight"], self._state[f"{name}.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, self._config.layer_norm_eps)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        return self._linear(functional.gelu(self._linear(x, f"{name}.fc1")), f"{name}.fc2")


class PeerInputs(NamedTuple):
    """What a forward reads: (P, patch_dim), (P, R) float32 twice, (sequences + 1,) int32."""

    pixels: Tensor
    cos: Tensor
    sin: Tensor
    cu_seqlens: Tensor


class PeerBucket(NamedTuple):
    """Input buffers, the replay that reads them, and (P / 4, O) that it overwrites."""

    inputs: PeerInputs
    replay: Callable[[], object]
    embeddings: Tensor


Capture = Callable[[PeerModel, PeerInputs], PeerBucket]


def graph_capture(device: torch.device) -> Capture:
    """Captures into one pool; to be given the largest budget first."""
    # Captures have a stream of their own: cuBLAS then takes its workspace for it from the pool.
    warm_up_stream, stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
    pool = torch.cuda.graph_pool_handle()

    def capture(model: PeerModel, inputs: PeerInputs) -> PeerBucket:
        # The buffers were filled on the caller's stream.
        torch.cuda.synchronize(device)
        # Lazy set-up, such as compiling the rotary kernel, is not capturable.
        with torch.cuda.stream(warm_up_stream):
            model(*inputs)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            embeddings = model(*inputs)
        torch.cuda.synchronize(device)
        return PeerBucket(inputs, graph.replay, embeddings)

    return capture


class CapturedEager:
    """One bucket of a `PeerModel` a budget, and the packing in front of them.

    Args:
        model: what is captured.
        config: its sizes.
        inverse_frequency: (axis_dim / 2,) float32 on the device.
        dtype: of weights and pixels.
        capture: makes a bucket's replay.
    """

    name = "eager captured"

    def __init__(
        self,
        model: PeerModel,
        config: TowerConfig,
        inverse_frequency: Tensor,
        dtype: torch.dtype,
        capture: Capture,
        budgets: Sequence[int] = PEER_BUDGETS,
    ) -> None:
        self._model = model
        self._config = config
        self._inverse_frequency = inverse_frequency
        self._dtype = dtype
        self._budgets = tuple(budgets)
        self._real_tokens = self._padded_tokens = 0
        self._buckets: dict[int, PeerBucket] = {}
        with torch.no_grad():
            for budget in reversed(self._budgets):
                self._buckets[budget] = capture(model, self._inputs(4 * budget))

    def _inputs(self, rows: int) -> PeerInputs:
        device, pairs = self._inverse_frequency.device, 3 * self._config.axis_dim // 2
        ends = sequence_ends([], rows, _MAX_SEQUENCES)
        return PeerInputs(
            pixels=torch.zeros((rows, self._config.patch_dim), dtype=self._dtype, device=device),
            cos=torch.zeros((rows, pairs), dtype=torch.float32, device=device),
            sin=torch.zeros((rows, pairs), dtype=torch.float32, device=device),
            cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
        )

    def encode(self, pixel_values: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """As `Runner.encode`."""
        starts = item_rows(grids)
        segments = [segments_of(*grid, self._config.vision_segment_max_frames) for grid in grids]
        batches = pack_ascending(
            [math.prod(grid) // 4 for grid in grids],
            [len(parts) for parts in segments],
            self._budgets,
            PEER_MAX_ITEMS,
            _MAX_SEQUENCES,
        )
        results: dict[int, Tensor] = {}
        for items, tokens, budget in batches:
            rows = [pixel_values[starts[item] : starts[item + 1]] for item in items]
            pixels = torch.cat(rows) if len(rows) > 1 else rows[0]
            table = [part for item in items for part in segments[item]]
            embeddings = self._run(pixels, table, budget)
            self._real_tokens += tokens
            self._padded_tokens += (budget or tokens) - tokens
            offset = 0
            for item in items:
                count = (starts[item + 1] - starts[item]) // 4
                part = embeddings[offset : offset + count]
                # A graph's result is overwritten by its next replay.
                results[item] = part if budget is None else part.clone()
                offset += count
        return [results[item] for item in range(len(grids))]

    def prepare(
        self, pixel_values: Tensor, grids: Sequence[Grid], budget: int | None = None
    ) -> tuple[Callable[[], object], int | None] | None:
        """As `Runner.prepare`."""
        tokens = len(pixel_values) // 4
        if budget is None:
            budget = next((size for size in self._budgets if size >= tokens), None)
        if budget not in self._buckets or len(grids) > PEER_MAX_ITEMS:
            return None
        table = segments_of_items(grids, self._config.vision_segment_max_frames)
        if len(table) > _MAX_SEQUENCES:
            return None
        self._run(pixel_values, table, budget)
        return self._buckets[budget].replay, budget

    def padding(self) -> tuple[int, int]:
        """As `Runner.padding`."""
        return self._real_tokens, self._padded_tokens

    def _run(self, pixels: Tensor, segments: list[Grid], budget: int | None) -> Tensor:
        """One run; the result (P / 4, O) is the bucket's own, or fresh without a bucket."""
        with torch.no_grad():
            table = torch.tensor(segments, dtype=torch.int32).to(pixels.device, non_blocking=True)
            geometry = locate_rows(table, len(pixels))
            cos, sin = rotary_tables(geometry.positions, self._inverse_frequency)
            if budget is None:
                return self._model(pixels, cos, sin, geometry.cu_seqlens)
            lengths = [math.prod(segment) for segment in segments]
            ends = torch.tensor(
                sequence_ends(lengths, 4 * budget, _MAX_SEQUENCES), dtype=torch.int32
            )
            bucket = self._buckets[budget]
            _copy_padded(bucket.inputs.pixels, pixels)
            _copy_padded(bucket.inputs.cos, cos)
            _copy_padded(bucket.inputs.sin, sin)
            bucket.inputs.cu_seqlens.copy_(ends, non_blocking=True)
            bucket.replay()
            return bucket.embeddings


def _copy_padded(target: Tensor, source: Tensor) -> None:
    """Zero first: padding must be finite, or attention's over-reads would spread it."""
    target.zero_()
    target[: len(source)].copy_(source)
