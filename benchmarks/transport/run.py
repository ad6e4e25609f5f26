"""How fast KV blocks move between two processes of one host: `ucx` and `tcp` against a memcpy and a bare socket.

One interleaved run: in each round every method moves every shape once, in turn, so that what else the machine does
meets all of them alike; the table shows medians over the rounds. Prints markdown; raw numbers go to `results/`.

    python -m benchmarks.transport.run --rounds 9
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from antiphon_kvtransfer.tcp import TcpTransport
from antiphon_kvtransfer.transport import PeerKey, ReadRange, Region, Transport
from antiphon_kvtransfer.ucx import UcxTransport
from antiphon_telemetry.exit import leave
from numpy.typing import NDArray

POOL_BYTES = 256 << 20
DEMO_BLOCK_BYTES = 23_040 * 64
"""Of the demo model: 30 layers, 3 KV heads of 64 dimensions, K and V, bf16, 64 tokens."""
SMALL_BYTES = 64
WAIT_S = 60.0
_REQUEST = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Shape:
    label: str
    block_bytes: int
    blocks: int

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.blocks

    @property
    def ranges(self) -> list[ReadRange]:
        """Every other block, so that none can be merged with its neighbour."""
        return [
            ReadRange(2 * number * self.block_bytes, 2 * number * self.block_bytes, self.block_bytes)
            for number in range(self.blocks)
        ]

    @property
    def repeats(self) -> int:
        """Enough to move 64 MiB, so that the clock and one late wake-up do not matter."""
        return max(1, (64 << 20) // self.total_bytes)


SHAPES = [
    Shape(f"{label} x {blocks}", block_bytes, blocks)
    for label, block_bytes in (("64 KiB", 64 << 10), ("1,474,560 B", DEMO_BLOCK_BYTES), ("16 MiB", 16 << 20))
    for blocks in (1, 8)
]
SMALL = Shape("64 B", SMALL_BYTES, 1)


class Method(ABC):
    name: str

    @abstractmethod
    async def move(self, shape: Shape) -> None: ...

    async def seconds(self, shape: Shape, repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            await self.move(shape)
        return (time.perf_counter() - began) / repeats


class Memcpy(Method):
    """Within one process: the limit that no copy between processes passes."""

    name = "memcpy"

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self._pool = pool
        self._source = np.full(POOL_BYTES, 7, np.uint8)

    async def move(self, shape: Shape) -> None:
        for one in shape.ranges:
            begin, end = one.local_offset_bytes, one.local_offset_bytes + one.length_bytes
            np.copyto(self._pool[begin:end], self._source[begin:end])


class BareSocket(Method):
    """One blocking TCP connection, received straight into the pool: what `tcp` could be at best on this host."""

    name = "bare socket"

    def __init__(self, pool: NDArray[np.uint8], port: int) -> None:
        self._view = memoryview(pool)
        self._connection = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def move(self, shape: Shape) -> None:
        ranges = shape.ranges
        self._connection.sendall(b"".join(_REQUEST.pack(one.remote_offset_bytes, one.length_bytes) for one in ranges))
        for one in ranges:
            target = self._view[one.local_offset_bytes : one.local_offset_bytes + one.length_bytes]
            while target:
                target = target[self._connection.recv_into(target) :]


class OverTransport(Method):
    def __init__(self, transport: Transport, peer: PeerKey) -> None:
        self.name = transport.name
        self._transport = transport
        self._peer = peer

    async def move(self, shape: Shape) -> None:
        await self._transport.read(self._peer, shape.ranges).wait(WAIT_S)


class Holder:
    """The process that is read from."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transport.run", "--hold", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.says = self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)


def _transport(kind: str, pool: NDArray[np.uint8], owner: str) -> Transport:
    region = Region(pool.ctypes.data, pool.nbytes)
    return UcxTransport(region, owner=owner) if kind == "ucx" else TcpTransport(region)


async def _hold(kind: str) -> None:
    pool = np.full(POOL_BYTES, 7, np.uint8)
    if kind == "socket":
        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        await asyncio.to_thread(_serve_bare, listener, memoryview(pool))
        return
    transport = _transport(kind, pool, "holder/1")
    await transport.start()
    print(transport.metadata().hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def _serve_bare(listener: socket.socket, pool: memoryview) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while len(request := connection.recv(_REQUEST.size, socket.MSG_WAITALL)) == _REQUEST.size:
        offset, length = _REQUEST.unpack(request)
        connection.sendall(pool[offset : offset + length])


async def _measure(rounds: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[float]]]:
    """(GB/s by shape and method, microseconds of a small read by method), one value a round."""
    pool = np.zeros(POOL_BYTES, np.uint8)
    pool[:] = 1  # Touched: page faults are not what is measured.
    bare = Holder("socket")
    holders = {kind: Holder(kind) for kind in ("tcp", "ucx")}
    methods: list[Method] = [Memcpy(pool), BareSocket(pool, int(bare.says))]
    transports = []
    for kind, holder in holders.items():
        transport = _transport(kind, pool, "reader/1")
        transports.append(transport)
        await transport.start()
        peer = PeerKey(f"{kind}/1/0")
        await transport.connect(peer, bytes.fromhex(holder.says), WAIT_S)
        methods.append(OverTransport(transport, peer))
    speed: dict[str, dict[str, list[float]]] = {shape.label: {one.name: [] for one in methods} for shape in SHAPES}
    small: dict[str, list[float]] = {one.name: [] for one in methods}
    for number in range(-1, rounds):  # The first round only warms up.
        for shape in SHAPES:
            for method in methods:
                seconds = await method.seconds(shape, shape.repeats)
                if number >= 0:
                    speed[shape.label][method.name].append(shape.total_bytes / seconds / 1e9)
        for method in methods:
            samples = [await method.seconds(SMALL, 1) for _ in range(200)]
            if number >= 0:
                small[method.name].append(statistics.median(samples) * 1e6)
    for transport in transports:
        await transport.close()
    for holder in holders.values():
        holder.close()
    return speed, small


def _table(speed: dict[str, dict[str, list[float]]], small: dict[str, list[float]]) -> str:
    lines = [
        "| blocks | memcpy GB/s | bare socket | `tcp` | `ucx` | `tcp` / bare socket | `ucx` / memcpy | `ucx` / `tcp` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, methods in speed.items():
        m = {name: statistics.median(values) for name, values in methods.items()}
        ratios = (m["tcp"] / m["bare socket"], m["ucx"] / m["memcpy"], m["ucx"] / m["tcp"])
        cells = [label, *(f"{m[name]:.2f}" for name in ("memcpy", "bare socket", "tcp", "ucx"))]
        lines.append("| " + " | ".join([*cells, *(f"{ratio:.2f}" for ratio in ratios)]) + " |")
    p50 = {name: statistics.median(values) for name, values in small.items()}
    cells = [f"{p50[name]:.0f} us" for name in ("memcpy", "bare socket", "tcp", "ucx")]
    ratios = (p50["tcp"] / p50["bare socket"], p50["ucx"] / p50["memcpy"], p50["ucx"] / p50["tcp"])
    lines.append("| one read of 64 B, p50 | " + " | ".join([*cells, *(f"{ratio:.2f}" for ratio in ratios)]) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.hold:
        uvloop.run(_hold(options.hold))
        return 0
    speed, small = uvloop.run(_measure(options.rounds))
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    raw = {
        "rounds": options.rounds,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "gigabytes_per_s": speed,
        "small_read_us": small,
    }
    (results / "transport.json").write_text(json.dumps(raw, indent=1) + "\n")
    print(_table(speed, small))
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
