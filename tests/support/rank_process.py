"""A process that hosts ranks of a worker: their pools lie in files that the test has mapped too.

`python -m tests.support.rank_process SOCKET` listens on a socket of its own. Whoever connects says in one line of
JSON which rank it wants (`HostedRank`), and drives its data plane from then on. The process ends with its input.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from antiphon_kvtransfer.local_plane import LocalRankPlane
from antiphon_kvtransfer.offer import TransportOffer
from antiphon_kvtransfer.plane import KvPart
from antiphon_kvtransfer.remote_plane import RemoteRankPlane
from antiphon_kvtransfer.serve_plane import serve_rank_plane
from antiphon_kvtransfer.transport import Region
from antiphon_telemetry.exit import leave


class HostedRank(msgspec.Struct, frozen=True):
    rank: int
    part: KvPart
    num_blocks: int
    block_bytes: int
    pool: str
    """The file, as long as the pool."""
    transport: str


class RankProcess:
    """The process, seen from the test."""

    def __init__(self, folder: Path, *, name: str, **environment: str) -> None:
        self._socket = folder / f"{name}.socket"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.rank_process", str(self._socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    def plane(self, rank: HostedRank) -> RemoteRankPlane:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._socket))
        connection.sendall(msgspec.json.encode(rank) + b"\n")
        return RemoteRankPlane(rank.rank, rank.part, rank.num_blocks, rank.block_bytes, connection)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It stands still meanwhile (SIGSTOP), unless it was killed."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def until_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def map_pool(rank: HostedRank) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """[block][byte], shared by all who have mapped it."""
    with open(rank.pool, "r+b") as file:
        memory = mmap.mmap(file.fileno(), rank.num_blocks * rank.block_bytes)
    return np.frombuffer(memory, np.uint8).reshape(rank.num_blocks, rank.block_bytes)


async def _host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    rank = msgspec.json.decode(await reader.readline(), type=HostedRank)
    pool = map_pool(rank)
    region = Region(pool.ctypes.data, pool.nbytes)
    transports = TransportOffer("hosted/i1", (rank.transport,)).transports(region)
    plane = LocalRankPlane(rank.rank, rank.part, region, rank.block_bytes, rank.num_blocks, transports)
    await serve_rank_plane(plane, reader, writer)


async def _main(path: str) -> None:
    async with await asyncio.start_unix_server(_host, path):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
    leave(0)
