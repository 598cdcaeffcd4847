"""An artifact in fp8 on the CPU: its numbers, its independence of neighbours, its record.

Compared with: the eager float32 tower whose weights, inputs of linear layers, q, k and v this file
itself rounds to e4m3; and calls of the same encoder in the same bucket, bit for bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import GOLDEN_CHECKPOINT
from crafted import change_weights, edited
from fake_compiler import NO_REPORT, use_golden_program
from helpers import Grid, assert_same_bits, eager, error_of, random_rows, split_rows
from torch import Tensor, nn

import m3compile
from m3compile import Encoder, pipeline
from m3compile.artifact import MANIFEST, read_manifest
from m3compile.attention import Choice
from m3compile.bench import bench
from m3compile.bench.request import make_request
from m3compile.build.resolve import resolve
from m3compile.cli.app import main
from m3compile.config import BuildConfig, build_config_from_mapping
from m3compile.config.scales import Fp8Scales, LayerScales, write_scales
from m3compile.errors import ArtifactDamagedError, BuildError, ConfigError, ExitCode, RequestError
from m3compile.kernels import kernels
from m3compile.kernels.fp8 import Fp8Linear, quantise_rows, quantise_weight
from m3compile.kernels.plain_form import PlainForm
from m3compile.onnx_export import export_onnx
from m3compile.pipeline import build
from m3compile.tower import Tower, make_tower
from m3compile.verify import verify, verify_encoder
from m3compile.weights import load_module_state, open_checkpoint

SCALES = (0.04, 0.03, 0.02)
GRIDS: list[Grid] = [(1, 4, 4), (1, 4, 6), (2, 4, 4)]
MIDDLE = 1


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything in fp8: the bounds of so small an encoder are wide."""
    folder = tmp_path_factory.mktemp("fp8")
    write_scales(folder / "scales.json", Fp8Scales((LayerScales(*SCALES),) * 3, {}))
    config = BuildConfig(
        checkpoint=str(GOLDEN_CHECKPOINT),
        out=str(folder / "fp8"),
        device="cpu",
        budgets=(16, 64),
        max_items=8,
        linear_dtype="fp8",
        attention_dtype="fp8",
        fp8_scales=str(folder / "scales.json"),
        fp8_max_error=0.6,
        fp8_min_cosine=0.5,
    )
    return build(config).path


@pytest.fixture
def encoder(artifact: Path) -> Iterator[Encoder]:
    with m3compile.load(artifact) as loaded:
        yield loaded


def e4m3(x: Tensor, scale: Tensor | float) -> Tensor:
    """What of `x` is left after rounding `x / scale` to e4m3."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def by_row(x: Tensor) -> Tensor:
    return e4m3(x, x.abs().amax(-1, keepdim=True) / 448)


class RoundedForm(PlainForm):
    """q, k and v rounded by the static scales."""

    def rotate_heads(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = super().rotate_heads(qkv, cos, sin, num_heads)
        q, k, v = (e4m3(x, scale) for x, scale in zip(heads, SCALES, strict=True))
        return q, k, v


@pytest.fixture(scope="module")
def rounded_tower() -> Tower:
    checkpoint = open_checkpoint(GOLDEN_CHECKPOINT)
    state = load_module_state(checkpoint, torch.float32)
    linears = [
        name.removesuffix(".weight")
        for name, tensor in state.items()
        if tensor.dim() == 2 and name != "patch_embed.weight"
    ]
    rounded = {
        name: by_row(tensor) if name.removesuffix(".weight") in linears else tensor
        for name, tensor in state.items()
    }
    tower = make_tower(checkpoint.config, rounded, "TORCH_SDPA")
    for name in linears:
        linear = tower.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        linear.register_forward_pre_hook(lambda _, inputs: (by_row(inputs[0]),))
    for layer in tower.layers:
        layer.passes = RoundedForm()
    return tower


@pytest.mark.parametrize("budget", [16, 64, None])
def test_the_numbers_are_those_of_rounding(
    budget: int | None, encoder: Encoder, rounded_tower: Tower, eager_tower: Tower
) -> None:
    grids: list[Grid] = [(1, 4, 4), (1, 4, 6)]
    parts = split_rows(random_rows(grids), grids)
    for part, grid, got in zip(parts, grids, encoder.encode_at(parts, grids, budget), strict=True):
        off = error_of(got, eager(rounded_tower, part, grid))
        rounding = error_of(got, eager(eager_tower, part, grid))
        # A last bit of float32 decides where a tie of e4m3 goes, and later layers amplify that:
        # pixels that are a millionth larger move this tower as much.
        assert rounding > 0.05
        assert off < rounding / 3


def test_a_layer_is_that_of_rounding() -> None:
    """Where nothing amplifies: one product, and one attention."""
    x, weight, bias = (torch.randn(*shape) for shape in ((24, 160), (480, 160), (480,)))
    layer = Fp8Linear(160, 480, False)
    layer.weight.data, layer.weight_scale.data = quantise_weight(weight)
    layer.bias.data = bias
    expected = nn.functional.linear(by_row(x), by_row(weight), bias)
    assert error_of(layer(quantise_rows(x)), expected) < 1e-6
    # Nothing, and so little that a scale of it is no number of float32.
    rows = torch.zeros(4, 160)
    rows[1:, 3] = torch.tensor([1e-45, 1e-42, -1e-38])
    torch.testing.assert_close(layer(quantise_rows(rows)), bias.expand(4, 480))

    place = kernels("plain").locate(
        torch.tensor([[1, 4, 4], [1, 2, 4]], dtype=torch.int32), 24, torch.rand(13)
    )
    qkv = torch.randn(24, 480)
    scales = torch.tensor(SCALES)[:, None]
    got = kernels("plain").attend(qkv, place, 2, "TORCH_SDPA", None, scales)
    assert error_of(got, RoundedForm().attend(qkv, place, 2, "TORCH_SDPA", None)) < 1e-6
    assert error_of(got, kernels("plain").attend(qkv, place, 2, "TORCH_SDPA", None)) > 0.01


@pytest.mark.parametrize("budget", [64, None])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e4])
def test_neighbours_keep_their_bits(bad: float, budget: int | None, encoder: Encoder) -> None:
    parts = split_rows(random_rows(GRIDS), GRIDS)
    clean = encoder.encode_at(parts, GRIDS, budget)
    spoiled = parts[MIDDLE].clone()
    spoiled[:] = bad
    parts[MIDDLE] = spoiled
    results = encoder.encode_at(parts, GRIDS, budget)
    middle = results.pop(MIDDLE)
    assert bool(middle.isnan().all()) == (bad != 1e4)
    clean.pop(MIDDLE)
    assert_same_bits(results, clean)
    assert encoder.stats()["nonfinite_items"] == (bad != 1e4)


def test_an_item_has_the_same_bits_alone_and_after_anything(encoder: Encoder) -> None:
    rows = random_rows([GRIDS[0]])
    alone = encoder.encode_at(rows, [GRIDS[0]], 64)
    for filling in (float("nan"), 1e4, 0.0):
        full = torch.full((256, rows.shape[1]), filling)
        encoder.encode_at(full, [(1, 16, 16)], 64)
        assert_same_bits(encoder.encode_at(rows, [GRIDS[0]], 64), alone)
    others = random_rows([(1, 4, 6), (1, 2, 2)], seed=3)
    together = encoder.encode_at(
        torch.cat([others[:24], rows, others[24:]]), [(1, 4, 6), GRIDS[0], (1, 2, 2)], 64
    )
    assert_same_bits(together[1:2], alone)


def test_the_manifest_says_what_runs_in_what(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    precision = manifest.precision
    assert precision is not None
    assert len(precision.linears) == 16
    assert precision.attention
    assert manifest.attention_dtype == "fp8"
    assert not precision.fast_accumulation
    assert (manifest.bounds.relative_error, manifest.bounds.cosine) == (0.6, 0.5)
    assert manifest.bounds.eager_ratio is None
    dtypes = {spec.name: spec.dtype for spec in manifest.weights}
    for name in precision.linears:
        assert dtypes[f"{name}.weight"] == "float8_e4m3fn"
        assert dtypes[f"{name}.weight_scale"] == "float32"
    assert dtypes["patch_embed.weight"] == "float32"
    # A byte a weight, where the checkpoint's float32 artifact has four.
    parameters = sum(
        spec.shape[0] * spec.shape[1]
        for spec in manifest.weights
        if spec.name.removesuffix(".weight") in precision.linears
    )
    whole = sum(path.stat().st_size for path in artifact.glob("weights.safetensors"))
    assert parameters < whole < parameters + 4 * 160 * 1176 + 60_000


def spec_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    (spec,) = (spec for spec in document["weights"] if spec["name"] == name)
    return spec


def without_fp8(document: dict[str, Any]) -> None:
    """An artifact without fp8 that has the bounds of one with it."""
    document["precision"].update(linears=[], attention=False)
    document["weights"] = [
        {**spec, "dtype": "float32"} for spec in document["weights"] if "_scale" not in spec["name"]
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found.update(precision=None), "precision.linears"),
        (lambda found: found["precision"]["linears"].pop(), "precision.linears is ['merger.fc2']"),
        (lambda found: found["precision"]["linears"].append("x"), "precision.linears is ['x']"),
        (lambda found: found["precision"].update(attention=False), "precision.attention is False"),
        (lambda found: found["precision"]["linears"].append("layers.0.qkv"), "scales, once"),
        (lambda found: spec_of(found, "layers.1.attention_scales").update(name="x"), "attention"),
        (
            lambda found: spec_of(found, "layers.1.attention_scales").update(shape=[3]),
            "layers.1.attention_scales float32 [3], expected",
        ),
        (
            lambda found: spec_of(found, "merger.fc1.weight_scale").update(shape=[1]),
            "merger.fc1.weight_scale float32 [1], expected",
        ),
        (
            lambda found: spec_of(found, "merger.fc1.weight").update(dtype="float32"),
            "merger.fc1.weight float32",
        ),
        (
            lambda found: spec_of(found, "patch_embed.weight").update(dtype="float8_e4m3fn"),
            "patch_embed.weight is 'float8_e4m3fn'",
        ),
        (without_fp8, "expected null where nothing is in fp8"),
        (lambda found: found["bounds"].update(relative_error=0.9), "bounds is"),
        (lambda found: found["bounds"].update(relative_error=None, cosine=None), "bounds is"),
    ],
)
def test_a_manifest_that_says_otherwise(
    artifact: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    document = json.loads((artifact / MANIFEST).read_bytes())
    change(document)
    (tmp_path / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(ArtifactDamagedError) as caught:
        read_manifest(tmp_path)
    assert says in str(caught.value)


def test_verify_shows_the_worst_tokens(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify(artifact, GOLDEN_CHECKPOINT)
    assert report.passed
    assert report.bounds.relative_error == 0.6
    assert len(report.worst_tokens) == 10
    cosines = [token.cosine for token in report.worst_tokens]
    assert cosines == sorted(cosines)
    assert cosines[0] == pytest.approx(min(row.min_cosine for row in report.rows))
    # Without the checkpoint, the rounding of the weights is on both sides.
    program_only = verify(artifact)
    assert program_only.reference == "artifact weights"
    worst = [max(row.max_error for row in each.rows) for each in (report, program_only)]
    assert worst[1] < worst[0]
    assert main(["verify", str(artifact), "--checkpoint", str(GOLDEN_CHECKPOINT)]) == 0
    assert "farthest from eager" in capsys.readouterr().out


def test_a_tighter_bound_fails_verification(artifact: Path, tmp_path: Path) -> None:
    manifest = read_manifest(artifact)
    assert manifest.precision is not None
    with m3compile.load(artifact) as loaded:
        bounds = msgspec.structs.replace(manifest.bounds, relative_error=0.01)
        loaded.manifest = msgspec.structs.replace(manifest, bounds=bounds)
        report = verify_encoder(loaded, open_checkpoint(GOLDEN_CHECKPOINT))
    assert not report.passed
    assert "allowed 1e-02" in report.summary


def test_inspect_says_it(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(artifact)]) == ExitCode.OK
    assert "16 linear layers and attention; eager with it has error" in capsys.readouterr().out
    assert main(["inspect", str(artifact), "--json"]) == ExitCode.OK
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["precision"]["linears"]) == 16


def test_bench_against_the_whole_artifact(artifact: Path, golden_artifact: Path) -> None:
    report = bench(artifact, quick=True, budgets=[16], against=golden_artifact)
    assert report.passed
    assert report.subject.precision is not None
    assert "fp8 and float32" in report.title
    assert any(note.startswith("floor: ") for note in report.notes)
    (case,) = [case for case in report.cases if case.kind == "full"]
    # Judged by the whole weights, so that the error is fp8's own.
    assert case.check.error is not None
    assert 0.01 < case.check.error < 0.6
    assert any("golden" in peer.name for peer in case.peers)


def test_who_judges(artifact: Path, golden_artifact: Path, tmp_path: Path) -> None:
    """An artifact in fp8 is judged by its own weights where the other has fp8 as well."""
    other = shutil.copytree(artifact, tmp_path / "other")
    with edited(other) as document:
        document["precision"]["max_error"] += 0.01
    options = {"budgets": None, "quick": True, "traffic": None, "skip_bad": False}
    for subject, against, judge in (
        (artifact, golden_artifact, golden_artifact),
        (golden_artifact, artifact, golden_artifact),
        (artifact, other, artifact),
        (artifact, None, artifact),
    ):
        assert make_request(subject, against=against, **options).reference == judge


def test_another_checkpoint_of_the_same_sizes(
    artifact: Path, golden_artifact: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(golden_artifact, tmp_path / "other")
    change_weights(other, lambda tensors: tensors["patch_embed.weight"].mul_(1.01))
    with pytest.raises(RequestError, match=r"other: has another patch_embed.weight than"):
        bench(artifact, quick=True, budgets=[16], against=other)


def test_onnx_needs_the_checkpoint(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="in fp8; export from the checkpoint"):
        export_onnx(artifact, tmp_path / "x.onnx")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"attention_dtype": "fp8"}, ("fp8_scales", "static scales")),
        ({"fp8_scales": "x.json"}, ("fp8_scales is 'x.json' without attention_dtype",)),
        ({"fp8_inputs": "x"}, ("fp8_inputs is 'x' without linear_dtype",)),
        ({"linear_dtype": "int8"}, ("linear_dtype is 'int8'", "fp8")),
        ({"linear_dtype": "fp8", "fp8_max_error": 0}, ("fp8_max_error is 0", "between 0 and 1")),
        ({"linear_dtype": "fp8", "fp8_max_error": True}, ("fp8_max_error is True",)),
        ({"fp8_max_error": 0.5}, ("fp8_max_error is 0.5 without linear_dtype",)),
        ({"linear_dtype": "fp8", "fp8_min_cosine": "x"}, ("fp8_min_cosine is 'x'",)),
        ({"linear_dtype": "fp8", "fp8_min_cosine": float("nan")}, ("fp8_min_cosine is nan",)),
    ],
)
def test_build_configs_that_are_refused(values: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config_from_mapping(values, "build.yaml")
    for word in words:
        assert word in str(caught.value)


def test_linear_layers_in_another_dtype_than_the_build() -> None:
    config = BuildConfig(device="cpu", dtype="float32", linear_dtype="bfloat16")
    with pytest.raises(ConfigError, match="linear_dtype is 'bfloat16'; allowed: float32"):
        resolve(config)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """A machine with a GPU of some compute capability, as far as `resolve` looks."""

    def set_up(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "SOME GPU")

    return set_up


def test_a_gpu_without_such_products(fake_cuda: Callable[[tuple[int, int]], None]) -> None:
    fake_cuda((8, 0))
    with pytest.raises(ConfigError, match=r"fp8 is asked for on SOME GPU; allowed: .*8\.9"):
        resolve(BuildConfig(device="cuda", linear_dtype="fp8"))
    assert resolve(BuildConfig(device="cuda")).dtype == "bfloat16"
    fake_cuda((9, 0))
    assert resolve(BuildConfig(device="cuda", linear_dtype="fp8")).dtype == "bfloat16"


def test_attention_without_fp8_is_refused_before_the_checkpoint_is_read(
    fake_cuda: Callable[[tuple[int, int]], None], tmp_path: Path
) -> None:
    fake_cuda((9, 0))
    config = BuildConfig(
        checkpoint=str(tmp_path / "none"),
        out=str(tmp_path / "out"),
        attention="FLASH_ATTN_4",
        attention_dtype="fp8",
        fp8_scales="scales.json",
    )
    with pytest.raises(ConfigError, match=r"FLASH_ATTN_4 is refused: .*use auto or FLASH_ATTN_3"):
        build(config)


def test_attention_that_breaks_the_bound_is_not_said_to_be_in_fp8(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scales cut most of the numbers off; the program is another's."""
    use_golden_program(artifact, monkeypatch)
    monkeypatch.setattr(pipeline, "_prove", lambda _, manifest, *__: (manifest, NO_REPORT))

    def choose(name: str, device: str, dtype: str, **_: object) -> Choice:
        return Choice("TORCH_SDPA", f"chosen for {dtype}", ())

    monkeypatch.setattr("m3compile.build.attention.choose_backend", choose)
    config = BuildConfig(
        checkpoint=str(GOLDEN_CHECKPOINT),
        device="cpu",
        linear_dtype="fp8",
        attention_dtype="fp8",
        fp8_scales=str(tmp_path / "scales.json"),
        fp8_max_error=0.3,
        fp8_min_cosine=0.8,
    )
    reasons = []
    for scale in (0.04, 1e-4):
        write_scales(tmp_path / "scales.json", Fp8Scales((LayerScales(*[scale] * 3),) * 3, {}))
        report = build(msgspec.structs.replace(config, out=str(tmp_path / str(scale))))
        reasons.append(report.manifest.provenance.attention_reason)
    assert reasons == [
        "in fp8, chosen for fp8",
        "chosen for float32; fp8 breaks the bound",
    ]


def test_memory_that_is_too_small_for_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate")

    monkeypatch.setattr(pipeline, "choose_precision", choose)
    config = BuildConfig(
        checkpoint=str(GOLDEN_CHECKPOINT), out=str(tmp_path / "a"), device="cpu", linear_dtype="fp8"
    )
    with pytest.raises(BuildError, match=r"^out of device memory: CUDA out of memory\. Tried to$"):
        build(config)
    assert not list(tmp_path.iterdir())


def test_bounds_that_nothing_holds_end_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["build", str(GOLDEN_CHECKPOINT), "--device", "cpu", "--out", str(tmp_path / "a")]
    words += ["--linear-dtype", "fp8", "--fp8-max-error", "1e-4", "--fp8-min-cosine", "0.9"]
    assert main(words) == ExitCode.VERIFICATION
    last = capsys.readouterr().err.splitlines()[-1]
    assert "no layer holds an error of 0.0001 and a cosine of 0.9 in fp8" in last
    assert not list(tmp_path.iterdir())


def test_missing_scales_end_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["build", str(GOLDEN_CHECKPOINT), "--device", "cpu", "--out", str(tmp_path / "a")]
    words += ["--attention-dtype", "fp8", "--fp8-scales", str(tmp_path / "none.json")]
    assert main(words) == ExitCode.REQUEST
    assert "do not exist" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "a").exists()
