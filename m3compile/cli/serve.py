"""`serve`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from m3compile.cli.console import StageProgress, counted, stderr, stdout
from m3compile.errors import DependencyError, ExitCode
from m3compile.integrations.ray.options import ServeOptions, serve_options
from m3compile.integrations.ray.proxy import prefer_haproxy
from m3compile.wire import ENCODE_PATH

if TYPE_CHECKING:
    from m3compile.integrations.ray.server import Server

_DEFAULTS = ServeOptions(artifact="-")
_WATCH_SECONDS = 5.0


@click.command()
@click.argument("artifact")
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 for every network.")
@click.option("--port", type=click.IntRange(1, 65_535), default=8000, show_default=True)
@click.option(
    "--replicas",
    default=_DEFAULTS.replicas,
    show_default=True,
    metavar="N|auto",
    help="Encoders; auto is one a GPU, or one on the CPU, which it fills by itself.",
)
@click.option(
    "--max-batch-tokens",
    type=int,
    help="Tokens encoded together.  [default: the largest budget]",
)
@click.option(
    "--batch-wait-ms",
    type=float,
    default=_DEFAULTS.batch_wait_ms,
    show_default=True,
    help="How long a batch waits for requests that are being received.",
)
@click.option(
    "--queue-limit",
    type=int,
    default=_DEFAULTS.queue_limit,
    show_default=True,
    help="Requests that a replica holds at once; more are answered 429.",
)
@click.option(
    "--timeout-s",
    type=float,
    default=_DEFAULTS.timeout_s,
    show_default=True,
    help="Requests that take longer are answered 504.",
)
@click.option("--max-body-mb", type=float, default=_DEFAULTS.max_body_mb, show_default=True)
def serve(artifact: str, host: str, port: int, replicas: str, **settings: Any) -> int:
    """Serve ARTIFACT over HTTP, on Ray Serve.

    POST image files or safetensors to /v1/encode; docs/serving.md tells the rest. SIGTERM or
    Ctrl-C stops it once every accepted request is answered. Clusters take a Serve config file
    instead: `serve run` with m3compile.integrations.ray:app.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    values = {"artifact": str(Path(artifact).absolute()), "replicas": replicas, **settings}
    options = serve_options(_with_cores(values))
    prefer_haproxy(host)
    try:
        from m3compile.integrations.ray.server import Server
    except ImportError as error:
        raise DependencyError(
            f"serving needs Ray ({error}): pip install 'm3compile[serve]'"
        ) from error
    with StageProgress() as progress:
        server = Server(options, host, port, progress)
    with server, _stopped() as stop:
        _show(server)
        while not stop.wait(_WATCH_SECONDS):
            server.status()
        stderr().print("  stopping: waiting for accepted requests ...", markup=False)
        server.drain()
    return ExitCode.INTERRUPTED if stop.signal == signal.SIGINT else ExitCode.OK


def _with_cores(values: dict[str, Any]) -> dict[str, Any]:
    """Each replica's share of this machine's cores."""
    replicas = str(values["replicas"])
    sharers = int(replicas) if replicas.isdecimal() and int(replicas) > 0 else 1
    return {**values, "cpus_per_replica": max(1, (os.cpu_count() or 1) // sharers)}


class _Stop(threading.Event):
    """Set by the signal that asks the server to stop."""

    signal: signal.Signals | None = None


@contextmanager
def _stopped() -> Iterator[_Stop]:
    """The first signal asks for a clean stop; a second one interrupts that."""
    stop = _Stop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.signal = signal.Signals(number)
        stop.set()

    for number in numbers:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _show(server: Server) -> None:
    info = server.info()
    count = counted(server.replicas, "replica")
    console = stdout()
    console.print(
        f"Serving {info['artifact']} at {server.url} ({count} on {info['device']}, "
        f"{len(info['budgets'])} budgets, {info['captured']} captured)",
        markup=False,
    )
    if info["weights"] == "random":
        console.print("  The weights are random: its embeddings mean nothing.", markup=False)
    console.print(
        f"  try      curl -F images=@picture.jpg -H 'Accept: application/json' "
        f"{server.url}{ENCODE_PATH}",
        markup=False,
    )
    console.print(f"  metrics  {' '.join(server.metrics_urls)}", markup=False)
