"""The Serve application: an encoder a replica, each with its own HTTP routes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve

from m3compile.artifact import read_manifest
from m3compile.integrations.ray.ingress import EncoderIngress, make_api
from m3compile.integrations.ray.options import ServeOptions, serve_options

APPLICATION = "m3compile"
DEPLOYMENT = "Encoder"
# A replica that cannot start is tried once more, since memory may have been short for a moment;
# then the deployment has failed.
_START_ATTEMPTS = 2
_HEALTH_SECONDS = 5
# Bodies and answers are megabytes, in several threads. glibc would hand such memory back after each
# and have it faulted in again page by page; here one heap keeps it, up to 1 GiB.
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
# Beyond `queue_limit`, so that a replica itself refuses what is too much, and probes get through.
_SPARE_REQUESTS = 32


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application for a Serve config file, `import_path: m3compile.integrations.ray:app`.

    Args:
        args: keys of `ServeOptions`.

    Raises:
        ConfigError: a key is unknown or missing, or a value impossible.
        ArtifactError: the manifest is missing, damaged, or of another format.
    """
    options = serve_options(args)
    device = read_manifest(Path(options.artifact)).requirements.device
    return make_app(options, device, num_replicas(options, device))


def num_replicas(options: ServeOptions, device: str) -> int:
    """How many replicas the cluster gets; it is asked only for `auto` on GPUs."""
    if options.replicas != "auto":
        return options.replicas
    if device == "cpu":
        return 1
    return max(1, int(ray.cluster_resources().get("GPU", 0)))


def make_app(options: ServeOptions, device: str, replicas: int) -> serve.Application:
    """The application with its number of replicas settled; `device` is the artifact's."""
    variables = dict(_ALLOCATOR)
    actor: dict[str, Any] = {
        "num_cpus": options.cpus_per_replica,
        "runtime_env": {"env_vars": variables},
    }
    if device == "cuda":
        actor["num_gpus"] = 1
    else:
        # Compiled code has the number of threads of its build machine; this is their bound.
        threads = str(options.cpus_per_replica)
        variables |= {
            "OMP_NUM_THREADS": threads,
            "OMP_THREAD_LIMIT": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    deployment = serve.deployment(
        serve.ingress(make_api)(EncoderIngress),
        name=DEPLOYMENT,
        num_replicas=replicas,
        ray_actor_options=actor,
        max_ongoing_requests=options.queue_limit + _SPARE_REQUESTS,
        max_queued_requests=options.queue_limit * replicas,
        max_constructor_retry_count=_START_ATTEMPTS,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=options.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config={"enable_access_log": False},
    )
    return deployment.bind(options)
