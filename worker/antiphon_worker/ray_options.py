"""From a worker's options to the Ray cluster that its ranks are placed in."""

from __future__ import annotations

import logging
import os
import socket

from antiphon_engine.gang import ClusterKind, ClusterSettings
from antiphon_telemetry.exit import ExitCode

from antiphon_worker.errors import WorkerStartError
from antiphon_worker.options import WorkerOptions

log = logging.getLogger("antiphon.worker")

TOKEN_PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"
"""Ray's own; used where --ray-token-file is not given."""


def token_file(options: WorkerOptions) -> str:
    """Empty: the machines of a cluster ask each other for no token, which is logged."""
    found = options.ray_token_file or os.environ.get(TOKEN_PATH_VARIABLE, "")
    if not found:
        log.warning("this Ray cluster runs without a token: whoever reaches its ports can run code; --ray-token-file")
    return found


def node_ip(options: WorkerOptions) -> str:
    """This machine's address, as the cluster's other machines reach it. Raises WorkerStartError."""
    name = options.advertise_host or options.host
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise WorkerStartError(
            f"{name} has no address ({error}): name this machine by --advertise-host", ExitCode.BAD_INPUT
        ) from error


def cluster_settings(options: WorkerOptions) -> ClusterSettings:
    """Raises WorkerStartError."""
    if options.ray_address:
        return ClusterSettings(ClusterKind.EXISTING, address=options.ray_address, token_file=token_file(options))
    if options.ray_head:
        return ClusterSettings(
            ClusterKind.HEAD,
            node_ip=node_ip(options),
            token_file=token_file(options),
            node_ranks=options.ray_node_ranks,
        )
    return ClusterSettings(ClusterKind.LOCAL)
