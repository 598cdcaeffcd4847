"""The objects that pass between vLLM's encoder graph manager and a host.

They are vLLM's own where it is importable, else equivalents with the same fields, so that a host
can be driven and tested without it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

PaddingLogic = Callable[[Tensor, Tensor], None]
DEFAULT_PATH = "default"


class ProtocolTypes(NamedTuple):
    """The four classes that a host makes objects of."""

    graph_config: Any
    item_spec: Any
    capture_inputs: Any
    replay_buffers: Any


def protocol_types() -> ProtocolTypes:
    """vLLM's classes, or ours where this process cannot import them."""
    try:
        from vllm.v1.worker import encoder_cudagraph_defs as theirs
    except ImportError:
        return ProtocolTypes(GraphConfig, ItemSpec, CaptureInputs, ReplayBuffers)
    return ProtocolTypes(
        theirs.EncoderCudaGraphConfig,
        theirs.EncoderItemSpec,
        theirs.EncoderCudaGraphCaptureInputs,
        theirs.EncoderCudaGraphReplayBuffers,
    )


@dataclass
class ItemSpec:
    """One item of a batch.

    Attributes:
        input_size: patch rows.
        output_tokens: rows of its embeddings.
        path_output_tokens: what it counts against a path's budget; empty for `output_tokens`.
    """

    input_size: int
    output_tokens: int
    path_output_tokens: dict[str, int] = field(default_factory=dict)

    def get_path_output_tokens(self, path: str) -> int:
        """Tokens to count on `path`; an item that names paths takes no part in others."""
        if not self.path_output_tokens and path == DEFAULT_PATH:
            return self.output_tokens
        return self.path_output_tokens.get(path, 0)


@dataclass(frozen=True)
class PathConfig:
    """How one path is captured: from which budget on, and whether a batch may skip it."""

    min_token_budget: int | None = None
    allow_zero_tokens: bool = False


def _one_path() -> dict[str, PathConfig]:
    return {DEFAULT_PATH: PathConfig()}


@dataclass
class GraphConfig:
    """What a manager asks once.

    Attributes:
        modalities: which it may send here.
        buffer_keys: inputs that are recorded into a graph.
        out_hidden_size: columns of the output.
        padding_logics: by buffer, `f(captured buffer, replay value)`, which copies.
        max_frames_per_video: along time, in patches.
        paths: encoders that are captured separately.
        capture_axes: further axes of capture, beside the budget.
    """

    modalities: list[str]
    buffer_keys: list[str]
    out_hidden_size: int
    padding_logics: dict[str, PaddingLogic] = field(default_factory=dict)
    max_frames_per_video: int = 1
    paths: dict[str, PathConfig] = field(default_factory=_one_path)
    capture_axes: tuple[tuple[Hashable, ...], ...] = ()


@dataclass
class CaptureInputs:
    """The buffers of one capture, which a manager keeps and writes to before a replay."""

    values: dict[str, Tensor]


@dataclass
class ReplayBuffers:
    """What to copy into the captured buffers; None leaves one as it is."""

    values: dict[str, Tensor | None]
