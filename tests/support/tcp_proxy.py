"""A TCP proxy between a client and a server, in the test's own loop: it holds bytes back, cuts, and changes its target.

async with TcpProxy(server_port) as proxy:
    connect(proxy.port)
    proxy.hold_requests()   # bytes towards the server stay here until `release`
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

_CHUNK_BYTES = 65_536


class TcpProxy:
    """Both ends are on 127.0.0.1."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._requests_pass = asyncio.Event()
        self._replies_pass = asyncio.Event()
        self.port = 0
        self.release()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        tasks = self.cut()
        await asyncio.gather(*tasks, return_exceptions=True)

    def hold_requests(self) -> None:
        """Nothing more reaches the server. What the server still says passes."""
        self._requests_pass.clear()

    def hold_replies(self) -> None:
        """Nothing more reaches the client. What it still says passes."""
        self._replies_pass.clear()

    def release(self) -> None:
        self._requests_pass.set()
        self._replies_pass.set()

    def cut(self) -> list[asyncio.Task[None]]:
        """End all connections; what is held is lost. New ones are taken."""
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        return tasks

    def point_at(self, target_port: int) -> None:
        """As when an address moves to another server: connections break, new ones go there."""
        self._target_port = target_port
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        with contextlib.suppress(asyncio.CancelledError, OSError):
            try:
                await self._relay(reader, writer)
            finally:
                self._connections.discard(task)
                writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        pumps = [
            asyncio.create_task(_pump(reader, far_writer, self._requests_pass)),
            asyncio.create_task(_pump(far_reader, writer, self._replies_pass)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            far_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event) -> None:
    """Until one of the two ends goes away."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            await passes.wait()
            writer.write(data)
            await writer.drain()
