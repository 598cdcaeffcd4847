"""Device memory of an encoder with its graphs: a model, from the tower's sizes.

Captures share one pool, so that what a forward needs on its way is there once, at the size of the
largest budget. Every graph keeps its result, and something of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from m3compile.config import TowerConfig

# So that 28 budgets, evenly spread from 64 to 2,560 tokens, come to the 620 MB that were measured
# on an H200; the tensors counted below are 543 MB of it.
GRAPH_BYTES = 2_800_000

# The released weights in bf16.
RELEASED_WEIGHTS_BYTES = 1_730_000_000

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


class MemoryModel(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the device, without the CUDA context and what uncaptured runs take on their way.

    Attributes:
        weights: the one copy.
        largest_token: a token of the largest budget: its rows of the shared input buffer, and the
            widest point of a forward in the shared pool.
        own_token: a token of any budget: its row of the bucket's result.
        graph: a graph of any size.
    """

    weights: int
    largest_token: int
    own_token: int
    graph: int

    def total(self, ladder: Sequence[int]) -> int:
        """Bytes with these budgets captured."""
        return (
            self.weights
            + self.largest_token * max(ladder)
            + self.own_token * sum(ladder)
            + self.graph * len(ladder)
        )

    def exact_run(self, tokens: int) -> int:
        """Bytes that an uncaptured run of this size takes while it runs, beside the total."""
        return (self.largest_token + self.own_token) * tokens


def memory_model(
    tower: TowerConfig | None = None,
    dtype: str = "bfloat16",
    weights_bytes: int = RELEASED_WEIGHTS_BYTES,
) -> MemoryModel:
    """The model for a tower; without arguments for the released one.

    The widest point is where a row is projected (hidden, projector and output width side by side)
    or, in a tower with a small projector, in the MLP (two hidden and two intermediate widths).
    """
    tower = tower or TowerConfig()
    size = ELEMENT_BYTES[dtype]
    projected = tower.hidden_size + tower.projector_hidden_size + tower.output_size
    widest = max(projected, 2 * tower.hidden_size + 2 * tower.intermediate_size)
    return MemoryModel(
        weights=weights_bytes,
        largest_token=tower.patches_per_token * (tower.patch_dim + widest) * size,
        own_token=tower.output_size * size,
        graph=GRAPH_BYTES,
    )
