"""The status pages of all simulated workers: one address, one page that says for each of them that it is idle.

A process of its own, so that pages answer also while the double of the cluster is busy. It lives until its standard
input ends.

    python -m benchmarks.operator.pages ADDRESS PORT
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

_PAGE = json.dumps({"running": 0, "waiting": 0, "active_requests": 0, "pins": 0})
_ANSWER = f"HTTP/1.1 200 OK\r\nContent-Length: {len(_PAGE)}\r\nConnection: close\r\n\r\n{_PAGE}".encode()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_ANSWER)
        await writer.drain()
    writer.close()


async def main(address: str, port: int) -> None:
    async with await asyncio.start_server(_serve, address, port, backlog=1024):
        print("listening", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
