"""Thousands of bodies that are half right: each is served or refused, none is a fault of ours, and nothing stays."""

from __future__ import annotations

import asyncio
import http.client
from collections import Counter
from urllib.parse import urlsplit

import pytest
from antiphon_proto import worker_pb2 as pb
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.fake_worker import Connection, FakeWorker, byte_card
from tests.support.fuzzed_bodies import Fuzzed, fuzzed, is_fault
from tests.support.gateway import eventually, running_gateway

BATCHES = 50
BATCH = 40


def send_all(url: str) -> Counter[int]:
    """How often each status came. Raises AssertionError with the body that made a fault."""
    found: Counter[int] = Counter()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)

    @settings(
        max_examples=BATCHES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(fuzzed("test-model"), min_size=BATCH, max_size=BATCH))
    def send(bodies: list[Fuzzed]) -> None:
        for body in bodies:
            connection.request("POST", body.path, body.raw)
            response = connection.getresponse()
            answer = response.read()
            assert not is_fault(response.status, answer), (body, answer)
            found[response.status] += 1

    try:
        send()
    finally:
        connection.close()
    return found


async def test_no_body_is_a_fault_and_nothing_stays() -> None:
    async with running_gateway(FakeWorker(byte_card(context=200)), trust_request_chat_template=True) as running:
        found = await asyncio.to_thread(send_all, running.url)
        await eventually(lambda: running.at_rest)
        assert found[200] > 100
        assert found[400] > 100
        assert sum(found.values()) >= BATCHES * BATCH


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_is_too_much_in_the_middle_is_the_requests_fault_on_whatever_worker(stream: bool) -> None:
    async def give_up(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        why = "structured output failed: lexer error: too many expressions constructed"
        connection.step(submit.ref, finish=pb.FINISH_ERROR, error=why)

    workers = [FakeWorker(behaviour=give_up), FakeWorker(worker_id="w2", behaviour=give_up)]
    body = {"model": "test-model", "prompt": "hi", "guided_regex": "a{5}", "stream": stream}
    async with running_gateway(*workers) as running:
        response = await running.client.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "grammar_too_complex")
        assert sum(len(worker.submits) for worker in workers) == 1
        await eventually(lambda: running.at_rest)
