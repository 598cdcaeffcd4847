"""The client against servers that play a script: what it sends, what it makes of answers, what it
sends again. Answers are written with safetensors' own torch functions.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GOLDENS
from helpers import run_fresh
from safetensors.torch import load, save
from serve_support import Script, free_port

from m3compile.client import Client
from m3compile.errors import (
    InputError,
    InputNotFoundError,
    M3CompileError,
    RequestError,
    ServiceError,
    TooLargeError,
)
from m3compile.wire import fault_body

GRIDS = [[1, 4, 4], [1, 2, 2]]
ROWS = np.arange(20 * 6, dtype=np.float32).reshape(20, 6)
EMBEDDINGS = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def success(dtype: torch.dtype = torch.float32) -> tuple[int, dict[str, str], bytes]:
    tensors = {"embeddings": EMBEDDINGS.to(dtype), "token_counts": torch.tensor([4, 1])}
    return 200, {}, save(tensors)


def refusal(status: int, kind: str, message: str, **headers: str) -> Any:
    return status, headers, fault_body(kind, message)


def counted(counts: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, save({"embeddings": EMBEDDINGS, "token_counts": torch.tensor(counts)})


def encode(script: Script, **options: Any) -> list[np.ndarray]:
    with Client(script.url, **options) as client:
        return client.encode(ROWS, GRIDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_answer_becomes_an_array_an_item(dtype: torch.dtype) -> None:
    with Script(success(dtype)) as script:
        first, second = encode(script)
    expected = EMBEDDINGS.to(dtype).float().numpy()
    assert first.dtype == second.dtype == np.float32
    assert np.array_equal(first, expected[:4])
    assert np.array_equal(second, expected[4:])


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
@pytest.mark.parametrize("as_list", [False, True])
def test_rows_are_sent_as_they_are(dtype: str, as_list: bool) -> None:
    numpy_dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    rows = ROWS.astype(numpy_dtype)
    given: Any = [rows[:16], rows[16:]] if as_list else rows
    with Script(success()) as script, Client(script.url) as client:
        client.encode(given, np.array(GRIDS, np.int32))
    path, body = script.seen[0]
    assert path == "/v1/encode"
    sent = load(body)
    assert sent["pixel_values"].dtype == getattr(torch, dtype)
    assert torch.equal(sent["pixel_values"].float(), torch.from_numpy(rows.astype("f4")))
    assert sent["grid_thw"].tolist() == GRIDS


def test_files_are_sent_in_order() -> None:
    paths = [GOLDENS / "images" / name for name in ("tiny.png", "gray.png")]
    with Script(success()) as script, Client(script.url) as client:
        client.encode_files(paths)
    body = script.seen[0][1]
    assert 0 < body.index(paths[0].read_bytes()) < body.index(paths[1].read_bytes())


def test_nothing_to_send() -> None:
    with Script(success()) as script, Client(script.url) as client:
        assert client.encode_files([]) == []
    assert script.seen == []


@pytest.mark.parametrize(
    ("pixel_values", "grids", "says"),
    [
        (ROWS[:19], GRIDS, "has 19 rows, expected 20"),
        (ROWS[0], GRIDS, "has shape (6,)"),
        (ROWS, [[1, 4, 5]], "item 0: grid is [1, 4, 5]"),
        (ROWS, "x", "expected a tensor or nested lists"),
        (ROWS.astype("c16"), GRIDS, "dtype complex128, expected a float dtype"),
        ([ROWS[:16], ROWS[16:, :5]], GRIDS, "pixel_values is no array of rows"),
        (torch.from_numpy(ROWS).bfloat16(), GRIDS, "pixel_values is no array of rows"),
    ],
)
def test_what_cannot_be_right_is_not_sent(pixel_values: Any, grids: Any, says: str) -> None:
    with Script(success()) as script, Client(script.url) as client:
        with pytest.raises(InputError) as raised:
            client.encode(pixel_values, grids)
        assert says in str(raised.value)
    assert script.seen == []


def test_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")
    Path(path).write_bytes(b"x")
    with Script(success()) as script, Client(script.url) as client:
        client.encode_files([path])
    assert rb'filename="\\xff.png"' in script.seen[0][1]


def test_a_file_name_that_cannot_be(tmp_path: Path) -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(InputError, match="null byte"):
        client.encode_files(["a\0b"])


def test_a_missing_file(tmp_path: Path) -> None:
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(InputNotFoundError, match=r"gone\.png: no such file"),
    ):
        client.encode_files([tmp_path / "gone.png"])


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (refusal(400, "InputError", "item 1: no"), InputError, "item 1: no"),
        (refusal(413, "TooLargeError", "too big"), TooLargeError, "too big"),
        (refusal(415, "MediaType", "odd"), RequestError, "odd"),
        (refusal(504, "Timeout", "late"), ServiceError, "answered 504: late"),
        (refusal(500, "Internal", "broken"), ServiceError, "answered 500: broken"),
        ((403, {}, b"Not\nhere"), ServiceError, "answered 403: Not here"),
        (refusal(404, "NoRoute", "none"), RequestError, "none"),
        # Kinds that a server has no business to name.
        (refusal(400, "ExitCode", "odd"), RequestError, "odd"),
        (refusal(400, "EncoderClosedError", "odd"), RequestError, "odd"),
        ((200, {}, b"no tensors"), ServiceError, "not one of this server"),
        ((200, {}, save({"a": torch.ones(1)})), ServiceError, "not one of this server"),
        (counted([4, 2]), ServiceError, "5 embeddings for 6 tokens"),
        (counted([6, -1]), ServiceError, "not one of this server"),
        (counted([4.0, 1.0]), ServiceError, "not one of this server"),
        (counted([[4], [1]]), ServiceError, "not one of this server"),
        (counted(5), ServiceError, "not one of this server"),
        ((200, {"Content-Encoding": "gzip"}, b"no gzip"), ServiceError, "decompressing"),
    ],
)
def test_what_is_refused_is_sent_once(answer: Any, kind: type, says: str) -> None:
    with Script(answer) as script:
        with pytest.raises(M3CompileError) as raised:
            encode(script)
        assert type(raised.value) is kind
        assert says in str(raised.value)
    assert len(script.seen) == 1


@pytest.mark.parametrize(
    "failure",
    [
        refusal(429, "QueueFull", "full"),
        refusal(503, "Draining", "stopping"),
        (502, {}, b""),
        (500, {}, b"Internal Server Error"),
        (404, {}, b"Path '/v1/encode' not found."),
        None,
    ],
)
def test_what_is_safe_is_sent_again(failure: Any) -> None:
    with Script(failure, failure, success()) as script:
        assert len(encode(script)) == 2
    assert len(script.seen) == 3
    assert len({body for _, body in script.seen}) == 1


def test_retries_end() -> None:
    script = Script(refusal(503, "Draining", "stopping"))
    with script, pytest.raises(ServiceError, match="503: stopping"):
        encode(script, retries=2)
    assert len(script.seen) == 3


def test_the_server_says_when() -> None:
    script = Script(refusal(429, "QueueFull", "full", **{"Retry-After": "60"}))
    with script, pytest.raises(ServiceError, match="429: full"):
        encode(script, timeout_s=5)
    # Nobody waits for what would come too late.
    assert len(script.seen) == 1


def test_nobody_listens() -> None:
    with Client(f"http://127.0.0.1:{free_port()}", retries=1) as client:
        assert not client.ready()
        with pytest.raises(ServiceError, match=r"127\.0\.0\.1"):
            client.encode(ROWS, GRIDS)


@pytest.mark.parametrize("url", [None, "http://a:b", "127.0.0.1:8000", "ftp://a", "", "http://"])
def test_a_bad_address(url: Any) -> None:
    with pytest.raises(RequestError, match="url is"):
        Client(url)


@pytest.mark.parametrize(
    "options", [{"timeout_s": 0}, {"timeout_s": float("nan")}, {"retries": -1}]
)
def test_settings_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="expected a time above 0, and 0 or more"):
        Client("http://127.0.0.1:1", **options)


def test_a_closed_client_says_so() -> None:
    client = Client("http://127.0.0.1:1")
    client.close()
    assert not client.ready()
    with pytest.raises(RequestError, match="the client is closed"):
        client.info()


def test_info_that_is_none() -> None:
    with (
        Script((200, {}, b"<html>")) as script,
        Client(script.url) as client,
        pytest.raises(ServiceError, match="not one of this server"),
    ):
        client.info()


def test_it_needs_neither_torch_nor_ray() -> None:
    ending = "import m3compile.client, sys; print('MODULES', *sys.modules)"
    found = set(run_fresh(ending).rpartition("MODULES ")[2].split())
    assert "m3compile.client" in found
    assert {"torch", "ray", "fastapi"}.isdisjoint(found)
