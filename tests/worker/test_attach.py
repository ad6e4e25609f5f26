"""One stream with a gateway, its far end played by the test: when silence counts and when it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from antiphon_proto import worker_pb2 as wire
from antiphon_worker.attach import AttachServicer
from antiphon_worker.identity import new_identity
from antiphon_worker.options import WorkerOptions

from tests.support.workers import within

LOST_AFTER_S = 0.6


class Stream:
    """What gRPC gives to a handler."""

    def __init__(self) -> None:
        self.to_worker: asyncio.Queue[wire.GatewayMessage] = asyncio.Queue()
        self.from_worker: asyncio.Queue[wire.WorkerMessage] = asyncio.Queue()
        self.ending = ""

    async def read(self) -> wire.GatewayMessage:
        return await self.to_worker.get()

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        pass

    async def write(self, message: wire.WorkerMessage) -> None:
        self.from_worker.put_nowait(message)

    def done(self) -> bool:
        return False

    async def abort(self, code: object, details: str) -> None:
        self.ending = details

    def beat(self) -> None:
        self.to_worker.put_nowait(wire.GatewayMessage(heartbeat=wire.Heartbeat()))


@pytest.fixture
async def stream() -> AsyncIterator[Stream]:
    options = WorkerOptions(heartbeat_ms=100, lost_after_ms=int(LOST_AFTER_S * 1000))
    context: Any = SimpleNamespace(
        options=options,
        identity=new_identity(options),
        heartbeat_s=0.1,
        lost_after_s=LOST_AFTER_S,
        links=SimpleNamespace(wanted=lambda peers: None),
        load=SimpleNamespace(now=wire.QueueState),
        bridge=SimpleNamespace(observe=lambda observer: None),
        hardware="",
    )
    handler: Any = None
    far_end: Any = Stream()
    serving = asyncio.create_task(AttachServicer(context, handler, wire.ModelCard()).Attach(None, far_end))
    far_end.to_worker.put_nowait(wire.GatewayMessage(hello=wire.Hello(gateway_id="g", heartbeat_ms=100)))
    assert (await within(10, far_end.from_worker.get())).HasField("welcome")
    try:
        yield far_end
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_pause_of_the_worker_does_not_count_against_its_gateways(stream: Stream) -> None:
    for _ in range(2):
        stream.beat()
        await within(10, stream.from_worker.get())
        time.sleep(2 * LOST_AFTER_S)  # noqa: ASYNC251 - the event loop stands still
        # What the gateway sent meanwhile comes a little after the loop's own timers.
        await asyncio.sleep(LOST_AFTER_S / 20)
        stream.beat()
        await within(10, stream.from_worker.get())
    assert stream.ending == ""


async def test_a_gateway_that_is_not_heard_is_lost(stream: Stream) -> None:
    async with asyncio.timeout(10):
        while not stream.ending:  # noqa: ASYNC110 - heartbeats go on until then
            await asyncio.sleep(0.01)
    assert "not heard for 0.6 s" in stream.ending
