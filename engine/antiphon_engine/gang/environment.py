"""How every Ray of ours is set: ports, environment, resources. Known in one place.

Ports. A Ray cluster of one machine takes whatever ports are free, on a loopback address. Between pods, the head's is
the one that joiners are told, and the others are fixed, so that a network policy can name them; processes that compute
use the range. What Ray 2.60 lets nobody fix: the port of its metrics agent, which is off.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

HEAD_PORT = 6380
NODE_MANAGER_PORT = 6381
OBJECT_MANAGER_PORT = 6382
RUNTIME_ENV_AGENT_PORT = 6383
FIRST_WORKER_PORT = 6400
LAST_WORKER_PORT = 6499

OBJECT_STORE_BYTES = 80_000_000
"""Nearly the least that Ray takes: nothing of ours is an object of Ray's."""

LOOPBACK = "127.0.0.1"
"""Of a cluster on one machine. At this address, and no other of loopback, Ray's servers listen nowhere else."""

_GIVE_UP_HEAD_S = "15"


def prepare(environment: MutableMapping[str, str], token_file: str, node_ip: str) -> None:
    """Before ray is imported, in a process that runs nothing else. Processes that Ray starts inherit it.

    `token_file`: empty for a cluster without authentication.
    """
    for name in [name for name in environment if name.startswith("RAY_")]:
        # What a shell has exported for another Ray (an address, a token) would be obeyed.
        if name not in ("RAY_TMPDIR",):
            del environment[name]
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment["RAY_enable_worker_prestart"] = "0"
    environment["RAY_prestart_worker_first_driver"] = "0"
    environment["RAY_DISABLE_DOCKER_CPU_WARNING"] = "1"
    if node_ip == LOOPBACK:
        # Else Ray takes a loopback address for the machine's outer one, where such a cluster does not listen.
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # Ray kills ranks where most of the machine's or the pod's memory is in use, by whomever. A rank takes its memory at
    # the start and keeps it: its gang would die, start anew and die again.
    environment["RAY_memory_monitor_refresh_ms"] = "0"
    environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = _GIVE_UP_HEAD_S
    if not token_file:
        environment["RAY_AUTH_MODE"] = "disabled"
    else:
        environment["RAY_AUTH_MODE"] = "token"
        environment["RAY_AUTH_TOKEN_PATH"] = token_file


def is_on_loopback_alone(address: str) -> bool:
    """Whether a cluster at host:port is of this machine alone, as those that workers start for themselves are.

    Ray's own heads listen on the machine's outer address too, and know their node by that.
    """
    host, _, port = address.rpartition(":")
    if host not in (LOOPBACK, "localhost"):
        return False
    try:
        socket.create_connection((_outer_address(), int(port)), timeout=1.0).close()
    except OSError:
        return True
    return False


def _outer_address() -> str:
    """Of this machine, by which interface packets would leave it. None does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nowhere:
        nowhere.connect(("198.51.100.1", 9))
        return str(nowhere.getsockname()[0])


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
