"""What a driver and its rank say to each other about the rank's data plane: messages in frames, on one stream.

A frame is its length (4 bytes, little-endian) and that many bytes of MessagePack. Commands carry a number of their own,
under which the answers come. Block numbers and metadata travel, never blocks.

The driver speaks first. Every command has one answer, and a read two where it failed: `Failed` at once, and `Ended`
when nothing can be written by it any more.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from antiphon_kvtransfer.plane import KvPart, PeerPool, Wire

MAX_FRAME_BYTES = 8 << 20
"""More than the largest of the messages (a pull of 16,384 blocks, or the cards of a peer with many ranks)."""
_LENGTH = struct.Struct("<I")


class FrameError(Exception):
    """The other side sent something that is none of these messages."""


class Start(msgspec.Struct, frozen=True, tag=True):
    call: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    call: int
    peer: PeerPool
    deadline_s: float


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    call: int
    peer: PeerPool


class Read(msgspec.Struct, frozen=True, tag=True):
    call: int
    peer: PeerPool
    """Without its ranks: the one that was connected under this name."""
    remote_blocks: list[int]
    local_blocks: list[int]


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for that call any more."""

    call: int


class Close(msgspec.Struct, frozen=True, tag=True):
    call: int


class Started(msgspec.Struct, frozen=True, tag=True):
    call: int
    rank: int
    part: KvPart
    num_blocks: int
    block_bytes: int
    endpoints: tuple[tuple[str, bytes], ...]


class Connected(msgspec.Struct, frozen=True, tag=True):
    call: int
    wire: Wire


class Done(msgspec.Struct, frozen=True, tag=True):
    """Of a read: all is in local memory, and it has ended."""

    call: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    call: int
    problem: str
    unavailable: bool = False
    """No transport can run there."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A read that failed writes nothing any more."""

    call: int


Command = Start | Connect | Disconnect | Read | GiveUp | Close
Answer = Started | Connected | Done | Failed | Ended

COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_ENCODER = msgspec.msgpack.Encoder()


def frame(message: Command | Answer) -> bytes:
    """Raises FrameError for a message that the other side would not take."""
    content = _ENCODER.encode(message)
    if len(content) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(content)} bytes; at most {MAX_FRAME_BYTES} are taken")
    return _LENGTH.pack(len(content)) + content


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The content of the next frame. Raises FrameError, or EOFError or OSError when the stream has ended."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {length} bytes; at most {MAX_FRAME_BYTES} are taken")
    return await reader.readexactly(length)
