#!/usr/bin/env python3
"""How far the eager encoder is from float32 with its parts in fp8, measured on the CPU.

    python tools/fp8_accuracy.py CHECKPOINT --json FILE [--scales FILE] [--inputs FILE]

Scales are those of calibrate; without them attention is left out. Items are random, or those of a
safetensors file. Every part is measured alone and with the others. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from pathlib import Path

import torch

from m3compile.bench.circumstances import source_commit
from m3compile.build.resolve import resolve
from m3compile.config import BuildConfig
from m3compile.precision import ATTENTION, Trial, fp8_request, measured_items
from m3compile.weights import (
    attention_scales,
    load_module_state,
    open_checkpoint,
    quantised_weights,
)


def parts_of(linears: tuple[str, ...], attention: bool) -> dict[str, list[str]]:
    """What is measured, by name."""
    layers = [name for name in linears if name.startswith("layers.")]
    others = [name for name in linears if not name.startswith("layers.")]
    parts = {
        "all linears": list(linears),
        "linears of the layers": layers,
        "projector and merger": others,
        **{name: [name] for name in others},
    }
    if attention:
        parts[ATTENTION] = [ATTENTION]
        parts["all linears and attention"] = [*linears, ATTENTION]
        parts["the same but projector.fc1"] = [
            *(name for name in linears if name != "projector.fc1"),
            ATTENTION,
        ]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--scales", type=Path)
    parser.add_argument("--inputs", type=Path)
    asked = parser.parse_args()
    commit, is_clean = source_commit(Path(__file__).parent)
    checkpoint = open_checkpoint(asked.checkpoint)
    config = BuildConfig(
        device="cpu",
        linear_dtype="fp8",
        attention_dtype="fp8" if asked.scales else None,
        fp8_scales=str(asked.scales) if asked.scales else None,
        fp8_inputs=str(asked.inputs) if asked.inputs else None,
    )
    tower = checkpoint.config
    request = fp8_request(resolve(config), tower)
    state = load_module_state(checkpoint, torch.float32)
    trial = Trial(
        tower,
        state,
        quantised_weights(state, request.linears),
        attention_scales(request.scales or (), "cpu"),
        "TORCH_SDPA",
        measured_items(request, tower, state),
    )
    results = {}
    print(f"{'in fp8':34}{'error':>9}{'cosine':>10}{'weights, MB':>13}")
    for name, layers in parts_of(request.linears, request.scales is not None).items():
        found = trial.measure(layers, False)
        # As a build in bfloat16 would hold them: what is not in fp8 takes two bytes.
        changed = trial.state_with(layers)
        size = sum(x.numel() * (1 if x.dtype.itemsize == 1 else 2) for x in changed.values())
        results[name] = {**found._asdict(), "layers": len(layers), "weights_bytes": size}
        print(f"{name:34}{found.error:9.2%}{found.cosine:10.5f}{size / 1e6:13.1f}", flush=True)
    record = {
        "what": "eager float32 with parts in fp8 against eager float32; worst item, worst token",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "weights": "random" if checkpoint.is_random else "checkpoint",
        "hidden_size": tower.hidden_size,
        "num_hidden_layers": tower.num_hidden_layers,
        "inputs": request.inputs,
        "commit": commit,
        "is_clean": is_clean,
        "results": results,
    }
    asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
