"""A real transport whose reads stop at a gate, so that a test can act in the middle of a pull."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

from antiphon_kvtransfer.transport import PeerKey, ReadHandle, ReadRange, Transport, TransportError


class Gate:
    """Holds reads up at a place: "before" they start, or "after" their end, of which their waiters then do not know.

    Shut, it makes them wait. Armed, it stops the whole process (SIGSTOP) there, once.
    """

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._shut_at = ""
        self._armed_at = ""

    def shut(self, place: str) -> None:
        self._shut_at = place
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def arm(self, place: str) -> None:
        self._armed_at = place

    async def passed(self, place: str) -> None:
        if place == self._armed_at:
            self._armed_at = ""
            os.kill(os.getpid(), signal.SIGSTOP)
        if place == self._shut_at and not self._open.is_set():
            self.reached.set()
            await self._open.wait()


class GatedTransport(Transport):
    def __init__(self, inner: Transport, gate: Gate) -> None:
        self.name = inner.name
        self._inner = inner
        self._gate = gate
        self._reads: dict[PeerKey, list[_GatedRead]] = {}

    @property
    def scratch_bytes(self) -> int:
        return self._inner.scratch_bytes

    async def start(self) -> None:
        await self._inner.start()

    def metadata(self) -> bytes:
        return self._inner.metadata()

    async def connect(self, peer: PeerKey, metadata: bytes, deadline_s: float) -> None:
        await self._inner.connect(peer, metadata, deadline_s)

    def read(self, peer: PeerKey, ranges: Sequence[ReadRange]) -> ReadHandle:
        handle = _GatedRead(self._inner, self._gate, peer, ranges)
        self._reads.setdefault(peer, []).append(handle)
        return handle

    async def disconnect(self, peer: PeerKey) -> None:
        for handle in self._reads.pop(peer, []):
            handle.task.cancel()
        await self._inner.disconnect(peer)

    async def close(self) -> None:
        await self._inner.close()


class _GatedRead(ReadHandle):
    def __init__(self, inner: Transport, gate: Gate, peer: PeerKey, ranges: Sequence[ReadRange]) -> None:
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        self.task = loop.create_task(self._run(inner, gate, peer, ranges))

    async def _run(self, inner: Transport, gate: Gate, peer: PeerKey, ranges: Sequence[ReadRange]) -> None:
        ends_with: asyncio.Future[None] | None = None
        try:
            await gate.passed("before")
            handle = inner.read(peer, ranges)
            ends_with = handle.ended
            await handle.wait(3600)
            await gate.passed("after")
        finally:
            if ends_with is None:
                self._ended.set_result(None)
            else:
                ends_with.add_done_callback(lambda _: self._ended.set_result(None))

    async def wait(self, deadline_s: float) -> None:
        try:
            done, _ = await asyncio.wait({self.task}, timeout=deadline_s)
        except asyncio.CancelledError:
            self.task.cancel()
            raise
        if not done:
            self.task.cancel()
            raise TransportError(f"did not end within {deadline_s:g} s")
        if self.task.cancelled():
            raise TransportError("disconnected")
        self.task.result()

    @property
    def ended(self) -> asyncio.Future[None]:
        return self._ended
