"""The status page on a real socket: its pages, and what a bad client cannot do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import pytest
from antiphon_telemetry import status
from antiphon_telemetry.status import StatusServer
from prometheus_client import Counter

PAGES_SEEN = Counter("antiphon_test_pages_seen", "Counted by a test.")


class Owner:
    def __init__(self) -> None:
        self.ready = True
        self.reason = ""

    def detail(self) -> Mapping[str, object]:
        return {"role": "decode", "links": [{"up": True}]}


@asynccontextmanager
async def serving(owner: Owner) -> AsyncIterator[tuple[StatusServer, httpx.AsyncClient]]:
    server = StatusServer("127.0.0.1", 0, ready=lambda: (owner.ready, owner.reason), detail=owner.detail)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
        try:
            yield server, client
        finally:
            await server.close()


async def raw(server: StatusServer, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(10):
            writer.write(request)
            return await reader.read()
    finally:
        writer.close()


async def test_health_ready_status_and_metrics() -> None:
    owner = Owner()
    PAGES_SEEN.inc()
    async with serving(owner) as (_, client):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        owner.ready, owner.reason = False, "loading the model"
        answer = await client.get("/ready")
        assert (answer.status_code, answer.text.strip()) == (503, "loading the model")
        assert (await client.get("/status")).json() == {"role": "decode", "links": [{"up": True}]}
        metrics = await client.get("/metrics")
        assert "antiphon_test_pages_seen_total 1.0" in metrics.text
        assert metrics.headers["content-type"].startswith("text/plain")


async def test_head_has_the_length_and_no_body() -> None:
    async with serving(Owner()) as (server, _):
        answer = await raw(server, b"HEAD /status HTTP/1.1\r\nHost: x\r\n\r\n")
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"Content-Length: 40" in head
    assert body == b""


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"GET /else HTTP/1.1\r\n\r\n", 404),
        (b"GET /status?x=1 HTTP/1.1\r\n\r\n", 200),
        (b"GET /blocks HTTP/1.1\r\n\r\n", 404),
        (b"POST /status HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * status.MAX_REQUEST_BYTES + b"\r\n\r\n", 431),
    ],
)
async def test_answers_to_requests_of_all_kinds(request_bytes: bytes, expected: int) -> None:
    async with serving(Owner()) as (server, _):
        answer = await raw(server, request_bytes)
    assert answer.startswith(f"HTTP/1.1 {expected} ".encode())


async def test_a_client_that_never_ends_its_request_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "REQUEST_DEADLINE_S", 0.1)
    async with serving(Owner()) as (server, _):
        assert (await raw(server, b"GET /health HT")).startswith(b"HTTP/1.1 408 ")


async def test_stuck_clients_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MAX_CONNECTIONS", 2)
    async with serving(Owner()) as (server, client):
        stuck = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        assert await raw(server, b"GET /health HTTP/1.1\r\n\r\n") == b""
        for _, writer in stuck:
            writer.close()
        for reader, _ in stuck:
            await reader.read()
        assert (await client.get("/health")).status_code == 200


async def test_a_page_that_fails_is_an_error_and_the_next_one_is_served(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Owner):
        def detail(self) -> Mapping[str, object]:
            raise KeyError("gone")

    async with serving(Broken()) as (_, client):
        assert (await client.get("/status")).status_code == 500
        assert (await client.get("/health")).status_code == 200
    assert "KeyError" in caplog.text


async def test_further_pages_of_the_owner() -> None:
    async def slow() -> object:
        await asyncio.sleep(0)
        return ["a", "b"]

    owner = Owner()
    server = StatusServer(
        "127.0.0.1",
        0,
        ready=lambda: (True, ""),
        detail=owner.detail,
        pages={"/blocks": slow, "/plain": lambda: {"x": 1}},
    )
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
        try:
            assert (await client.get("/blocks")).json() == ["a", "b"]
            assert (await client.get("/plain")).json() == {"x": 1}
            assert (await client.get("/status")).json() == owner.detail()
            assert "/status, /blocks, /plain" in (await client.get("/else")).text
        finally:
            await server.close()


async def test_close_ends_open_connections_and_frees_the_port() -> None:
    async with serving(Owner()) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await server.close()
        await server.close()
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        with pytest.raises(OSError, match="onnect"):
            await asyncio.open_connection("127.0.0.1", server.port)


async def test_a_port_in_use_is_an_error() -> None:
    async with serving(Owner()) as (server, _):
        other = StatusServer("127.0.0.1", server.port, ready=lambda: (True, ""), detail=dict)
        with pytest.raises(OSError, match="in use"):
            await other.start()
