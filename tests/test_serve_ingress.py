"""The routes of a replica without Ray around them: statuses and counts where the encoder is slow,
fails, or drains, against a stand-in for it. And what joins requests, against `Encoder.encode`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

pytest.importorskip("ray", reason="needs the extra serve, which is not installed")

import serve_support  # noqa: F401 (settles how Ray Serve is imported)
import torch
import yaml
from conftest import GOLDENS
from ray import serve
from ray.serve.schema import ServeDeploySchema
from safetensors.torch import load, save

import m3compile
from m3compile.config import PreprocessConfig
from m3compile.errors import (
    ArtifactDamagedError,
    ConfigError,
    InputError,
    M3CompileError,
    OperationError,
    TooLargeError,
)
from m3compile.integrations.ray import batching, ingress, proxy, replica, requests
from m3compile.integrations.ray.application import make_app
from m3compile.integrations.ray.batching import encode_jobs, make_job
from m3compile.integrations.ray.ingress import EncoderIngress, make_api
from m3compile.integrations.ray.options import ServeOptions, serve_options
from m3compile.integrations.ray.refusals import Refused
from m3compile.integrations.ray.server import start_error
from m3compile.integrations.ray.signals import own_signals
from m3compile.wire import ENCODE_PATH, READY_PATH, read_fault

GRIDS = [(1, 4, 4), (1, 2, 6)]
ROWS = torch.randn(28, 1176, generator=torch.Generator().manual_seed(0))
BODY = save({"pixel_values": ROWS, "grid_thw": torch.tensor(GRIDS)})
HEADERS = {"Content-Type": "application/x-safetensors"}


class Metrics:
    """Notes instead of exporting."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.depths: list[int] = []

    def queue(self, depth: int) -> None:
        self.depths.append(depth)

    def answered(self, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.statuses.append(status)

    def encoded(self, *numbers: Any) -> None:
        pass


class Batcher:
    """Encodes nothing: waits, then does what it is told."""

    seconds = 0.0
    result: Callable[[Any], Any] = staticmethod(lambda job: torch.ones(sum(job.tokens), 96))

    def __init__(self, *arguments: Any) -> None:
        pass

    async def encode(self, job: Any) -> Any:
        await asyncio.sleep(self.seconds)
        return self.result(job)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def serving(
    golden_artifact: Path, monkeypatch: pytest.MonkeyPatch, metrics: Metrics
) -> Iterator[EncoderIngress]:
    monkeypatch.setattr(replica, "ReplicaMetrics", lambda: metrics)
    monkeypatch.setattr(replica, "Batcher", Batcher)
    threads = torch.get_num_threads()
    # On a busy machine decoding may take a while; the test of the timeout has one of its own.
    made = EncoderIngress(ServeOptions(artifact=str(golden_artifact), queue_limit=2))
    monkeypatch.setattr(ingress, "_replica", lambda: made)
    yield made
    torch.set_num_threads(threads)


def send(*paths: str) -> list[httpx.Response]:
    """Requests at once: a POST of `BODY`, or a GET of another path."""

    async def all_of_them() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=make_api())
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return await asyncio.gather(
                *(
                    client.post(path, content=BODY, headers=HEADERS)
                    if path == ENCODE_PATH
                    else client.get(path)
                    for path in paths
                )
            )

    return asyncio.run(all_of_them())


def told(answer: httpx.Response) -> tuple[int, str]:
    fault = read_fault(answer.content)
    assert fault is not None, answer.text
    return answer.status_code, fault.kind


def test_a_success_is_counted(serving: EncoderIngress, metrics: Metrics) -> None:
    (answer,) = send(ENCODE_PATH)
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "application/x-safetensors"
    assert metrics.statuses == [200]
    assert metrics.depths == [1, 0]


def test_too_slow(
    serving: EncoderIngress, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Batcher, "seconds", 30.0)
    service = serving._service
    service.options = msgspec.structs.replace(service.options, timeout_s=0.3)
    started = time.monotonic()
    (answer,) = send(ENCODE_PATH)
    assert told(answer) == (504, "Timeout")
    assert time.monotonic() - started < 20
    assert metrics.statuses == [504]
    assert metrics.depths[-1] == 0


def test_too_many(serving: EncoderIngress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batcher, "seconds", 0.5)
    answers = send(*[ENCODE_PATH] * 5)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
    full = next(answer for answer in answers if answer.status_code == 429)
    assert told(full) == (429, "QueueFull")
    assert full.headers["Retry-After"] == "1"


def post(content: bytes, kind: str) -> httpx.Response:
    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(app=make_api())
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return await client.post(ENCODE_PATH, content=content, headers={"Content-Type": kind})

    return asyncio.run(one())


def test_a_size_that_no_tensor_can_have(serving: EncoderIngress) -> None:
    tensor = '{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}'
    header = f'{{"pixel_values":{tensor},"grid_thw":{tensor}}}'.encode()
    answer = post(len(header).to_bytes(8, "little") + header, HEADERS["Content-Type"])
    assert told(answer) == (400, "InputError")
    assert "Exception raised from" not in answer.text


def test_items_are_counted_before_they_are_looked_at(
    serving: EncoderIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "make_job", fail(AssertionError("looked at")))
    body = save({"pixel_values": ROWS, "grid_thw": torch.full((1_000_000, 3), 2).to(torch.uint8)})
    answer = post(body, HEADERS["Content-Type"])
    assert told(answer) == (413, "TooLargeError")
    assert "1000000 items" in answer.text


def test_images_over_the_limit_of_tokens_are_not_all_decoded() -> None:
    image = (GOLDENS / "images" / "tiny.png").read_bytes()
    files = [requests.ImageFile("a", image)] * 3 + [requests.ImageFile("b", b"broken")]
    with pytest.raises(TooLargeError, match="over 8 output tokens"):
        requests.read_images(files, PreprocessConfig(), 10_000, 8)
    with pytest.raises(InputError, match="item 3: b"):
        requests.read_images(files, PreprocessConfig(), 10_000, 18)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("multipart/form-data; Boundary=b", "item 0: x.png"),
        # A name that UTF-8 cannot spell.
        ("multipart/form-data; boundary=b; charset=unicode_escape", r"item 0: \ud800.png"),
    ],
)
def test_forms_that_are_odd(serving: EncoderIngress, kind: str, says: str) -> None:
    name = r"\ud800.png" if "charset" in kind else "x.png"
    part = f'Content-Disposition: form-data; name="a"; filename="{name}"\r\n\r\nno image'
    answer = post(f"--b\r\n{part}\r\n--b--\r\n".encode(), kind)
    assert told(answer) == (400, "InputError")
    fault = read_fault(answer.content)
    assert fault is not None
    assert fault.message.startswith(says)


def fail(error: Exception) -> Callable[[Any], Any]:
    def raise_it(job: Any) -> Any:
        raise error

    return staticmethod(raise_it)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InputError("item 0: no"), 400, "InputError"),
        (TooLargeError("no"), 413, "TooLargeError"),
        (OperationError("the device failed"), 500, "OperationError"),
        (ZeroDivisionError("secret"), 500, "Internal"),
    ],
)
def test_errors_of_the_encoder(
    serving: EncoderIngress,
    metrics: Metrics,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    kind: str,
) -> None:
    monkeypatch.setattr(Batcher, "result", fail(error))
    (answer,) = send(ENCODE_PATH)
    assert told(answer) == (status, kind)
    assert "secret" not in answer.text
    assert metrics.statuses == [status]


def test_draining(serving: EncoderIngress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batcher, "seconds", 1.0)

    async def scenario() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=make_api())
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            first = asyncio.create_task(client.post(ENCODE_PATH, content=BODY, headers=HEADERS))
            await asyncio.sleep(0.05)
            drained = asyncio.create_task(serving.drain())
            await asyncio.sleep(0.05)
            assert not drained.done()
            late = await client.post(ENCODE_PATH, content=BODY, headers=HEADERS)
            ready = await client.get(READY_PATH)
            answers = [await first, late, ready]
            await asyncio.wait_for(drained, 30)
            return answers

    accepted, late, ready = asyncio.run(scenario())
    assert accepted.status_code == 200
    assert told(late) == told(ready) == (503, "Draining")
    assert late.headers["Retry-After"] == "1"


# Joining requests.


def jobs_of(encoder: m3compile.Encoder, count: int) -> list[Any]:
    tower = encoder.manifest.tower
    return [make_job(ROWS * (seed + 1), GRIDS, tower) for seed in range(count)]


def assert_same(found: Any, expected: Sequence[torch.Tensor]) -> None:
    assert isinstance(found, torch.Tensor), found
    for ours, theirs in zip(found.split([*map(len, expected)]), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_jobs_together(encoder: m3compile.Encoder) -> None:
    empty = make_job(torch.zeros(0, 1176), [], encoder.manifest.tower)
    jobs = [*jobs_of(encoder, 3), empty]
    outcomes = encode_jobs(encoder, jobs)
    assert encoder.counts()["calls"] == 1
    for job, found in zip(jobs, outcomes, strict=True):
        assert_same(found, encoder.encode(list(job.rows), job.grids))
    (alone,) = encode_jobs(encoder, [empty])
    assert isinstance(alone, torch.Tensor)
    for nothing in (alone, outcomes[3]):
        assert (nothing.shape, nothing.dtype) == ((0, 96), encoder.dtype)
        answer = load(requests.write_answer(nothing, empty.tokens, as_json=False))
        assert answer["embeddings"].shape == (0, 96)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (float("nan"), "item 1: pixel_values has a value that is not finite"),
        (3e30, "item 1: pixel_values reaches 3e+30, too large for the encoder"),
    ],
)
def test_a_job_that_is_not_finite_fails_alone(
    encoder: m3compile.Encoder, bad: float, says: str
) -> None:
    jobs = jobs_of(encoder, 3)
    jobs[1].rows[1][2, 5] = bad
    outcomes = encode_jobs(encoder, jobs)
    assert isinstance(outcomes[1], InputError)
    assert str(outcomes[1]).startswith(says)
    for index in (0, 2):
        assert_same(outcomes[index], encoder.encode(list(jobs[index].rows), GRIDS))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_that_are_not_finite(encoder: m3compile.Encoder, dtype: torch.dtype) -> None:
    rows = ROWS.to(dtype)
    rows[17, 3] = float("nan")
    (outcome,) = encode_jobs(encoder, [make_job(rows, GRIDS, encoder.manifest.tower)])
    assert isinstance(outcome, InputError)
    assert str(outcome).startswith("item 1: pixel_values has a value that is not finite")


def test_a_batch_that_fails_is_encoded_one_by_one(
    encoder: m3compile.Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(encoder, 3)
    real = encoder.encode

    def encode(rows: list[torch.Tensor], grids: Any) -> list[torch.Tensor]:
        if any(part is jobs[2].rows[0] for part in rows):
            raise RuntimeError("out of memory")
        return real(rows, grids)

    monkeypatch.setattr(encoder, "encode", encode)
    first, second, third = encode_jobs(encoder, jobs)
    assert_same(first, real(list(jobs[0].rows), GRIDS))
    assert_same(second, real(list(jobs[1].rows), GRIDS))
    assert isinstance(third, OperationError)
    assert str(third) == "out of memory"


@pytest.mark.parametrize("concurrent", [1, 2])
def test_batches_under_way_at_once(monkeypatch: pytest.MonkeyPatch, concurrent: int) -> None:
    """What waits meanwhile becomes one batch, and every job gets its own result."""
    # All that `serve.batch` asks of a replica, for a warning.
    told = SimpleNamespace(_deployment_config=SimpleNamespace(max_ongoing_requests=10))
    monkeypatch.setattr(serve, "get_replica_context", lambda: told)
    batches: list[int] = []

    async def scenario() -> list[torch.Tensor]:
        release = asyncio.Event()

        async def run(jobs: list[Any]) -> list[Any]:
            batches.append(len(jobs))
            await release.wait()
            return [torch.full((1, 1), float(job.rows[0][0, 0])) for job in jobs]

        batcher = batching.Batcher(run, 4096, 0.0, lambda: False, concurrent)
        waiting = []
        for number in range(8):
            job = batching.Job([torch.full((4, 1), float(number))], [(1, 2, 2)], [1])
            waiting.append(asyncio.create_task(batcher.encode(job)))
            while len(batches) < min(number + 1, concurrent):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert batches == [1] * concurrent
        release.set()
        return await asyncio.gather(*waiting)

    results = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert [float(result) for result in results] == list(range(8))
    assert batches == [*[1] * concurrent, 8 - concurrent]


# The deployment.


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_environment_of_a_replica(device: str) -> None:
    app = make_app(ServeOptions(artifact="a", cpus_per_replica=3), device, 1)
    actor = app._bound_deployment.ray_actor_options
    variables = actor["runtime_env"]["env_vars"]
    assert variables["MALLOC_ARENA_MAX"] == "1"
    # glibc takes no threshold above half of a heap of 64 MiB, and then keeps its own.
    assert int(variables["MALLOC_MMAP_THRESHOLD_"]) <= 32 * 2**20
    assert variables.get("OMP_NUM_THREADS") == ("3" if device == "cpu" else None)
    assert actor.get("num_gpus", 0) == (device == "cuda")


# Which proxy.


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "1"), ("0.0.0.0", "1"), ("192.0.2.1", None), ("::1", None), ("::", None)],
)
def test_haproxy_is_used_where_it_reaches_the_replicas(
    monkeypatch: pytest.MonkeyPatch, host: str, expected: str | None
) -> None:
    """At another address than these two, Ray's HAProxy finds no replica and answers 500."""
    environment: dict[str, str] = {}
    monkeypatch.setattr(proxy, "os", SimpleNamespace(environ=environment))
    monkeypatch.delitem(sys.modules, "ray.serve")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    proxy.prefer_haproxy(host)
    assert environment.get("RAY_SERVE_ENABLE_HA_PROXY") == expected


def test_sigterm_while_ray_starts_and_after_it() -> None:
    """Unwinds like Ctrl-C, whatever Ray makes of it, and is as it was."""

    def start() -> None:
        with own_signals():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert signal.getsignal(signal.SIGTERM) is before


# Settings, and errors that cross processes.


def test_settings_are_read_from_text_too() -> None:
    found = serve_options({"artifact": "a", "replicas": "2", "batch_wait_ms": "1.5"})
    assert (found.replicas, found.batch_wait_ms) == (2, 1.5)
    assert serve_options({"artifact": "a"}).replicas == "auto"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "`artifact`"),
        ({"artifact": ""}, "artifact is "),
        ({"artifact": "a", "replica": 1}, "`replica`"),
        ({"artifact": "a", "replicas": 0}, "replicas is 0; allowed: a whole number from 1"),
        ({"artifact": "a", "replicas": "many"}, "replicas is 'many'; allowed"),
        ({"artifact": "a", "queue_limit": 0}, "queue_limit is "),
        ({"artifact": "a", "batch_wait_ms": -1}, "batch_wait_ms is "),
        ({"artifact": "a", "concurrent_batches": 0}, "concurrent_batches is "),
        ({"artifact": "a", "timeout_s": "nan"}, "timeout_s is "),
    ],
)
def test_settings_that_cannot_be(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        serve_options(values)
    assert says in str(raised.value)


def test_the_documented_config_file_is_one(
    golden_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "serve.yaml").read_text("utf-8")
    config = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (application,) = config.applications
    module, name = application.import_path.split(":")
    args = {**application.args, "artifact": str(golden_artifact)}
    assert isinstance(getattr(importlib.import_module(module), name)(args), serve.Application)
    assert (config.http_options.request_timeout_s or 0) > serve_options(args).timeout_s


def test_every_setting_is_documented() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "serving.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", text, re.MULTILINE))
    defaults = dict(
        zip(ServeOptions.__struct_fields__[1:], ServeOptions.__struct_defaults__, strict=True)
    )
    assert rows.keys() >= defaults.keys()
    told = {name: rows[name].strip("`").replace(",", "") for name in defaults}
    assert told.pop("max_batch_tokens") == "largest budget"
    assert serve_options({"artifact": "a", **told}) == ServeOptions(artifact="a")


def test_a_refusal_survives_its_way_to_another_process() -> None:
    copy = pickle.loads(pickle.dumps(Refused.full(3)))
    assert (copy.status, copy.kind, str(copy)) == (429, "QueueFull", str(Refused.full(3)))


@pytest.mark.parametrize(
    ("message", "kind", "says"),
    [
        ("x\nm3compile.errors.ArtifactDamagedError: a: bad\n", ArtifactDamagedError, "a: bad"),
        ("\x1b[36mm3compile.errors.InputError: b\n", InputError, "b"),
        ("m3compile.errors.Unknown: c", OperationError, "c"),
        ("no resources", OperationError, "the replicas cannot start: no resources"),
    ],
)
def test_what_a_replica_died_of(message: str, kind: type[M3CompileError], says: str) -> None:
    error = start_error(message)
    assert type(error) is kind
    assert str(error) == says
