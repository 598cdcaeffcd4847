"""Which layers may be in fp8: the choice against the error that this file measures itself.

Errors are of the eager tower with the chosen layers in fp8, on the choice's own items and on
others, against eager float32.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from conftest import GOLDEN_CHECKPOINT
from helpers import Grid, error_of, random_rows
from safetensors.torch import save_file
from torch import Tensor

from m3compile.build.resolve import resolve
from m3compile.config import Bounds, BuildConfig, TowerConfig
from m3compile.config.scales import Fp8Scales, LayerScales, write_scales
from m3compile.errors import (
    ConfigError,
    InputError,
    InputNotFoundError,
    VerificationError,
)
from m3compile.kernels.fp8 import Fp8Linear
from m3compile.precision import (
    ATTENTION,
    Fp8Request,
    Measured,
    _Search,
    choose_precision,
    fp8_request,
    measured_items,
)
from m3compile.tower import Tower, make_tower
from m3compile.verify import eager
from m3compile.weights import (
    Checkpoint,
    fp8_linears,
    load_module_state,
    open_checkpoint,
    whole_state,
)

GRIDS: list[Grid] = [(1, 16, 16), (1, 12, 20), (2, 8, 8)]


def request(**options: object) -> Fp8Request:
    base = BuildConfig(checkpoint=str(GOLDEN_CHECKPOINT), device="cpu", linear_dtype="fp8")
    tower = open_checkpoint(GOLDEN_CHECKPOINT).config
    return fp8_request(resolve(msgspec.structs.replace(base, **options)), tower)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(GOLDEN_CHECKPOINT)


@pytest.fixture(scope="module")
def state(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return load_module_state(checkpoint, torch.float32)


@pytest.fixture(scope="module")
def scales(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("scales") / "scales.json"
    write_scales(path, Fp8Scales((LayerScales(0.04, 0.04, 0.02),) * 3, {}))
    return str(path)


def measured(tower: Tower, exact: Tower) -> tuple[float, float]:
    """The largest error of an item and the smallest cosine, on this file's items."""
    errors, cosines = [], []
    for grid in GRIDS:
        rows = random_rows([grid], seed=7)
        got, expected = eager(tower, rows, grid), eager(exact, rows, grid)
        errors.append(error_of(got, expected))
        cosines.append(float(torch.cosine_similarity(got, expected, dim=1).min()))
    return max(errors), min(cosines)


def work_of(name: str, state: dict[str, Tensor]) -> float:
    """Multiplications for a row of patches; four of them share one of the merger."""
    return state[f"{name}.weight"].numel() / (4 if name.startswith("merger.") else 1)


def test_all_of_it_where_the_bound_is_wide(
    checkpoint: Checkpoint, state: dict[str, Tensor], scales: str, eager_tower: Tower
) -> None:
    asked = request(attention_dtype="fp8", fp8_scales=scales, fp8_max_error=0.6, fp8_min_cosine=0.5)
    changed, precision = choose_precision(checkpoint, asked, state, "TORCH_SDPA")
    assert precision.linears == fp8_linears(checkpoint.config)
    assert len(precision.linears) == 3 * 4 + 4
    assert precision.attention
    assert not precision.kept
    assert precision.inputs == "random"
    assert 0.01 < precision.max_error < 0.6 * 0.95
    for name in precision.linears:
        assert changed[f"{name}.weight"].dtype == torch.float8_e4m3fn
        rows = state[f"{name}.weight"].shape[0]
        assert changed[f"{name}.weight_scale"].shape == (rows,)
    assert changed["patch_embed.weight"] is state["patch_embed.weight"]
    for index in range(3):
        expected = torch.tensor([[0.04], [0.04], [0.02]])
        assert torch.equal(changed[f"layers.{index}.attention_scales"], expected)
    # The record is what the eager tower shows, and other items show the like.
    error, cosine = measured(make_tower(checkpoint.config, changed, "TORCH_SDPA"), eager_tower)
    assert error == pytest.approx(precision.max_error, rel=0.5)
    assert cosine < 1


def test_a_tighter_bound_keeps_more_and_holds(
    checkpoint: Checkpoint, state: dict[str, Tensor], eager_tower: Tower
) -> None:
    previous = 0
    for bound in (0.15, 0.08):
        asked = request(fp8_max_error=bound, fp8_min_cosine=0.5)
        changed, precision = choose_precision(checkpoint, asked, state, "TORCH_SDPA")
        names = [kept.name for kept in precision.kept]
        assert len(names) > previous
        previous = len(names)
        # First what breaks the bound alone, then the most error for the least work; all are there.
        prices = [
            (kept.error > 0.95 * bound, kept.error**2 / work_of(kept.name, state))
            for kept in precision.kept
        ]
        assert prices == sorted(prices, reverse=True)
        assert sorted([*names, *precision.linears]) == sorted(fp8_linears(checkpoint.config))
        assert precision.max_error <= bound
        for name in names:
            assert changed[f"{name}.weight"] is state[f"{name}.weight"]
            assert f"{name}.weight_scale" not in changed
        tower = make_tower(checkpoint.config, changed, "TORCH_SDPA")
        assert measured(tower, eager_tower)[0] <= bound
        # No fewer would do: with one of them less, the choice's own room is used up.
        back = names[-1]
        fewer, _ = choose_precision(
            checkpoint, request(fp8_max_error=0.9, fp8_min_cosine=0.1), state, "TORCH_SDPA"
        )
        for part in ("weight", "weight_scale"):
            changed[f"{back}.{part}"] = fewer[f"{back}.{part}"]
        error, _ = measured(make_tower(checkpoint.config, changed, "TORCH_SDPA"), eager_tower)
        assert error > 0.8 * bound


def test_the_bound_of_the_cosine_counts_too(
    checkpoint: Checkpoint, state: dict[str, Tensor]
) -> None:
    asked = request(fp8_max_error=0.9, fp8_min_cosine=0.98)
    _, precision = choose_precision(checkpoint, asked, state, "TORCH_SDPA")
    assert precision.kept
    assert precision.min_cosine >= 0.985


def test_outlier_channels_are_noticed(checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
    """Gains that are 50 times larger in four channels make the layer behind them stand out."""
    asked = request(fp8_max_error=0.21, fp8_min_cosine=0.85)
    spoiled = dict(state)
    gains = state["layers.1.norm1.weight"].clone()
    gains[[3, 50, 90, 120]] *= 50
    spoiled["layers.1.norm1.weight"] = gains

    class Spoiled:
        """The checkpoint with those gains."""

        config = checkpoint.config

    results = {}
    for name, given in (("clean", state), ("outliers", spoiled)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("m3compile.precision.load_module_state", lambda *_, g=given: dict(g))
            _, results[name] = choose_precision(Spoiled(), asked, given, "TORCH_SDPA")
    assert not results["clean"].kept
    kept = {layer.name: layer.error for layer in results["outliers"].kept}
    assert kept["layers.1.qkv"] > 0.1
    assert results["outliers"].max_error <= 0.21


def test_attention_is_one_of_the_layers(
    checkpoint: Checkpoint, state: dict[str, Tensor], tmp_path: Path
) -> None:
    """Scales that cut most of the numbers off."""
    path = tmp_path / "scales.json"
    write_scales(path, Fp8Scales((LayerScales(1e-4, 1e-4, 1e-4),) * 3, {}))
    asked = request(
        attention_dtype="fp8", fp8_scales=str(path), fp8_max_error=0.3, fp8_min_cosine=0.8
    )
    changed, precision = choose_precision(checkpoint, asked, state, "TORCH_SDPA")
    assert [kept.name for kept in precision.kept] == [ATTENTION]
    assert not precision.attention
    assert len(precision.linears) == 16
    assert not any(name.endswith("attention_scales") for name in changed)


def test_nothing_holds(checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
    asked = request(fp8_max_error=1e-4)
    with pytest.raises(VerificationError, match=r"no layer holds an error of 0.0001.*leave fp8"):
        choose_precision(checkpoint, asked, state, "TORCH_SDPA")


def test_a_cheap_layer_that_holds_alone() -> None:
    """Much work makes a large error look small, also where that error is past the bound."""
    errors, works = {"wide": 0.1, "narrow": 0.05}, {"wide": 1000.0, "narrow": 10.0}

    class Trial:
        def measure(self, names: list[str], fast: bool, most_items: int = 16) -> Measured:
            return Measured(math.hypot(*(errors[name] for name in names)), 1.0)

        def work(self, name: str) -> float:
            return works[name]

    search = _Search(Trial(), Bounds(relative_error=0.07, cosine=0.9), False, None)
    kept, _ = search.run(list(errors))
    assert [layer.name for layer in kept] == ["wide"]


def test_attention_that_fails_over_many_rows_stays_out_first() -> None:
    """It holds on a thumbnail, where layers are ranked, and is the cheapest by its error there."""
    names = [*(f"layers.{index}.fc1" for index in range(8)), ATTENTION]

    class Trial:
        def measure(self, names: list[str], fast: bool, most_items: int | None = None) -> Measured:
            is_long = most_items is None and ATTENTION in names
            return Measured(0.3 if is_long else 0.01 * math.sqrt(len(names)), 0.99)

        def work(self, name: str) -> float:
            return 100.0 if name == ATTENTION else 1.0

    search = _Search(Trial(), Bounds(relative_error=0.07, cosine=0.9), False, None)
    kept, _ = search.run(names)
    assert [(layer.name, layer.error) for layer in kept] == [(ATTENTION, 0.3)]


def test_on_a_gpu_the_longest_image_counts(
    checkpoint: Checkpoint, state: dict[str, Tensor]
) -> None:
    asked = resolve(BuildConfig(device="cpu", linear_dtype="fp8", budgets=(64, 96)))
    assert fp8_request(asked, checkpoint.config).longest is None
    on_gpu = fp8_request(msgspec.structs.replace(asked, device="cuda"), checkpoint.config)
    items = measured_items(on_gpu, checkpoint.config, state)
    assert items[0].grid == (1, 16, 16)
    assert items[-1].grid == (1, 16, 24)
    assert items[-1].expected.shape == (96, checkpoint.config.output_size)


def test_the_choice_holds_where_verify_looks(
    checkpoint: Checkpoint, state: dict[str, Tensor], eager_tower: Tower, tmp_path: Path
) -> None:
    """Items that fp8 serves well say nothing of the random ones, by which a build is judged."""
    path = tmp_path / "flat.safetensors"
    # More than are read.
    grids: list[Grid] = [(1, 8, 8)] * 20
    pixels = torch.full((20 * 64, 1176), 2.0)
    save_file({"pixel_values": pixels, "grid_thw": torch.tensor(grids)}, path)
    asked = request(fp8_inputs=str(path), fp8_max_error=0.13, fp8_min_cosine=0.9)
    changed, precision = choose_precision(checkpoint, asked, state, "TORCH_SDPA")
    assert precision.inputs == "flat.safetensors"
    tower = make_tower(checkpoint.config, changed, "TORCH_SDPA")
    assert measured(tower, eager_tower)[0] <= 0.13


def test_each_attention_has_its_own_backend(
    checkpoint: Checkpoint, state: dict[str, Tensor], scales: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[str, bool]] = set()

    def recorded(
        config: TowerConfig, state: dict[str, Tensor], backend: str, **options: bool
    ) -> Tower:
        seen.add((backend, "layers.0.attention_scales" in state))
        return make_tower(config, state, "TORCH_SDPA", **options)

    monkeypatch.setattr("m3compile.precision.make_tower", recorded)
    asked = request(attention_dtype="fp8", fp8_scales=scales, fp8_min_cosine=0.5)
    choose_precision(checkpoint, asked, state, "FLASH_ATTN_3_4", "FLASH_ATTN_3")
    assert seen == {("TORCH_SDPA", False), ("FLASH_ATTN_3_4", False), ("FLASH_ATTN_3", True)}


def test_real_inputs(checkpoint: Checkpoint, state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "items.safetensors"
    grids: list[Grid] = [(1, 4, 4), (2, 4, 6)]
    rows = random_rows(grids)
    save_file({"pixel_values": rows, "grid_thw": torch.tensor(grids)}, path)
    options = {"fp8_max_error": 0.6, "fp8_min_cosine": 0.5}
    _, found = choose_precision(
        checkpoint, request(fp8_inputs=str(path), **options), state, "TORCH_SDPA"
    )
    _, other = choose_precision(checkpoint, request(**options), state, "TORCH_SDPA")
    assert found.inputs == "items.safetensors"
    assert found.max_error != other.max_error


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (None, InputNotFoundError, "no such file"),
        ({"pixel_values": torch.zeros(4, 1176)}, InputError, "grid_thw is missing"),
        (
            {"pixel_values": torch.zeros(0, 1176), "grid_thw": torch.zeros(0, 3).long()},
            InputError,
            "holds no items",
        ),
        (
            {"pixel_values": torch.zeros(5, 1176), "grid_thw": torch.tensor([[1, 2, 2]])},
            InputError,
            "fp8_inputs .*has 5 rows",
        ),
        (
            {
                "pixel_values": torch.full((4, 1176), float("nan")),
                "grid_thw": torch.tensor([[1, 2, 2]]),
            },
            InputError,
            "not finite",
        ),
    ],
)
def test_bad_inputs(
    tmp_path: Path, tensors: dict[str, Tensor] | None, error: type[Exception], message: str
) -> None:
    path = tmp_path / "items.safetensors"
    if tensors is not None:
        save_file(tensors, path)
    with pytest.raises(error, match=message):
        request(fp8_inputs=str(path))


def test_inputs_that_are_too_large(
    checkpoint: Checkpoint, state: dict[str, Tensor], tmp_path: Path
) -> None:
    """Finite pixels behind ordinary ones, of which eager float32 makes NaN."""
    path = tmp_path / "items.safetensors"
    rows = random_rows([(1, 4, 4)] * 2)
    rows[16:] = 1e38
    save_file({"pixel_values": rows, "grid_thw": torch.tensor([[1, 4, 4]] * 2)}, path)
    with pytest.raises(InputError, match=r"items.safetensors: item 1 has pixels .*too large"):
        choose_precision(checkpoint, request(fp8_inputs=str(path)), state, "TORCH_SDPA")


def test_a_nan_is_not_lost_behind_numbers(
    checkpoint: Checkpoint, state: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fp8 that spoils the last item alone: a bound that is this wide would hold without it."""

    def spoiled(tower: Tower, pixels: Tensor, grid: Grid) -> Tensor:
        result = eager(tower, pixels, grid)
        is_fp8 = any(isinstance(part, Fp8Linear) for part in tower.modules())
        return result * float("nan") if is_fp8 and grid == (2, 8, 8) else result

    monkeypatch.setattr("m3compile.precision.eager", spoiled)
    with pytest.raises(VerificationError, match="no layer holds"):
        choose_precision(
            checkpoint, request(fp8_max_error=0.9, fp8_min_cosine=0.1), state, "TORCH_SDPA"
        )


def test_scales_of_another_encoder(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    write_scales(path, Fp8Scales((LayerScales(0.1, 0.1, 0.1),) * 2, {}))
    with pytest.raises(ConfigError, match="layer 2 is missing"):
        request(attention_dtype="fp8", fp8_scales=str(path))


def test_an_encoder_of_odd_sizes() -> None:
    tower = msgspec.structs.replace(
        open_checkpoint(GOLDEN_CHECKPOINT).config,
        hidden_size=2 * 12,
        intermediate_size=40,
        projector_hidden_size=20,
        output_size=12,
    )
    asked = resolve(BuildConfig(device="cpu", linear_dtype="fp8"))
    with pytest.raises(ConfigError, match="multiples of 16; leave linear_dtype out"):
        fp8_request(asked, tower)


def test_there_and_back(checkpoint: Checkpoint, state: dict[str, Tensor], scales: str) -> None:
    asked = request(attention_dtype="fp8", fp8_scales=scales, fp8_max_error=0.6, fp8_min_cosine=0.5)
    changed, _ = choose_precision(checkpoint, asked, state, "TORCH_SDPA")
    whole = whole_state(changed, torch.float32)
    assert whole.keys() == state.keys()
    for name, tensor in whole.items():
        assert tensor.dtype == torch.float32
        if name.removesuffix(".weight") in fp8_linears(checkpoint.config):
            # e4m3 rounds to an eighth of a power of two; half a step, channel by channel.
            assert 0 < error_of(tensor, state[name]) < 0.04
            step = state[name].abs().amax(1, keepdim=True) / 448
            off = (tensor - state[name]).abs()
            assert bool((off <= state[name].abs() / 16 + step * 2**-9).all())
        else:
            assert torch.equal(tensor, state[name])
