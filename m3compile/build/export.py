"""From the tower to an exported program with a symbolic number of patches."""

from __future__ import annotations

import torch
from torch.export import Dim, ExportedProgram

from m3compile.config.build import MAX_TOKENS
from m3compile.tower import Tower

# What the trace runs on; small, and no size in it is 0 or 1, which export would bake in.
_EXAMPLE_GRID = (1, 4, 6)


def export_tower(tower: Tower, max_segments: int, max_tokens: int = MAX_TOKENS) -> ExportedProgram:
    """Trace the tower once, for runs of 1 to `max_tokens` tokens in up to `max_segments` slots."""
    weight = tower.patch_embed.weight
    t, h, w = _EXAMPLE_GRID
    pixel_values = torch.zeros(
        t * h * w, tower.config.patch_dim, dtype=weight.dtype, device=weight.device
    )
    segments = torch.zeros(max_segments, 3, dtype=torch.int32, device=weight.device)
    segments[0] = torch.tensor(_EXAMPLE_GRID, dtype=torch.int32)
    num_tokens = Dim("num_tokens", min=1, max=max_tokens)
    return torch.export.export(
        tower,
        (pixel_values, segments),
        dynamic_shapes=({0: tower.config.patches_per_token * num_tokens}, None),
        strict=False,
    )
