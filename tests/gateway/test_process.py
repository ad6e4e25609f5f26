"""The gateway as a process: how it starts, drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
from antiphon_gateway.server import ReadyRecord
from antiphon_kvtransfer.scaling_news import read_news
from antiphon_proto import worker_pb2 as pb
from redis.asyncio import Redis

from tests.support.fake_worker import Connection, FakeWorker, fake_workers
from tests.support.valkey import Valkey

SCRIPT = """
import sys, msgspec
from antiphon_gateway import GatewayOptions, run_gateway
from antiphon_telemetry import logs
logs.configure("gateway")
options = msgspec.json.decode(sys.argv[1])
options["worker"] = tuple(options.get("worker", ()))
code = run_gateway(GatewayOptions(**options))
forbidden = {"torch", "transformers", "antiphon_engine"} & set(sys.modules)
sys.exit(77 if forbidden else code)
"""
CHAT: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


class Process:
    def __init__(self, process: subprocess.Popen[bytes], client: httpx.AsyncClient) -> None:
        self.process = process
        self.client = client

    def signal(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_code(self) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), 20)

    async def ready(self, status: int) -> None:
        async with asyncio.timeout(20):
            while (await self.client.get("/ready")).status_code != status:  # noqa: ASYNC110  # it can only be asked for
                await asyncio.sleep(0.01)


def start(**options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, json.dumps(options)], stderr=subprocess.PIPE)


@contextlib.asynccontextmanager
async def gateway(tmp_path: Path, worker: FakeWorker, **options: Any) -> AsyncIterator[Process]:
    ready_file = tmp_path / "ready.json"
    async with fake_workers(worker) as addresses:
        process = start(**{"port": 0, "worker": addresses, "ready_file": str(ready_file), **options})
        try:
            async with asyncio.timeout(20):
                while not ready_file.exists():  # the file is the signal
                    assert process.poll() is None
                    await asyncio.sleep(0.01)
            record = msgspec.json.decode(ready_file.read_bytes(), type=ReadyRecord)
            assert record.pid == process.pid
            url = f"http://{record.address}"
            async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
                running = Process(process, client)
                await running.ready(200)
                yield running
        finally:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


class Gate:
    """A behaviour that sends one token, and the end when it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.step(submit.ref, token_ids=[97], text="a")
        await self.open.wait()
        connection.step(submit.ref, token_ids=[97], text="b", finish=pb.FINISH_STOP)


async def test_a_signal_drains_running_requests_end_well_and_new_ones_go_elsewhere(tmp_path: Path) -> None:
    """ai-dynamo/dynamo#13565: scaling down costs no client an error."""
    gate = Gate()
    worker = FakeWorker(behaviour=gate)
    async with gateway(tmp_path, worker) as process:
        running = asyncio.create_task(process.client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
        await worker.until(lambda: worker.running == 1)
        process.signal()
        await process.ready(503)
        refused = await process.client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        assert (await process.client.get("/health")).status_code == 200
        gate.open.set()
        assert (await running).text.endswith("data: [DONE]\n\n")
        assert await process.exit_code() == 0


async def test_what_does_not_end_in_time_ends_with_an_error_event(tmp_path: Path) -> None:
    worker = FakeWorker(behaviour=Gate())
    async with gateway(tmp_path, worker, drain_timeout_s=0.2) as process:
        streamed = asyncio.create_task(process.client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
        whole = asyncio.create_task(process.client.post("/v1/chat/completions", json=CHAT))
        await worker.until(lambda: worker.running == 2)
        process.signal()
        response = await streamed
        assert response.status_code == 200
        last = json.loads(response.text.rstrip("\n").split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "draining"
        assert (await whole).status_code == 503
        assert await process.exit_code() == 0


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    worker = FakeWorker(behaviour=Gate())
    async with gateway(tmp_path, worker, drain_timeout_s=1000.0) as process:
        running = asyncio.create_task(process.client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
        await worker.until(lambda: worker.running == 1)
        process.signal()
        await process.ready(503)
        process.signal()
        assert '"draining"' in (await running).text
        assert await process.exit_code() == 0


async def test_an_idle_gateway_ends_at_once_without_a_trace_of_an_engine(tmp_path: Path) -> None:
    async with gateway(tmp_path, FakeWorker()) as process:
        assert (await process.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        process.signal()
        assert await process.exit_code() == 0


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(port=taken.getsockname()[1])
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 4
    assert b"cannot listen" in errors
    assert b"Traceback" not in errors


def test_a_keys_file_that_is_missing_is_said(tmp_path: Path) -> None:
    process = start(port=0, api_keys_file=str(tmp_path / "none.json"))
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert b"none.json" in errors
    assert b"Traceback" not in errors


def test_a_redis_url_that_is_none_is_said_without_its_password() -> None:
    process = start(port=0, redis_url="http://user:secret@localhost:6379")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert b"--redis-url: the Redis URL http://localhost:6379 has no scheme that is known: use redis://" in errors
    assert b"Traceback" not in errors
    assert b"secret" not in errors


async def test_two_processes_share_a_port_where_both_say_so(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    async with gateway(tmp_path / "1", FakeWorker(), reuse_port=True) as first:
        port = first.client.base_url.port
        async with gateway(tmp_path / "2", FakeWorker(), reuse_port=True, port=port) as second:
            assert second.client.base_url.port == port
            first.signal()
            assert await first.exit_code() == 0
            await second.ready(200)  # what answered before may have been the first
            assert (await second.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_gateway_that_ends_takes_its_news_for_scaling_away(tmp_path: Path) -> None:
    with Valkey() as server:
        async with (
            gateway(tmp_path, FakeWorker(), redis_url=server.url) as running,
            Redis.from_url(server.url, protocol=2) as redis,
        ):
            async with asyncio.timeout(20):
                while len(await read_news(redis, "test-model")) != 1:  # noqa: ASYNC110  # it can only be asked for
                    await asyncio.sleep(0.02)
            running.signal()
            assert await running.exit_code() == 0
            assert await read_news(redis, "test-model") == {}
