"""One session with a peer: wired up once, alive until its `Pin` call breaks; pulls run on it.

Owned by the `PeerLink` that keeps the context of `wire_up` open. What may fail: everything, as a LinkError. See
`antiphon_kvtransfer.links` for the rules that a pull keeps; they are carried out here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from antiphon_proto import worker_pb2, worker_pb2_grpc

from antiphon_kvtransfer.cards import LocalWorker, build_card, read_card
from antiphon_kvtransfer.data_plane import DataPlane
from antiphon_kvtransfer.pins import BlockKeeper
from antiphon_kvtransfer.plane import PeerPool, Wire
from antiphon_kvtransfer.transport import TransportError

_log = logging.getLogger("antiphon.kvtransfer.links")

_T = TypeVar("_T")

MAX_PULLS_PER_LINK = 64
"""Pulls that run at the same time on one link; more wait. Well below what a holder allows on one call."""
_WIRE_UP_S = 10.0
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
    plane: DataPlane
    keeper: BlockKeeper
    heartbeat_ms: int
    lost_after_ms: int


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
                    reader_worker_id=local.worker.worker_id, reader=build_card(local.worker, local.plane.ranks)
                )
                card = await stub.GetTransportCard(request)
                pool = read_card(card, local.worker, worker_id=peer.worker_id, incarnation=peer.incarnation)
                wire = await local.plane.connect(pool, _WIRE_UP_S)
                stack.push_async_callback(local.plane.disconnect, pool)
                session = Session(local, peer, pool, wire, stub.Pin())  # type: ignore[call-arg]  # writing by hand instead of from an iterator
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


class Session:
    """One `Pin` call with one incarnation of the peer, from wire-up until it breaks."""

    def __init__(
        self,
        local: LocalEnd,
        peer: PeerAddress,
        pool: PeerPool,
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
        self._pool = pool
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
        keeper = self._local.keeper
        keeper.retain(targets)
        try:
            handle = self._local.plane.read(self._pool, remote_blocks, targets)
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


def _rpc_problem(peer: PeerAddress, error: grpc.aio.AioRpcError) -> str:
    return f"worker {peer.worker_id} at {peer.address}: {error.code().name}: {error.details()}"
