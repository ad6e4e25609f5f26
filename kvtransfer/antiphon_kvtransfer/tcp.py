"""The `tcp` transport: asyncio sockets, no dependency. For hosts without NIXL and links where UCX has only TCP too.

Every transport of this kind is a server (peers read our pool from it) and a client (we read theirs). The holder sends
straight from pool memory and the reader receives straight into its own, so no byte is copied but by the kernel.

A reader keeps a few connections to each peer, each of which carries one read at a time; more reads wait in line.
The one idea behind that: *closing the connection is what ends a read*. A read that timed out or was cancelled can be
ended by nothing else (the peer may be stopped, with our bytes in its socket), and with one read a connection nobody
else's read ends with it. Several connections also keep the wire busy while one reader's loop is between two reads.

Protocol, little-endian: the client sends `hello` (magic, version, 32-byte token), the server answers magic, version
and the pool's size; then requests, each a count and that many (offset, length) pairs, and for each the bytes of all
its ranges in order. A server that does not like what it hears closes the connection: the bounds are known to a
well-behaved client, so there is nothing to explain on the wire, and the server's log says what was wrong.
The token is a random secret that stands in the metadata: whoever holds it can read the whole pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec

from antiphon_kvtransfer._memory import SCRATCH_BYTES, LocalMemory, check_ranges, total_bytes
from antiphon_kvtransfer.transport import PeerKey, ReadHandle, ReadRange, Region, Transport, TransportError

_log = logging.getLogger("antiphon.kvtransfer.tcp")

_MAGIC = b"AKVT"
_VERSION = 1
_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<4sI{_TOKEN_BYTES}s")
_WELCOME = struct.Struct("<4sIQ")
_COUNT = struct.Struct("<I")
_RANGE = struct.Struct("<QQ")

MAX_RANGES_PER_REQUEST = 4096
"""What a server takes in one request; a client splits longer reads."""
MAX_SERVED_CONNECTIONS = 1024
_HELLO_S = 5.0
_SEND_CHUNK_BYTES = 4 << 20
_SEND_STALL_S = 30.0
"""A peer that takes less than a chunk in this time is given up (it was stopped, or its host is gone)."""


class TcpMetadata(msgspec.Struct, frozen=True):
    """How to reach a server: the first host that answers is used."""

    hosts: tuple[str, ...]
    port: int
    token: bytes
    region_bytes: int


class TcpTransport(Transport):
    """Serves the region on `host` and reads from peers.

    `advertise`: the host names or addresses under which peers find this server; needed when `host` is a wildcard.
    `connections`: how many reads from one peer run at the same time.
    """

    name = "tcp"

    def __init__(
        self,
        region: Region,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: Sequence[str] = (),
        connections: int = 4,
    ) -> None:
        if not advertise and host in ("", "0.0.0.0", "::"):
            raise ValueError(f"a tcp transport that listens on {host!r} must be told which host to advertise to peers")
        self._memory = LocalMemory(region, SCRATCH_BYTES)
        self._host = host
        self._port = port
        self._advertise = tuple(advertise) or (host,)
        self._connections = connections
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._server: _Server | None = None
        self._peers: dict[PeerKey, _Peer] = {}

    @property
    def scratch_bytes(self) -> int:
        return self._memory.scratch_bytes

    async def start(self) -> None:
        try:
            listener = _listen(self._host, self._port)
        except OSError as error:
            raise TransportError(f"tcp transport cannot listen on {self._host} port {self._port}: {error}") from error
        self._server = _Server(listener, self._memory, self._token)

    def metadata(self) -> bytes:
        if self._server is None:
            raise TransportError("the tcp transport is not started")
        return msgspec.msgpack.encode(
            TcpMetadata(self._advertise, self._server.port, self._token, self._memory.region.length_bytes)
        )

    async def connect(self, peer: PeerKey, metadata: bytes, deadline_s: float) -> None:
        try:
            decoded = msgspec.msgpack.decode(metadata, type=TcpMetadata)
        except msgspec.DecodeError as error:
            raise TransportError(f"{peer} sent tcp metadata that cannot be read: {error}") from error
        fresh = _Peer(peer, decoded, self._memory, self._connections)
        try:
            async with asyncio.timeout(deadline_s):
                fresh.give_back(await fresh.open())
        except TimeoutError as error:
            raise TransportError(f"no tcp connection to {peer} at {fresh.where} within {deadline_s:g} s") from error
        replaced = self._peers.get(peer)
        self._peers[peer] = fresh
        if replaced is not None:
            await replaced.close()

    def read(self, peer: PeerKey, ranges: Sequence[ReadRange]) -> ReadHandle:
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"not connected to {peer} over tcp: connect first")
        check_ranges(self._memory, ranges, known.metadata.region_bytes)
        return known.read(tuple(ranges))

    async def disconnect(self, peer: PeerKey) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            await known.close()

    async def close(self) -> None:
        peers, self._peers = list(self._peers.values()), {}
        await asyncio.gather(*(peer.close() for peer in peers))
        if self._server is not None:
            await self._server.close()


# ------------------------------------------------------------------------------------------------ reader


class _TcpRead(ReadHandle):
    def __init__(self, what: str) -> None:
        loop = asyncio.get_running_loop()
        self._what = what
        self._result: asyncio.Future[None] = loop.create_future()
        # A failure that nobody waits for (the waiter was cancelled) is not worth a traceback.
        self._result.add_done_callback(lambda done: done.exception())
        self._ended: asyncio.Future[None] = loop.create_future()
        self.task: asyncio.Task[None] | None = None
        self.ends_with: asyncio.Future[None] | None = None
        """Set when a connection had to be closed under the read: it has ended once the connection is gone."""

    async def wait(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(self._result)
        except TimeoutError as error:
            self._give_up()
            raise TransportError(f"{self._what} did not end within {deadline_s:g} s") from error
        except asyncio.CancelledError:
            self._give_up()
            raise

    @property
    def ended(self) -> asyncio.Future[None]:
        return self._ended

    def _give_up(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def succeed(self) -> None:
        self._result.set_result(None)
        self._ended.set_result(None)

    def fail(self, error: TransportError) -> None:
        self._result.set_exception(error)
        if self.ends_with is None:
            self._ended.set_result(None)
        else:
            self.ends_with.add_done_callback(lambda _: self._ended.set_result(None))


class _Peer:
    """The connections to one peer and the reads that use them."""

    def __init__(self, key: PeerKey, metadata: TcpMetadata, memory: LocalMemory, connections: int) -> None:
        self.key = key
        self.metadata = metadata
        self._memory = memory
        self._slots = asyncio.Semaphore(connections)
        self._idle: list[_Connection] = []
        self._reads: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def where(self) -> str:
        return f"{','.join(self.metadata.hosts)}:{self.metadata.port}"

    async def open(self) -> _Connection:
        """A new connection with its handshake done. Raises TransportError."""
        problems: list[str] = []
        for host in self.metadata.hosts:
            try:
                return await self._open_to(host)
            except (OSError, TransportError) as error:
                problems.append(f"{host}: {error}")
        raise TransportError(f"no tcp connection to {self.key} at {self.where}: {'; '.join(problems)}")

    async def _open_to(self, host: str) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, host, self.metadata.port)
        try:
            welcome = bytearray(_WELCOME.size)
            await connection.exchange(_HELLO.pack(_MAGIC, _VERSION, self.metadata.token), [memoryview(welcome)])
            magic, version, region_bytes = _WELCOME.unpack(welcome)
            if (magic, version) != (_MAGIC, _VERSION):
                raise TransportError(f"the server speaks {magic!r} version {version}, not {_MAGIC!r} {_VERSION}")
            if region_bytes != self.metadata.region_bytes:
                raise TransportError(
                    f"the server has a pool of {region_bytes} bytes, not {self.metadata.region_bytes} as its metadata "
                    "said: it is another incarnation"
                )
        except BaseException:
            connection.abort()
            raise
        return connection

    def give_back(self, connection: _Connection) -> None:
        if self._closed:
            connection.abort()
        else:
            self._idle.append(connection)

    def read(self, ranges: tuple[ReadRange, ...]) -> _TcpRead:
        handle = _TcpRead(f"a tcp read of {total_bytes(ranges)} bytes from {self.key}")
        task = asyncio.get_running_loop().create_task(self._read(handle, ranges))
        handle.task = task
        self._reads.add(task)
        task.add_done_callback(lambda done: self._finish(handle, done))
        return handle

    async def _read(self, handle: _TcpRead, ranges: tuple[ReadRange, ...]) -> None:
        async with self._slots:
            connection = await self._take()
            try:
                for part in _batches(ranges, MAX_RANGES_PER_REQUEST):
                    request = _COUNT.pack(len(part)) + b"".join(
                        _RANGE.pack(one.remote_offset_bytes, one.length_bytes) for one in part
                    )
                    targets = [self._memory.view(one.local_offset_bytes, one.length_bytes) for one in part]
                    await connection.exchange(request, targets)
            except BaseException:
                connection.abort()
                handle.ends_with = connection.lost
                raise
            self.give_back(connection)

    async def _take(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost.done():
                return connection
        return await self.open()

    def _finish(self, handle: _TcpRead, done: asyncio.Task[None]) -> None:
        self._reads.discard(done)
        error = TransportError("it was given up") if done.cancelled() else done.exception()
        if error is None:
            handle.succeed()
            return
        failure = TransportError(f"a tcp read from {self.key} at {self.where} failed: {error}")
        failure.__cause__ = error
        handle.fail(failure)

    async def close(self) -> None:
        self._closed = True
        for task in self._reads:
            task.cancel()
        if self._reads:
            await asyncio.wait(set(self._reads))
        for connection in self._idle:
            connection.abort()
        self._idle.clear()


class _Connection(asyncio.BufferedProtocol):
    """One connection to a server. `exchange` sends a request and receives the answer straight into its targets."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the connection is gone: nothing is received into any target any more."""
        self._transport: asyncio.Transport | None = None
        self._targets: deque[memoryview] = deque()
        self._answered: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, targets: Sequence[memoryview]) -> None:
        """Raises TransportError when the connection is lost. After any error or cancellation: `abort`."""
        if self._transport is None or self.lost.done():
            raise TransportError("the connection is closed")
        self._targets.extend(targets)
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._answered
        finally:
            self._answered = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        _tune(transport.get_extra_info("socket"))

    def get_buffer(self, sizehint: int) -> memoryview:
        # With nothing asked for, what comes (one byte of it) is a breach of the protocol.
        return self._targets[0] if self._targets else memoryview(bytearray(1))

    def buffer_updated(self, nbytes: int) -> None:
        if not self._targets:
            self.abort()
            return
        target = self._targets[0]
        if nbytes < len(target):
            self._targets[0] = target[nbytes:]
            return
        self._targets.popleft()
        if not self._targets and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._targets.clear()
        if self._answered is not None and not self._answered.done():
            reason = f": {exc}" if exc is not None else " by the peer"
            self._answered.set_exception(TransportError(f"the connection was closed{reason}"))
        self.lost.set_result(None)


# ------------------------------------------------------------------------------------------------ holder


class _Server:
    """Accepts connections and answers requests from pool memory. One task a connection."""

    def __init__(self, listener: socket.socket, memory: LocalMemory, token: bytes) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._memory = memory
        self._token = token
        loop = asyncio.get_running_loop()
        self._serving: set[asyncio.Task[None]] = set()
        self._accepting = loop.create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(self._listener)
            except OSError as error:
                # For instance no descriptor left: others will be closed, so go on, but not in a busy loop.
                _log.error("cannot accept a tcp connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._serving) >= MAX_SERVED_CONNECTIONS:
                _log.warning("refused a tcp connection from %s: %d are open", address, len(self._serving))
                client.close()
                continue
            task = loop.create_task(self._serve(client, str(address)))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, client: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            client.setblocking(False)
            _tune(client)
            async with asyncio.timeout(_HELLO_S):
                hello = await _receive(loop, client, _HELLO.size)
            magic, version, token = _HELLO.unpack(hello)
            if (magic, version) != (_MAGIC, _VERSION) or not hmac.compare_digest(token, self._token):
                _log.warning("refused a tcp connection from %s: wrong protocol, version or token", address)
                return
            await self._send(loop, client, _WELCOME.pack(_MAGIC, _VERSION, self._memory.region.length_bytes))
            while True:
                (count,) = _COUNT.unpack(await _receive(loop, client, _COUNT.size))
                if not 0 < count <= MAX_RANGES_PER_REQUEST:
                    _log.warning("closed the tcp connection of %s: it asked for %d ranges at once", address, count)
                    return
                raw = await _receive(loop, client, count * _RANGE.size)
                for view in [self._memory.pool_view(*one) for one in _RANGE.iter_unpack(raw)]:
                    await self._send(loop, client, view)
        except _Closed:
            pass  # The reader went away, as it may at any time.
        except TransportError as error:
            _log.warning("closed the tcp connection of %s: %s", address, error)
        except TimeoutError:
            _log.warning("closed the tcp connection of %s: it neither sent nor took anything", address)
        except OSError as error:
            _log.debug("tcp connection of %s ended: %s", address, error)
        finally:
            _close(loop, client)

    async def _send(self, loop: asyncio.AbstractEventLoop, client: socket.socket, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _SEND_CHUNK_BYTES):
            async with asyncio.timeout(_SEND_STALL_S):
                await loop.sock_sendall(client, view[start : start + _SEND_CHUNK_BYTES])

    async def close(self) -> None:
        tasks = {self._accepting, *self._serving}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        _close(asyncio.get_running_loop(), self._listener)


class _Closed(Exception):
    """The other side closed the connection."""


async def _receive(loop: asyncio.AbstractEventLoop, client: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        received = await loop.sock_recv_into(client, view)
        if received == 0:
            raise _Closed
        view = view[received:]
    return bytes(data)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128, reuse_port=False)
    listener.setblocking(False)
    return listener


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A peer whose host vanished sends nothing, not even a reset: without this an idle connection would stay for ever.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _close(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    # The loop forgets a cancelled wait on a socket only in its next turn, by descriptor number, which may by then
    # belong to another socket. So it is told before the descriptor is closed.
    with contextlib.suppress(NotImplementedError, ValueError, OSError):
        loop.remove_reader(connection)
        loop.remove_writer(connection)
    connection.close()


def _batches(ranges: Sequence[ReadRange], size: int) -> Iterator[Sequence[ReadRange]]:
    for start in range(0, len(ranges), size):
        yield ranges[start : start + size]
