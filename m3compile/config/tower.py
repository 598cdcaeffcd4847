"""The tower's sizes."""

from __future__ import annotations

import msgspec

from m3compile.config.shown import shown

# The largest value of a field: beyond it a damaged config would ask for absurd work.
_LARGEST: dict[str, float] = {
    "num_hidden_layers": 1024,
    "vision_segment_max_frames": 2**31 - 1,
    "layer_norm_eps": 1.0,
    "rope_theta": 1e12,
}
_LARGEST_SIZE = 2**20


class TowerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of the MiniMax-M3 vision encoder; the defaults are the released model's.

    Raises:
        ValueError: from the constructor, for sizes no such encoder can have.
    """

    hidden_size: int = 1280
    num_attention_heads: int = 16
    num_hidden_layers: int = 32
    intermediate_size: int = 5120
    patch_size: int = 14
    num_channels: int = 3
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    layer_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    vision_segment_max_frames: int = 4
    projector_hidden_size: int = 6144
    output_size: int = 6144

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            largest = _LARGEST.get(name, _LARGEST_SIZE)
            if not 0 < value <= largest:
                raise ValueError(
                    f"{name} is {shown(value)}; allowed: a positive number up to {largest}"
                )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}; allowed: a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim (hidden_size {self.hidden_size} / num_attention_heads "
                f"{self.num_attention_heads}) is {self.head_dim}; allowed: an even number"
            )
        if self.head_dim < 6:
            raise ValueError(
                f"head_dim is {self.head_dim}; allowed: at least 6 (three rotary axes)"
            )
        if self.spatial_merge_size != 2:
            raise ValueError(f"spatial_merge_size is {self.spatial_merge_size}; allowed: 2")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def axis_dim(self) -> int:
        """Rotary dims of a head that one axis (time, height or width) rotates."""
        return 2 * ((self.head_dim // 3) // 2)

    @property
    def patch_dim(self) -> int:
        """Columns of `pixel_values`."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.spatial_merge_size**2

    @property
    def merged_size(self) -> int:
        """Width of a token before the merge MLP: its patches side by side."""
        return self.patches_per_token * self.output_size


TINY = TowerConfig(
    hidden_size=160,
    num_attention_heads=2,
    num_hidden_layers=3,
    intermediate_size=320,
    projector_hidden_size=128,
    output_size=96,
)
