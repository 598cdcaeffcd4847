"""An artifact in fp8 on CUDA: products and attention, bits, both programs, and the judge.

Compared with: the CPU forms of the ops, which compute with the numbers that fp8 stands for; the
eager float32 tower; and calls of the same encoder in the same bucket, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import BUDGETS, GOLDEN_CHECKPOINT, HAS_FA3, MAX_ITEMS
from gpu_support import SMALL, Eager, Grid, pixels_of

pytestmark = pytest.mark.gpu

ERROR, COSINE = 0.6, 0.5


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that can be in fp8 here is: the bounds of so small an encoder are wide."""
    from m3compile.config import BuildConfig
    from m3compile.config.scales import Fp8Scales, LayerScales, write_scales
    from m3compile.pipeline import build

    folder = tmp_path_factory.mktemp("fp8")
    write_scales(folder / "scales.json", Fp8Scales((LayerScales(0.04, 0.03, 0.02),) * 3, {}))
    config = BuildConfig(
        checkpoint=str(GOLDEN_CHECKPOINT),
        out=str(folder / "fp8"),
        device="cuda",
        budgets=BUDGETS,
        max_items=MAX_ITEMS,
        linear_dtype="fp8",
        attention_dtype="fp8" if HAS_FA3 else None,
        fp8_scales=str(folder / "scales.json") if HAS_FA3 else None,
        fp8_max_error=ERROR,
        fp8_min_cosine=COSINE,
    )
    return build(config).path


@pytest.fixture
def encoder(artifact: Path) -> Iterator:
    from m3compile.loading import load

    with load(artifact) as loaded:
        yield loaded


@pytest.mark.parametrize("rows", [1, 4, 21, 40])
def test_the_widest_product_of_the_full_encoder_has_a_kernel_for_few_rows(rows: int) -> None:
    from m3compile.kernels.fp8 import Fp8Linear, quantise_rows, quantise_weight

    layer = Fp8Linear(24576, 6144, True).cuda()
    layer.weight.data, layer.weight_scale.data = quantise_weight(torch.randn(6144, 24576).cuda())
    layer.bias.data = torch.zeros(6144, device="cuda", dtype=torch.bfloat16)
    got = layer(quantise_rows(torch.randn(rows, 24576).cuda()))
    assert got.shape == (rows, 6144)
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("rows", [4, 36, 1000])
@pytest.mark.parametrize("fast", [False, True])
def test_products_are_those_of_the_cpu(rows: int, fast: bool) -> None:
    from m3compile.kernels.fp8 import Fp8Linear, Fp8Rows, quantise_rows, quantise_weight
    from m3compile.verify import relative_error

    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((rows, 1280), (640, 1280), (640,))
    )
    x[1] *= 1000
    x[2] = float("nan")
    layer = Fp8Linear(1280, 640, fast)
    layer.weight.data, layer.weight_scale.data = quantise_weight(weight)
    layer.bias.data = bias.bfloat16()
    rows_fp8 = quantise_rows(x)
    expected = layer(rows_fp8)
    got = layer.cuda()(Fp8Rows(*(part.cuda() for part in rows_fp8))).cpu()
    assert got[2].isnan().all()
    keep = torch.arange(rows) != 2
    assert relative_error(got[keep].float(), expected[keep].float()) < (2e-2 if fast else 5e-3)


@pytest.mark.fa3
@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("num_rows", [300, 2048, 16384])
def test_attention_is_that_of_the_cpu(num_rows: int, mean: float) -> None:
    from m3compile.attention import attention_schedule, fp8_attention
    from m3compile.verify import relative_error

    heads, dim = 4, 80
    generator = torch.Generator().manual_seed(num_rows)
    # Side by side, as a fused product leaves them.
    fused = torch.randn((num_rows, 3, heads, dim), generator=generator)
    fused[:, 2] += mean
    scales = torch.tensor([[0.012], [0.013], [0.014]])
    fused = (fused / scales[:, None]).to(torch.float8_e4m3fn)
    real = num_rows - 20
    bounds = torch.tensor([0, 4, 4, 132, real, real], dtype=torch.int32)
    expected = fp8_attention(*fused.unbind(1), scales, bounds, "TORCH_SDPA")
    on_device = [*fused.cuda().unbind(1), scales.cuda(), bounds.cuda()]
    schedule = attention_schedule(on_device[4], num_rows, heads, dim, "FLASH_ATTN_3", True)
    assert not on_device[0].is_contiguous()
    for given in (None, schedule):
        got = fp8_attention(*on_device, "FLASH_ATTN_3", given).cpu()
        assert got.dtype == torch.bfloat16
        # The softmax's weights are in e4m3 there.
        assert relative_error(got[:real].float(), expected[:real]) < 0.05


def test_what_is_in_fp8(artifact: Path) -> None:
    from m3compile.artifact import read_manifest

    manifest = read_manifest(artifact)
    assert manifest.precision is not None
    assert len(manifest.precision.linears) == 16
    assert manifest.few_rows_tokens == 64
    if manifest.build.attention_dtype == "fp8":
        faster = "in fp8" in manifest.provenance.attention_reason
        assert manifest.precision.attention or not faster


def test_the_judge_passes_it(artifact: Path) -> None:
    from m3compile.verify import verify

    report = verify(artifact, GOLDEN_CHECKPOINT)
    assert report.passed, report.summary
    assert len(report.worst_tokens) == 10


@pytest.mark.parametrize("budget", [16, 64, 256, 576, None])
def test_embeddings_are_near_eager(budget: int | None, encoder) -> None:
    from m3compile.verify import relative_error

    grid: Grid = (1, 4, 12) if budget == 16 else SMALL
    pixels = pixels_of(grid)
    (got,) = encoder.encode_at(pixels, [grid], budget)
    expected, _ = Eager().expect(pixels, grid)
    assert 0.01 < relative_error(got.float(), expected) < ERROR


@pytest.mark.parametrize("budget", [64, 256, None])
@pytest.mark.parametrize("bad", [float("nan"), 1e4])
def test_neighbours_keep_their_bits(budget: int | None, bad: float, encoder) -> None:
    grids: list[Grid] = [(1, 4, 4), (1, 4, 6), (2, 4, 4)]
    parts = [pixels_of(grid) for grid in grids]
    clean = encoder.encode_at(parts, grids, budget)
    parts[1] = torch.full_like(parts[1], bad)
    results = encoder.encode_at(parts, grids, budget)
    assert bool(results[1].isnan().all()) == (bad != 1e4)
    for index in (0, 2):
        assert torch.equal(results[index], clean[index])


@pytest.mark.parametrize("budget", [64, 256])
def test_padding_changes_nothing(budget: int, encoder) -> None:
    """What an earlier replay left in the buffers: NaN, then large numbers."""
    grid: Grid = (1, 4, 4)
    pixels = pixels_of(grid)
    (alone,) = encoder.encode_at(pixels, [grid], budget)
    full: Grid = (1, 2, 2 * budget)
    for filling in (float("nan"), 1e4):
        encoder.encode_at(torch.full((4 * budget, 1176), filling), [full], budget)
        (again,) = encoder.encode_at(pixels, [grid], budget)
        assert torch.equal(again, alone)
