#!/usr/bin/env python3
"""Time the passes and products of one layer alone, on a CUDA device, by graph replay.

Every candidate is checked against float32 first, then captured 32 times over (products with 32
sets of weights, so that they come from memory and not from the cache) and replayed; a number is
the median microseconds of one launch. Prints a table and writes JSON.

    python tools/bench_kernels.py --json FILE
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3compile.attention import attention_schedule, fp8_attention, varlen_attention
from m3compile.attention.reference import attend_segments
from m3compile.bench.circumstances import source_commit
from m3compile.config import TowerConfig
from m3compile.config.backends import BACKENDS
from m3compile.geometry import inverse_frequencies
from m3compile.host import attention_versions
from m3compile.kernels import kernels
from m3compile.kernels.fp8 import Fp8Linear, Fp8Rows, quantise_rows, quantise_weight, to_fp8
from m3compile.kernels.product import add_product_, split_product

ROWS = (256, 512, 1024, 2304, 5184, 16384)
LAUNCHES = 32
SLOTS = 128
CONFIG = TowerConfig()
# Of a layer: name, outputs, inputs.
LINEARS = (
    ("qkv", 3 * CONFIG.hidden_size, CONFIG.hidden_size),
    ("out_proj", CONFIG.hidden_size, CONFIG.hidden_size),
    ("fc1", CONFIG.intermediate_size, CONFIG.hidden_size),
    ("fc2", CONFIG.hidden_size, CONFIG.intermediate_size),
)


def replay_us(call: Callable[[int], object]) -> float:
    """Median microseconds of one launch out of a captured sequence."""
    stream = torch.cuda.Stream()
    # What the launches read may still be under way.
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for index in range(3):
            call(index)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(LAUNCHES):
                call(index)
        samples = []
        for _ in range(15):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(1000 * start.elapsed_time(end) / LAUNCHES)
    return statistics.median(samples)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def linear(weights: list[Tensor], bias: Tensor, x: Tensor, index: int) -> Tensor:
    return functional.linear(x, weights[index], bias)


def into(total: Tensor, weights: list[Tensor], x: Tensor, index: int) -> None:
    add_product_(total, x, weights[index])


def in_parts(weights: list[Tensor], x: Tensor, index: int) -> Tensor:
    return split_product(x, weights[index], 4)


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, backend: str, schedule: Tensor | None, _: int
) -> Tensor:
    return varlen_attention(q, k, v, cu, backend, False, schedule)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def bounds(rows: int) -> Tensor:
    ends = torch.full((SLOTS + 1,), rows, dtype=torch.int32)
    ends[0] = 0
    return ends.cuda()


def passes(rows: int) -> dict[str, tuple[Callable[[int], object], float]]:
    """Name to call and relative error against plain float32."""
    size, wide, heads = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_attention_heads
    ours, plain, cu = kernels("triton"), kernels("plain"), bounds(rows)
    x, qkv, hidden = randn(rows, size), randn(rows, 3 * size), randn(rows, wide)
    norm = nn.LayerNorm(size).to("cuda", torch.bfloat16)
    zero = torch.zeros(size, device="cuda")
    cos, sin = torch.randn(2, rows, 3 * CONFIG.axis_dim // 2, device="cuda").unbind(0)
    reference = functional.layer_norm(x.float(), (size,))
    rotated = plain.rotate_heads(qkv.float(), cos, sin, heads)[0]
    return {
        "norm": (
            lambda _: ours.norm(x, cu, norm, zero),
            error(ours.norm(x, cu, norm, zero), reference),
        ),
        "norm, torch": (lambda _: norm(x), error(norm(x), reference)),
        "rotate": (
            lambda _: ours.rotate_heads(qkv, cos, sin, heads),
            error(ours.rotate_heads(qkv, cos, sin, heads)[0], rotated),
        ),
        "gelu": (
            lambda _: ours.gelu(hidden, cu),
            error(ours.gelu(hidden, cu), functional.gelu(hidden.float())),
        ),
        "gelu, torch": (
            lambda _: functional.gelu(hidden),
            error(functional.gelu(hidden), functional.gelu(hidden.float())),
        ),
    }


def whole(rows: Fp8Rows) -> Tensor:
    return rows.values.float() * rows.scales


def fp8_passes(rows: int) -> dict[str, tuple[Callable[[int], object], float]]:
    """The passes that end in fp8, with the error that its rounding makes."""
    from m3compile.kernels.triton_form import FORM as ours

    size, wide, heads = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_attention_heads
    cu, norm = bounds(rows), nn.LayerNorm(size).to("cuda", torch.bfloat16)
    x, qkv, hidden = randn(rows, size), randn(rows, 3 * size), randn(rows, wide)
    parts, zero = randn(1, rows, size), torch.zeros(size, device="cuda")
    cos, sin = torch.randn(2, rows, 3 * CONFIG.axis_dim // 2, device="cuda").unbind(0)
    scales = torch.full((3, 1), 12 / 448, device="cuda")
    added = x.float() + parts[0].float()
    # Name to call, what of the result is compared, and with what.
    calls: dict[str, tuple[Callable[[], object], Callable[[Any], Tensor], Tensor]] = {
        "norm to fp8": (
            lambda: ours.norm(x, cu, norm, zero, True),
            whole,
            functional.layer_norm(x.float(), (size,)),
        ),
        "add and norm to fp8": (
            lambda: ours.add_parts(x, parts, (None, None), cu, norm, zero, True),
            lambda got: whole(got[1]),
            functional.layer_norm(added, (size,)),
        ),
        "rotate to fp8": (
            lambda: ours.rotate_heads_fp8(qkv, cos, sin, heads, scales),
            lambda got: got[0].float() * scales[0],
            kernels("plain").rotate_heads(qkv.float(), cos, sin, heads)[0],
        ),
        "gelu to fp8": (
            lambda: ours.gelu(hidden, cu, True),
            whole,
            functional.gelu(hidden.float()),
        ),
        "quantise": (lambda: ours.quantise(x), whole, x.float()),
    }
    return {
        name: (partial(ignoring, call), error(read(call()), expected))
        for name, (call, read, expected) in calls.items()
    }


def ignoring(call: Callable[[], object], _: int) -> object:
    return call()


def fp8_layer(layers: list[Fp8Linear], rows: Fp8Rows, index: int) -> Tensor:
    return layers[index](rows)


def fp8_products(rows: int) -> dict[str, tuple[Callable[[int], object], float]]:
    found: dict[str, tuple[Callable[[int], object], float]] = {}
    for name, out, inner in LINEARS:
        x, bias = randn(rows, inner), torch.zeros(out, device="cuda", dtype=torch.bfloat16)
        quantised = quantise_rows(x)
        for fast in (False, True):
            layers = []
            for _ in range(LAUNCHES):
                layer = Fp8Linear(inner, out, fast)
                weight = randn(out, inner) * inner**-0.5
                layer.weight.data, layer.weight_scale.data = quantise_weight(weight)
                layer.bias.data = bias
                layers.append(layer)
            first = layers[0].weight.float() * layers[0].weight_scale[:, None]
            expected = functional.linear(x.float(), first)
            found[f"{name} in fp8{', fast' if fast else ''}"] = (
                partial(fp8_layer, layers, quantised),
                error(layers[0](quantised), expected),
            )
    return found


def fp8_attentions(rows: int) -> dict[str, tuple[Callable[[int], object], float]]:
    """FlashAttention 3 in fp8, where it is installed."""
    if "FLASH_ATTN_3" not in attention_versions(str(torch.__version__)):
        return {}
    heads, dim, cu = CONFIG.num_attention_heads, CONFIG.head_dim, bounds(rows)
    whole_heads = [randn(rows, heads, dim) for _ in range(3)]
    scales = torch.full((3, 1), 6 / 448, device="cuda")
    q, k, v = (to_fp8(part, scales[0]) for part in whole_heads)
    schedule = attention_schedule(cu, rows, heads, dim, "FLASH_ATTN_3", True)
    got = fp8_attention(q, k, v, scales, cu, "FLASH_ATTN_3", schedule)
    first, second, third = (part.float() for part in whole_heads)
    expected = attend_segments(first, second, third, cu)
    return {
        "FLASH_ATTN_3 in fp8": (
            lambda _: fp8_attention(q, k, v, scales, cu, "FLASH_ATTN_3", schedule),
            error(got, expected),
        )
    }


def products(rows: int) -> dict[str, tuple[Callable[[int], object], float]]:
    size = CONFIG.hidden_size
    found: dict[str, tuple[Callable[[int], object], float]] = {}
    for name, out, inner in LINEARS:
        weights = [randn(out, inner) * inner**-0.5 for _ in range(LAUNCHES)]
        bias, x = randn(out), randn(rows, inner)
        expected = functional.linear(x.float(), weights[0].float())
        found[name] = (
            partial(linear, weights, bias, x),
            error(functional.linear(x, weights[0]), expected),
        )
        if out == size:
            total = torch.zeros(rows, size, device="cuda", dtype=torch.bfloat16)
            add_product_(total, x, weights[0])
            wrong = error(total, expected)
            found[f"{name} into the residual"] = (
                partial(into, total, weights, x),
                wrong,
            )
        if name == "fc2":
            parts = split_product(x, weights[0], 4)
            found["fc2 in 4 parts"] = (
                partial(in_parts, weights, x),
                error(parts.float().sum(0), expected),
            )
    return found


def attentions(rows: int) -> dict[str, tuple[Callable[[int], object], float]]:
    heads, dim = CONFIG.num_attention_heads, CONFIG.head_dim
    q, k, v = (randn(rows, heads, dim) for _ in range(3))
    cu = bounds(rows)
    expected = attend_segments(q.float(), k.float(), v.float(), cu)
    found: dict[str, tuple[Callable[[int], object], float]] = {}
    installed = attention_versions(str(torch.__version__))
    for backend, facts in BACKENDS.items():
        if facts.family != "FLASH_ATTN" or backend not in installed:
            continue
        got = varlen_attention(q, k, v, cu, backend)
        found[backend] = (
            partial(attend, q, k, v, cu, backend, None),
            error(got, expected),
        )
        schedule = attention_schedule(cu, rows, heads, dim, backend)
        if schedule is not None:
            got = varlen_attention(q, k, v, cu, backend, True, schedule)
            found[f"{backend}, schedule given"] = (
                partial(attend, q, k, v, cu, backend, schedule),
                error(got, expected),
            )
    if rows <= 1024:
        short, plain = kernels("few_rows"), kernels("plain")
        qkv = randn(rows, 3 * heads * dim)
        cos, sin = torch.randn(2, rows, 3 * CONFIG.axis_dim // 2, device="cuda").unbind(0)
        table = torch.zeros(SLOTS, 3, dtype=torch.int32, device="cuda")
        table[0] = torch.tensor([1, rows // 2, 2], device="cuda")
        located = short.locate(table, rows, inverse_frequencies(CONFIG).cuda())
        located = located._replace(cos=cos, sin=sin)
        rotated = plain.rotate_heads(qkv.float(), cos, sin, heads)
        got = short.attend(qkv, located, heads, "", None)
        found["short, with the rotation pass"] = (
            lambda _: short.attend(qkv, located, heads, "", None),
            error(got, attend_segments(*rotated, cu).flatten(1)),
        )
    return found


# bfloat16 rounds to 3e-3, fp8 to 3e-2; a wrong kernel is off by far more.
GROUPS = (
    (passes, 1e-2),
    (products, 1e-2),
    (attentions, 1e-2),
    (fp8_passes, 6e-2),
    (fp8_products, 6e-2),
    (fp8_attentions, 0.12),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    out = parser.parse_args().json
    results: dict[str, dict[int, dict[str, float]]] = {}
    with torch.no_grad():
        for rows in ROWS:
            for group, allowed in GROUPS:
                for name, (call, wrong) in group(rows).items():
                    if not wrong < allowed:
                        raise SystemExit(f"{name} at {rows} rows is wrong by {wrong:.1e}")
                    results.setdefault(name, {})[rows] = {"us": replay_us(call), "error": wrong}
    commit, is_clean = source_commit(Path(__file__).parent)
    record = {
        "what": "one launch of one layer's parts, microseconds, bfloat16 but where fp8 is said",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "attention": attention_versions(str(torch.__version__)),
        "commit": commit,
        "is_clean": is_clean,
        "results": results,
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{'rows':34}" + "".join(f"{rows:>9}" for rows in ROWS))
    for name, by_rows in results.items():
        cells = (f"{by_rows[r]['us']:9.1f}" if r in by_rows else "        -" for r in ROWS)
        print(f"{name:34}" + "".join(cells))


if __name__ == "__main__":
    main()
