"""The order in which a request lets go of things, with a pull that can be halted at its most delicate moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from antiphon_decode.service import DecodeService
from antiphon_engine import BlockEngine, SchedulerConfig, TimedExecutor, TimedSettings
from antiphon_policy.latency import StepModel
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import PrefillServicer, add_PrefillServicer_to_server
from antiphon_worker.bridge import EngineBridge
from antiphon_worker.channels import ChannelPool
from antiphon_worker.identity import new_identity
from antiphon_worker.load import LoadReport
from antiphon_worker.metrics import WorkerMetrics
from antiphon_worker.options import WorkerOptions
from antiphon_worker.role import CurrentRole
from antiphon_worker.service import WorkerContext
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from tests.support.workers import eventually, prompt_of, within

BLOCK_TOKENS = 16


class AnnouncingPrefill(PrefillServicer):
    """Says that four blocks are ready, and then nothing but heartbeats."""

    async def Run(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        await context.read()
        await context.write(wire.RunDown(chunk=wire.ChunkReady(blocks=4)))
        while True:
            await asyncio.sleep(0.2)
            await context.write(wire.RunDown(heartbeat=wire.Heartbeat()))


@dataclass
class HaltingLink:
    """A link whose pulls stand still between the answer to their pin and the retaining of their target blocks."""

    engine: BlockEngine
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    pinned: asyncio.Event = field(default_factory=asyncio.Event)
    problems: list[Exception] = field(default_factory=list)

    async def pull(self, hashes: Sequence[bytes], local_blocks: Sequence[int], *, deadline_s: float) -> int:
        self.asked.set()
        await self.pinned.wait()
        try:
            self.engine.retain(local_blocks)
        except ValueError as error:
            self.problems.append(error)
            raise
        try:
            await asyncio.sleep(deadline_s)
        finally:
            self.engine.release(local_blocks)
        return 0


@dataclass
class OneLink:
    """`PeerLinks` with one link to everybody."""

    the_link: HaltingLink

    async def link(self, peer: Any, deadline_s: float) -> HaltingLink:
        return self.the_link

    def wanted(self, peers: Any) -> None: ...

    def statuses(self) -> list[Any]:
        return []


@dataclass
class Collected:
    steps: list[wire.RequestStep] = field(default_factory=list)

    def accepted(self) -> None: ...

    def refused(self, reason: int, message: str) -> None:
        raise AssertionError(message)

    def step(self, step: wire.RequestStep) -> None:
        self.steps.append(step)


@dataclass
class Parts:
    service: DecodeService
    engine: BlockEngine
    link: HaltingLink
    prefill: wire.Peer


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    options = WorkerOptions(role="decode", block_tokens=BLOCK_TOKENS, max_batch_tokens=64)
    engine = BlockEngine(
        TimedExecutor(TimedSettings(step_ms=StepModel().step_ms, num_blocks=64, block_tokens=BLOCK_TOKENS)),
        SchedulerConfig(max_batch_tokens=64),
    )
    bridge = EngineBridge(on_blocks=lambda _: None, on_failure=lambda _: None)
    link = HaltingLink(engine)
    links: Any = OneLink(link)
    role = CurrentRole("decode")
    context = WorkerContext(
        options=options,
        identity=new_identity(options),
        role=role,
        engine=engine,
        bridge=bridge,
        links=links,
        tokenizer=Tokenizer.from_buffer(engine.info.tokenizer_json),
        load=LoadReport(engine, role, prior=StepModel(), links=links.statuses, draining=lambda: False),
        channels=ChannelPool(),
        metrics=WorkerMetrics(CollectorRegistry()),
    )
    server = grpc.aio.server()
    add_PrefillServicer_to_server(AnnouncingPrefill(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engine.start(bridge)
    service = DecodeService(context)
    try:
        yield Parts(service, engine, link, wire.Peer(worker_id="p", incarnation="0", address=f"127.0.0.1:{port}"))
    finally:
        await service.close()
        bridge.close()
        await asyncio.to_thread(engine.close)
        await context.channels.close()
        await server.stop(None)


async def test_blocks_are_not_given_up_under_a_pull_that_is_about_to_begin(parts):
    """Cancelled in the very turn in which its pin is answered: the read must not land in somebody else's blocks."""
    submit = wire.Submit(
        request_id="r",
        prompt_token_ids=prompt_of(200),
        sampling=wire.Sampling(max_tokens=4),
        prefill=[parts.prefill],
    )
    request = parts.service.submit(submit, Collected())
    await within(10, parts.link.asked.wait())
    parts.link.pinned.set()
    request.cancel()
    await eventually(lambda: parts.service.open_tasks == 0)
    assert parts.link.problems == []
    report = parts.engine.check_integrity()
    assert (report.used_blocks, report.requests) == (0, 0)
    assert parts.engine.load().retained_blocks == 0
