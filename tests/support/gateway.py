"""A gateway with its real HTTP server on a free port, in the test's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from antiphon_gateway import ApiKeys, Gateway, GatewayOptions
from antiphon_gateway.server import create_server, listen

from tests.support.fake_worker import FakeWorker, fake_workers

DEFAULTS = GatewayOptions(port=0, heartbeat_ms=100, lost_after_ms=600)


@dataclasses.dataclass(slots=True)
class RunningGateway:
    url: str
    gateway: Gateway
    server: Any
    client: httpx.AsyncClient

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels; 0 where it has none yet."""
        page = self.gateway.metrics.page().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE))

    @property
    def at_rest(self) -> bool:
        """Nothing of any request is left."""
        dispatcher = self.gateway.dispatcher
        return (
            self.gateway.in_flight == 0
            and dispatcher.waiting == 0
            and all(client.requests == 0 for client in self.gateway.fleet.workers().values())
            and dispatcher.pledges == 0
            and self.metric("antiphon_gateway_requests_in_flight") == 0
        )


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll for something that nobody announces; fails when it does not come about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running_gateway(
    *workers: FakeWorker, keys: dict[str, str] | None = None, gateway_id: str = "gateway-test", **options: Any
) -> AsyncIterator[RunningGateway]:
    """Workers and a gateway that is attached to all of them."""
    async with fake_workers(*workers) as addresses:
        gateway = Gateway(dataclasses.replace(DEFAULTS, **{"worker": addresses, **options}), ApiKeys(keys), gateway_id)
        listener = listen("127.0.0.1", 0)
        server = create_server(gateway)
        gateway.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=20.0, trust_env=False) as client:
                await eventually(lambda: server.started and len(gateway.fleet.workers()) >= len(workers))
                yield RunningGateway(url, gateway, server, client)
        finally:
            server.stop()
            await serving
            await gateway.close()
            listener.close()
