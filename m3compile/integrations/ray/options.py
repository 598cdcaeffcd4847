"""What a server can be told: the `args` of a Serve config file, and the flags of `serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from m3compile.config.shown import one_line, shown
from m3compile.errors import ConfigError

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class ServeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a server; every default stands here alone.

    Attributes:
        artifact: its folder, at the same path on every machine with a replica.
        replicas: encoders, or `auto`: one a GPU of the cluster; for a CPU artifact one, since an
            encoder on the CPU uses every core by itself.
        cpus_per_replica: cores reserved for each; on a CPU artifact also the threads it computes
            with.
        max_batch_tokens: output tokens that are encoded together; None for the largest budget. A
            request with more runs alone.
        concurrent_batches: batches under way at once. With 2 a GPU computes one while the results
            of the one before are copied and handed on.
        batch_wait_ms: how long a batch waits for requests that are still being received.
        queue_limit: requests that a replica holds at once, those being encoded included.
        timeout_s: from a request's arrival at a replica to its answer.
        drain_s: how long accepted requests have to finish when the server stops.
        max_body_mb: bytes of a request's body, in millions.
        max_items: images and clips of a request.
        max_request_tokens: output tokens of a request.
        max_image_pixels: of an image file, before it is decoded.
        max_json_tokens: output tokens of an answer as JSON.
    """

    artifact: Annotated[str, msgspec.Meta(min_length=1)]
    replicas: _Count | Literal["auto"] = "auto"
    cpus_per_replica: _Count = 1
    max_batch_tokens: _Count | None = None
    concurrent_batches: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    batch_wait_ms: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 2.0
    queue_limit: _Count = 64
    timeout_s: _Seconds = 30.0
    drain_s: _Seconds = 60.0
    max_body_mb: Annotated[float, msgspec.Meta(gt=0)] = 256.0
    max_items: _Count = 256
    max_request_tokens: _Count = 65_536
    max_image_pixels: _Count = 50_000_000
    max_json_tokens: _Count = 256

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 1e6)


def serve_options(values: Mapping[str, Any]) -> ServeOptions:
    """Check settings from a config file or from flags; text is read as the number it spells.

    Raises:
        ConfigError: a key is unknown or missing, or a value impossible; names it.
    """
    try:
        return msgspec.convert(dict(values), ServeOptions, strict=False)
    except msgspec.ValidationError as error:
        if "$.replicas" in str(error):
            found = shown(values.get("replicas"))
            raise ConfigError(
                f"serve options: replicas is {found}; allowed: a whole number from 1, or auto"
            ) from None
        # msgspec says what it expected, and at `$.key`.
        expected, _, key = one_line(error).rpartition(" - at `$.")
        key = key.rstrip("`")
        if key in values:
            found = shown(values[key])
            rule = expected[:1].lower() + expected[1:]
            raise ConfigError(f"serve options: {key} is {found}; {rule}") from None
        raise ConfigError(f"serve options: {one_line(error)}") from None
