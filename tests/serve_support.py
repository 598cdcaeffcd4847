"""A server for tests, in a Ray cluster of its own, and one that plays a script."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import soak_serve

from m3compile.integrations.ray.proxy import prefer_haproxy

__all__ = ["Script", "free_port", "ray_folder", "running_server", "soak_serve"]


# Before any test imports Ray Serve, which looks at the environment then.
prefer_haproxy()
# Replicas that leave wait so long for balancers on other machines.
os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def ray_folder() -> Iterator[str]:
    """A folder with a short name, for the sockets of a Ray cluster; Ray starts there."""
    folder = tempfile.mkdtemp(prefix="m3-")
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = folder
    try:
        yield folder
    finally:
        if before is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running_server(artifact: Path, **settings: Any) -> Iterator[Any]:
    from m3compile.integrations.ray.options import serve_options
    from m3compile.integrations.ray.server import Server

    options = serve_options({"artifact": str(artifact), **settings})
    with ray_folder(), Server(options, "127.0.0.1", free_port()) as server:
        yield server


class Script:
    """An HTTP server that answers with what a list says, then with its last entry for ever.

    An entry is (status, headers, body), or None to drop the connection.
    """

    def __init__(self, *answers: tuple[int, dict[str, str], bytes] | None) -> None:
        self.seen: list[tuple[str, bytes]] = []
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                script.seen.append((self.path, body))
                answer = answers[min(len(script.seen), len(answers)) - 1]
                if answer is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                status, headers, content = answer
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Script:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
