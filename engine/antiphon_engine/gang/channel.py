"""Framed messages over TCP between the driver and its ranks, and the port where ranks prove who they are.

A frame is four bytes of length (little-endian) and the payload; longer ones than its reader allows end the connection.
Ranks connect; the driver reads nothing of a connection but one small frame, which has to hold the gang's secret, before
anything it says counts. The secret is drawn for one life of the gang.

A lost host sends no reset: the kernel's keepalive and user timeout notice it (`KEEPALIVE_S`), and `Alive` messages
notice a process that only stands still.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass

import msgspec

from antiphon_engine.gang.messages import FROM_RANK, Hello

MAX_HELLO_BYTES = 4096
MAX_FRAME_BYTES = 256 << 20
"""A whole tokenizer fits, and any step."""
HELLO_S = 10.0
KEEPALIVE_S = 2
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


class ChannelError(ConnectionError):
    """The connection is of no more use."""


def tuned(connection: socket.socket) -> socket.socket:
    """No small message waits, and a host that vanished is noticed within seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 4 * KEEPALIVE_S * 1000),
    ):
        if hasattr(socket, name):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def read_frame(connection: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> bytearray | None:
    """One whole frame; None at the end of the stream. Blocks as long as the socket's timeout says. Raises OSError."""
    head = _read_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > max_bytes:
        raise ChannelError(f"a frame of {length} bytes; at most {max_bytes} are taken")
    payload = _read_exactly(connection, length)
    if payload is None:
        raise ChannelError("the stream ended within a frame")
    return payload


def _read_exactly(connection: socket.socket, length: int) -> bytearray | None:
    found = bytearray(length)
    view = memoryview(found)
    done = 0
    while done < length:
        count = connection.recv_into(view[done:])
        if count == 0:
            if done:
                raise ChannelError("the stream ended within a frame")
            return None
        done += count
    return found


class FrameBuffer:
    """Frames out of whatever came: for a reader of many connections."""

    def __init__(self) -> None:
        self._held = bytearray()

    def receive(self, connection: socket.socket) -> list[bytes] | None:
        """What one `recv` brings: whole frames, maybe none; None at the end of the stream. Raises OSError."""
        piece = connection.recv(_READ_BYTES)
        if not piece:
            return None
        self._held += piece
        frames = []
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held)
            if length > MAX_FRAME_BYTES:
                raise ChannelError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are taken")
            end = _LENGTH.size + length
            if len(self._held) < end:
                break
            frames.append(bytes(self._held[_LENGTH.size : end]))
            del self._held[:end]
        return frames


@dataclass(frozen=True, slots=True)
class Guest:
    """A connection whose other end has proved that it is a rank of this gang."""

    hello: Hello
    connection: socket.socket
    address: str


class Reception:
    """Where ranks connect. Guests are collected in the background until `close`."""

    def __init__(self, host: str, secret: str) -> None:
        """Raises OSError where `host` cannot be listened on."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._secret = secret
        self._lock = threading.Condition()
        self._guests: list[Guest] = []
        self._closed = False
        self._thread = threading.Thread(target=self._receive, name="gang-reception", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def guests(self, wait_s: float) -> list[Guest]:
        """Those that came since the last call; waits so long for the first."""
        with self._lock:
            if not self._guests:
                self._lock.wait(wait_s)
            found, self._guests = self._guests, []
            return found

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for guest in self._guests:
                guest.connection.close()
            self._guests.clear()
        # Wakes the thread, which waits in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        self._listener.close()

    def _receive(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            if self._closed:
                connection.close()
                return
            # A thread each: one that says nothing must not keep the others waiting.
            threading.Thread(
                target=self._greet, args=(connection, str(address[0])), name="gang-greeting", daemon=True
            ).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        hello = _hello(connection, self._secret)
        if hello is None:
            connection.close()
            return
        connection.settimeout(None)
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._guests.append(Guest(hello, tuned(connection), address))
            self._lock.notify_all()


def _hello(connection: socket.socket, secret: str) -> Hello | None:
    """None: not one of ours."""
    ends_at = time.monotonic() + HELLO_S
    received = bytearray()
    connection.setblocking(False)
    try:
        while True:
            left_s = ends_at - time.monotonic()
            if left_s <= 0 or not select.select([connection], [], [], left_s)[0]:
                return None
            # Never past the frame: what follows belongs to whoever takes the connection.
            wanted = _LENGTH.size if len(received) < _LENGTH.size else _LENGTH.size + _LENGTH.unpack_from(received)[0]
            if wanted > MAX_HELLO_BYTES:
                return None
            piece = connection.recv(wanted - len(received))
            if not piece:
                return None
            received += piece
            if len(received) > _LENGTH.size and len(received) == _LENGTH.size + _LENGTH.unpack_from(received)[0]:
                break
        hello = FROM_RANK.decode(received[_LENGTH.size :])
    except (OSError, ValueError, msgspec.DecodeError):
        return None
    if not isinstance(hello, Hello) or not hmac.compare_digest(hello.secret.encode(), secret.encode()):
        return None
    return hello


def new_secret() -> str:
    return secrets.token_hex(32)


def connect(host: str, port: int, deadline_s: float) -> socket.socket:
    """The rank's side, before it says who it is. Raises OSError."""
    connection = socket.create_connection((host, port), timeout=deadline_s)
    connection.settimeout(None)
    return tuned(connection)


def greet(connection: socket.socket, hello: Hello) -> None:
    connection.sendall(framed(msgspec.msgpack.encode(hello)))
