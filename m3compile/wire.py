"""What client and server of `serve` say to each other; told in prose in docs/serving.md."""

from __future__ import annotations

import re

import msgspec

ENCODE_PATH = "/v1/encode"
INFO_PATH = "/v1/info"
LIVE_PATH = "/health/live"
READY_PATH = "/health/ready"

SAFETENSORS = "application/x-safetensors"
MULTIPART = "multipart/form-data"
JSON = "application/json"
# What tools send that know no better; the body is taken for safetensors.
OCTETS = "application/octet-stream"

# Tensors of a request, and of an answer.
PIXELS, GRIDS = "pixel_values", "grid_thw"
EMBEDDINGS, COUNTS = "embeddings", "token_counts"

_ITEM = re.compile(r"item (\d+)\b")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused.

    Attributes:
        kind: name of the error in `m3compile.errors`, or what the server lacked; see
            docs/serving.md.
        message: one line: what was found, what was expected, the way out.
        item: the item that broke a rule, None where it is not one item's fault.
    """

    kind: str
    message: str
    item: int | None = None


class FaultBody(msgspec.Struct, frozen=True):
    """The JSON body of every answer of the server that is not a success."""

    error: Fault


def fault_body(kind: str, message: str) -> bytes:
    """The body that tells of an error; a message that begins with an item names it."""
    # A file's name may hold what UTF-8 has no bytes for.
    line = " ".join(message.split()).encode(errors="backslashreplace").decode()
    found = _ITEM.match(line)
    item = int(found[1]) if found else None
    return msgspec.json.encode(FaultBody(Fault(kind=kind, message=line, item=item)))


def read_fault(body: bytes) -> Fault | None:
    """The error in an answer's body, None where it is not one of the server's own."""
    try:
        return msgspec.json.decode(body, type=FaultBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
