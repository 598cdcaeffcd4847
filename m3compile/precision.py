"""What of an encoder may run in fp8: measured against eager float32, layer by layer where needed.

All that is asked for is tried together. Where that breaks the bound, every layer is tried alone.
What breaks it by itself, and then what makes a large error for the work that fp8 saves there,
stays in the artifact's dtype. How many is found by bisection: what is left holds the bound, and
no fewer would do as long as every layer that stays out makes the result better.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from m3compile.artifact import KeptLayer, Precision
from m3compile.batch import check_batch
from m3compile.config import Bounds, BuildConfig, TowerConfig
from m3compile.config.scales import LayerScales, read_scales
from m3compile.errors import ConfigError, InputError, VerificationError
from m3compile.progress import Progress
from m3compile.rows import read_rows
from m3compile.tower import make_tower
from m3compile.verify.cases import FILLERS, LARGE_FILLER, Grid, one_item, random_pixels
from m3compile.verify.judge import broken_bound, eager, largest, relative_error, smallest
from m3compile.weights import (
    Checkpoint,
    attention_scales,
    fp8_linears,
    load_module_state,
    quantised_weights,
)

ATTENTION = "attention"

# What the build's own verification is made of; on the first, a thumbnail, layers are ranked.
_GRIDS: tuple[Grid, ...] = (*FILLERS, LARGE_FILLER)
# Frames of a clip of the smallest segments: the worst token is found where many stand alone.
_CLIP_FRAMES = 513
# Of the items in a file.
_MOST_ITEMS = 16
# What may be used up here of the distance to the bound: among more items some are worse, and among
# more tokens the worst is farther out.
_ERROR_SHARE, _COSINE_SHARE = 0.95, 0.75
# Of a photo, to weigh the work of attention with.
_ATTENDED_ROWS = 1024
# Stands for every error that large, and for NaN: a manifest holds numbers.
_USELESS = 1e6


class Item(NamedTuple):
    """Pixels (t*h*w, patch_dim) of one item, its grid, and its (tokens, O) in eager float32."""

    pixels: Tensor
    grid: Grid
    expected: Tensor


class Fp8Request(NamedTuple):
    """What is asked for in fp8, with the files that it names read and checked.

    Attributes:
        linears: the linear layers; empty where they are not asked for.
        scales: of attention in every layer; None where it is not asked for.
        items: pixels and grid of what it is measured on beside random ones; None for those alone.
        inputs: the name of their file, or `random`.
        bounds: what the artifact is held to.
        longest: tokens of the longest segment that `verify` will look at; None for a small one.
    """

    linears: tuple[str, ...]
    scales: tuple[LayerScales, ...] | None
    items: list[tuple[Tensor, Grid]] | None
    inputs: str
    bounds: Bounds
    longest: int | None = None


class Measured(NamedTuple):
    """The largest relative error of an item, and the smallest cosine of a token."""

    error: float
    cosine: float


def fp8_request(config: BuildConfig, tower: TowerConfig) -> Fp8Request:
    """What a build asks for in fp8.

    Raises:
        ConfigError, InputError: its scales or its inputs cannot be read or do not fit, or no linear
            layer can be in fp8.
    """
    scales, items = None, None
    linears = fp8_linears(tower) if config.linear_dtype == "fp8" else ()
    if config.linear_dtype == "fp8" and not linears:
        raise ConfigError(
            "linear_dtype is 'fp8', and no linear layer of this encoder has sizes that are "
            "multiples of 16; leave linear_dtype out"
        )
    if config.attention_dtype == "fp8":
        assert config.fp8_scales is not None
        scales = read_scales(Path(config.fp8_scales), tower.num_hidden_layers).attention
    if config.fp8_inputs is not None:
        items = _file_items(config.fp8_inputs, tower)
    return Fp8Request(
        linears=linears,
        scales=scales,
        items=items,
        inputs=Path(config.fp8_inputs).name if config.fp8_inputs else "random",
        bounds=Bounds(relative_error=config.fp8_max_error, cosine=config.fp8_min_cosine),
        longest=config.budgets[-1] if config.budgets and config.device == "cuda" else None,
    )


def choose_precision(
    checkpoint: Checkpoint,
    request: Fp8Request,
    state: dict[str, Tensor],
    backend: str,
    fp8_backend: str | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], Precision]:
    """Decide what runs in fp8, and quantise it.

    Args:
        checkpoint: what `state` came from; its float32 values are the reference.
        request: something is asked for.
        state: in the build's dtype, by the tower's names, where the program will run.
        backend: of the attention op.
        fp8_backend: of attention in fp8, where that is asked for; None for `backend`.

    Returns:
        The tower's state with what is in fp8, and the record for the manifest.

    Raises:
        VerificationError: nothing that was asked for holds the bound.
        InputError: as `measured_items`.
    """
    tower, bounds = checkpoint.config, request.bounds
    device = state["patch_embed.weight"].device
    exact = load_module_state(checkpoint, torch.float32, device)
    items = measured_items(request, tower, exact)
    if request.items is not None:
        # By these `verify` judges the build: what holds on real items alone would fail there.
        items += measured_items(request._replace(items=None), tower, exact)
    trial = Trial(
        tower,
        state,
        quantised_weights(exact, request.linears),
        attention_scales(request.scales or (), device),
        backend,
        items,
        fp8_backend,
    )
    del exact
    asked = [*request.linears, *([ATTENTION] if request.scales is not None else [])]
    kept, fast = _Search(trial, bounds, device.type == "cuda", progress).run(asked)
    chosen = [name for name in asked if name not in {layer.name for layer in kept}]
    if not chosen:
        raise VerificationError(
            f"no layer holds an error of {bounds.relative_error} and a cosine of "
            f"{bounds.cosine} in fp8; raise fp8_max_error, or leave fp8 out"
        )
    linears = tuple(name for name in chosen if name != ATTENTION)
    # Attention has no products of ours.
    fast = fast and bool(linears)
    measured = trial.measure(chosen, fast)
    return trial.state_with(chosen), Precision(
        linears=linears,
        attention=ATTENTION in chosen,
        fast_accumulation=fast,
        kept=tuple(kept),
        inputs=request.inputs,
        max_error=measured.error,
        min_cosine=measured.cosine,
    )


class Trial:
    """The eager tower in the build's dtype, with any of its layers in fp8."""

    def __init__(
        self,
        tower: TowerConfig,
        state: dict[str, Tensor],
        quantised: dict[str, Tensor],
        scales: dict[str, Tensor],
        backend: str,
        items: Sequence[Item],
        fp8_backend: str | None = None,
    ) -> None:
        self._tower = tower
        self._state = state
        self._quantised = quantised
        self._scales = scales
        self._backend = backend
        self._fp8_backend = fp8_backend or backend
        self._items = items
        self._dtype = state["patch_embed.weight"].dtype

    def state_with(self, names: Collection[str]) -> dict[str, Tensor]:
        """The tower's state with the named layers in fp8."""
        wanted = set(names)
        changed = {
            name: tensor
            for name, tensor in self._quantised.items()
            if name.rpartition(".")[0] in wanted
        }
        return {**self._state, **changed, **(self._scales if ATTENTION in wanted else {})}

    def work(self, name: str) -> float:
        """Multiplications of a layer for one row of patches."""
        config = self._tower
        if name == ATTENTION:
            return config.num_hidden_layers * 2 * config.hidden_size * _ATTENDED_ROWS
        work = self._quantised[f"{name}.weight"].numel()
        return work / config.patches_per_token if name.startswith("merger.") else work

    def measure(
        self, names: Collection[str], fast: bool, most_items: int | None = None
    ) -> Measured:
        """How far the tower is from eager float32 with the named layers in fp8.

        On the first `most_items` items; on all unless said.
        """
        backend = self._fp8_backend if ATTENTION in names else self._backend
        tower = make_tower(self._tower, self.state_with(names), backend, fast_accumulation=fast)
        errors, cosines = [], []
        for item in self._items[:most_items]:
            got = eager(tower, item.pixels.to(self._dtype), item.grid).to(torch.float32)
            errors.append(relative_error(got, item.expected))
            cosines.append(float(torch.cosine_similarity(got, item.expected, dim=1).min()))
        return Measured(largest(errors), smallest(cosines))


class _Search:
    """Finds the layers to keep in the build's dtype."""

    def __init__(
        self, trial: Trial, bounds: Bounds, has_fast: bool, progress: Progress | None
    ) -> None:
        assert bounds.relative_error is not None
        assert bounds.cosine is not None
        self._trial = trial
        # What other items must still find room in.
        self._bounds = Bounds(
            relative_error=_ERROR_SHARE * bounds.relative_error,
            cosine=1 - _COSINE_SHARE * (1 - bounds.cosine),
        )
        self._has_fast = has_fast
        self._progress = progress or Progress()

    def run(self, asked: Sequence[str]) -> tuple[list[KeptLayer], bool]:
        """The layers to keep, and whether sums may be kept in fewer bits."""
        for fast in (True, False) if self._has_fast else (False,):
            if self._holds(asked, fast):
                return [], fast
        alone: dict[str, float] = {}
        hopeless: set[str] = set()
        for done, name in enumerate(asked, 1):
            # Attention is another thing over many rows; a product is not.
            most_items = None if name == ATTENTION else 1
            error, cosine = self._trial.measure([name], False, most_items)
            # A layer that makes the result NaN is the worst there is.
            alone[name] = min(error, _USELESS) if error == error else _USELESS
            if not self._is_within(error, cosine):
                hopeless.add(name)
            self._progress.advance(done, len(asked))

        def price(name: str) -> tuple[bool, float]:
            # Errors of layers add up as squares do.
            return name in hopeless, alone[name] ** 2 / self._trial.work(name)

        ranked = sorted(asked, key=price, reverse=True)
        fewest, most = 1, len(ranked)
        while fewest < most:
            middle = (fewest + most) // 2
            if self._holds(ranked[middle:], False):
                most = middle
            else:
                fewest = middle + 1
        fast = self._has_fast and self._holds(ranked[fewest:], True)
        return [KeptLayer(name=name, error=alone[name]) for name in ranked[:fewest]], fast

    def _holds(self, names: Collection[str], fast: bool) -> bool:
        return self._is_within(*self._trial.measure(names, fast))

    def _is_within(self, error: float, cosine: float) -> bool:
        return not broken_bound(self._bounds, _GRIDS[0], error, cosine, None)


def measured_items(request: Fp8Request, tower: TowerConfig, exact: dict[str, Tensor]) -> list[Item]:
    """What is measured on, with what eager float32 makes of it.

    Raises:
        InputError: eager float32 makes nothing finite of an item.
    """
    reference = make_tower(tower, exact, "TORCH_SDPA")
    device = exact["patch_embed.weight"].device
    items = []
    given = request.items or _random_items(tower, request.longest)
    for number, (pixels, grid) in enumerate(given):
        on_device = pixels.to(device, torch.float32)
        expected = eager(reference, on_device, grid)
        if not bool(expected.isfinite().all()):
            raise InputError(
                f"fp8_inputs {request.inputs}: item {number} has pixels that are too large for "
                "the encoder; expected normalised pixels"
            )
        items.append(Item(on_device, grid, expected))
    return items


def _random_items(tower: TowerConfig, longest: int | None) -> list[tuple[Tensor, Grid]]:
    fitting = [grid for grid in _GRIDS if grid[0] <= tower.vision_segment_max_frames]
    grids = [*fitting, (_CLIP_FRAMES, 2, 2)]
    if longest is not None:
        grids.append(one_item(longest))
    return [(random_pixels(grid, tower.patch_dim), grid) for grid in grids]


def _file_items(name: str, tower: TowerConfig) -> list[tuple[Tensor, Grid]]:
    """The first items of a file."""
    pixel_values, grid_thw = read_rows(name)
    try:
        batch = check_batch(pixel_values, grid_thw, tower)
    except InputError as error:
        raise InputError(f"fp8_inputs {name}: {error}") from None
    if not batch.grids:
        raise InputError(f"fp8_inputs {name}: holds no items; expected at least one")
    if not bool(pixel_values.isfinite().all()):
        raise InputError(f"fp8_inputs {name}: has pixels that are not finite")
    return [
        (pixel_values[start:end], grid)
        for start, end, grid in zip(batch.starts[:-1], batch.starts[1:], batch.grids, strict=True)
    ][:_MOST_ITEMS]
