"""`serve` as a command: what it refuses before anything starts, by the exit codes of the contract;
and one whole life of a server in a process of its own, to a SIGTERM under load.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from crafted import copy, edited
from serve_support import free_port, ray_folder
from terminal import Refused, Terminal

from m3compile.client import Client
from m3compile.errors import ServiceError

CLIENTS = 12
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Terminal(capsys).refused


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--replicas", "0"), "replicas is '0'; allowed: a whole number from 1, or auto"),
        (("--replicas", "some"), "replicas is 'some'"),
        (("--queue-limit", "0"), "queue_limit is "),
        (("--max-batch-tokens", "0"), "max_batch_tokens is "),
        (("--batch-wait-ms", "-1"), "batch_wait_ms is "),
        (("--timeout-s", "0"), "timeout_s is "),
        (("--port", "0"), "--port"),
    ],
)
def test_flags_that_are_wrong(refused: Refused, tmp_path: Path, flags: tuple, says: str) -> None:
    assert says in refused(2, "serve", tmp_path, *flags)


def test_no_artifact(refused: Refused, tmp_path: Path) -> None:
    assert "no such artifact folder" in refused(3, "serve", tmp_path / "gone")


def test_an_artifact_of_another_machine(
    refused: Refused, golden_artifact: Path, tmp_path: Path
) -> None:
    folder = copy(golden_artifact, tmp_path / "a")
    with edited(folder) as manifest:
        manifest["requirements"]["torch"] = "9.9"
    assert "built for torch 9.9" in refused(3, "serve", folder)


def test_a_damaged_artifact(refused: Refused, golden_artifact: Path, tmp_path: Path) -> None:
    folder = copy(golden_artifact, tmp_path / "a")
    (folder / "weights.safetensors").write_bytes(b"short")
    assert "weights.safetensors: found 5 bytes" in refused(3, "serve", folder)


def test_a_port_that_is_taken(refused: Refused, golden_artifact: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(2, "serve", golden_artifact, "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line


def test_without_ray(
    refused: Refused, golden_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "m3compile.integrations.ray.server", raising=False)
    line = refused(2, "serve", golden_artifact)
    assert "pip install 'm3compile[serve]'" in line


@contextmanager
def serving(*words: object) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The command in a process of its own, once it says that it serves; and what it said."""
    with ray_folder() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "m3compile", "serve", *map(str, words)],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            lines = []
            while not lines or not lines[-1].startswith("  metrics"):
                line = process.stdout.readline()
                assert line, process.communicate()
                lines.append(line)
            yield process, lines
        finally:
            process.terminate()
            process.communicate(timeout=60)


def test_sigterm_lets_accepted_requests_finish(golden_artifact: Path) -> None:
    port = free_port()
    with serving(golden_artifact, "--port", port, "--replicas", 1) as (process, lines):
        assert lines[0] == (
            f"Serving {golden_artifact.name} at http://127.0.0.1:{port} "
            "(1 replica on cpu, 4 budgets, 0 captured)\n"
        )
        assert re.search(r"metrics  http://\S+:\d+/metrics\n", lines[-1])
        # One after another: each is more than a batch, and a while in the queue.
        rows = np.zeros((4 * 600, 1176), np.float16)
        outcomes: list[list[str]] = [[] for _ in range(CLIENTS)]

        def keep_encoding(noted: list[str]) -> None:
            with Client(f"http://127.0.0.1:{port}", retries=0) as client:
                while not noted or noted[-1] == "encoded":
                    try:
                        (result,) = client.encode(rows, [[1, 60, 40]])
                        noted.append("encoded" if result.shape == (600, 96) else "wrong")
                    except ServiceError as error:
                        noted.append(str(error))

        threads = [threading.Thread(target=keep_encoding, args=(noted,)) for noted in outcomes]
        for thread in threads:
            thread.start()
        while min(map(len, outcomes)) < 2:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert process.wait(timeout=90) == 0
        assert process.stderr is not None
        assert "stopping: waiting for accepted requests" in process.stderr.read()
    for noted in outcomes:
        *done, last = noted
        assert set(done) == {"encoded"}
        # Whoever is slow to send another one finds nobody there; nothing was accepted then.
        assert "answered 503: the server is stopping" in last or "Connection refused" in last
    assert any("answered 503: the server is stopping" in noted[-1] for noted in outcomes)
