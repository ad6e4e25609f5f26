"""Which transports a worker offers, best first."""

from __future__ import annotations

from antiphon_kvtransfer.offer import TRANSPORTS, TransportOffer

from antiphon_worker.identity import WorkerIdentity
from antiphon_worker.options import WorkerOptions


def transport_offer(options: WorkerOptions, identity: WorkerIdentity) -> TransportOffer:
    """`auto` offers UCX and, for hosts and peers without it, TCP."""
    return TransportOffer(
        owner=f"{identity.worker_id}/{identity.incarnation}",
        names=TRANSPORTS if options.transport == "auto" else (options.transport,),
        host=options.host,
        advertise=(options.advertise_host,) if options.advertise_host else (),
    )
