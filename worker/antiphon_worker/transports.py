"""Which transports a worker offers, best first."""

from __future__ import annotations

from antiphon_kvtransfer.cards import LocalWorker
from antiphon_kvtransfer.tcp import TcpTransport
from antiphon_kvtransfer.transport import Transport
from antiphon_kvtransfer.ucx import UcxTransport

from antiphon_worker.options import WorkerOptions


def create_transports(options: WorkerOptions, local: LocalWorker) -> list[Transport]:
    """`auto` offers UCX and, for hosts and peers without it, TCP."""
    offered: list[Transport] = []
    if options.transport in ("auto", "ucx"):
        offered.append(UcxTransport(local.region, owner=f"{local.worker_id}/{local.incarnation}"))
    if options.transport in ("auto", "tcp"):
        advertise = (options.advertise_host,) if options.advertise_host else ()
        offered.append(TcpTransport(local.region, host=options.host, advertise=advertise))
    return offered
