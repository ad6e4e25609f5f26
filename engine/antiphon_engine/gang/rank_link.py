"""A connected rank, as the driver holds it: its two sockets, and what it has said of itself."""

from __future__ import annotations

import logging
import socket
import threading

from antiphon_kvtransfer.plane import KvPart

from antiphon_engine.gang import messages
from antiphon_engine.gang.channel import FrameBuffer, Guest, framed

SEND_S = 10.0
"""For a rank to take a message. It holds megabytes that it has not read by then."""
_NO_PART = KvPart(0, 1, 0, 1)


class RankLink:
    """Sends from any thread; one thread at a time receives."""

    def __init__(self, rank: int, steps: Guest, transfers: Guest) -> None:
        self.rank = rank
        self.steps = steps.connection
        self.steps.settimeout(SEND_S)
        self.pid = steps.hello.pid
        self.node = steps.hello.node
        """Ray's id of its node."""
        self.address = steps.address
        self.meeting_port = steps.hello.meeting_port
        self.part = _NO_PART
        self.block_bytes = 0
        self._transfers: socket.socket | None = transfers.connection
        self._buffer = FrameBuffer()
        self._lock = threading.Lock()

    @property
    def where(self) -> str:
        return f"process {self.pid} on {self.address}"

    def send(self, data: bytes) -> None:
        """Raises OSError."""
        with self._lock:
            self.steps.sendall(data)

    def tell(self, message: messages.ToRank) -> None:
        self.send(framed(messages.ENCODER.encode(message)))

    def receive(self) -> list[messages.FromRank] | None:
        """What came, once the socket can be read; None: the connection is over. Raises OSError, DecodeError."""
        frames = self._buffer.receive(self.steps)
        return None if frames is None else [messages.FROM_RANK.decode(frame) for frame in frames]

    def log(self, said: messages.Said) -> None:
        logging.getLogger(said.logger).log(said.level, "rank %d: %s", self.rank, said.text)

    def take_transfers(self) -> socket.socket:
        """The other connection; its new owner closes it."""
        taken, self._transfers = self._transfers, None
        if taken is None:
            raise RuntimeError(f"rank {self.rank}'s connection for transfers has been taken")
        return taken

    def close(self) -> None:
        self.steps.close()
        if self._transfers is not None:
            self._transfers.close()
