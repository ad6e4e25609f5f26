"""A process that serves a patterned pool over one transport, for tests of the reader's side.

`python -m tests.support.transport_peer KIND` prints one line with its metadata and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys

import numpy as np
from antiphon_kvtransfer.tcp import TcpTransport
from antiphon_kvtransfer.transport import PeerKey, Region, Transport
from antiphon_kvtransfer.ucx import UcxTransport
from antiphon_telemetry.exit import leave
from numpy.typing import NDArray

POOL_BYTES = 16 << 20

Pool = NDArray[np.uint8]


@functools.cache
def pattern() -> Pool:
    """What a peer's pool holds: no two nearby stretches are alike."""
    return ((np.arange(POOL_BYTES, dtype=np.uint32) * np.uint32(2654435761)) >> np.uint32(24)).astype(np.uint8)


def empty_pool() -> Pool:
    return np.zeros(POOL_BYTES, np.uint8)


def make_transport(kind: str, pool: Pool, owner: str) -> Transport:
    region = Region(pool.ctypes.data, pool.nbytes)
    return TcpTransport(region) if kind == "tcp" else UcxTransport(region, owner=owner)


class TransportPeer:
    """The process, seen from the test."""

    def __init__(self, kind: str) -> None:
        self.key = PeerKey(f"{kind}-peer/1/0")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.transport_peer", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.metadata = bytes.fromhex(self._process.stdout.readline())

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """SIGSTOP, and wait until the process really stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> TransportPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


async def _serve(kind: str) -> None:
    pool = pattern()
    transport = make_transport(kind, pool, "peer/1")
    await transport.start()
    print(transport.metadata().hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
    leave(0)
