"""One session with a peer: wired up once, alive until its `Pin` call breaks; pulls run on it.

Owned by the `PeerLink` that keeps the context of `wire_up` open. What may fail: everything, as a LinkError. See
`antiphon_kvtransfer.links` for the rules that a pull keeps; they are carried out here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from antiphon_proto import worker_pb2, worker_pb2_grpc

from antiphon_kvtransfer.cards import LocalWorker, PeerPool, build_card, read_card
from antiphon_kvtransfer.pins import BlockKeeper
from antiphon_kvtransfer.transport import ReadRange, Transport, TransportError

_log = logging.getLogger("antiphon.kvtransfer.links")

_T = TypeVar("_T")

MAX_PULLS_PER_LINK = 64
"""Pulls that run at the same time on one link; more wait. Well below what a holder allows on one call."""
_WIRE_UP_S = 10.0
_MEASURED_READS = 4
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # Workers talk to each other directly, whatever the environment says.
    ("grpc.use_local_subchannel_pool", 1),  # A new channel tries at once; the back-off is ours.
)


class LinkError(TransportError):
    """There is no working link to the peer, or a pull on it failed. Prefill elsewhere, or recompute."""


class PeerLeft(LinkError):
    """The peer said goodbye: it ends, as it was told to."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    worker_id: str
    incarnation: str
    address: str
    """gRPC host:port."""


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """This worker's end of all its links."""

    worker: LocalWorker
    keeper: BlockKeeper
    heartbeat_ms: int
    lost_after_ms: int
    wanted_transport: str
    transports: tuple[Transport, ...]
    """Those that run here, best first."""
    unavailable: tuple[tuple[str, str], ...]
    """(transport, why) of those that do not."""


@dataclass(frozen=True, slots=True)
class Wire:
    """The data plane of a session."""

    pool: PeerPool
    transport: Transport
    gigabytes_per_s: float
    detail: str


@contextlib.asynccontextmanager
async def wire_up(local: LocalEnd, peer: PeerAddress) -> AsyncIterator[Session]:
    """A session with the peer for as long as the context is open. Raises LinkError."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(_WIRE_UP_S):
                channel = await stack.enter_async_context(
                    grpc.aio.insecure_channel(peer.address, options=_CHANNEL_OPTIONS)
                )
                stub = worker_pb2_grpc.KvBlocksStub(channel)
                request = worker_pb2.TransportCardRequest(
                    reader_worker_id=local.worker.worker_id, reader=build_card(local.worker, local.transports)
                )
                card = await stub.GetTransportCard(request)
                pool = read_card(card, local.worker, worker_id=peer.worker_id, incarnation=peer.incarnation)
                wire = await _connect(local, pool)
                stack.push_async_callback(wire.transport.disconnect, pool.key)
                session = Session(local, peer, wire, stub.Pin())  # type: ignore[call-arg]  # writing by hand instead of from an iterator
                stack.push_async_callback(session.close)
                await session.greet()
        except TimeoutError as error:
            raise LinkError(f"worker {peer.worker_id} at {peer.address} did not answer in {_WIRE_UP_S:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise LinkError(_rpc_problem(peer, error)) from error
        except LinkError:
            raise
        except TransportError as error:
            raise LinkError(str(error)) from error
        yield session


async def _connect(local: LocalEnd, pool: PeerPool) -> Wire:
    """Connect the best transport that both sides have and that works."""
    skipped = [f"{name}: {reason}" for name, reason in local.unavailable]
    for transport in local.transports:
        metadata = pool.metadata(transport.name)
        if metadata is None:
            skipped.append(f"{transport.name}: the peer does not serve it")
            continue
        try:
            await transport.connect(pool.key, metadata, _WIRE_UP_S / 2)
            gigabytes_per_s = await _measure(local.worker, transport, pool)
        except TransportError as error:
            _log.warning("%s does not work to %s: %s", transport.name, pool.key, error)
            skipped.append(f"{transport.name}: {error}")
            await transport.disconnect(pool.key)
            continue
        detail = ""
        if transport.name != local.wanted_transport:
            detail = f"{transport.name} is used instead of {local.wanted_transport} ({'; '.join(skipped)})"
        return Wire(pool, transport, gigabytes_per_s, detail)
    raise LinkError(f"no common transport with {pool.key} works ({'; '.join(skipped)})")


async def _measure(worker: LocalWorker, transport: Transport, pool: PeerPool) -> float:
    """GB/s of the best of a few reads from the start of the peer's pool into scratch memory."""
    length = min(transport.scratch_bytes, pool.num_blocks * pool.block_bytes)
    best = 0.0
    for _ in range(_MEASURED_READS):
        began = time.perf_counter()
        handle = transport.read(pool.key, [ReadRange(0, worker.region.length_bytes, length)])
        await handle.wait(_WIRE_UP_S / 2)
        best = max(best, length / (time.perf_counter() - began) / 1e9)
    return best


class Session:
    """One `Pin` call with one incarnation of the peer, from wire-up until it breaks."""

    def __init__(
        self,
        local: LocalEnd,
        peer: PeerAddress,
        wire: Wire,
        call: grpc.aio.StreamStreamCall[worker_pb2.PinUp, worker_pb2.PinDown],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.wire = wire
        self.broken: asyncio.Future[LinkError] = loop.create_future()
        """Done, with the reason, when the session is over."""
        self.pulls = 0
        self._local = local
        self._peer = peer
        self._call = call
        self._loop = loop
        self._heard_at = loop.time()
        self._slots = asyncio.Semaphore(MAX_PULLS_PER_LINK)
        self._pin_ids = itertools.count(1)
        self._outgoing: asyncio.Queue[worker_pb2.PinUp] = asyncio.Queue()
        self._pinned: dict[int, asyncio.Future[list[int]]] = {}
        self._confirmed: dict[int, asyncio.Future[bool]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def greet(self) -> None:
        """Open the call. Raises LinkError, or the status with which the holder refused."""
        hello = worker_pb2.PinHello(
            reader_worker_id=self._local.worker.worker_id,
            incarnation=self._peer.incarnation,
            heartbeat_ms=self._local.heartbeat_ms,
        )
        with contextlib.suppress(asyncio.InvalidStateError):  # The call has failed: `read` says how.
            await self._call.write(worker_pb2.PinUp(hello=hello))
        first = await self._call.read()
        if not isinstance(first, worker_pb2.PinDown) or first.WhichOneof("kind") != "welcome":
            raise LinkError(f"worker {self._peer.worker_id} did not welcome the call: it speaks another protocol")
        if first.welcome.ttl_ms <= self._local.heartbeat_ms:
            raise LinkError(
                f"pins at worker {self._peer.worker_id} lapse after {first.welcome.ttl_ms} ms, which the heartbeat of "
                f"{self._local.heartbeat_ms} ms cannot renew: run all workers with the same settings"
            )
        self._heard_at = self._loop.time()
        self._tasks = [self._loop.create_task(part) for part in (self._receive(), self._send(), self._watch())]

    async def close(self) -> None:
        self.break_off(LinkError(f"the link to worker {self._peer.worker_id} was closed"))
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def break_off(self, reason: LinkError) -> None:
        """Fail everything that waits for the peer's word. Reads fail when the peer is disconnected, right after."""
        if self.broken.done():
            return
        self.broken.set_result(reason)
        waiting: list[asyncio.Future[Any]] = [*self._pinned.values(), *self._confirmed.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(LinkError(str(reason)))

    # -------------------------------------------------------------- one pull

    async def pull(self, what: worker_pb2.PinBlocks, local_blocks: Sequence[int], deadline_s: float) -> int:
        async with self._slots:
            self.pulls += 1
            try:
                return await self._pull(what, local_blocks, deadline_s)
            finally:
                self.pulls -= 1

    async def _pull(self, what: worker_pb2.PinBlocks, local_blocks: Sequence[int], deadline_s: float) -> int:
        pin_id = what.pin_id = next(self._pin_ids)
        confirming = False
        try:
            remote_blocks = await self._ask(self._pinned, pin_id, worker_pb2.PinUp(pin=what))
            if not remote_blocks:
                return 0
            await self._read(remote_blocks, local_blocks, deadline_s)
            confirming = True
            confirm = worker_pb2.PinUp(confirm=worker_pb2.PinConfirm(pin_id=pin_id))
            if await self._ask(self._confirmed, pin_id, confirm):
                return len(remote_blocks)
            _log.warning("worker %s did not hold %d blocks to the end", self._peer.worker_id, len(remote_blocks))
            return 0
        finally:
            if not confirming:  # Which releases too.
                self._outgoing.put_nowait(worker_pb2.PinUp(release=worker_pb2.PinRelease(pin_id=pin_id)))

    async def _ask(self, waiting: dict[int, asyncio.Future[_T]], pin_id: int, message: worker_pb2.PinUp) -> _T:
        if self.broken.done():
            raise LinkError(str(self.broken.result()))
        answer: asyncio.Future[_T] = self._loop.create_future()
        waiting[pin_id] = answer
        self._outgoing.put_nowait(message)
        try:
            return await answer
        finally:
            del waiting[pin_id]

    async def _read(self, remote_blocks: Sequence[int], local_blocks: Sequence[int], deadline_s: float) -> None:
        if len(remote_blocks) > len(local_blocks):
            raise LinkError(f"worker {self._peer.worker_id} pinned more blocks than it was asked for")
        targets = list(local_blocks[: len(remote_blocks)])
        keeper, wire = self._local.keeper, self.wire
        keeper.retain(targets)
        try:
            handle = wire.transport.read(wire.pool.key, merge_blocks(remote_blocks, targets, wire.pool.block_bytes))
        except TransportError as error:
            keeper.release(targets)
            raise LinkError(str(error)) from error
        handle.ended.add_done_callback(lambda _: keeper.release(targets))
        try:
            await handle.wait(deadline_s)
        except TransportError as error:
            # A broken session ends its reads: then that is the reason, not how the read noticed.
            raise LinkError(str(self.broken.result() if self.broken.done() else error)) from error

    # -------------------------------------------------------------- the call

    async def _receive(self) -> None:
        peer = self._peer
        try:
            while isinstance(message := await self._call.read(), worker_pb2.PinDown):
                self._heard_at = self._loop.time()
                self._take(message)
            self.break_off(PeerLeft(f"worker {peer.worker_id} is ending"))
        except grpc.aio.AioRpcError as error:
            self.break_off(LinkError(_rpc_problem(peer, error)))

    def _take(self, message: worker_pb2.PinDown) -> None:
        kind = message.WhichOneof("kind")
        # An answer that nobody waits for is to a pull that was given up.
        if kind == "pinned":
            pinned = self._pinned.get(message.pinned.pin_id)
            if pinned is not None and not pinned.done():
                pinned.set_result(list(message.pinned.block_numbers))
        elif kind == "confirmed":
            confirmed = self._confirmed.get(message.confirmed.pin_id)
            if confirmed is not None and not confirmed.done():
                confirmed.set_result(message.confirmed.held)

    async def _send(self) -> None:
        # The only one who writes: cancelling a write would cancel the whole call.
        try:
            while True:
                try:
                    async with asyncio.timeout(self._local.heartbeat_ms / 1000):
                        message = await self._outgoing.get()
                except TimeoutError:
                    message = worker_pb2.PinUp(heartbeat=worker_pb2.Heartbeat())
                await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self.break_off(LinkError(f"the call to worker {self._peer.worker_id} has ended: {error}"))

    async def _watch(self) -> None:
        lost_after_ms = self._local.lost_after_ms
        # A deadline that moves, not a wait for something.
        while (left_s := self._heard_at + lost_after_ms / 1000 - self._loop.time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)
        self.break_off(LinkError(f"nothing heard from worker {self._peer.worker_id} for {lost_after_ms} ms"))


def merge_blocks(remote_blocks: Sequence[int], local_blocks: Sequence[int], block_bytes: int) -> list[ReadRange]:
    """Ranges that read each remote block into the local block beside it; neighbours on both sides share a range."""
    ranges: list[ReadRange] = []
    run = 0
    for number, (remote, local) in enumerate(zip(remote_blocks, local_blocks, strict=True)):
        run += 1
        following = number + 1
        if (
            following == len(remote_blocks)
            or remote_blocks[following] != remote + 1
            or local_blocks[following] != local + 1
        ):
            first_remote, first_local = remote - run + 1, local - run + 1
            ranges.append(ReadRange(first_remote * block_bytes, first_local * block_bytes, run * block_bytes))
            run = 0
    return ranges


def _rpc_problem(peer: PeerAddress, error: grpc.aio.AioRpcError) -> str:
    return f"worker {peer.worker_id} at {peer.address}: {error.code().name}: {error.details()}"
