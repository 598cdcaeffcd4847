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

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Terminal(capsys).refused


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--replicas", "0"), "replicas is '0'; allowed: a whole number from 1, or auto"),
        (("--replicas", "some"), "replicas is 'some'"),
        (("--queue-limit", "0"), "`$.queue_limit`"),
        (("--max-batch-tokens", "0"), "`$.max_batch_tokens`"),
        (("--batch-wait-ms", "-1"), "`$.batch_wait_ms`"),
        (("--timeout-s", "0"), "`$.timeout_s`"),
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
        url = f"http://127.0.0.1:{port}"
        outcomes: list[object] = []
        rows = np.zeros((4 * 12_000, 1176), np.float16)

        def encode() -> None:
            with Client(url, retries=0) as client:
                outcomes.append(client.encode(rows, [[750, 8, 8]])[0].shape)

        # More than a batch each, so one after another.
        accepted = [threading.Thread(target=encode) for _ in range(3)]
        for thread in accepted:
            thread.start()
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with Client(url, retries=0) as client:
            assert not client.ready()
            with pytest.raises(ServiceError, match="503"):
                client.encode(rows[:64], [[1, 8, 8]])
        for thread in accepted:
            thread.join()
        assert outcomes == [(12_000, 96)] * 3
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None
        assert "stopping: waiting for accepted requests" in process.stderr.read()
