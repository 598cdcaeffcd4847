"""A server on this machine from start to stop, as the command line runs it.

Call `proxy.prefer_haproxy` before this is imported: Ray reads its environment then.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from m3compile import errors
from m3compile.artifact import check_files, read_manifest
from m3compile.errors import M3CompileError, OperationError, RequestError, ServiceError
from m3compile.integrations.ray.application import APPLICATION, DEPLOYMENT, make_app, num_replicas
from m3compile.integrations.ray.options import ServeOptions
from m3compile.integrations.ray.proxy import ADDRESS_VARIABLE
from m3compile.integrations.ray.signals import own_signals
from m3compile.loading import check_machine
from m3compile.progress import Progress

_POLL_SECONDS = 0.2
# What Ray adds to a timeout: ours must be the one that answers.
_PROXY_GRACE_SECONDS = 5.0
# The last line of a traceback, as a replica that cannot start leaves it in its status.
_CAUSE = re.compile(r"^(?:\x1b\[\d+m)*m3compile\.errors\.(\w+): (.+)$", re.MULTILINE)


class Server:
    """A running server: every replica holds a loaded encoder. A context manager.

    Args:
        options: what is served, and how.
        host, port: where its HTTP proxy listens.
        progress: told of the stages of the start.

    Raises:
        ArtifactError: the artifact is missing, damaged or does not fit this machine; told before
            anything starts, or by the replica that found it.
        RequestError: the port is taken, or the machine has too few GPUs.
        OperationError: Ray or a replica cannot start.
    """

    def __init__(
        self, options: ServeOptions, host: str, port: int, progress: Progress | None = None
    ) -> None:
        progress = progress or Progress()
        self.options = options
        self._host, self._port = host, port
        self._owns_cluster = ADDRESS_VARIABLE not in os.environ
        folder = Path(options.artifact)
        manifest = read_manifest(folder)
        if self._owns_cluster:
            with progress.stage("check artifact"):
                check_files(folder, manifest)
                check_machine(folder, manifest, None)
        _check_port(host, port)
        device = manifest.requirements.device
        try:
            with progress.stage("start Ray"):
                _start_ray(self._owns_cluster, options)
                self.replicas = num_replicas(options, device)
                _check_gpus(device, self.replicas)
                _start_proxy(host, port, options.timeout_s)
            count = "1 replica" if self.replicas == 1 else f"{self.replicas} replicas"
            with progress.stage(f"start {count}"):
                self._run(make_app(options, device, self.replicas), progress)
        except BaseException:
            self.close()
            raise

    def _run(self, app: serve.Application, progress: Progress) -> None:
        target = serve.RunTarget(target=app, name=APPLICATION, route_prefix="/")
        (self._handle,) = serve.run_many([target], wait_for_applications_running=False)
        while True:
            status = self.status()
            if status.status == ApplicationStatus.RUNNING:
                return
            found = status.deployments.get(DEPLOYMENT)
            if status.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                raise start_error(found.message if found is not None else status.message)
            if found is not None:
                progress.advance(found.replica_states.get("RUNNING", 0), self.replicas)
            time.sleep(_POLL_SECONDS)

    def status(self) -> Any:
        """Serve's own account of the application.

        Raises:
            ServiceError: Ray is gone.
        """
        try:
            return serve.status().applications[APPLICATION]
        except (ray.exceptions.RayError, KeyError) as error:
            raise ServiceError(f"the server's Ray is gone: {error}") from None

    def info(self) -> dict[str, Any]:
        """What `/v1/info` says."""
        found: dict[str, Any] = self._handle.info.remote().result(timeout_s=30)
        return found

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def metrics_urls(self) -> list[str]:
        """Where each machine exports its replicas' metrics as Prometheus text."""
        return [
            f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            for node in ray.nodes()
            if node["Alive"]
        ]

    def drain(self) -> None:
        """Refuse new requests and wait for those that were accepted, at most `drain_s`.

        Raises:
            ServiceError: some were not answered in time.
        """
        try:
            self._handle.broadcast("drain").results(timeout_s=self.options.drain_s)
        except TimeoutError:
            raise ServiceError(
                f"requests were still running after {self.options.drain_s:g} s; they were cut off"
            ) from None

    def close(self) -> None:
        """Stop at once; may be repeated."""
        if not ray.is_initialized():
            return
        if not self._owns_cluster:
            serve.delete(APPLICATION)
        ray.shutdown()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RequestError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _start_ray(owns_cluster: bool, options: ServeOptions) -> None:
    """A cluster of this machine's own, never one that merely runs here."""
    wanted = options.cpus_per_replica * (options.replicas if options.replicas != "auto" else 1)
    try:
        with own_signals():
            ray.init(
                address="local" if owns_cluster else None,
                # Replicas may share cores, where their number was asked for.
                num_cpus=max(os.cpu_count() or 1, wanted) if owns_cluster else None,
                include_dashboard=False if owns_cluster else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (RuntimeError, OSError, ValueError) as error:
        raise OperationError(f"cannot start Ray: {error}") from error


def _check_gpus(device: str, replicas: int) -> None:
    found = int(ray.cluster_resources().get("GPU", 0))
    if device == "cuda" and replicas > found:
        raise RequestError(f"{replicas} replicas need a GPU each; Ray has {found}")


def _start_proxy(host: str, port: int, timeout_s: float) -> None:
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(
        proxy_location="HeadOnly",
        http_options={
            "host": host,
            "port": port,
            "request_timeout_s": timeout_s + _PROXY_GRACE_SECONDS,
        },
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )


def start_error(message: str) -> M3CompileError:
    """What a replica died of, with the exit code of that cause."""
    causes = _CAUSE.findall(message)
    if not causes:
        return OperationError(f"the replicas cannot start: {message}")
    name, text = causes[-1]
    kind = getattr(errors, name, OperationError)
    return kind(text)
