"""A real replica of a Valkey that can be made to lag, and then to take its primary's place."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import redis

from tests.support.membership import until
from tests.support.tcp_proxy import TcpProxy
from tests.support.valkey import Valkey


class LaggingReplica:
    def __init__(self, server: Valkey, replication: TcpProxy) -> None:
        self.server = server
        self._replication = replication

    def lag(self) -> None:
        """It hears nothing more of what is written."""
        self._replication.hold_replies()

    def promote(self) -> None:
        """It is a primary of its own, with what it heard."""
        self._replication.cut()
        with redis.Redis.from_url(self.server.url, protocol=2) as client:
            client.replicaof("NO", "ONE")


@contextlib.asynccontextmanager
async def replica_of(primary: Valkey) -> AsyncIterator[LaggingReplica]:
    """In step with its primary from the beginning."""
    async with TcpProxy(port_of(primary)) as replication:
        with Valkey() as server:
            with redis.Redis.from_url(primary.url, protocol=2) as client:
                client.config_set("repl-diskless-sync-delay", 0)
            with redis.Redis.from_url(server.url, protocol=2) as client:
                client.replicaof("127.0.0.1", replication.port)
                await until(lambda: client.info("replication")["master_link_status"] == "up")
            yield LaggingReplica(server, replication)


def port_of(server: Valkey) -> int:
    return int(server.url.rpartition(":")[2].partition("/")[0])
