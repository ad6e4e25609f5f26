"""A worker changes its role while its stream stands: the gateway follows, and loses nothing."""

from __future__ import annotations

import asyncio

import httpx
from antiphon_policy.routing import WorkerRole
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Connection, FakeWorker, generate
from tests.support.gateway import RunningGateway, eventually, running_gateway

CHAT = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


async def chat(running: RunningGateway) -> httpx.Response:
    return await running.client.post("/v1/chat/completions", json=CHAT)


def takes(worker: FakeWorker, role: pb.Role.ValueType) -> None:
    """Its next heartbeat says so, as does everything after it."""
    worker.queue.role = role
    worker.queue.role_version += 1


def role_of(running: RunningGateway, worker_id: str) -> WorkerRole:
    client = running.gateway.fleet.worker(worker_id)
    assert client is not None
    assert client.attachment is not None
    return client.attachment.role


async def test_requests_go_where_answers_are_made_now_on_the_streams_that_stand() -> None:
    one = FakeWorker(worker_id="one", role=pb.ROLE_DECODE, heartbeat_ms=20)
    two = FakeWorker(worker_id="two", role=pb.ROLE_PREFILL, heartbeat_ms=20)
    async with running_gateway(one, two) as running:
        streams = [*one.connections, *two.connections]
        assert (await chat(running)).status_code == 200
        for round_trip in range(2):
            takes(two, pb.ROLE_DECODE if round_trip == 0 else pb.ROLE_PREFILL)
            takes(one, pb.ROLE_PREFILL if round_trip == 0 else pb.ROLE_DECODE)
            decodes, prefills = (two, one) if round_trip == 0 else (one, two)
            await eventually(lambda to=decodes: role_of(running, to.worker_id) is WorkerRole.DECODE)
            await eventually(lambda to=prefills: role_of(running, to.worker_id) is WorkerRole.PREFILL)
            seen = len(decodes.submits), len(prefills.submits)
            assert (await chat(running)).status_code == 200
            assert (len(decodes.submits), len(prefills.submits)) == (seen[0] + 1, seen[1])
            # The prompt is computed by the other, who did the decoding a moment ago.
            assert [peer.worker_id for peer in decodes.submits[-1].prefill] == [prefills.worker_id]
        assert [*one.connections, *two.connections] == streams
        await eventually(lambda: running.at_rest)


async def test_an_answer_goes_on_at_a_worker_that_takes_no_new_ones() -> None:
    release = asyncio.Event()

    async def held(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        await release.wait()
        await generate(worker, connection, submit)

    leaving = FakeWorker(worker_id="leaving", role=pb.ROLE_DECODE, heartbeat_ms=20, behaviour=held)
    other = FakeWorker(worker_id="other", role=pb.ROLE_DECODE, heartbeat_ms=20)
    other.queue.waiting_tokens = 100_000
    async with running_gateway(leaving, other) as running:
        asked = asyncio.create_task(chat(running))
        await leaving.until(lambda: len(leaving.submits) == 1)
        takes(leaving, pb.ROLE_PREFILL)
        await eventually(lambda: role_of(running, "leaving") is WorkerRole.PREFILL)
        other.queue.waiting_tokens = 0
        assert (await chat(running)).status_code == 200
        assert (len(leaving.submits), len(other.submits)) == (1, 1)
        release.set()
        assert (await asked).status_code == 200
        assert not leaving.cancelled
        await eventually(lambda: running.at_rest)


async def test_a_refusal_that_crosses_the_change_does_not_shut_the_worker_out() -> None:
    """The only worker left for an answer may be one that refused it in its other role."""

    async def changes_first(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        takes(worker, pb.ROLE_PREFILL)
        connection.send(step=pb.StepBatch(queue=worker.queue))
        connection.refuse(submit.ref, pb.REFUSAL_WRONG_ROLE, "a prefill worker now")

    back = FakeWorker(worker_id="back", role=pb.ROLE_DECODE, heartbeat_ms=20, behaviour=changes_first)
    full = FakeWorker(worker_id="full", role=pb.ROLE_DECODE, heartbeat_ms=20)
    full.queue.waiting_tokens = 100_000
    full.behaviour = lambda worker, connection, submit: _refuse(connection, submit)
    async with running_gateway(back, full) as running:
        asked = asyncio.create_task(chat(running))
        await full.until(lambda: len(full.submits) >= 1)
        takes(full, pb.ROLE_PREFILL)
        back.behaviour = generate
        takes(back, pb.ROLE_DECODE)
        assert (await asked).status_code == 200
        assert len(back.submits) == 2


async def _refuse(connection: Connection, submit: pb.Submit) -> None:
    connection.refuse(submit.ref, pb.REFUSAL_CAPACITY, "full")


async def test_a_worker_that_says_nothing_of_its_role_keeps_it() -> None:
    """One of the version before."""
    worker = FakeWorker(worker_id="old", role=pb.ROLE_DECODE, heartbeat_ms=20)
    worker.queue.role_version = 7
    async with running_gateway(worker) as running:
        assert (await chat(running)).status_code == 200
        assert role_of(running, "old") is WorkerRole.DECODE
