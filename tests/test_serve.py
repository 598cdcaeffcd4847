"""A server of two replicas on the golden artifact: answers are compared with `Encoder.encode` of
the same request alone, within `verify`'s bound; refusals with the statuses of docs/serving.md, and
what goes on inside with what the metrics say.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from conftest import GOLDENS
from safetensors.torch import load, save
from serve_support import running_server, soak_serve

import m3compile
from m3compile.client import Client
from m3compile.config import BOUNDS, PreprocessConfig
from m3compile.errors import ArtifactNotFoundError, InputError
from m3compile.images import load_images
from m3compile.wire import ENCODE_PATH, read_fault

IMAGES = [GOLDENS / "images" / name for name in ("tiny.png", "gray.png", "wide.png")]
GRIDS = [(1, 4, 4), (3, 2, 6), (1, 8, 8)]
SAFETENSORS = {"Content-Type": "application/x-safetensors"}
MAX_BODY_MB = 20
QUEUE_LIMIT = 24


@pytest.fixture(scope="module")
def server(golden_artifact: Path) -> Iterator[Any]:
    with running_server(
        golden_artifact,
        replicas=2,
        queue_limit=QUEUE_LIMIT,
        max_body_mb=MAX_BODY_MB,
        max_items=8,
        max_request_tokens=800,
        max_json_tokens=40,
        max_batch_tokens=256,
        max_image_pixels=1_000_000,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def encoder(golden_artifact: Path) -> m3compile.Encoder:
    return m3compile.load(golden_artifact)


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Client]:
    with Client(server.url) as found:
        yield found


def rows_of(grids: Any, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(map(math.prod, grids)), 1176, generator=generator)


def body_of(grids: Any = GRIDS, **changes: Any) -> bytes:
    """A request; `changes` replace its tensors, or drop them (None)."""
    table = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
    tensors = {"pixel_values": rows_of(grids), "grid_thw": table, **changes}
    return save({name: tensor for name, tensor in tensors.items() if tensor is not None})


def assert_equal(found: list[np.ndarray], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        error = np.linalg.norm(ours - theirs.numpy()) / np.linalg.norm(theirs.numpy())
        assert error <= (BOUNDS["float32"].relative_error or 0)


def assert_refused(answer: httpx.Response, status: int, kind: str, says: str) -> None:
    fault = read_fault(answer.content)
    assert fault is not None, answer.text
    assert (answer.status_code, fault.kind) == (status, kind), fault
    assert says in fault.message
    found = re.match(r"item (\d+)", fault.message)
    assert fault.item == (int(found[1]) if found else None)


# What is right.


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_rows(client: Client, encoder: m3compile.Encoder, dtype: Any) -> None:
    rows = rows_of(GRIDS).numpy().astype(dtype)
    assert_equal(client.encode(rows, GRIDS), encoder.encode(torch.from_numpy(rows), GRIDS))


def test_bfloat16_rows(http: httpx.Client, encoder: m3compile.Encoder) -> None:
    rows = rows_of(GRIDS).bfloat16()
    answer = http.post(ENCODE_PATH, content=body_of(pixel_values=rows), headers=SAFETENSORS)
    found = load(answer.content)
    expected = encoder.encode(rows, GRIDS)
    assert found["token_counts"].tolist() == [4, 9, 16]
    assert found["embeddings"].dtype == torch.float32
    assert_equal([found["embeddings"].numpy()], [torch.cat(expected)])


def test_files(client: Client, encoder: m3compile.Encoder) -> None:
    expected = encoder.encode(*load_images(IMAGES, PreprocessConfig()))
    assert_equal(client.encode_files(IMAGES), expected)


def test_json(http: httpx.Client, encoder: m3compile.Encoder) -> None:
    answer = http.post(
        ENCODE_PATH, content=body_of(), headers={**SAFETENSORS, "Accept": "application/json"}
    )
    found = answer.json()
    assert found["token_counts"] == [4, 9, 16]
    expected = torch.cat(encoder.encode(rows_of(GRIDS), GRIDS))
    assert_equal([np.array(found["embeddings"], np.float32)], [expected])


def test_no_items(client: Client, http: httpx.Client) -> None:
    assert client.encode(np.zeros((0, 1176), np.float32), []) == []
    answer = http.post(ENCODE_PATH, content=body_of([]), headers=SAFETENSORS)
    assert load(answer.content)["embeddings"].shape == (0, 96)


def test_more_than_a_whole_batch_runs_alone(client: Client, encoder: m3compile.Encoder) -> None:
    # The first one is larger than every bucket, too.
    grids = [(1, 52, 52), (1, 20, 20)]
    rows = rows_of(grids)
    assert_equal(client.encode(rows.numpy(), grids), encoder.encode(rows, grids))


def test_health_and_info(http: httpx.Client, client: Client, golden_artifact: Path) -> None:
    assert client.ready()
    assert http.get("/health/live").json() == {"status": "live"}
    info = client.info()
    assert info["artifact"] == golden_artifact.name
    assert (info["device"], info["dtype"], info["width"]) == ("cpu", "float32", 96)
    assert info["budgets"] == [16, 64, 256, 576]
    assert info["limits"]["body_bytes"] == MAX_BODY_MB * 1_000_000


def test_callers_inside_the_cluster(server: Any, encoder: m3compile.Encoder) -> None:
    import ray
    from ray import serve

    from m3compile.integrations.ray import EncoderActor

    rows = rows_of(GRIDS)
    expected = encoder.encode(rows, GRIDS)
    handle = serve.get_app_handle("m3compile")
    assert_equal(handle.encode_rows.remote(rows.numpy(), GRIDS).result(), expected)
    with pytest.raises(InputError, match=r"item 0: grid is \[1, 3, 4\]"):
        handle.encode_rows.remote(rows.numpy(), [(1, 3, 4)]).result()
    actor = ray.remote(EncoderActor).remote(server.options.artifact, threads=1)
    assert_equal(ray.get(actor.encode.remote(rows.numpy(), GRIDS)), expected)
    with pytest.raises(InputError, match="expected 116"):
        ray.get(actor.encode.remote(rows.numpy()[:60], GRIDS))
    ray.kill(actor)


# What is wrong.


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (b"", "InputError", "not a readable safetensors file"),
        (b"\xff" * 100, "InputError", "not a readable safetensors file"),
        (body_of()[:-1], "InputError", "not a readable safetensors file"),
        (body_of(pixel_values=None), "InputError", "tensor pixel_values is missing"),
        (body_of(grid_thw=None), "InputError", "tensor grid_thw is missing"),
        (body_of(pixel_values=torch.zeros(115, 1176)), "InputError", "115 rows, expected 116"),
        (body_of(pixel_values=torch.zeros(116, 7)), "InputError", "expected (rows, 1176)"),
        (body_of(pixel_values=torch.zeros(116, 1176).int()), "InputError", "a float dtype"),
        (body_of(grid_thw=torch.ones(3, 3)), "InputError", "expected integers"),
        (body_of([(1, 4, 4), (1, 3, 4)]), "InputError", "item 1: grid is [1, 3, 4]"),
        (body_of(grid_thw=torch.tensor([[1, 4, -4]])), "InputError", "item 0: grid is [1, 4, -4]"),
    ],
)
def test_bad_rows(http: httpx.Client, body: bytes, kind: str, says: str) -> None:
    assert_refused(http.post(ENCODE_PATH, content=body, headers=SAFETENSORS), 400, kind, says)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_item_that_is_not_finite(http: httpx.Client, value: float) -> None:
    rows = rows_of(GRIDS)
    rows[30, 7] = value
    answer = http.post(ENCODE_PATH, content=body_of(pixel_values=rows), headers=SAFETENSORS)
    assert_refused(answer, 400, "InputError", "item 1: pixel_values has a value that is not finite")


@pytest.mark.parametrize(
    ("data", "status", "kind", "says"),
    [
        (b"", 400, "InputError", "item 1: a.png: not recognised as an image"),
        (b"no image", 400, "InputError", "item 1: a.png: not recognised as an image"),
        (IMAGES[0].read_bytes()[:60], 400, "InputError", "item 1: a.png: "),
        (soak_serve.png(1000, 1001), 413, "TooLargeError", "item 1: a.png: 1001000 pixels"),
        (soak_serve.png(20_000, 20_000), 413, "TooLargeError", "item 1: a.png: "),
    ],
)
def test_bad_images(http: httpx.Client, data: bytes, status: int, kind: str, says: str) -> None:
    files = [("images", ("good.png", IMAGES[0].read_bytes())), ("images", ("a.png", data))]
    assert_refused(http.post(ENCODE_PATH, files=files), status, kind, says)


@pytest.mark.parametrize(
    ("content", "type_", "status", "kind", "says"),
    [
        (b"{}", "application/json", 415, "MediaType", "content type is application/json"),
        (b"", "", 415, "MediaType", "content type is missing"),
        (b"x", "multipart/form-data", 400, "InputError", "without a boundary"),
        (b"x", "multipart/form-data; boundary=b", 400, "InputError", "the form is malformed"),
        (b"--b--\r\n", "multipart/form-data; boundary=b", 400, "InputError", "has no files"),
    ],
)
def test_other_bodies(
    http: httpx.Client, content: bytes, type_: str, status: int, kind: str, says: str
) -> None:
    answer = http.post(ENCODE_PATH, content=content, headers={"Content-Type": type_})
    assert_refused(answer, status, kind, says)


def test_too_much(http: httpx.Client) -> None:
    def refused(says: str, **send: Any) -> None:
        assert_refused(http.post(ENCODE_PATH, **send), 413, "TooLargeError", says)

    big = bytes(MAX_BODY_MB * 1_000_000 + 1)
    refused("20000001 bytes", content=big, headers=SAFETENSORS)
    # Without a length it is told while it arrives.
    refused("allowed: at most 20000000", content=iter([big[:-1], b"12"]), headers=SAFETENSORS)
    refused("9 items", content=body_of([(1, 2, 2)] * 9), headers=SAFETENSORS)
    refused("over 8 files", files=[("a", ("a.png", b"a"))] * 9)
    refused("801 output tokens", content=body_of([(1, 2, 1602)]), headers=SAFETENSORS)
    refused(
        "64 output tokens for an answer as JSON",
        content=body_of([(1, 16, 16)]),
        headers={**SAFETENSORS, "Accept": "application/json"},
    )


def test_other_routes(http: httpx.Client) -> None:
    assert_refused(http.get("/nowhere"), 404, "NoRoute", "GET /nowhere")
    assert_refused(http.get(ENCODE_PATH), 405, "NoRoute", "Method Not Allowed")


# Under load.


def test_many_clients_and_bad_ones_among_them(server: Any, encoder: m3compile.Encoder) -> None:
    soak = soak_serve.Soak(server.url, encoder)
    soak.run(400, 16)
    assert soak.faults == []
    # Every tenth was bad.
    refused = soak.statuses["400"] + soak.statuses["413"]
    assert soak.statuses == {**soak.statuses, "200": 360}
    assert refused == 40


def test_a_full_queue_is_told_and_what_was_accepted_is_answered(server: Any) -> None:
    body = body_of([(1, 24, 24)])
    barrier = threading.Barrier(3 * QUEUE_LIMIT)

    def send(_: int) -> httpx.Response:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            barrier.wait()
            return http.post(ENCODE_PATH, content=body, headers=SAFETENSORS)

    with ThreadPoolExecutor(barrier.parties) as pool:
        answers = list(pool.map(send, range(barrier.parties)))
    full = [answer for answer in answers if answer.status_code == 429]
    assert full
    assert len(full) + sum(answer.status_code == 200 for answer in answers) == len(answers)
    for answer in full:
        assert_refused(answer, 429, "QueueFull", f"{QUEUE_LIMIT} requests are waiting")
        assert answer.headers["Retry-After"] == "1"


def test_metrics_tell_of_it(server: Any) -> None:
    wanted = {
        'ray_m3compile_requests_total{.*status="200"',
        'ray_m3compile_requests_total{.*status="400"',
        'ray_m3compile_requests_total{.*status="413"',
        'ray_m3compile_requests_total{.*status="429"',
        "ray_m3compile_queue_depth{",
        "ray_m3compile_batch_tokens_bucket{",
        "ray_m3compile_encode_ms_bucket{",
        "ray_m3compile_replays_total{",
        "ray_m3compile_padded_tokens_total{",
        "ray_m3compile_exact_runs_total{",
        "ray_m3compile_nonfinite_items_total{",
    }
    deadline = time.monotonic() + 20
    while wanted and time.monotonic() < deadline:
        text = "".join(httpx.get(url).text for url in server.metrics_urls)
        wanted = {pattern for pattern in wanted if not re.search(pattern, text)}
        time.sleep(0.5)
    assert wanted == set()


def test_a_replica_that_dies_is_replaced(server: Any, encoder: m3compile.Encoder) -> None:
    soak = soak_serve.Soak(server.url, encoder)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(soak.run, 300, 8, True)
        time.sleep(0.5)
        soak_serve.kill_one_replica(server)
        load.result()
    assert soak.faults == []
    assert sum(soak.statuses.values()) == 300
    with Client(server.url) as client:
        for seed in range(20):
            rows = rows_of(GRIDS, seed)
            assert_equal(client.encode(rows.numpy(), GRIDS), encoder.encode(rows, GRIDS))


def test_a_replica_that_cannot_start_ends_in_its_error(server: Any, tmp_path: Path) -> None:
    from ray import serve

    from m3compile.integrations.ray.application import make_app
    from m3compile.integrations.ray.options import serve_options
    from m3compile.integrations.ray.server import start_error

    # For the cores: this is the last test that uses the server.
    serve.delete("m3compile")
    app = make_app(serve_options({"artifact": str(tmp_path / "gone")}), "cpu", 1)
    target = serve.RunTarget(target=app, name="broken", route_prefix="/broken")
    serve.run_many([target], wait_for_applications_running=False)
    deadline = time.monotonic() + 60
    while (found := serve.status().applications["broken"]).status != "DEPLOY_FAILED":
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    error = start_error(found.deployments["Encoder"].message)
    assert isinstance(error, ArtifactNotFoundError)
    assert str(error) == f"{tmp_path / 'gone'}: no such artifact folder"
    serve.delete("broken")
