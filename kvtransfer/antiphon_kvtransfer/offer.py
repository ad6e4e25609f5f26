"""Which transports a worker offers, and how its peers find them: said once, made anew for the pool of every rank."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_kvtransfer.tcp import TcpTransport
from antiphon_kvtransfer.transport import Region, Transport
from antiphon_kvtransfer.ucx import UcxTransport

TRANSPORTS = ("ucx", "tcp")
"""All there are, best first."""


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """Plain values, so that it can be sent to the process of a rank."""

    owner: str
    """Worker and incarnation."""
    names: tuple[str, ...] = TRANSPORTS
    """Best first."""
    host: str = "127.0.0.1"
    """Where `tcp` listens."""
    advertise: tuple[str, ...] = ()
    """Under which names or addresses peers find `host`; needed where it is a wildcard."""

    def transports(self, region: Region) -> list[Transport]:
        """For one pool, not started."""
        return [self._transport(name, region) for name in self.names]

    def _transport(self, name: str, region: Region) -> Transport:
        if name == "ucx":
            return UcxTransport(region, owner=self.owner)
        if name == "tcp":
            return TcpTransport(region, host=self.host, advertise=self.advertise)
        raise ValueError(f"no transport {name!r}: there are {', '.join(TRANSPORTS)}")
