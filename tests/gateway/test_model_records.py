"""What the operator says of its Models is what clients see: names, revisions, limits, who drains, who is asleep."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from antiphon_gateway import app
from antiphon_gateway.auth import cache_salt
from antiphon_gateway.keep_alive import COMMENT
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Connection, FakeWorker, accept_and_hang, byte_card, generate
from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.model_records import KEY, OperatorVoice, model_record
from tests.support.valkey import Valkey

BODY: dict[str, Any] = {"model": "qwen", "prompt": "hello", "max_tokens": 4}


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.fixture
def operator(valkey: Valkey) -> OperatorVoice:
    return OperatorVoice(valkey)


def worker(worker_id: str = "w1", revision: str = "", **options: Any) -> FakeWorker:
    card = options.pop("card", None) or byte_card(KEY)
    return FakeWorker(card, worker_id=worker_id, revision=revision, **options)


async def ask(running: RunningGateway, **changes: Any) -> httpx.Response:
    return await running.client.post("/v1/completions", json={**BODY, **changes})


async def heard(running: RunningGateway, record: Any) -> None:
    await eventually(lambda: running.gateway.fleet.catalogue.record(record.model) == record)


async def listed(running: RunningGateway) -> dict[str, int]:
    page = (await running.client.get("/v1/models")).json()
    return {model["id"]: model["max_model_len"] for model in page["data"]}


async def said(operator: OperatorVoice, running: RunningGateway, **fields: Any) -> None:
    record = model_record(**fields)
    operator.put(record)
    await heard(running, record)


# -- names


async def test_clients_use_the_records_names_and_answers_say_the_name_that_was_used(
    valkey: Valkey, operator: OperatorVoice
) -> None:
    async with running_gateway(worker(), redis_url=valkey.url) as running:
        await said(operator, running, names=("qwen", "best"), max_context_tokens=100)
        assert await listed(running) == {"qwen": 100, "best": 100}
        for name in ("qwen", "best"):
            assert (await ask(running, model=name)).json()["model"] == name
            chat = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            assert (await running.client.post("/v1/chat/completions", json=chat)).json()["model"] == name
            streamed = (await running.client.post("/v1/chat/completions", json={**chat, "stream": True})).text
            assert f'"model":"{name}"' in streamed
            assert KEY not in streamed
            assert (await running.client.get(f"/v1/models/{name}")).json()["id"] == name
        # The workers' own name is not one of them.
        assert (await ask(running, model=KEY)).status_code == 404
        await said(operator, running, names=("qwen", "better"), generation=2)
        assert (await ask(running, model="best")).status_code == 404
        assert (await ask(running, model="better")).json()["model"] == "better"
        assert (await listed(running)).keys() == {"qwen", "better"}


async def test_a_records_name_wins_over_what_workers_call_their_model(valkey: Valkey, operator: OperatorVoice) -> None:
    by_hand = FakeWorker(byte_card("qwen"), worker_id="by-hand")
    of_model = worker()
    async with running_gateway(by_hand, of_model, redis_url=valkey.url) as running:
        assert (await ask(running)).status_code == 200
        assert len(by_hand.submits) == 1
        await said(operator, running)
        assert (await ask(running)).status_code == 200
        assert (len(by_hand.submits), len(of_model.submits)) == (1, 1)
        assert list(await listed(running)) == ["qwen"]


async def test_the_records_context_limit_counts(valkey: Valkey, operator: OperatorVoice) -> None:
    async with running_gateway(worker(), redis_url=valkey.url) as running:
        await said(operator, running, max_context_tokens=100)
        response = await ask(running, prompt="x" * 97)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "100 tokens" in response.json()["error"]["message"]
        await said(operator, running, max_context_tokens=101)
        assert (await ask(running, prompt="x" * 97)).status_code == 200


async def test_isolation_decides_whether_tenants_share_blocks(valkey: Valkey, operator: OperatorVoice) -> None:
    fake = worker()
    async with running_gateway(fake, redis_url=valkey.url, keys={"k1": "t1", "k2": "t2"}) as running:
        for isolation in ("PerTenant", "Shared"):
            await said(operator, running, isolation=isolation)
            for key in ("k1", "k2"):
                headers = {"authorization": f"Bearer {key}"}
                assert (await running.client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        assert [submit.cache_salt for submit in fake.submits] == [cache_salt("t1"), cache_salt("t2"), b"", b""]


# -- Models without workers


async def test_a_known_model_without_workers_is_503_and_an_unknown_one_404(
    valkey: Valkey, operator: OperatorVoice
) -> None:
    async with running_gateway(redis_url=valkey.url) as running:
        await said(operator, running, retry_after_s=17)
        response = await ask(running)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
        assert response.headers["retry-after"] == "17"
        assert list(await listed(running)) == ["qwen"]
        response = await ask(running, model="other")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert "retry-after" not in response.headers
        await eventually(lambda: running.at_rest)


async def test_requests_wait_for_a_model_that_wakes(valkey: Valkey, operator: OperatorVoice) -> None:
    late = worker()
    await late.start()
    try:
        async with running_gateway(redis_url=valkey.url) as running:
            await said(operator, running, waking=True)
            waiting = [asyncio.create_task(ask(running)) for _ in range(3)]
            await eventually(lambda: running.gateway.dispatcher.waiting == 3)
            running.gateway.fleet._static = (late.address,)
            running.gateway.fleet._reconcile()
            assert [response.status_code for response in await asyncio.gather(*waiting)] == [200] * 3
            await eventually(lambda: running.at_rest)
    finally:
        await late.stop()


async def test_a_stream_that_waits_for_a_model_that_wakes_is_kept_alive(
    valkey: Valkey, operator: OperatorVoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_SWEEP_S", 0.02)
    late = worker()
    await late.start()
    try:
        async with running_gateway(
            redis_url=valkey.url, keep_alive_s=0.05, keep_alive_first_s=0.1, wake_timeout_s=20.0
        ) as running:
            for wakes in (False, True):
                await said(operator, running, waking=True)
                whole = asyncio.create_task(running.client.post("/v1/completions", json=BODY))
                async with running.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
                    pieces = response.aiter_bytes()
                    assert (await anext(pieces)).startswith(COMMENT)
                    if wakes:
                        running.gateway.fleet._static = (late.address,)
                        running.gateway.fleet._reconcile()
                    else:
                        operator.put(model_record(waking=False))
                    raw = b"".join([piece async for piece in pieces]).replace(COMMENT, b"")
                    assert raw.endswith(b"data: [DONE]\n\n" if wakes else b"}}\n\n")
                    assert raw.startswith(b'data: {"id"' if wakes else b'data: {"error":{')
                assert (await whole).status_code == (200 if wakes else 503)
                await eventually(lambda: running.at_rest)
    finally:
        await late.stop()


async def test_waiting_for_a_model_that_wakes_is_bounded(valkey: Valkey, operator: OperatorVoice) -> None:
    async with running_gateway(redis_url=valkey.url, wake_timeout_s=4.0, queue_size=1) as running:
        await said(operator, running, waking=True, retry_after_s=5)
        waiting = asyncio.create_task(ask(running))
        await eventually(lambda: running.gateway.dispatcher.waiting == 1)
        refused = await ask(running)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert "is starting" in refused.json()["error"]["message"]
        response = await waiting
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
        assert response.headers["retry-after"] == "5"
        # A client that goes away is not waited for.
        gone = asyncio.create_task(ask(running))
        await eventually(lambda: running.gateway.dispatcher.waiting == 1)
        gone.cancel()
        await eventually(lambda: running.at_rest)
        # Nor is a Model that does not wake any more.
        waiting = asyncio.create_task(ask(running))
        await eventually(lambda: running.gateway.dispatcher.waiting == 1)
        operator.put(model_record(waking=False, retry_after_s=6))
        assert (await waiting).headers["retry-after"] == "6"


async def test_what_waits_for_a_model_that_wakes_is_bounded_in_length_too(
    valkey: Valkey, operator: OperatorVoice
) -> None:
    async with running_gateway(redis_url=valkey.url, queue_tokens=1000) as running:
        await said(operator, running, waking=True, retry_after_s=9)
        # One alone may wait, however long it is.
        waiting = [asyncio.create_task(ask(running, prompt="x" * 100_000))]
        await eventually(lambda: running.gateway.dispatcher.waiting == 1)
        assert (await ask(running)).headers["retry-after"] == "9"
        waiting[0].cancel()
        await eventually(lambda: running.at_rest)
        waiting += [asyncio.create_task(ask(running)) for _ in range(2)]
        await eventually(lambda: running.gateway.dispatcher.waiting == 2)
        assert (await ask(running, prompt="x" * 100_000)).status_code == 429
        for request in waiting:
            request.cancel()
        await eventually(lambda: running.at_rest)


async def test_who_waits_for_a_model_that_wakes_is_told_when_the_gateway_ends(
    valkey: Valkey, operator: OperatorVoice
) -> None:
    async with running_gateway(redis_url=valkey.url) as running:
        await said(operator, running, waking=True)
        waiting = asyncio.create_task(ask(running))
        await eventually(lambda: running.gateway.dispatcher.waiting == 1)
        running.gateway.drain()
        assert not waiting.done(), "it may still be served"
        running.gateway.end_all()
        response = await waiting
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in response.headers


# -- revisions


async def test_new_requests_follow_the_weights_and_their_changes(valkey: Valkey, operator: OperatorVoice) -> None:
    old, new = worker("old", "a"), worker("new", "b")
    async with running_gateway(old, new, redis_url=valkey.url) as running:
        draws = random.Random(5)
        running.gateway.dispatcher.selection._draw = draws.random
        for weights, expected in (({"a": 1000}, 0), ({"a": 500, "b": 500}, 20), ({"b": 1000, "a": 0}, 40)):
            await said(operator, running, revisions=weights)
            old.submits.clear()
            new.submits.clear()
            for _ in range(40):
                assert (await ask(running)).status_code == 200
            assert len(old.submits) + len(new.submits) == 40
            assert abs(len(new.submits) - expected) <= (0 if expected in (0, 40) else 10)


async def test_workers_of_two_revisions_are_no_peers_and_never_work_together(
    valkey: Valkey, operator: OperatorVoice
) -> None:
    roles = {"d": pb.ROLE_DECODE, "p": pb.ROLE_PREFILL}
    fleet = [worker(f"{name}{revision}", revision, role=role) for revision in "ab" for name, role in roles.items()]
    async with running_gateway(*fleet, redis_url=valkey.url) as running:
        await said(operator, running, revisions={"a": 500, "b": 500})
        for fake in fleet:
            own = sorted({f"d{fake.revision}", f"p{fake.revision}"} - {fake.worker_id})
            await eventually(lambda fake=fake, own=own: bool(fake.peers) and fake.peers[-1] == own)  # type: ignore[misc]
        for _ in range(20):
            assert (await ask(running, prompt="x" * 4000)).status_code == 200
        used = Counter[str]()
        for fake in fleet:
            for submit in fake.submits:
                used[fake.revision] += 1
                others = [peer.worker_id for peer in submit.prefill]
                others += [prefix.peer.worker_id for prefix in submit.prefix_peers]
                assert {name[-1] for name in others} <= {fake.revision}
                assert submit.prefill
        assert used.keys() == {"a", "b"}


async def test_what_waits_goes_to_another_revision_when_its_own_has_nobody_left(
    valkey: Valkey, operator: OperatorVoice
) -> None:
    """Equal cards: the prompt stays. Another card: the request starts again with that card's tokens."""

    async def full(fake: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.refuse(submit.ref, pb.REFUSAL_CAPACITY)

    for card in (byte_card(KEY), byte_card(KEY, template="{{ messages[0]['content'] }}")):
        old, new = worker("old", "a", behaviour=full), worker("new", "b", card=card)
        async with running_gateway(old, new, redis_url=valkey.url) as running:
            await said(operator, running, revisions={"a": 1000}, draining=("new",))
            chat = {"model": "qwen", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            waiting = asyncio.create_task(running.client.post("/v1/chat/completions", json=chat))
            await eventually(lambda old=old: len(old.submits) > 0)  # type: ignore[misc]
            await said(operator, running, revisions={"a": 1000}, draining=())
            await old.stop()
            assert (await waiting).status_code == 200
            tokens = [len(fake.submits[-1].prompt_token_ids) for fake in (old, new)]
            assert (tokens[0] == tokens[1]) == (card.digest == old.card.digest)
            await eventually(lambda running=running: running.at_rest)  # type: ignore[misc]


async def test_a_worker_that_dies_before_the_first_token_may_be_replaced_by_another_revision(
    valkey: Valkey, operator: OperatorVoice
) -> None:
    async def die(fake: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.close()

    old, new = worker("old", "a", behaviour=die), worker("new", "b")
    async with running_gateway(old, new, redis_url=valkey.url) as running:
        await said(operator, running, revisions={"a": 1000, "b": 0})
        assert (await ask(running)).status_code == 200
        assert len(old.submits) == len(new.submits) == 1


async def test_an_answer_that_has_begun_stays_in_its_revision(valkey: Valkey, operator: OperatorVoice) -> None:
    async def die(fake: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.step(submit.ref, token_ids=[64], text="a")
        connection.close()

    old, new = worker("old", "a", behaviour=die), worker("new", "b")
    async with running_gateway(old, new, redis_url=valkey.url) as running:
        await said(operator, running, revisions={"a": 1000, "b": 0})
        response = await ask(running)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_failed")
        assert not new.submits


# -- draining


async def test_a_draining_worker_gets_nothing_new_in_any_role_and_finishes_what_it_has(
    valkey: Valkey, operator: OperatorVoice
) -> None:
    go_on = asyncio.Event()

    async def patient(fake: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        await go_on.wait()
        connection.step(submit.ref, token_ids=[64] * 4, text="aaaa", finish=pb.FINISH_LENGTH)

    going = worker("d1", role=pb.ROLE_DECODE, behaviour=patient)
    staying = worker("d2", role=pb.ROLE_DECODE)
    prefill = [worker(name, role=pb.ROLE_PREFILL) for name in ("p1", "p2")]
    async with running_gateway(going, *prefill, redis_url=valkey.url) as running:
        await said(operator, running)
        running_one = asyncio.create_task(ask(running))
        await eventually(lambda: len(going.submits) == 1)
        await said(operator, running, draining=("d1", "p1"))
        assert (await ask(running)).status_code == 503
        await staying.start()
        try:
            running.gateway.fleet._static = (*running.gateway.fleet._static, staying.address)
            running.gateway.fleet._reconcile()
            await eventually(lambda: len(running.gateway.fleet.workers()) == 4)
            for _ in range(10):
                assert (await ask(running, prompt="x" * 4000)).status_code == 200
            assert len(going.submits) == 1
            assert all([peer.worker_id for peer in submit.prefill] == ["p2"] for submit in staying.submits)
            page = (await running.client.get("/ready")).json()["models"][KEY]
            assert page == {"decode": 1, "prefill": 1, "both": 0, "revisions": {"": {"prefill": 1, "decode": 1}}}
            go_on.set()
            assert (await running_one).json()["choices"][0]["text"] == "aaaa"
        finally:
            await staying.stop()


# -- Redis, readiness


async def test_records_count_while_redis_is_down(valkey: Valkey, operator: OperatorVoice) -> None:
    async with running_gateway(worker(), redis_url=valkey.url) as running:
        await said(operator, running, names=("qwen", "alias"), draining=("w9",))
        valkey.kill()
        await eventually(lambda: running.gateway.fleet.mirror_healthy is False)
        assert (await ask(running, model="alias")).status_code == 200
        assert (await listed(running)).keys() == {"qwen", "alias"}


async def test_a_gateway_of_a_cluster_is_ready_when_it_knows_who_is_there(
    valkey: Valkey, operator: OperatorVoice
) -> None:
    async with running_gateway(redis_url=valkey.url, ready_without_workers=True) as running:
        await eventually(lambda: running.gateway.fleet.mirror_healthy is True)
        page = await running.client.get("/ready")
        assert (page.status_code, page.json()["models"]) == (200, {})
        await said(operator, running)
        page = await running.client.get("/ready")
        assert page.status_code == 200
        assert page.json()["models"] == {KEY: {"decode": 0, "prefill": 0, "both": 0, "revisions": {}}}
        valkey.kill()
        await eventually(lambda: running.gateway.fleet.mirror_healthy is False)
        assert (await running.client.get("/ready")).status_code == 200
    # One that never heard of anybody is not.
    async with running_gateway(redis_url=valkey.url, ready_without_workers=True) as running:
        assert (await running.client.get("/ready")).status_code == 503


async def test_workers_are_counted_by_revision(valkey: Valkey, operator: OperatorVoice) -> None:
    fleet = [
        worker("d1", "a", role=pb.ROLE_DECODE),
        worker("p1", "a", role=pb.ROLE_PREFILL),
        worker("b1", "b", behaviour=accept_and_hang),
        worker("b2", "b", behaviour=generate),
    ]
    async with running_gateway(*fleet, redis_url=valkey.url) as running:
        await said(operator, running)
        page = (await running.client.get("/ready")).json()["models"][KEY]
        assert page["revisions"] == {"a": {"prefill": 1, "decode": 1}, "b": {"prefill": 0, "decode": 2}}
        assert (page["decode"], page["prefill"], page["both"]) == (1, 1, 2)
