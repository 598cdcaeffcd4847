"""Each installed attention backend on CUDA against plain attention in float32."""

from __future__ import annotations

import math

import pytest
import torch

from m3compile.attention import attention_schedule, varlen_attention
from m3compile.attention.backends import implementation
from m3compile.attention.reference import attend_segments
from m3compile.config.backends import BACKENDS
from m3compile.errors import DependencyError

pytestmark = pytest.mark.gpu

ON_CUDA = [
    facts.name for facts in BACKENDS.values() if facts.distributions or "cuda" in facts.devices
]
HEADS, HEAD_DIM = 16, 80
# Empty segments at the start, inside and at the end; padding of 100 rows behind the last.
BOUNDS = [0, 0, 4, 4, 260, 324, 1000, 1900, 1900]
NUM_ROWS = 2000


@pytest.fixture(params=ON_CUDA)
def backend(request: pytest.FixtureRequest) -> str:
    try:
        implementation(request.param)
    except DependencyError as error:
        pytest.skip(str(error))
    return request.param


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as the tower has them: v is a strided part of the fused product."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (NUM_ROWS, 3, HEADS, HEAD_DIM)
    fused = torch.randn(shape, generator=generator, device="cuda").bfloat16()
    q, k, v = fused.unbind(1)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")
    return q.contiguous(), k.contiguous(), v, bounds


def test_agrees_with_plain_attention_and_zeroes_padding(backend: str) -> None:
    q, k, v, bounds = inputs()
    q[BOUNDS[-1] :] = math.nan
    got = varlen_attention(q, k, v, bounds, backend).float()
    expected = attend_segments(q.float(), k.float(), v.float(), bounds)
    error = (got - expected).norm() / expected.norm()
    assert error < 6e-3
    assert got.shape == q.shape
    assert (got[BOUNDS[-1] :] == 0).all()


def test_the_schedule_computed_once_gives_the_same_bits(backend: str) -> None:
    q, k, v, bounds = inputs()
    schedule = attention_schedule(bounds, NUM_ROWS, HEADS, HEAD_DIM, backend)
    expected = varlen_attention(q, k, v, bounds, backend)
    for _ in range(3):
        assert torch.equal(varlen_attention(q, k, v, bounds, backend, True, schedule), expected)


def test_neighbours_change_no_bit(backend: str) -> None:
    q, k, v, bounds = inputs()
    alone = varlen_attention(q, k, v, bounds, backend)[324:1000]
    other_q, other_k, other_v, _ = inputs(1)
    for mine, other in ((q, other_q), (k, other_k), (v, other_v)):
        mine[:324] = 1000 * other[:324]
        mine[1000:1900] = 1000 * other[1000:1900]
    assert torch.equal(varlen_attention(q, k, v, bounds, backend)[324:1000], alone)


def test_no_segment_at_all_is_all_padding(backend: str) -> None:
    q, k, v, bounds = inputs()
    schedule = attention_schedule(bounds * 0, NUM_ROWS, HEADS, HEAD_DIM, backend)
    assert (varlen_attention(q, k, v, bounds * 0, backend, True, schedule) == 0).all()


def test_can_be_captured_with_bounds_that_change(backend: str) -> None:
    if BACKENDS[backend].capture_refusal:
        pytest.skip(f"{backend} cannot be captured")
    q, k, v, bounds = inputs()
    whole = torch.tensor([0] + [NUM_ROWS] * (len(BOUNDS) - 1), dtype=torch.int32, device="cuda")

    def work() -> torch.Tensor:
        schedule = attention_schedule(live, NUM_ROWS, HEADS, HEAD_DIM, backend)
        return varlen_attention(q, k, v, live, backend, True, schedule)

    live = whole.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = work()
    for table in (bounds, whole, bounds * 0, bounds):
        live.copy_(table)
        graph.replay()
        assert torch.equal(out, varlen_attention(q, k, v, table, backend))
