"""Static FP8 scales from data: the eager tower runs over real items, and its largest values count.

Every segment runs alone at its exact shape. So padding cannot count, memory is bounded by the
largest segment, and the scales depend neither on how items were batched nor on their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from m3compile.batch import check_batch
from m3compile.config import TowerConfig
from m3compile.config.build import MAX_TOKENS
from m3compile.config.scales import (
    FP8_MAX,
    Fp8Scales,
    LayerScales,
    check_scale,
    linear_names,
)
from m3compile.errors import InputError, RequestError
from m3compile.grids import Grid
from m3compile.kernels.plain_form import PlainForm
from m3compile.progress import Progress
from m3compile.tower import Tower, make_tower
from m3compile.weights import Checkpoint, load_module_state

# What a peak is called unusual from, over the root mean square; of normal numbers it is about 5.
UNUSUAL_RATIO = 30.0

# Steps that progress counts inside a source.
_STEPS = 1000


class Source(NamedTuple):
    """A file of items: its name, and what reads its `pixel_values` and `grid_thw`."""

    name: str
    read: Callable[[], tuple[Tensor, Tensor]]


class Recorded(msgspec.Struct, frozen=True):
    """What one tensor held over all items.

    Attributes:
        name: of a linear, whose input it is, or such as `layers.0.attention.q`.
        amax: largest absolute value.
        ratio: `amax` over the root mean square.
        scale: what follows from it.
    """

    name: str
    amax: float
    ratio: float
    scale: float


class CalibrationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, and the scales that came of it.

    Attributes:
        weights: `checkpoint`, or `random` where the scales mean nothing.
        items, tokens: of all sources.
        recorded: every tensor, in the order of the forward pass.
    """

    device: str
    dtype: str
    weights: str
    margin: float
    items: int
    tokens: int
    recorded: tuple[Recorded, ...]

    @property
    def scales(self) -> Fp8Scales:
        """What `m3compile.config.scales.write_scales` writes."""
        scale = {record.name: record.scale for record in self.recorded}
        num_layers = sum(name.endswith(".attention.q") for name in scale)
        attention = (
            LayerScales(*(scale[name] for name in _attention_names(index)))
            for index in range(num_layers)
        )
        linears = {name: scale[name] for name in linear_names(num_layers)}
        return Fp8Scales(tuple(attention), linears)

    @property
    def unusual(self) -> list[Recorded]:
        """Tensors whose peak is far above the rest of them, the farthest first."""
        found = [record for record in self.recorded if record.ratio >= UNUSUAL_RATIO]
        return sorted(found, key=lambda record: -record.ratio)


def check_margin(margin: float) -> None:
    """Refuse a margin that leaves less room than the data needs.

    Raises:
        RequestError: it is not finite, or less than 1.
    """
    if not (math.isfinite(margin) and margin >= 1):
        raise RequestError(f"margin is {margin}; allowed: a finite number, at least 1")


def calibrate(
    checkpoint: Checkpoint,
    sources: Sequence[Source],
    *,
    margin: float = 1.5,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Progress | None = None,
) -> CalibrationReport:
    """Find the scales `amax * margin / 448` of q, k, v and of every linear's input.

    q, k and v are taken where attention takes them, after rotation, which is where vLLM's scales
    apply too.

    Args:
        sources: read one after another; at most one is held at a time.
        margin: room for values larger than any of these items has.
        device, dtype: what the eager tower runs in.

    Raises:
        RequestError: the margin is impossible; there are no items; or a tensor was zero throughout,
            overflowed `dtype`, or has no scale in float32.
        InputError: a source holds no valid batch, or an item that is not finite; says which.
        CheckpointError: the checkpoint has changed, or holds values that are not finite.
    """
    check_margin(margin)
    progress = progress or Progress()
    with progress.stage("read checkpoint"):
        torch_dtype: torch.dtype = getattr(torch, dtype)
        state = load_module_state(checkpoint, torch_dtype, device, progress.advance)
    tower = make_tower(checkpoint.config, state, "TORCH_SDPA")
    recorder = _Recorder(tower)
    items = tokens = 0
    with progress.stage("calibrate"), torch.no_grad():
        for index, source in enumerate(sources):
            segments = list(_segments(source, checkpoint.config))
            for done, (item, rows, segment) in enumerate(segments, 1):
                _run(tower, rows.to(device, torch_dtype), segment, f"{source.name}: item {item}")
                tokens += len(rows) // checkpoint.config.patches_per_token
                progress.advance(
                    _STEPS * index + _STEPS * done // len(segments), _STEPS * len(sources)
                )
            items += segments[-1][0] + 1 if segments else 0
    if not items:
        raise RequestError("the inputs hold no items; expected at least one to calibrate on")
    return CalibrationReport(
        device=device,
        dtype=dtype,
        weights="random" if checkpoint.is_random else "checkpoint",
        margin=margin,
        items=items,
        tokens=tokens,
        recorded=tuple(recorder.results(margin, dtype)),
    )


def _segments(source: Source, config: TowerConfig) -> Iterator[tuple[int, Tensor, Grid]]:
    """Item, rows (t*h*w, patch_dim) and grid of every segment of a source."""
    pixel_values, grid_thw = source.read()
    try:
        batch = check_batch(pixel_values, grid_thw, config)
        for item, sizes in enumerate(batch.segment_tokens):
            if max(sizes) > MAX_TOKENS:
                raise InputError(
                    f"item {item}: a segment has {max(sizes)} tokens; allowed: at most "
                    f"{MAX_TOKENS}, those of one run"
                )
    except InputError as error:
        raise InputError(f"{source.name}: {error}") from None
    for item, segments in enumerate(batch.segments):
        row = batch.starts[item]
        for segment in segments:
            rows = math.prod(segment)
            yield item, pixel_values[row : row + rows], segment
            row += rows


def _run(tower: Tower, rows: Tensor, segment: Grid, where: str) -> None:
    table = torch.tensor([segment], dtype=torch.int32, device=rows.device)
    is_nonfinite = tower(rows, table)[1]
    if bool(is_nonfinite.any()):
        raise InputError(
            f"{where} has pixels that are not finite, or too large for the encoder; "
            "expected normalised pixels"
        )


class _Seen:
    """Largest absolute value and sum of squares of one tensor, kept on its device."""

    def __init__(self) -> None:
        self._amax: Tensor | None = None
        self._squares: Tensor | None = None
        self._count = 0

    def add(self, x: Tensor) -> None:
        # Norms, which need no temporary of the tensor's size; NaN comes through both.
        amax = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)
        squares = torch.linalg.vector_norm(x, dtype=torch.float32).double().square()
        if self._amax is None or self._squares is None:
            self._amax, self._squares = amax, squares
        else:
            self._amax, self._squares = torch.maximum(self._amax, amax), self._squares + squares
        self._count += x.numel()

    def recorded(self, name: str, margin: float, dtype: str) -> Recorded:
        assert self._amax is not None, name
        assert self._squares is not None
        amax = float(self._amax)
        if not math.isfinite(amax):
            raise RequestError(f"{name} is not finite in {dtype}; calibrate with dtype float32")
        squares = float(self._squares)
        # Also where every square is too small for float32.
        if not squares:
            raise RequestError(
                f"{name} is zero throughout, no scale follows from that; expected real items"
            )
        ratio = amax / math.sqrt(squares / self._count)
        scale = amax * margin / FP8_MAX
        try:
            check_scale(f"the scale of {name}", scale)
        except ValueError as error:
            raise RequestError(f"{error}, from {amax:.3g} with margin {margin:g}") from None
        return Recorded(name, amax, ratio, scale)


class _Recorder:
    """Watches a tower: the input of every linear, and what every layer's attention takes."""

    def __init__(self, tower: Tower) -> None:
        num_layers = tower.config.num_hidden_layers
        self._seen = {name: _Seen() for name in _names(num_layers)}
        for name in linear_names(num_layers):
            tower.get_submodule(name).register_forward_pre_hook(self._watch_linear(name))
        for index, layer in enumerate(tower.layers):
            layer.passes = _WatchedForm([self._seen[name] for name in _attention_names(index)])

    def _watch_linear(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: self._seen[name].add(inputs[0])

    def results(self, margin: float, dtype: str) -> Iterator[Recorded]:
        for name, seen in self._seen.items():
            yield seen.recorded(name, margin, dtype)


class _WatchedForm(PlainForm):
    """The plain passes of one layer, with q, k and v seen on their way into attention."""

    def __init__(self, seen: Sequence[_Seen]) -> None:
        self._seen = seen

    def rotate_heads(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = super().rotate_heads(qkv, cos, sin, num_heads)
        for seen, tensor in zip(self._seen, heads, strict=True):
            seen.add(tensor)
        return heads


def _attention_names(layer: int) -> list[str]:
    return [f"layers.{layer}.attention.{part}" for part in ("q", "k", "v")]


def _names(num_layers: int) -> Iterator[str]:
    """Every recorded tensor, in the order of the forward pass."""
    for name in linear_names(num_layers):
        yield name
        if name.endswith(".qkv"):
            yield from _attention_names(int(name.split(".")[1]))
