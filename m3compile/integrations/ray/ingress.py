"""The HTTP contract as FastAPI routes around one encoder; told in docs/serving.md."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import numpy as np
from fastapi import FastAPI
from ray import serve
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from m3compile.errors import M3CompileError
from m3compile.integrations.ray.actor import as_rows
from m3compile.integrations.ray.batching import Job
from m3compile.integrations.ray.options import ServeOptions
from m3compile.integrations.ray.refusals import (
    RETRY_AFTER_S,
    Refused,
    check_size,
    kind_of,
    status_of,
)
from m3compile.integrations.ray.replica import EncoderService
from m3compile.integrations.ray.requests import (
    Parts,
    read_images,
    read_request,
    read_rows,
    wants_json,
    write_answer,
)
from m3compile.version import VERSION
from m3compile.wire import (
    ENCODE_PATH,
    INFO_PATH,
    JSON,
    LIVE_PATH,
    READY_PATH,
    SAFETENSORS,
    fault_body,
)

_log = logging.getLogger("ray.serve")
# What nginx calls a client that left; it is only counted.
_CLIENT_LEFT = 499


def _refusal(error: M3CompileError) -> Response:
    headers = {}
    if isinstance(error, Refused) and error.may_be_retried:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    body = fault_body(kind_of(error), str(error))
    return Response(body, status_of(error), headers, media_type=JSON)


def make_api() -> FastAPI:
    """The routes of a replica; Serve calls this inside it."""
    api = FastAPI(title="m3compile", version=VERSION)
    api.add_exception_handler(HTTPException, _no_route)
    api.post(ENCODE_PATH, response_class=Response)(_encode)
    api.get(LIVE_PATH)(_live)
    api.get(READY_PATH)(_ready)
    api.get(INFO_PATH)(_info)
    return api


def _replica() -> EncoderIngress:
    return serve.get_replica_context().servable_object


async def _encode(request: Request) -> Response:
    """Encode image files of a form, or pixel_values and grid_thw of a safetensors body."""
    return await _replica().answer(request)


async def _live() -> dict[str, str]:
    """The replica's process answers."""
    return {"status": "live"}


async def _ready() -> Response:
    """The replica captured every budget, and takes requests."""
    return _replica().readiness()


async def _info() -> dict[str, Any]:
    """The artifact in short, and the limits of a request."""
    return await _replica().info()


async def _no_route(request: Request, error: Any) -> Response:
    body = fault_body("NoRoute", f"{request.method} {request.url.path}: {error.detail}")
    return Response(body, error.status_code, error.headers, media_type=JSON)


class EncoderIngress:
    """What a replica serves: HTTP, and `encode_rows` for callers inside the cluster."""

    def __init__(self, options: ServeOptions) -> None:
        self._service = EncoderService(options)

    async def answer(self, request: Request) -> Response:
        """The answer to a request to encode, whatever becomes of it."""
        started = time.perf_counter()
        status = _CLIENT_LEFT
        try:
            response = await self._answer(request)
            status = response.status_code
            return response
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        finally:
            self._service.answered(status, time.perf_counter() - started)

    async def _answer(self, request: Request) -> Response:
        seconds = self._service.options.timeout_s
        try:
            return await asyncio.wait_for(self._encoded(request), seconds)
        except asyncio.TimeoutError:
            return _refusal(Refused.late(seconds))
        except M3CompileError as error:
            if status_of(error) >= 500 and not isinstance(error, Refused):
                _log.error("a request failed: %s", error)
            return _refusal(error)
        except ClientDisconnect:
            raise
        except Exception:  # noqa: BLE001 (a client is answered whatever happened; the log has it)
            _log.exception("a request failed by a fault of the server")
            body = fault_body("Internal", "a fault of the server; its log has the details")
            return Response(body, 500, media_type=JSON)

    async def _encoded(self, request: Request) -> Response:
        service = self._service
        with service.admitted():
            job = await self._read(request)
            as_json = wants_json(request)
            if as_json:
                allowed = service.options.max_json_tokens
                check_size("output tokens for an answer as JSON", sum(job.tokens), allowed)
            embeddings = await service.encode(job)
            body = await service.in_thread(lambda: write_answer(embeddings, job.tokens, as_json))
            return Response(body, media_type=JSON if as_json else SAFETENSORS)

    async def _read(self, request: Request) -> Job:
        service, options = self._service, self._service.options
        body = await read_request(request, options.max_body_bytes, options.max_items)

        def parse() -> Job:
            if isinstance(body, Parts):
                return service.job(*read_rows(body))
            pixels, tokens = options.max_image_pixels, options.max_request_tokens
            return service.job(*read_images(body, service.preprocess, pixels, tokens))

        return await service.in_thread(parse)

    def readiness(self) -> Response:
        # A replica gets no request before its encoder is loaded.
        if self._service.is_draining:
            return _refusal(Refused.draining())
        return JSONResponse({"status": "ready"})

    async def info(self) -> dict[str, Any]:
        return self._service.info()

    async def encode_rows(self, pixel_values: Any, grid_thw: Any) -> list[np.ndarray]:
        """Encode without HTTP, batched with the requests that come over it.

        Args:
            pixel_values: (N, patch_dim) float array or tensor, or a list of one an item.
            grid_thw: (num_items, 3) integers.

        Returns:
            One float32 (t*h*w / 4, width) array an item; bfloat16 results are widened, exactly.

        Raises:
            InputError, TooLargeError: as over HTTP.
            ServiceError: the replica is full or draining.
        """
        service = self._service
        with service.admitted():
            job = await service.in_thread(lambda: service.job(as_rows(pixel_values), grid_thw))
            embeddings = await service.encode(job)
            return [rows.float().numpy() for rows in embeddings.split(list(job.tokens))]

    async def drain(self) -> None:
        """See `EncoderService.drain`."""
        await self._service.drain()
