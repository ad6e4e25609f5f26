"""Reads made of several reads: complete when all are, failed when one is, ended when all have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from antiphon_kvtransfer._together import together
from antiphon_kvtransfer.transport import ReadHandle, TransportError


class FailedRead(ReadHandle):
    """A read that could not be started: it fails, and has ended."""

    def __init__(self, error: TransportError) -> None:
        self._error = error
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended.set_result(None)

    async def wait(self, deadline_s: float) -> None:
        raise self._error

    @property
    def ended(self) -> asyncio.Future[None]:
        return self._ended


class JoinedRead(ReadHandle):
    """One failure gives all parts up; each of them still ends in its own time, and the whole with the last."""

    def __init__(self, parts: Sequence[ReadHandle]) -> None:
        self._parts = tuple(parts)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running = len(self._parts)
        for part in self._parts:
            part.ended.add_done_callback(self._one_ended)

    async def wait(self, deadline_s: float) -> None:
        await together(part.wait(deadline_s) for part in self._parts)

    @property
    def ended(self) -> asyncio.Future[None]:
        return self._ended

    def _one_ended(self, _: asyncio.Future[None]) -> None:
        self._running -= 1
        if self._running == 0:
            self._ended.set_result(None)


def joined(parts: Sequence[ReadHandle]) -> ReadHandle:
    """A single read stays as it is."""
    return parts[0] if len(parts) == 1 else JoinedRead(parts)
