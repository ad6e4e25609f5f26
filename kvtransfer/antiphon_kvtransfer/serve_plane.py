"""The rank's end of `remote_plane`: carries out what its driver says, on this rank's own data plane.

Owns the plane and closes it, however the stream ends. Connects and disconnects of one peer are carried out one after
the other, and a later one gives the earlier up, as the driver has no use for it. A read is answered when it is in *and*
has ended; one that failed is answered at once, and again when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec

import msgspec

from antiphon_kvtransfer import _plane_wire as wire_format
from antiphon_kvtransfer.plane import PeerPool, RankPlane
from antiphon_kvtransfer.transport import ReadHandle, TransportError, TransportUnavailable

_log = logging.getLogger("antiphon.kvtransfer.plane")

_P = ParamSpec("_P")

_READ_S = 3600.0
"""The driver gives a read up long before."""


async def serve_rank_plane(plane: RankPlane, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the driver closes the plane or its stream ends. Then the plane is closed, and so is the stream.

    After that this rank serves nobody: its process ends.
    """
    service = _Service(plane, writer)
    close = None
    try:
        close = await service.until_closed(reader)
    finally:
        await service.end()
        if close is not None:
            service.answer(wire_format.Done(close.call))
        writer.close()


class _Service:
    def __init__(self, plane: RankPlane, writer: asyncio.StreamWriter) -> None:
        self._plane = plane
        self._writer = writer
        self._tasks: set[asyncio.Task[None]] = set()
        self._connects: dict[int, asyncio.Task[None]] = {}
        self._reads: dict[int, ReadHandle] = {}
        self._wiring: dict[tuple[str, str], asyncio.Task[None]] = {}
        """The last connect or disconnect of each peer that is not over."""

    async def until_closed(self, reader: asyncio.StreamReader) -> wire_format.Close | None:
        """None: the stream ended without a word."""
        try:
            while True:
                command = wire_format.COMMANDS.decode(await wire_format.read_frame(reader))
                if isinstance(command, wire_format.Close):
                    return command
                self._take(command)
        except (EOFError, OSError):
            _log.info("the driver's stream has ended; rank %d's data plane is closed", self._plane.rank)
        except (wire_format.FrameError, msgspec.DecodeError) as error:
            _log.error("the driver says what cannot be understood (%s); rank %d ends", error, self._plane.rank)
        return None

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._plane.close()

    def answer(self, message: wire_format.Answer) -> None:
        if not self._writer.is_closing():
            self._writer.write(wire_format.frame(message))

    def _take(self, command: wire_format.Command) -> None:
        match command:
            case wire_format.Start(call):
                self._run(call, self._start, call)
            case wire_format.Connect(call, peer, deadline_s):
                self._connects[call] = self._wire(call, peer, self._connect, deadline_s)
            case wire_format.Disconnect(call, peer):
                self._wire(call, peer, self._disconnect)
            case wire_format.Read():
                self._read(command)
            case wire_format.GiveUp(call):
                self._give_up(call)

    def _run(
        self, call: int, what: Callable[_P, Coroutine[Any, Any, None]], *args: _P.args, **named: _P.kwargs
    ) -> asyncio.Task[None]:
        """In a task of its own; what it raises is the answer."""
        task = asyncio.create_task(self._answered(call, functools.partial(what, *args, **named)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answered(self, call: int, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await what()
        except TransportError as error:
            self.answer(wire_format.Failed(call, str(error), isinstance(error, TransportUnavailable)))
        except Exception as error:  # noqa: BLE001 - told to the driver; the rank goes on for the others
            _log.exception("rank %d's data plane failed by a fault of its own", self._plane.rank)
            self.answer(wire_format.Failed(call, repr(error)))

    async def _start(self, call: int) -> None:
        plane = self._plane
        await plane.start()
        self.answer(
            wire_format.Started(call, plane.rank, plane.part, plane.num_blocks, plane.block_bytes, plane.endpoints)
        )

    # -------------------------------------------------------------- connections

    def _wire(
        self,
        call: int,
        peer: PeerPool,
        what: Callable[Concatenate[int, PeerPool, _P], Coroutine[Any, Any, None]],
        *args: _P.args,
        **named: _P.kwargs,
    ) -> asyncio.Task[None]:
        """After whatever else is being done about the connection to this peer."""
        name = (peer.worker_id, peer.incarnation)
        earlier = self._wiring.get(name)
        for number, connect in self._connects.items():
            if connect is earlier:
                self._give_up(number)
        task = self._run(call, _after, earlier, functools.partial(what, call, peer, *args, **named))
        self._wiring[name] = task
        task.add_done_callback(functools.partial(self._wired, call, name))
        return task

    def _wired(self, call: int, name: tuple[str, str], task: asyncio.Task[None]) -> None:
        self._connects.pop(call, None)
        if self._wiring.get(name) is task:
            del self._wiring[name]

    async def _connect(self, call: int, peer: PeerPool, deadline_s: float) -> None:
        wire = await self._plane.connect(peer, deadline_s)
        self.answer(wire_format.Connected(call, wire))

    async def _disconnect(self, call: int, peer: PeerPool) -> None:
        await self._plane.disconnect(peer)
        self.answer(wire_format.Done(call))

    # -------------------------------------------------------------- reads

    def _read(self, command: wire_format.Read) -> None:
        call = command.call
        try:
            handle = self._plane.read(command.peer, command.remote_blocks, command.local_blocks)
        except TransportError as error:
            self.answer(wire_format.Failed(call, str(error)))
            self.answer(wire_format.Ended(call))
            return
        self._reads[call] = handle
        self._run(call, self._until_read, call, handle)

    async def _until_read(self, call: int, handle: ReadHandle) -> None:
        last: wire_format.Answer = wire_format.Ended(call)
        try:
            await handle.wait(_READ_S)
            last = wire_format.Done(call)
        finally:
            del self._reads[call]
            handle.ended.add_done_callback(lambda _: self.answer(last))

    def _give_up(self, call: int) -> None:
        connect, read = self._connects.get(call), self._reads.get(call)
        if connect is not None:
            connect.cancel()
        elif read is not None:
            self._run(call, _give_up, read)


async def _after(earlier: asyncio.Task[None] | None, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
    if earlier is not None:
        await asyncio.wait({earlier})
    await what()


async def _give_up(read: ReadHandle) -> None:
    """A wait of no time gives the read up. Who waits for it otherwise, and answers, hears of it."""
    with contextlib.suppress(TransportError):
        await read.wait(0.0)
