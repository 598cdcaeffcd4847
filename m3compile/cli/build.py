"""`build`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from m3compile.cli.console import StageProgress, counted, stderr, stdout
from m3compile.cli.precision import fp8_line
from m3compile.config.bounds import FP8_MAX_ERROR, FP8_MIN_COSINE
from m3compile.config.build import (
    ATTENTION_NAMES,
    DEVICES,
    DTYPES,
    ENGINES,
    BuildConfig,
    build_config_from_mapping,
    load_build_config,
)
from m3compile.errors import ConfigError

_DEFAULT_CONFIG = Path("build.yaml")


@click.command()
@click.argument("checkpoint", required=False)
@click.option(
    "--out", help="Folder of the artifact. Default: exported/ plus the checkpoint's name."
)
@click.option(
    "--config", "config_file", help="Build config, YAML. Default: ./build.yaml if it exists."
)
@click.option("--device", help=f"{' or '.join(DEVICES)}. Default: cuda if there is one.")
@click.option("--dtype", help=f"{' or '.join(DTYPES)}. Default: bfloat16 on cuda, float32 on cpu.")
@click.option("--budgets", help="Token budgets, increasing, such as 64,128,256.")
@click.option("--max-items", help="Most segments in one run. Default: 128.")
@click.option("--attention", help=f"One of {', '.join(ATTENTION_NAMES)}. Default: auto.")
@click.option("--engine", help=f"{' or '.join(ENGINES)}. Default: aoti.")
@click.option("--linear-dtype", help="fp8 for linear layers in fp8. Default: the dtype.")
@click.option("--attention-dtype", help="fp8, with --fp8-scales. Default: the dtype.")
@click.option("--fp8-scales", metavar="FILE", help="Static scales, of calibrate or of vLLM.")
@click.option(
    "--fp8-inputs",
    metavar="FILE",
    help="Safetensors file with pixel_values and grid_thw, to decide on what may be in fp8.",
)
@click.option(
    "--fp8-max-error", help=f"Largest relative error of an item. Default: {FP8_MAX_ERROR}."
)
@click.option("--fp8-min-cosine", help=f"Smallest cosine of a token. Default: {FP8_MIN_COSINE}.")
@click.option("--force", is_flag=True, help="Replace an artifact of the same name.")
def build(config_file: str | None, **flags: Any) -> None:
    """Compile CHECKPOINT, verify it against eager, and write an artifact.

    Without a checkpoint and without a build.yaml that names one, the tiny encoder with random
    weights is built: a first try, whose embeddings mean nothing.
    """
    config = _read_config(config_file, flags)
    from m3compile.pipeline import build as run_build

    console = stderr()
    if config.checkpoint is None:
        console.print("No checkpoint given: building the tiny encoder with random weights.")
    with StageProgress() as progress:
        report = run_build(config, progress)
    for warning in report.warnings:
        console.print(f"warning: {warning}", markup=False)
    manifest = report.manifest
    weights = manifest.files["weights.safetensors"].size
    out = stdout()
    out.print(f"Built {report.path} in {sum(report.seconds.values()):.0f} s", markup=False)
    out.print(f"  verified against eager: {report.verification.summary}", markup=False)
    out.print(
        f"  {manifest.requirements.device}, {manifest.dtype}, attention "
        f"{manifest.requirements.attention_backend} ({manifest.provenance.attention_reason})",
        markup=False,
    )
    if manifest.precision is not None:
        out.print(f"  {fp8_line(manifest.precision)}", markup=False)
    out.print(
        f"  {counted(len(manifest.ladder), 'budget')} from {manifest.ladder[0]} to "
        f"{manifest.ladder[-1]} tokens, weights {weights / 1e6:.1f} MB",
        markup=False,
    )
    if manifest.provenance.weights == "random":
        out.print("  The weights are random: its embeddings mean nothing.", markup=False)


def _read_config(config_file: str | None, flags: dict[str, Any]) -> BuildConfig:
    overrides = {key: value for key, value in flags.items() if value not in (None, False)}
    if "budgets" in overrides:
        overrides["budgets"] = [
            _whole_number(part, "--budgets") for part in overrides["budgets"].split(",")
        ]
    if "max_items" in overrides:
        overrides["max_items"] = _whole_number(overrides["max_items"], "--max-items")
    for key in ("fp8_max_error", "fp8_min_cosine"):
        if key in overrides:
            overrides[key] = _number(overrides[key], f"--{key.replace('_', '-')}")
    if config_file is not None:
        return load_build_config(Path(config_file), overrides)
    # A link to nothing is a mistake to report, not a folder without a config.
    if os.path.lexists(_DEFAULT_CONFIG):
        stderr().print(f"config: {_DEFAULT_CONFIG}", markup=False)
        return load_build_config(_DEFAULT_CONFIG, overrides)
    return build_config_from_mapping(overrides, "build")


def _number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{flag} has {text!r}; allowed: a number between 0 and 1") from None


def _whole_number(text: str, flag: str) -> int:
    try:
        return int(text.strip())
    except ValueError:
        raise ConfigError(f"{flag} has {text!r}; allowed: whole numbers") from None
