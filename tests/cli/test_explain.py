"""`antiphon explain ID` against a running gateway: what it tells, and what it says where it cannot."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from antiphon.__main__ import run
from antiphon_gateway.explain_document import Explanation
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Connection, FakeWorker, answer_bytes, tokens
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.serve import environment

BODY: dict[str, Any] = {"model": "test-model", "prompt": "x" * 1000, "max_tokens": 5}
NOWHERE = "http://127.0.0.1:9"


async def ask(running: RunningGateway, request_id: str, key: str = "") -> None:
    headers = {"x-request-id": request_id} | ({"authorization": f"Bearer {key}"} if key else {})
    response = await running.client.post("/v1/completions", json=BODY, headers=headers)
    assert response.status_code == 200, response.text


async def explain(*arguments: str, **variables: str) -> int:
    """The command's exit code. It runs beside the gateway's event loop, as a process would."""
    return await asyncio.to_thread(run, ["explain", *arguments], variables)


async def breaking(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.accept(submit.ref)
    await tokens(connection, submit, answer_bytes(submit)[:2], finish=False)
    connection.step(submit.ref, finish=pb.FINISH_ERROR, error="out of luck")


async def test_the_story_of_a_request_in_the_terminal() -> None:
    other = FakeWorker(worker_id="other")
    other.queue.waiting_tokens = 10_000
    async with running_gateway(FakeWorker(worker_id="dying", behaviour=breaking), other) as running:
        await ask(running, "mine")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "antiphon", "explain", "mine", "--gateway", running.url, "--replay"),
            stdout=asyncio.subprocess.PIPE,
            env=environment(COLUMNS="120"),
        )
        output, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    text = output.decode()
    words = " ".join(text.split())
    assert "answered with status 200" in words
    assert "Decode on dying, which computes the prompt too: there was no prefill worker" in words
    assert "and 2 tokens: out of luck." in words
    assert "attempt 2, " in words
    assert "It ended (length)" in words
    assert words.count("the same decision") == 2
    # The alternatives, with the parts of their costs.
    head, chosen, next_best = (line.split() for line in _table(text))
    assert head[:4] == ["decode", "prefill", "cost", "TTFT"]
    assert chosen[:3] == ["chosen", "dying", "itself"]
    assert next_best[:2] == ["other", "itself"]
    assert float(next_best[2]) > float(chosen[3])


def _table(text: str) -> list[str]:
    """The first attempt's."""
    lines = text.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.split()[:2] == ["decode", "prefill"])
    return lines[begin : begin + 3]


async def test_json_is_what_the_gateway_says_and_the_replays_where_they_are_wanted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with running_gateway(FakeWorker()) as running:
        await ask(running, "mine")
        assert await explain("mine", "--json", ANTIPHON_GATEWAY=running.url) == 0
        told = json.loads(capsys.readouterr().out)
        said = (await running.client.get("/v1/antiphon/explain/mine")).json()
        assert told == said
        assert set(told) == set(Explanation.__struct_fields__)
        assert await explain("mine", "--json", "--replay", "--gateway", f"{running.url}/v1") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["explanation"] == said
        assert told["replays"] == [{"choice": 0, "attempt": 1, "same": True, "whole": True, "differences": []}]


async def test_several_gateways_are_asked_until_one_knows(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_gateway(FakeWorker()) as one, running_gateway(FakeWorker()) as other:
        await ask(other, "mine")
        assert await explain("mine", "--gateway", f"{NOWHERE},{one.url}", "--gateway", other.url) == 0
        assert "request mine" in capsys.readouterr().out
        assert await explain("unknown", "--gateway", f"{one.url},{other.url}") == 1
        error = capsys.readouterr().err
        assert error.count("Nothing is known here of a request 'unknown'") == 2
        assert one.url in error
        assert other.url in error
        assert await explain("unknown", "--gateway", one.url, "--gateway", NOWHERE) == 4
        assert f"no gateway answers at {NOWHERE}" in capsys.readouterr().err


async def test_the_key_of_the_tenant_opens_its_own_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"key-{name}\n")
    async with running_gateway(FakeWorker(), keys={"key-a": "a-tenant", "key-b": "b-tenant"}) as running:
        await ask(running, "mine", key="key-a")
        assert await explain("mine", "--gateway", running.url) == 2
        assert "--api-key-file" in capsys.readouterr().err
        assert await explain("mine", "--gateway", running.url, ANTIPHON_API_KEY_FILE=str(tmp_path / "b")) == 1
        assert await explain("mine", "--gateway", running.url, "--api-key-file", str(tmp_path / "a")) == 0


async def test_what_is_no_gateway_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
        writer.close()

    server = await asyncio.start_server(page, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await explain("mine", "--gateway", f"http://127.0.0.1:{port}") == 2
        assert "is it a gateway of this version?" in capsys.readouterr().err
    for arguments in (
        ("--gateway", "localhost:8000"),
        ("--gateway", ","),
        ("--api-key-file", str(tmp_path / "none")),
    ):
        assert await explain("mine", *arguments) == 2
        assert arguments[0] in capsys.readouterr().err
