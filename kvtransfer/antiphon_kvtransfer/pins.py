"""The holder's side of a pull: blocks kept for a reader, and the `KvBlocks` service that readers call.

A reader pins blocks by hash, reads them from our memory behind our back, and then asks whether the pin stood all the
time. The one idea: *the answer is yes exactly if the pin is still in the table*. A pin keeps its blocks in the engine
from the moment it is made until it leaves the table, and it never comes back; so nothing else has to be proved. It
leaves by confirmation, by release, by the end of the call it was made on, or because nothing was heard on that call
for `ttl_s` (a reader that is stopped, or whose host vanished, sends no reset). A reader that comes back later finds
its pins gone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import grpc
import grpc.aio
from antiphon_proto import worker_pb2, worker_pb2_grpc

from antiphon_kvtransfer.cards import LocalWorker, build_card
from antiphon_kvtransfer.data_plane import DataPlane
from antiphon_kvtransfer.identity import HASH_BYTES, BlockHash

_log = logging.getLogger("antiphon.kvtransfer.pins")

MAX_PINS_PER_CALL = 256
MAX_HASHES_PER_PIN = 16_384
MAX_ANSWERS_WAITING = 1024


class BlockKeeper(Protocol):
    """The engine, seen from here. Callable from any thread; returns at once."""

    def pin(self, hashes: Sequence[BlockHash]) -> list[int]: ...
    def pin_partial(self, request_id: str) -> list[int]: ...
    def retain(self, blocks: Sequence[int]) -> None: ...
    def release(self, blocks: Sequence[int]) -> None: ...


class PinRefused(Exception):
    """The reader breaks a rule of the protocol or a bound. Its call is ended with this message."""


class PinTable:
    """The pins of one call."""

    def __init__(self, keeper: BlockKeeper, *, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keeper = keeper
        self._ttl_s = ttl_s
        self._clock = clock
        self._pins: dict[int, list[int]] = {}
        self._heard_at = clock()

    @property
    def held_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._pins.values())

    def seconds_left(self) -> float:
        return max(0.0, self._heard_at + self._ttl_s - self._clock())

    def lapse(self) -> bool:
        """True, and no pin is left, if nothing was heard for the time to live."""
        if self._clock() - self._heard_at < self._ttl_s:
            return False
        self.end()
        return True

    def heard(self) -> None:
        """Renews all pins, unless it comes too late: then they have lapsed, whoever noticed first."""
        self.lapse()
        self._heard_at = self._clock()

    def pin(self, pin_id: int, hashes: Sequence[bytes]) -> list[int]:
        """Physical numbers of the leading blocks that are here. Raises PinRefused."""
        if len(hashes) > MAX_HASHES_PER_PIN:
            raise PinRefused(f"{len(hashes)} hashes in one pin; at most {MAX_HASHES_PER_PIN} are taken")
        if any(len(one) != HASH_BYTES for one in hashes):
            raise PinRefused(f"a block hash has {HASH_BYTES} bytes")
        self._check(pin_id)
        return self._add(pin_id, self._keeper.pin([BlockHash(one) for one in hashes]))

    def pin_partial(self, pin_id: int, request_id: str) -> list[int]:
        self._check(pin_id)
        return self._add(pin_id, self._keeper.pin_partial(request_id))

    def confirm(self, pin_id: int) -> bool:
        """Whether the pin stood without a break until now. Releases it."""
        return self.release(pin_id)

    def release(self, pin_id: int) -> bool:
        blocks = self._pins.pop(pin_id, None)
        if blocks is None:
            return False
        self._keeper.release(blocks)
        return True

    def end(self) -> None:
        for pin_id in list(self._pins):
            self.release(pin_id)

    def _check(self, pin_id: int) -> None:
        if pin_id in self._pins:
            raise PinRefused(f"pin id {pin_id} is in use on this call")
        if len(self._pins) >= MAX_PINS_PER_CALL:
            raise PinRefused(f"{len(self._pins)} pins stand on this call already: confirm or release some first")

    def _add(self, pin_id: int, blocks: list[int]) -> list[int]:
        self._pins[pin_id] = blocks
        return blocks


class KvBlocksService(worker_pb2_grpc.KvBlocksServicer):
    """Answers readers. Pins lapse after `lost_after_ms` of silence."""

    def __init__(
        self,
        local: LocalWorker,
        plane: DataPlane,
        keeper: BlockKeeper,
        *,
        heartbeat_ms: int = 500,
        lost_after_ms: int = 1500,
    ) -> None:
        self._local = local
        self._plane = plane
        self._keeper = keeper
        self._heartbeat_s = heartbeat_ms / 1000
        self._ttl_ms = lost_after_ms
        self._calls: set[_PinCall] = set()
        self._used = asyncio.Event()
        """Somebody pinned blocks or let go of some."""

    @property
    def held_blocks(self) -> int:
        """Blocks pinned for peers now."""
        return sum(call.table.held_blocks for call in self._calls)

    async def GetTransportCard(  # noqa: N802 - the name is the protocol's
        self, request: worker_pb2.TransportCardRequest, context: _Context
    ) -> worker_pb2.TransportCard:
        return build_card(self._local, self._plane.ranks)

    async def Pin(  # type: ignore[override]  # noqa: N802 - the protocol's name; grpc also takes a coroutine
        self, request_iterator: AsyncIterator[worker_pb2.PinUp], context: _Context
    ) -> None:
        call = _PinCall(self._local, self._keeper, self._heartbeat_s, self._ttl_ms, self._used.set)
        self._calls.add(call)
        try:
            # By themselves: grpc cannot end a call whose first message, with them inside, is still being written.
            await context.send_initial_metadata(())
            await call.serve(request_iterator, context)
        finally:
            self._calls.discard(call)

    async def until_unread(self, quiet_s: float) -> None:
        """Return once no block is pinned and none was for `quiet_s`, from now on. The caller sets the deadline."""
        while True:
            self._used.clear()
            try:
                async with asyncio.timeout(quiet_s):
                    await self._used.wait()
            except TimeoutError:
                if not self.held_blocks:
                    return

    def close(self) -> None:
        """End all calls; their pins are released."""
        for call in self._calls:
            call.close()


_Context = grpc.aio.ServicerContext[worker_pb2.PinUp, worker_pb2.PinDown]


class _PinCall:
    """One open call: a task reads, a task writes, and the handler watches the time."""

    def __init__(
        self, local: LocalWorker, keeper: BlockKeeper, heartbeat_s: float, ttl_ms: int, used: Callable[[], None]
    ) -> None:
        """`used`: to be called with each pin and each end of one."""
        self._local = local
        self._used = used
        self._heartbeat_s = heartbeat_s
        self._ttl_ms = ttl_ms
        self._reader = "?"
        self._answers: asyncio.Queue[worker_pb2.PinDown] = asyncio.Queue(MAX_ANSWERS_WAITING)
        self._closing = asyncio.Event()
        self.table = PinTable(keeper, ttl_s=ttl_ms / 1000)

    def close(self) -> None:
        self._closing.set()

    async def serve(self, requests: AsyncIterator[worker_pb2.PinUp], context: _Context) -> None:
        reading = asyncio.create_task(self._read(requests))
        writing = asyncio.create_task(self._write(context))
        closing = asyncio.create_task(self._closing.wait())
        tasks = (reading, writing, closing)
        try:
            while True:
                await asyncio.wait(tasks, timeout=self.table.seconds_left(), return_when=asyncio.FIRST_COMPLETED)
                if closing.done():
                    return  # An end without an error is how a holder says goodbye.
                if self.table.lapse():
                    _log.warning("nothing heard from reader %s for %d ms; its pins lapsed", self._reader, self._ttl_ms)
                    await context.abort(
                        grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing heard for {self._ttl_ms} ms: all pins have lapsed"
                    )
                if reading.done():
                    reading.result()
                    return
                if writing.done():
                    writing.result()
                    return
        except _WrongIncarnation as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except PinRefused as error:
            _log.warning("ended the call of reader %s: %s", self._reader, error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self.table.end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[worker_pb2.PinUp]) -> None:
        for number in itertools.count():
            try:
                message = await anext(requests)
            except StopAsyncIteration:
                return
            self.table.heard()
            kind = message.WhichOneof("kind")
            if (number == 0) != (kind == "hello"):
                raise PinRefused("the first message of a call, and no other, is its hello")
            self._take(message, kind)

    def _take(self, message: worker_pb2.PinUp, kind: str | None) -> None:
        if kind in ("pin", "confirm", "release"):
            self._used()
        if kind == "hello":
            self._reader = message.hello.reader_worker_id
            if message.hello.incarnation != self._local.incarnation:
                raise _WrongIncarnation(
                    f"worker {self._local.worker_id} is incarnation {self._local.incarnation}, not "
                    f"{message.hello.incarnation}: all that was known of the old one is void"
                )
            if message.hello.heartbeat_ms >= self._ttl_ms:
                raise PinRefused(
                    f"a heartbeat every {message.hello.heartbeat_ms} ms is too seldom: pins lapse after "
                    f"{self._ttl_ms} ms; run all workers with the same heartbeat_ms and lost_after_ms"
                )
            self._answer(worker_pb2.PinDown(welcome=worker_pb2.PinWelcome(ttl_ms=self._ttl_ms)))
        elif kind == "pin":
            pin = message.pin
            if pin.partial_request_id:
                blocks = self.table.pin_partial(pin.pin_id, pin.partial_request_id)
            else:
                blocks = self.table.pin(pin.pin_id, pin.hashes)
            self._answer(worker_pb2.PinDown(pinned=worker_pb2.Pinned(pin_id=pin.pin_id, block_numbers=blocks)))
        elif kind == "confirm":
            held = self.table.confirm(message.confirm.pin_id)
            confirmed = worker_pb2.PinConfirmed(pin_id=message.confirm.pin_id, held=held)
            self._answer(worker_pb2.PinDown(confirmed=confirmed))
        elif kind == "release":
            self.table.release(message.release.pin_id)

    def _answer(self, message: worker_pb2.PinDown) -> None:
        try:
            self._answers.put_nowait(message)
        except asyncio.QueueFull:
            raise PinRefused(f"{MAX_ANSWERS_WAITING} answers wait for a reader that does not take them") from None

    async def _write(self, context: _Context) -> None:
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    message = await self._answers.get()
            except TimeoutError:
                message = worker_pb2.PinDown(heartbeat=worker_pb2.Heartbeat())
            await context.write(message)


class _WrongIncarnation(Exception):
    """The reader means another incarnation of this worker."""
