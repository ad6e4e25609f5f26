"""One stream with a gateway, its far end played by the test: when silence counts and when it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from antiphon_proto import worker_pb2 as wire
from antiphon_worker import attach
from antiphon_worker.attach import AttachServicer
from antiphon_worker.identity import new_identity
from antiphon_worker.options import WorkerOptions
from antiphon_worker.role import CurrentRole
from antiphon_worker.service import Drain

from tests.support.workers import within

LOST_AFTER_S = 0.6


class Stream:
    """What gRPC gives to a handler."""

    def __init__(self) -> None:
        self.to_worker: asyncio.Queue[wire.GatewayMessage] = asyncio.Queue()
        self.from_worker: asyncio.Queue[wire.WorkerMessage] = asyncio.Queue()
        self.ending = ""
        self.takes = asyncio.Event()
        """Cleared: what is written does not go."""
        self.takes.set()
        self.servicer: Any = None
        self.drain = Drain()

    async def read(self) -> wire.GatewayMessage:
        return await self.to_worker.get()

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        pass

    async def write(self, message: wire.WorkerMessage) -> None:
        await self.takes.wait()
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
    drain = Drain()
    context: Any = SimpleNamespace(
        options=options,
        identity=new_identity(options),
        role=CurrentRole("decode"),
        drain=drain,
        heartbeat_s=0.1,
        lost_after_s=LOST_AFTER_S,
        links=SimpleNamespace(wanted=lambda peers: None),
        load=SimpleNamespace(now=lambda: wire.QueueState(draining=drain.on), kept_back={}),
        bridge=SimpleNamespace(observe=lambda observer: None),
        hardware="",
    )
    handler: Any = None
    far_end: Any = Stream()
    far_end.drain = drain
    far_end.servicer = AttachServicer(context, handler, wire.ModelCard())
    serving = asyncio.create_task(far_end.servicer.Attach(None, far_end))
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


async def test_the_last_words_of_answers_come_before_the_end_of_a_worker(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of the last answer ends the drain, and is still to be written then."""
    stream.takes.clear()
    [session] = stream.servicer._sessions
    for ref in range(3):
        session.answer(wire.WorkerMessage(accepted=wire.Accepted(ref=ref)))
    monkeypatch.setattr(attach, "REST_S", 10.0)
    stream.servicer.break_off("the worker ends")
    await asyncio.sleep(0.05)
    stream.takes.set()
    async with asyncio.timeout(10):
        refs = []
        while len(refs) < 3:
            message = await stream.from_worker.get()
            refs += [message.accepted.ref] if message.HasField("accepted") else []
        while not stream.ending:  # noqa: ASYNC110 - nobody says so
            await asyncio.sleep(0.01)
    assert (refs, stream.ending) == ([0, 1, 2], "the worker ends")


async def test_gateways_hear_of_a_drain_when_it_begins(stream: Stream) -> None:
    """Not with the next heartbeat: until then they would send what is refused, or what meets the end of the stream."""
    stream.drain.begin()
    async with asyncio.timeout(10):
        while not (message := await stream.from_worker.get()).HasField("step"):
            pass
    assert message.step.queue.draining
