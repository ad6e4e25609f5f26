"""The client's end of one bidirectional gRPC call, spoken directly: HTTP/2 frames on a connection of its own.

    open -> (messages both ways) -> closed, with why

The gateway's stream to a worker carries every request and every token. grpc's own asyncio client spends several times
what the gateway does itself on a message, as each passes through threads and tasks; here a message that came is
handed over in the event loop's read callback, and one that is sent is written at once. For that, only what one
call needs is spoken (RFC 9113, and gRPC over HTTP/2): DATA in both directions with flow control, SETTINGS, PING,
WINDOW_UPDATE, and the ways in which a call or a connection ends. Headers are written as literals, and those that come
are read only for how the call ended. No compression is offered, so none comes.

Owned by whoever opened it. `send` never waits: what is sent in one turn of the event loop leaves at its end in one
write, and what the worker's flow control does not let through yet is kept, as it would be in any queue before it. So
with many requests at once a worker wakes once for several of them, and answers them in one step. Nothing is raised
into the event loop: whatever goes wrong closes the stream.
"""

from __future__ import annotations

import asyncio
import struct
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Self, cast

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
WINDOW_BYTES = 8 * 1024 * 1024
"""Of what the worker may send ahead. Everything that comes is taken at once, so it is only to be large."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DEFAULT_WINDOW_BYTES = 65_535
_FRAME_BYTES = 16_384
"""Largest payload of a frame, for either end, while it has not said otherwise; we never do."""

_HEADER_BLOCK_BYTES = 256 * 1024

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 1, 2, 4, 5
_CANCEL = 8
_CALL = 1
"""The id of the one HTTP/2 stream; 0 is the connection's."""

_STATUS = {
    1: "CANCELLED", 2: "UNKNOWN", 3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 5: "NOT_FOUND", 6: "ALREADY_EXISTS",
    7: "PERMISSION_DENIED", 8: "RESOURCE_EXHAUSTED", 9: "FAILED_PRECONDITION", 10: "ABORTED", 11: "OUT_OF_RANGE",
    12: "UNIMPLEMENTED", 13: "INTERNAL", 14: "UNAVAILABLE", 15: "DATA_LOSS", 16: "UNAUTHENTICATED",
}  # fmt: skip


class BrokenProtocol(Exception):
    """The other end does not speak gRPC as it should; the message says where."""


class GrpcStream(asyncio.Protocol):
    """See the module. `closed` has, when it is done, why."""

    def __init__(self, path: str, authority: str, on_message: Callable[[bytes], None]) -> None:
        """`on_message` gets each message, in order, and must not raise; it may be replaced."""
        self.on_message = on_message
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[str] = self._loop.create_future()
        self._path = path
        self._authority = authority
        self._transport: asyncio.Transport
        self._rest = b""
        """The begin of a frame whose end has not come."""
        self._message = bytearray()
        """The same of a message, with its length before it."""
        self._message_bytes = 0
        """So long that message will be; 0: not known yet."""
        self._block = b""
        """The same of a header block."""
        self._block_ends_call = False
        self._untold_bytes = 0
        """Taken, and not given back to the worker's windows yet."""
        self._unsent = bytearray()
        self._flush_due = False
        """At the end of this turn of the event loop."""
        self._frame_bytes = _FRAME_BYTES
        self._call_window = self._first_window = _DEFAULT_WINDOW_BYTES
        self._connection_window = _DEFAULT_WINDOW_BYTES

    @classmethod
    async def open(cls, address: str, path: str, on_message: Callable[[bytes], None]) -> Self:
        """Connect and begin the call of the method `path`. Raises OSError. The caller bounds the wait."""
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            raise OSError(f"{address!r} is not of the form host:port")
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(
            lambda: cls(path, address, on_message), host.strip("[]") or "127.0.0.1", int(port)
        )
        return stream

    def send(self, message: bytes) -> None:
        """Send one message, soon or when there is room. Nothing happens once the stream is closed."""
        if self.closed.done():
            return
        self._unsent += b"\0" + len(message).to_bytes(4, "big")
        self._unsent += message
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    @property
    def unsent_bytes(self) -> int:
        """What waits for the worker to make room."""
        return len(self._unsent)

    def close(self) -> None:
        """End the call and the connection."""
        if not self.closed.done():
            self._flush()
            self._transport.write(_frame(_RST_STREAM, 0, _CALL, _CANCEL.to_bytes(4, "big")))
            self._close("closed by this gateway")

    def _close(self, why: str) -> None:
        if not self.closed.done():
            self.closed.set_result(why)
        self._transport.close()

    # -- sending

    def _flush(self) -> None:
        self._flush_due = False
        unsent, frame_bytes = self._unsent, self._frame_bytes
        size = min(len(unsent), self._call_window, self._connection_window)
        if size <= 0 or self.closed.done():
            return
        with memoryview(unsent) as view:
            frames = [
                _frame(_DATA, 0, _CALL, view[at : min(at + frame_bytes, size)]) for at in range(0, size, frame_bytes)
            ]
        self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        self._call_window -= size
        self._connection_window -= size
        del unsent[:size]

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        settings = ((_HEADER_TABLE_SIZE, 0), (_ENABLE_PUSH, 0), (_INITIAL_WINDOW_SIZE, WINDOW_BYTES))
        self._transport.write(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, b"".join(struct.pack(">HI", name, value) for name, value in settings))
            + _frame(_WINDOW_UPDATE, 0, 0, (WINDOW_BYTES - _DEFAULT_WINDOW_BYTES).to_bytes(4, "big"))
            + _frame(_HEADERS, _END_HEADERS, _CALL, _request_headers(self._path, self._authority))
        )

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(f"the connection broke ({error})" if error else "the connection was closed")

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        try:
            while end - at >= 9:
                size = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
                if size > _FRAME_BYTES:
                    raise BrokenProtocol(f"a frame of {size} bytes")
                if end - at - 9 < size:
                    break
                kind, flags, of_call = data[at + 3], data[at + 4], data[at + 8] == _CALL
                at += 9
                self._take(kind, flags, data[at : at + size], of_call=of_call)
                at += size
        except (BrokenProtocol, struct.error, IndexError) as error:
            self._close(f"it does not speak gRPC: {error}")
        self._rest = data[at:]

    # -- receiving

    def _take(self, kind: int, flags: int, payload: bytes, *, of_call: bool) -> None:
        """One frame, of the call or of the connection. Kinds that are not known, and priorities, say nothing to us."""
        if kind == _DATA:
            self._take_data(flags, payload)
        elif kind in (_HEADERS, _CONTINUATION):
            self._take_headers(kind, flags, payload)
        elif kind == _WINDOW_UPDATE:
            (size,) = struct.unpack(">I", payload)
            if of_call:
                self._call_window += size
            else:
                self._connection_window += size
            self._flush()
        elif kind == _SETTINGS and not flags & _ACK:
            self._take_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _RST_STREAM:
            self._close(f"the worker reset the stream (HTTP/2 error {int.from_bytes(payload, 'big')})")
        elif kind == _GOAWAY and int.from_bytes(payload[:4], "big") < _CALL:
            self._close("the worker takes no calls")

    def _take_data(self, flags: int, payload: bytes) -> None:
        self._give_back(len(payload))
        if flags & _PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        # Most frames are one whole message, and then nothing is copied.
        if self._message:
            self._message += payload
            if len(self._message) < self._message_bytes and not flags & _END_STREAM:
                return
            payload = bytes(self._message)
            self._message.clear()
        at, end = 0, len(payload)
        self._message_bytes = 0
        while end - at >= 5:
            compressed, size = struct.unpack_from(">BI", payload, at)
            if compressed or size > MAX_MESSAGE_BYTES:
                raise BrokenProtocol(f"a message of {size} bytes, compression {compressed}")
            if end - at - 5 < size:
                self._message_bytes = 5 + size
                break
            at += 5
            self.on_message(payload[at : at + size])
            at += size
        if at < end:
            self._message += payload[at:]
        if flags & _END_STREAM:
            self._close("the worker ended the stream")

    def _give_back(self, size: int) -> None:
        """Let the worker send as much again, told in large portions."""
        self._untold_bytes += size
        if self._untold_bytes > WINDOW_BYTES // 4:
            update = self._untold_bytes.to_bytes(4, "big")
            self._transport.write(_frame(_WINDOW_UPDATE, 0, 0, update) + _frame(_WINDOW_UPDATE, 0, _CALL, update))
            self._untold_bytes = 0

    def _take_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _INITIAL_WINDOW_SIZE:
                self._call_window += value - self._first_window
                self._first_window = value
            elif name == _MAX_FRAME_SIZE:
                self._frame_bytes = value
        self._transport.write(_frame(_SETTINGS, _ACK, 0, b""))
        self._flush()

    def _take_headers(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _HEADERS:
            end = len(payload)
            begin = 0
            if flags & _PADDED:
                begin, end = 1, end - payload[0]
            if flags & _PRIORITY:
                begin += 5
            payload = payload[begin:end]
            self._block_ends_call = bool(flags & _END_STREAM)
        self._block += payload
        if len(self._block) > _HEADER_BLOCK_BYTES:
            raise BrokenProtocol(f"{len(self._block)} bytes of headers")
        if not flags & _END_HEADERS:
            return
        block, self._block = self._block, b""
        if self._block_ends_call:
            self._close(_why(dict(_read_headers(block))))


def _frame(kind: int, flags: int, stream: int, payload: bytes | memoryview) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def _why(trailers: dict[bytes, bytes]) -> str:
    """How the call ended, by its trailers."""
    code = trailers.get(b"grpc-status", b"").decode("latin-1")
    if code in ("", "0"):
        return "the worker ended the stream"
    message = urllib.parse.unquote(trailers.get(b"grpc-message", b"").decode("latin-1"))
    return f"{_STATUS.get(int(code) if code.isdigit() else 0, code)}: {message}"


# -- header blocks (RFC 7541), with a dynamic table of no size


def _request_headers(path: str, authority: str) -> bytes:
    literals = (
        (4, path.encode()),
        (1, authority.encode()),
        (31, b"application/grpc"),
        (58, b"antiphon-gateway"),
    )
    block = b"\x83\x86"  # :method POST, :scheme http
    for name, value in literals:
        block += _write_integer(name, 4, 0) + _write_integer(len(value), 7, 0) + value
    return block + b"\x00\x02te\x08trailers"


def _write_integer(value: int, prefix_bits: int, flags: int) -> bytes:
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes([flags | value])
    out = [flags | most]
    value -= most
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _read_headers(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Those with literal names, which is where gRPC's are. A text in Huffman's code is given as an empty one."""
    at = 0
    while at < len(block):
        first = block[at]
        if first & 0x80:
            _, at = _read_integer(block, at, 7)
        elif first & 0xE0 == 0x20:
            _, at = _read_integer(block, at, 5)
        else:
            index, at = _read_integer(block, at, 6 if first & 0x40 else 4)
            name = b""
            if not index:
                name, at = _read_text(block, at)
            value, at = _read_text(block, at)
            if name:
                yield name, value


def _read_integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    most = (1 << prefix_bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _read_text(block: bytes, at: int) -> tuple[bytes, int]:
    huffman = block[at] & 0x80
    size, at = _read_integer(block, at, 7)
    return (b"" if huffman else block[at : at + size]), at + size
