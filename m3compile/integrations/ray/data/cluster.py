"""Ray for one job: a cluster of this machine's own, or one that runs already."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import ray

from m3compile.errors import OperationError, RequestError
from m3compile.integrations.ray.signals import own_signals

LOCAL = "local"
# Ray's own default for its object store, of the machine's memory.
_STORE_SHARE = 0.3
_LEAST_STORE_BYTES = 128 << 20
# Batches that lie in the store at a time, for every process that makes or takes them.
_BATCHES_PER_PROCESS = 2
# Of the CPUs, what is left to decoding where the encoders run on CPUs too.
_DECODING_SHARE = 0.25


class Share(NamedTuple):
    """What the stages may use.

    Attributes:
        encoders: processes with an encoder.
        gpus: of each encoder, 0 or 1.
        cpus: of each encoder; where it runs on them, also the threads of torch.
    """

    encoders: int
    gpus: int
    cpus: int


@contextmanager
def connected(address: str, batch_bytes: int) -> Iterator[None]:
    """Ray, quiet; left as it was found if this process had it already.

    Args:
        address: `local`, or of a cluster.
        batch_bytes: of a batch on its way, which a local cluster's store is sized by.

    Raises:
        OperationError: it does not start, or cannot be reached.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ours = {}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ours = {"include_dashboard": False, "object_store_memory": _store_bytes(batch_bytes)}
    try:
        with own_signals():
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **ours)
    except Exception as error:
        # Whatever Ray raises: its kinds are not part of its interface.
        reason = " ".join(str(error).split())[:500]
        raise OperationError(f"Ray at {address} did not start: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _store_bytes(batch_bytes: int) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = _BATCHES_PER_PROCESS * batch_bytes * ((os.cpu_count() or 1) + 1)
    return int(min(max(wanted, _LEAST_STORE_BYTES), _STORE_SHARE * memory))


def divide_cluster(concurrency: int | None, device: str) -> Share:
    """Divide the cluster's CPUs and GPUs between encoders and decoding.

    Args:
        concurrency: encoders; None for one a GPU, or one where there are none.
        device: the artifact's, `cpu` or `cuda`.

    Raises:
        RequestError: there are not as many GPUs or CPUs.
    """
    found = ray.cluster_resources()
    return divide(concurrency, device, int(found.get("CPU", 0)), int(found.get("GPU", 0)))


def divide(concurrency: int | None, device: str, cpus: int, gpus: int) -> Share:
    """As `divide_cluster`, for a given number of CPUs and GPUs."""
    if device == "cuda":
        encoders = concurrency or gpus
        if not 1 <= encoders <= gpus:
            raise RequestError(
                f"--concurrency {encoders}: each encoder takes a GPU; Ray has {gpus}"
            )
        # A CPU each to drive the GPU, where enough are left to decode.
        return Share(encoders, 1, 1 if cpus > encoders else 0)
    encoders = concurrency or 1
    if encoders > max(cpus - 1, 1):
        raise RequestError(
            f"--concurrency {encoders}: each encoder takes a CPU, and one decodes; Ray has {cpus}"
        )
    decoding = max(1, math.floor(_DECODING_SHARE * cpus))
    return Share(encoders, 0, max((cpus - decoding) // encoders, 1) if cpus > 1 else 0)
