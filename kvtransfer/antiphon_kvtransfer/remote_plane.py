"""The data plane of a rank in another process, driven over a stream.

The driver's end of what `serve_plane` serves. Commands and answers are small and carry no block. Every call has a
deadline of its own here, whatever the rank does about it; a read that was given up is told to the rank, and has ended
only when the rank says so.

What may fail: the stream. The one idea: *a rank whose stream broke is gone, and its memory with it*. The rank ends
itself when its driver's stream closes, so whatever its transports still wrote went into memory that nobody has any
more: all its reads fail and have ended, every later call fails, and `problem` says so. Who made the socket sees to it
that a host which vanished without a word is noticed, and closes the plane then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Sequence

import msgspec

from antiphon_kvtransfer import _plane_wire as wire_format
from antiphon_kvtransfer.plane import KvPart, PeerPool, RankPlane, Wire
from antiphon_kvtransfer.transport import ReadHandle, TransportError, TransportUnavailable

_log = logging.getLogger("antiphon.kvtransfer.plane")

_START_S = 90.0
_CONNECT_MARGIN_S = 1.0
"""The rank keeps the deadline of a connect itself, and says which part of it failed; this is for one that does not."""
_DISCONNECT_S = 5.0
_CLOSE_S = 10.0
MAX_WAITING_BYTES = 16 << 20
"""Of commands that the rank has not taken: it stands still, and is given up."""


class RemoteRankPlane(RankPlane):
    """`connection`: an already connected and authenticated socket, at whose other end `serve_rank_plane` answers."""

    def __init__(self, rank: int, part: KvPart, num_blocks: int, block_bytes: int, connection: socket.socket) -> None:
        self.rank = rank
        self.part = part
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._connection = connection
        self._writer: asyncio.StreamWriter | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._endpoints: tuple[tuple[str, bytes], ...] = ()
        self._problem = ""
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[wire_format.Answer]] = {}
        self._reads: dict[int, _RemoteRead] = {}

    @property
    def problem(self) -> str:
        return self._problem

    async def start(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._receiving = asyncio.create_task(self._receive(reader), name=f"data plane of rank {self.rank}")
        answer = await self._ask(wire_format.Start(next(self._numbers)), _START_S, "start its transports")
        if not isinstance(answer, wire_format.Started):
            raise TransportError(f"rank {self.rank} answered a start with {type(answer).__name__}")
        said = (answer.rank, answer.part, answer.num_blocks, answer.block_bytes)
        expected = (self.rank, self.part, self.num_blocks, self.block_bytes)
        if said != expected:
            raise TransportError(f"another rank answers for rank {self.rank}: it has {said}, not {expected}")
        self._endpoints = answer.endpoints

    @property
    def endpoints(self) -> tuple[tuple[str, bytes], ...]:
        return self._endpoints

    async def connect(self, peer: PeerPool, deadline_s: float) -> Wire:
        command = wire_format.Connect(next(self._numbers), peer, deadline_s)
        what = f"wire up to worker {peer.worker_id}"
        answer = await self._ask(command, deadline_s + _CONNECT_MARGIN_S, what)
        if not isinstance(answer, wire_format.Connected):
            raise TransportError(f"rank {self.rank} answered a connect with {type(answer).__name__}")
        return answer.wire

    def read(self, peer: PeerPool, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> ReadHandle:
        self._check()
        call = next(self._numbers)
        named = PeerPool(peer.worker_id, peer.incarnation, ())  # Its ranks were told when it was connected.
        handle = self._reads[call] = _RemoteRead(
            self, call, f"a read of {len(local_blocks)} blocks by rank {self.rank}"
        )
        try:
            self._send(wire_format.Read(call, named, list(remote_blocks), list(local_blocks)))
        except TransportError:
            self._reads.pop(call, None)
            raise
        return handle

    async def disconnect(self, peer: PeerPool) -> None:
        if self._problem:
            return  # Nothing is left to disconnect.
        command = wire_format.Disconnect(next(self._numbers), PeerPool(peer.worker_id, peer.incarnation, ()))
        try:
            await self._ask(command, _DISCONNECT_S, f"disconnect from worker {peer.worker_id}")
        except TransportError as error:
            _log.warning("%s", error)

    async def close(self) -> None:
        if not self._problem and self._writer is not None:
            try:
                await self._ask(wire_format.Close(next(self._numbers)), _CLOSE_S, "close its transports")
            except TransportError as error:
                _log.warning("%s", error)
        self._break("its data plane was closed")
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
        if self._writer is None:
            self._connection.close()

    # -------------------------------------------------------------- the stream

    async def _ask(self, command: wire_format.Command, deadline_s: float, what: str) -> wire_format.Answer:
        self._check()
        future: asyncio.Future[wire_format.Answer] = asyncio.get_running_loop().create_future()
        self._answers[command.call] = future
        try:
            self._send(command)
            async with asyncio.timeout(deadline_s):
                answer = await future
        except TimeoutError as error:
            self.give_up(command.call)
            raise TransportError(f"rank {self.rank} did not {what} within {deadline_s:g} s") from error
        except asyncio.CancelledError:
            self.give_up(command.call)
            raise
        finally:
            del self._answers[command.call]
        if isinstance(answer, wire_format.Failed):
            kind = TransportUnavailable if answer.unavailable else TransportError
            raise kind(f"rank {self.rank}: {answer.problem}")
        return answer

    def give_up(self, call: int) -> None:
        with contextlib.suppress(TransportError):  # A rank that is gone has given everything up.
            self._send(wire_format.GiveUp(call))

    def _check(self) -> None:
        if self._problem:
            raise TransportError(self._problem)
        if self._writer is None:
            raise TransportError(f"the data plane of rank {self.rank} is not started")

    def _send(self, command: wire_format.Command) -> None:
        self._check()
        assert self._writer is not None
        try:
            self._writer.write(wire_format.frame(command))
        except wire_format.FrameError as error:
            raise TransportError(f"rank {self.rank} cannot be told: {error}") from error
        if self._writer.transport.get_write_buffer_size() > MAX_WAITING_BYTES:
            self._break("it takes no commands any more")
            raise TransportError(self._problem)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        reason = "its stream has ended"
        try:
            while True:
                self._take(wire_format.ANSWERS.decode(await wire_format.read_frame(reader)))
        except EOFError:
            pass
        except OSError as error:
            reason = f"its stream broke: {error}"
        except (wire_format.FrameError, msgspec.DecodeError) as error:
            reason = f"it says what cannot be understood: {error}"
        finally:
            self._break(reason)

    def _take(self, answer: wire_format.Answer) -> None:
        read = self._reads.get(answer.call)
        if read is None:
            future = self._answers.get(answer.call)
            if future is not None and not future.done():  # Else it was given up.
                future.set_result(answer)
        elif isinstance(answer, wire_format.Failed):
            read.fail(TransportError(f"rank {self.rank}: {answer.problem}"))
        elif isinstance(answer, wire_format.Done):
            self._reads.pop(answer.call).succeed()
        else:
            self._reads.pop(answer.call).end()

    def _break(self, reason: str) -> None:
        """The rank is gone: nothing waits for it any more, and nothing can be written into its memory."""
        if self._problem:
            return
        self._problem = f"rank {self.rank} of this worker is gone: {reason}"
        for future in self._answers.values():
            if not future.done():
                future.set_exception(TransportError(self._problem))
        reads, self._reads = self._reads, {}
        for read in reads.values():
            read.fail(TransportError(self._problem))
            read.end()
        if self._writer is not None:
            self._writer.transport.abort()


class _RemoteRead(ReadHandle):
    def __init__(self, plane: RemoteRankPlane, call: int, what: str) -> None:
        loop = asyncio.get_running_loop()
        self._plane = plane
        self._call = call
        self._what = what
        self._result: asyncio.Future[None] = loop.create_future()
        self._result.add_done_callback(lambda done: done.exception())  # Nobody may be waiting.
        self._ended: asyncio.Future[None] = loop.create_future()

    async def wait(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(self._result)
        except TimeoutError as error:
            self._plane.give_up(self._call)
            raise TransportError(f"{self._what} did not end within {deadline_s:g} s") from error
        except asyncio.CancelledError:
            self._plane.give_up(self._call)
            raise

    @property
    def ended(self) -> asyncio.Future[None]:
        return self._ended

    def succeed(self) -> None:
        if not self._result.done():
            self._result.set_result(None)
        self.end()

    def fail(self, error: TransportError) -> None:
        if not self._result.done():
            self._result.set_exception(error)

    def end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
