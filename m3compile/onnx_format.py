"""What an exported ONNX file is: its inputs and output, and what its metadata says.

    pixel_values  (num_patches, patch_dim)       float, the file's dtype
    segments      (num_segments, 3)              int64, `t, h, w` in patches
    embeddings    (num_patches / 4, output_size) float, the file's dtype

Both sizes are symbolic. A segment is what attention never leaves: an image, or at most
`vision_segment_max_frames` consecutive frames of a clip. Zero rows of `segments` are unused, and
rows of `pixel_values` past the last segment are padding that may hold anything. A segment with a
non-finite pixel comes back as NaN throughout.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from m3compile.config import Bounds, TowerConfig

PRODUCER = "m3compile"
PIXEL_VALUES = "pixel_values"
SEGMENTS = "segments"
EMBEDDINGS = "embeddings"

DTYPES = ("float32", "float16", "bfloat16")
OPSETS = range(18, 26)
# The first with GELU as an operator of its own, and with IsInf for half floats.
DEFAULT_OPSET = 20

# Attention takes queries in blocks whose logits are at most this many float32 over all heads, 64
# MiB, or 64 queries where that is more. Smaller blocks would read the keys more often.
BLOCK_LOGITS = 1 << 24

# What `export-onnx --check` holds. Another runtime sums in another order than eager does, so
# float32 has more room here than in `verify`; float16 is held like bfloat16.
CHECK_BOUNDS: dict[str, Bounds] = {
    "float32": Bounds(relative_error=1e-4),
    "float16": Bounds(eager_ratio=1.25, cosine=0.999),
    "bfloat16": Bounds(eager_ratio=1.25, cosine=0.999),
}

_PREFIX = f"{PRODUCER}."


class OnnxMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of itself, under keys that begin with `m3compile.`.

    Attributes:
        version: of m3compile.
        source: kind and name of what was exported, such as `checkpoint MiniMax-M3`.
        weights: `checkpoint`, or `random` where the embeddings mean nothing.
        weights_dtype: what the weights had been rounded to before the export; `mixed` where they
            are a checkpoint's own.
        dtype: of the file, one of `DTYPES`.
        opset: of the default domain.
        config: sizes of the encoder.
    """

    version: str
    source: str
    weights: str
    weights_dtype: str
    dtype: str
    opset: int
    config: TowerConfig


def to_properties(metadata: OnnxMetadata) -> dict[str, str]:
    """As an ONNX model's `metadata_props`: text by key."""
    properties = {
        f"{_PREFIX}{name}": str(getattr(metadata, name))
        for name in metadata.__struct_fields__
        if name != "config"
    }
    return {**properties, f"{_PREFIX}config": msgspec.json.encode(metadata.config).decode()}


def from_properties(properties: Mapping[str, str]) -> OnnxMetadata:
    """The reverse of `to_properties`; keys of others are passed over.

    Raises:
        ValueError: a key is missing or has an impossible value.
    """
    found = {
        key.removeprefix(_PREFIX): value
        for key, value in properties.items()
        if key.startswith(_PREFIX)
    }
    if "config" not in found:
        raise ValueError(f"no {_PREFIX}config in its metadata")
    config = msgspec.json.decode(found["config"], type=TowerConfig)
    return msgspec.convert({**found, "config": config}, OnnxMetadata, strict=False)
