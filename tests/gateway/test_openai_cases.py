"""Every awkward request of the collected public reports, against a gateway with a worker double."""

from __future__ import annotations

import asyncio

import pytest
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Connection, FakeWorker, answer_bytes, tokens
from tests.support.gateway import eventually, running_gateway
from tests.support.openai_cases import CHECKS, lines
from tests.support.openai_cases_elsewhere import CHECKS as ELSEWHERE
from tests.support.openai_cases_elsewhere import NOWHERE_ELSE


async def behaviour(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    """Answers; stop strings end the answer. The story of S19 has no end in time."""
    connection.accept(submit.ref)
    data = answer_bytes(submit)
    for stop in submit.sampling.stop:
        data = data.split(stop.encode())[0]
    if not data:
        connection.step(submit.ref, token_ids=[0], finish=pb.FINISH_STOP, usage=pb.Usage(completion_tokens=1))
        return
    long = submit.sampling.max_tokens == 4000
    await tokens(connection, submit, data[:20] if long else data, finish=not long)
    if long:
        await asyncio.Event().wait()


def test_every_line_has_a_check() -> None:
    assert set(CHECKS) == set(lines())
    assert {name.split()[0] for name in ELSEWHERE} == set(lines()) - NOWHERE_ELSE


@pytest.mark.parametrize("case", CHECKS)
async def test_case(case: str) -> None:
    async with running_gateway(FakeWorker(behaviour=behaviour)) as running:
        await CHECKS[case](running.url, "test-model")
        await eventually(lambda: running.at_rest)
