"""A process that is one end of KV links: fake engine with real memory, real transports, real gRPC. Told what to do.

`python -m tests.support.kv_worker CONFIG` takes commands as JSON lines and answers each with one (any order).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

import grpc.aio
from antiphon_kvtransfer.links import PeerAddress, PeerLinks
from antiphon_kvtransfer.tcp import TcpTransport
from antiphon_kvtransfer.transport import Transport, TransportError
from antiphon_kvtransfer.ucx import UcxTransport
from antiphon_proto import worker_pb2_grpc
from antiphon_telemetry.exit import leave

from tests.support.block_keeper import FakeKeeper, hash_of
from tests.support.eventually import WAIT_S, eventually_now
from tests.support.gated_transport import Gate, GatedTransport

NUM_BLOCKS = 32
BLOCK_BYTES = 256 << 10
LOST_AFTER_MS = 600


class KvWorker:
    """The process, seen from the test."""

    def __init__(self, worker_id: str, transport: str, **environment: str) -> None:
        self.worker_id = worker_id
        self._ids = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kv_worker", worker_id, transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._ready: Future[Any] = Future()
        self._answers[-1] = self._ready
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.address = str(self._ready.result(WAIT_S))

    @property
    def as_peer(self) -> list[str]:
        return [self.worker_id, "i1", self.address]

    def start(self, what: str, *args: Any) -> Future[Any]:
        """Begin a command; the answer comes by itself. A TransportError there is an exception here."""
        number = next(self._ids)
        answer: Future[Any] = Future()
        self._answers[number] = answer
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([number, what, args]) + "\n")
        self._process.stdin.flush()
        return answer

    def ask(self, what: str, *args: Any) -> Any:
        return self.start(what, *args).result(WAIT_S)

    def until(self, what: str, value: Any) -> None:
        eventually_now(lambda: bool(self.ask(what) == value))

    def stop(self) -> None:
        """SIGSTOP, and wait until the process really stands still."""
        os.kill(self._process.pid, signal.SIGSTOP)
        self.until_stopped()

    def until_stopped(self) -> None:
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> KvWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reading.join(WAIT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, problem, value = json.loads(line)
            answer = self._answers.pop(number)
            if problem:
                answer.set_exception(TransportError(problem))
            else:
                answer.set_result(value)


class _Worker:
    def __init__(self, worker_id: str, transport: str) -> None:
        self.keeper = FakeKeeper(NUM_BLOCKS, BLOCK_BYTES)
        self.gate = Gate()
        region = self.keeper.region
        inner: Transport = TcpTransport(region) if transport == "tcp" else UcxTransport(region, owner=f"{worker_id}/i1")
        self.links = PeerLinks(
            self.keeper.local_worker(worker_id, "i1"),
            self.keeper.plane([GatedTransport(inner, self.gate)]),
            self.keeper,
            heartbeat_ms=100,
            lost_after_ms=LOST_AFTER_MS,
        )

    async def do(self, what: str, args: list[Any]) -> Any:
        if what == "store":
            self.keeper.store(*args)
        elif what == "reuse":
            return self.keeper.reuse()
        elif what == "contents":
            return self.keeper.contents(args[0])
        elif what == "kept":
            return self.keeper.kept_blocks()
        elif what == "held":
            return self.links.held_blocks
        elif what == "shut":
            self.gate.shut(*args)
        elif what == "arm":
            self.gate.arm(*args)
        elif what == "open":
            self.gate.open()
        elif what == "reached":
            await self.gate.reached.wait()
        elif what == "link":
            await self.links.link(PeerAddress(*args[0]), WAIT_S)
        elif what == "statuses":
            return [[one.peer_worker_id, one.transport, one.gigabytes_per_s, one.up] for one in self.links.statuses()]
        elif what == "pull":
            peer, contents, blocks = args
            link = await self.links.link(PeerAddress(*peer), WAIT_S)
            return await link.pull([hash_of(one) for one in contents], blocks, deadline_s=WAIT_S)
        else:
            raise ValueError(what)
        return None


async def _main(worker_id: str, transport: str) -> None:
    worker = _Worker(worker_id, transport)
    await worker.links.start()
    server = grpc.aio.server()
    worker_pb2_grpc.add_KvBlocksServicer_to_server(worker.links.servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def answer(line: str) -> None:
        number, what, args = json.loads(line)
        try:
            print(json.dumps([number, "", await worker.do(what, args)]), flush=True)
        except TransportError as error:
            print(json.dumps([number, str(error), None]), flush=True)

    print(json.dumps([-1, "", f"127.0.0.1:{port}"]), flush=True)
    async with asyncio.TaskGroup() as commands:
        while line := await asyncio.to_thread(sys.stdin.readline):
            commands.create_task(answer(line))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2]))
    leave(0)
