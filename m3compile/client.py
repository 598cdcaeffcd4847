"""A client of `python -m m3compile serve`; needs neither torch nor Ray, only httpx and NumPy.

with Client("http://127.0.0.1:8000") as client:
    embeddings = client.encode_files(["a.jpg", "b.png"])
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from m3compile import errors
from m3compile.errors import (
    DependencyError,
    InputError,
    InputNotFoundError,
    M3CompileError,
    RequestError,
    ServiceError,
)
from m3compile.grids import check_row_shape, read_grids
from m3compile.wire import (
    COUNTS,
    EMBEDDINGS,
    ENCODE_PATH,
    GRIDS,
    INFO_PATH,
    PIXELS,
    READY_PATH,
    SAFETENSORS,
    read_fault,
)

try:
    import httpx
except ImportError as missing:
    raise DependencyError("the client needs httpx: pip install 'm3compile[client]'") from missing

# Nothing ran, or nothing is lost by running it twice: an answer depends on the request alone.
_RETRIED_STATUSES = (429, 502, 503)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class Client:
    """A connection pool to one server; may be shared by threads. A context manager.

    Args:
        url: of the server, without a path.
        timeout_s: for a request and its retries together. An answer that has begun by then is read
            to its end, while its parts come.
        retries: at most so many, after a refused or broken connection, 429, 502 or 503, a replica
            that died, or a server that starts; with growing pauses, or the server's Retry-After.
    """

    def __init__(self, url: str, *, timeout_s: float = 60.0, retries: int = 4) -> None:
        if not 0 < timeout_s < math.inf or retries < 0:
            raise RequestError(
                f"timeout_s is {timeout_s}, retries is {retries}; expected a time above 0, and 0 "
                "or more"
            )
        self._timeout_s = timeout_s
        self._retries = retries
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise RequestError(f"url is {url!r}: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise RequestError(f"url is {url!r}; expected http://HOST:PORT")
        self._http = httpx.Client(base_url=parsed)

    def encode(self, pixel_values: Any, grid_thw: Any) -> list[np.ndarray]:
        """Encode rows that a processor made.

        Args:
            pixel_values: (N, patch_dim) array, or a list of one an item; float32, float16, float64
                or `ml_dtypes.bfloat16`, sent as it is: half the width is half the bytes.
            grid_thw: (num_items, 3) integers; t, h, w in patches of every item.

        Returns:
            One float32 (t*h*w / 4, width) array an item, in order. An encoder in bfloat16 sends
            that, and it is widened here, exactly.

        Raises:
            InputError: an item breaks a rule, or has a non-finite pixel; names it.
            TooLargeError: the request is over a limit of the server.
            ServiceError: no answer in time, in spite of the retries, or the server failed.
        """
        grids = read_grids(grid_thw)
        rows = _rows(pixel_values)
        if rows.ndim != 2:
            raise InputError(f"pixel_values has shape {rows.shape}, expected (rows, patch_dim)")
        expected = sum(t * h * w for t, h, w in grids)
        check_row_shape("pixel_values", rows.shape, expected, rows.shape[1], grids)
        table = np.asarray(grids, np.int64).reshape(-1, 3)
        try:
            body = safetensors.numpy.save({PIXELS: rows, GRIDS: table})
        except safetensors.SafetensorError:
            raise InputError(
                f"pixel_values has dtype {rows.dtype}, expected a float dtype"
            ) from None
        answer = self._send(
            "POST", ENCODE_PATH, content=body, headers={"Content-Type": SAFETENSORS}
        )
        return read_answer(answer.content)

    def encode_files(self, paths: Sequence[str | os.PathLike[str]]) -> list[np.ndarray]:
        """Encode image files as one batch, decoded by the server.

        Returns:
            As `encode`; no paths give no arrays.

        Raises:
            InputNotFoundError: there is no such file.
            InputError, TooLargeError, ServiceError: as `encode`; items count from 0 in the order
                of `paths`.
        """
        if not paths:
            return []
        files = []
        for path in map(Path, paths):
            try:
                name = os.fsencode(path.name).decode(errors="backslashreplace")
                files.append(("images", (name, path.read_bytes())))
            except FileNotFoundError:
                raise InputNotFoundError(f"{path}: no such file") from None
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise InputError(f"{path}: cannot be read: {reason}") from None
        return read_answer(self._send("POST", ENCODE_PATH, files=files).content)

    def info(self) -> dict[str, Any]:
        """The artifact in short, and the limits of a request. Raises: ServiceError."""
        answer = self._send("GET", INFO_PATH)
        try:
            found: dict[str, Any] = answer.json()
        except ValueError as error:
            raise ServiceError(f"the answer is not one of this server: {error}") from None
        return found

    def ready(self) -> bool:
        """Whether the server takes requests now; never raises, never retries."""
        if self._http.is_closed:
            return False
        try:
            return self._http.get(READY_PATH).status_code == 200
        except httpx.HTTPError:
            return False

    def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        if self._http.is_closed:
            raise RequestError("the client is closed; make another one")
        deadline = time.monotonic() + self._timeout_s
        headers = {"Accept": SAFETENSORS, **content.pop("headers", {})}
        failure: M3CompileError
        for attempt in range(self._retries + 1):
            left = deadline - time.monotonic()
            pause = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S) * (0.5 + random.random())
            try:
                answer = self._http.request(
                    method, path, headers=headers, timeout=max(left, 0.001), **content
                )
            except httpx.TimeoutException:
                raise ServiceError(
                    f"{self._http.base_url}: no answer within {self._timeout_s:g} s"
                ) from None
            except httpx.TransportError as error:
                failure = ServiceError(f"{self._http.base_url}: {error or type(error).__name__}")
            except httpx.HTTPError as error:
                raise ServiceError(f"{self._http.base_url}: {error}") from None
            else:
                if answer.is_success:
                    return answer
                failure = _failure(answer)
                if not _may_retry(answer):
                    raise failure
                pause = _told_pause(answer.headers, pause)
            if attempt == self._retries or time.monotonic() + pause > deadline:
                break
            time.sleep(pause)
        raise failure

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _rows(pixel_values: Any) -> np.ndarray:
    try:
        if isinstance(pixel_values, (list, tuple)) and pixel_values:
            pixel_values = np.concatenate(pixel_values)
        elif isinstance(pixel_values, (list, tuple)):
            pixel_values = np.zeros((0, 0), "f4")
        return np.ascontiguousarray(pixel_values)
    except (TypeError, ValueError) as error:
        raise InputError(f"pixel_values is no array of rows: {error}") from None


def _may_retry(answer: httpx.Response) -> bool:
    # Without the server's own words it is Ray's proxy that speaks: of a replica that died on the
    # way (500), or of a server that is still starting (404).
    is_proxy = answer.status_code in (404, 500) and read_fault(answer.content) is None
    return is_proxy or answer.status_code in _RETRIED_STATUSES


def _told_pause(headers: Mapping[str, str], pause: float) -> float:
    told = headers.get("retry-after", "")
    return max(pause, float(told)) if told.isdecimal() else pause


def _failure(answer: httpx.Response) -> M3CompileError:
    fault = read_fault(answer.content)
    if fault is None:
        text = " ".join(answer.text.split())[:200]
        return ServiceError(f"the server answered {answer.status_code}: {text}")
    if answer.status_code < 500 and answer.status_code != 429:
        kind = getattr(errors, fault.kind, None)
        if isinstance(kind, type) and issubclass(kind, RequestError):
            return kind(fault.message)
        return RequestError(fault.message)
    return ServiceError(f"the server answered {answer.status_code}: {fault.message}")


def read_answer(body: bytes) -> list[np.ndarray]:
    """The embeddings of every item, float32, from the safetensors body of an answer.

    Raises:
        ServiceError: it is something else.
    """
    try:
        tensors = dict(safetensors.deserialize(body))
        embeddings, counts = _array(tensors[EMBEDDINGS]), _array(tensors[COUNTS])
        if counts.ndim != 1 or counts.dtype.kind != "i" or (counts < 0).any():
            raise ValueError(f"{COUNTS} is {counts.dtype} of shape {counts.shape}")
        if counts.sum() != len(embeddings):
            raise ValueError(f"{len(embeddings)} embeddings for {counts.sum()} tokens")
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ServiceError(f"the answer is not one of this server: {error}") from None
    return np.split(embeddings, np.cumsum(counts)[:-1]) if len(counts) else []


def _array(tensor: Mapping[str, Any]) -> np.ndarray:
    data, shape = tensor["data"], tensor["shape"]
    if tensor["dtype"] == "BF16":
        # NumPy has none: its 16 bits are the upper half of a float32.
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    dtypes = {"F32": "<f4", "I64": "<i8"}
    return np.frombuffer(data, dtypes[tensor["dtype"]]).reshape(shape)
