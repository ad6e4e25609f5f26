"""HTTP's manners where nothing else looks: large uploads, what is asked before a body is sent, ids, and bodies that are
none."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Connection, FakeWorker, generate
from tests.support.gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_BYTES = 1024 * 1024
COMPLETION: dict[str, Any] = {"model": "test-model", "prompt": "hello", "max_tokens": 2}
READ = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> FakeWorker:
    return FakeWorker()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(worker: FakeWorker) -> AsyncIterator[RunningGateway]:
    async with running_gateway(worker, max_body_bytes=LIMIT_BYTES, body_timeout_s=20.0) as gateway:
        yield gateway


def body_of(size_bytes: int) -> bytes:
    """A good one, as long as that."""
    return json.dumps(COMPLETION).encode().ljust(size_bytes)


@contextlib.asynccontextmanager
async def socket_to(running: RunningGateway) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = running.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize(("size_bytes", "status"), [(LIMIT_BYTES, 200), (LIMIT_BYTES + 1, 413)])
@pytest.mark.parametrize("chunk_bytes", [0, 1000, 300_000])
async def test_a_body_may_have_all_that_the_limit_allows(
    running: RunningGateway, size_bytes: int, status: int, chunk_bytes: int
) -> None:
    """In one piece with its length, or in chunks without."""
    body = body_of(size_bytes)

    async def chunks() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), chunk_bytes):
            yield body[begin : begin + chunk_bytes]

    content = chunks() if chunk_bytes else body
    response = await running.client.post("/v1/completions", content=content)
    assert response.status_code == status, response.text
    assert (response.headers.get("connection") == "close") is (status == 413)


async def test_who_asks_first_is_refused_before_it_sends_what_is_too_much(running: RunningGateway) -> None:
    """RFC 9110, 10.1.1: the final answer instead of 100, and no more of this connection."""
    async with socket_to(running) as (reader, writer):
        head = f"POST /v1/completions HTTP/1.1\r\ncontent-length: {LIMIT_BYTES + 1}\r\nexpect: 100-continue\r\n\r\n"
        writer.write(head.encode())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"\r\nconnection: close\r\n" in answer
        assert b"request_too_large" in answer


@pytest.mark.parametrize("head", [b"POST /nothing HTTP/1.1", b"PUT /v1/completions HTTP/1.1"])
async def test_who_asks_first_and_is_refused_for_another_reason_is_told_that_its_body_is_not_waited_for(
    running: RunningGateway, head: bytes
) -> None:
    """Else the next request would be taken for the body that was never sent."""
    async with socket_to(running) as (reader, writer):
        writer.write(head + b"\r\ncontent-length: 500\r\nexpect: 100-continue\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 40")
        assert b"\r\nconnection: close\r\n" in answer
        assert b"100 Continue" not in answer


async def test_who_asks_first_is_told_to_go_on_and_keeps_its_connection(running: RunningGateway) -> None:
    body = body_of(100_000)
    async with socket_to(running) as (reader, writer):
        for _ in range(2):
            head = f"POST /v1/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\nexpect: 100-Continue\r\n\r\n"
            writer.write(head.encode())
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" not in answer
            length = int(answer.split(b"content-length: ")[1].split(b"\r\n")[0])
            assert json.loads(await reader.readexactly(length))["choices"]


async def test_a_client_of_http_1_0_is_never_told_to_go_on(running: RunningGateway) -> None:
    """RFC 9110, 10.1.1: it does not know that status."""
    body = body_of(100)
    async with socket_to(running) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: 100\r\nexpect: 100-continue\r\n\r\n")
        await asyncio.sleep(0)
        writer.write(body)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", READ)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nonsense",
        b"[]",
        b'"text"',
        b"model=test-model&prompt=hello",
        b'{"model": "\xff\xfe"}',
        b'{"model": "test-model", "user": "\xc3("}',
        b'{"model": "test-model"} {}',
        '{"model": "test-model"}'.encode("utf-16"),
        b"\x1f\x8b\x08\x00",
    ],
)
async def test_a_body_that_is_not_json_in_utf_8_is_400_everywhere(
    running: RunningGateway, worker: FakeWorker, path: str, raw: bytes
) -> None:
    before = len(worker.submits)
    response = await running.client.post(path, content=raw)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    assert len(worker.submits) == before


@pytest.mark.parametrize("path", READ[:5:2])
async def test_a_request_id_is_echoed_by_streams_and_by_errors(running: RunningGateway, path: str) -> None:
    prompt = {"input": "hello"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "hello"}]}
    good = {"model": "test-model", "stream": True, **prompt}
    good["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 2
    for body, status in ((good, 200), ({**good, "temperature": 9}, 400), ({**good, "model": "other"}, 404)):
        for given in ("abc-1.2_3:4", "x" * 128):
            response = await running.client.post(path, json=body, headers={"x-request-id": given})
            assert (response.status_code, response.headers["x-request-id"]) == (status, given)
        response = await running.client.post(path, json=body, headers={"x-request-id": "x" * 129})
        assert response.headers["x-request-id"].startswith("req-")


async def test_what_is_the_requests_own_fault_never_counts_against_a_worker() -> None:
    """Neither what the gateway refuses nor what a worker says no worker will take."""

    async def picky(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        if submit.sampling.max_tokens == 3:
            connection.refuse(submit.ref, pb.REFUSAL_INVALID, "not this one")
        else:
            await generate(worker, connection, submit)

    worker = FakeWorker(behaviour=picky)
    async with running_gateway(worker) as running:
        for wrong in ({"max_tokens": 3}, {"temperature": 9}, {"max_tokens": 10**9}):
            for stream in (False, True):
                response = await running.client.post("/v1/completions", json={**COMPLETION, **wrong, "stream": stream})
                assert response.status_code == 400
        assert running.metric("antiphon_gateway_workers_lost_total") == 0
        assert running.metric("antiphon_gateway_retries_total") == 0
        assert list(running.gateway.fleet.workers()) == [worker.worker_id]
        for _ in range(3):
            assert (await running.client.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert running.at_rest
