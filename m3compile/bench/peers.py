"""The peers of an artifact and the judge of its results, made from the artifact's own weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from m3compile.artifact import Manifest, read_manifest
from m3compile.bench.captured import CapturedEager, PeerModel, graph_capture
from m3compile.bench.judge import Judge
from m3compile.bench.runners import EagerRunner, Runner
from m3compile.config.backends import BACKENDS
from m3compile.loading import load_weights
from m3compile.tower import make_tower
from m3compile.weights import whole_state


class Peers(NamedTuple):
    """Runners to compare with, who judges results, and what was left out."""

    runners: list[Runner]
    judge: Judge
    notes: list[str]


def make_peers(folder: Path, manifest: Manifest, device: torch.device) -> Peers:
    """Eager and, on CUDA, eager captured; both in the artifact's dtype and with its attention.

    A peer that cannot run here is left out, and a note says why.

    Args:
        folder: the artifact whose weights they have, also the judge.
        manifest: of the artifact that is measured; it may be another one of the same checkpoint.
    """
    config, backend = manifest.tower, manifest.requirements.attention_backend
    source = read_manifest(folder)
    weights = load_weights(folder, source, device)
    if source.precision is not None:
        # They run without fp8: on the numbers that the weights stand for.
        weights = whole_state(weights, getattr(torch, manifest.dtype))
    tower = make_tower(config, weights, backend)
    exact = make_tower(config, whole_state(weights, torch.float32), "TORCH_SDPA")
    judge = Judge(exact, None if manifest.dtype == "float32" else tower, manifest.bounds)
    runners: list[Runner] = [EagerRunner(tower)]
    notes: list[str] = []
    refusal = BACKENDS[backend].capture_refusal
    if device.type != "cuda":
        notes.append("eager captured: left out, there are no CUDA graphs on a CPU")
    elif refusal is not None:
        notes.append(f"eager captured: left out, {backend} cannot be captured: {refusal}")
    else:
        try:
            runners.append(_captured(manifest, weights, device, notes))
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            notes.append(f"eager captured: left out, it does not run here: {reason}")
    return Peers(runners, judge, notes)


def _captured(
    manifest: Manifest, weights: dict[str, Tensor], device: torch.device, notes: list[str]
) -> CapturedEager:
    passes = "triton"
    if importlib.util.find_spec("triton") is None:
        passes = "plain"
        notes.append("eager captured: its rotary pass is plain PyTorch, there is no Triton here")
    config = manifest.tower
    model = PeerModel(config, weights, manifest.requirements.attention_backend, passes)
    frequency = weights["inverse_frequency"]
    return CapturedEager(
        model, config, frequency, weights["patch_embed.weight"].dtype, graph_capture(device)
    )
