"""A thousand streams open at once in one process (benchmarks/gateway/streams.py has five thousand)."""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any
from urllib.parse import urlsplit

import pytest
from antiphon_gateway.server import allow_many_connections
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Connection, FakeWorker
from tests.support.gateway import eventually, running_gateway

STREAMS = 1000
BODY: dict[str, Any] = {"model": "test-model", "prompt": [97, 98, 99], "max_tokens": 2, "stream": True}


async def test_a_thousand_streams_are_open_at_once_and_all_of_them_end_well() -> None:
    """vllm-project/production-stack#448: a router that falls over above a thousand."""
    go = asyncio.Event()

    async def two_tokens(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.step(submit.ref, token_ids=[97], text="a")
        await go.wait()
        connection.step(submit.ref, token_ids=[98], text="b", finish=pb.FINISH_LENGTH)

    workers = [FakeWorker(worker_id=f"w{number}", behaviour=two_tokens) for number in range(2)]
    for worker in workers:
        worker.queue = pb.QueueState(free_blocks=100_000, total_blocks=100_000)
    data = json.dumps(BODY).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)

    async with running_gateway(*workers, queue_size=STREAMS) as running:
        url = urlsplit(running.url)

        async def stream() -> bytes:
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(request)
            answer = await reader.readuntil(b"0\r\n\r\n")
            writer.close()
            return answer

        streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
        await eventually(
            lambda: running.metric("antiphon_gateway_time_to_first_token_seconds_count") == STREAMS, timeout_s=30
        )
        assert running.gateway.in_flight == STREAMS
        go.set()
        for answer in await asyncio.gather(*streams):
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.count(b'"text":') == 2
            assert b"data: [DONE]" in answer
        await eventually(lambda: running.at_rest)


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be_and_said_if_that_is_little(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    for soft, hard, now in (
        (1024, 4096, 4096),
        (1024, 524_288, 524_288),
        (1024, resource.RLIM_INFINITY, 1_048_576),
        (65_536, 65_536, 65_536),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        caplog.clear()
        given.clear()
        assert allow_many_connections() == now
        assert given == ([(now, hard)] if now != soft else [])
        assert ("ulimit -Hn" in caplog.text) == (now == 4096)
