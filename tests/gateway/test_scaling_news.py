"""What gateways tell for scaling: read from a real Valkey, as whoever scales reads it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from antiphon_gateway import scaling_writer
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_kvtransfer.scaling_news import read_news
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling.news import GatewayNews, decode_news
from antiphon_proto import worker_pb2 as pb
from redis.asyncio import Redis

from tests.support.fake_worker import Connection, FakeWorker, accept_and_hang, byte_card, endless, tokens
from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.model_records import KEY, OperatorVoice, model_record
from tests.support.valkey import Valkey

BODY: dict[str, Any] = {"model": KEY, "prompt": [7] * 200, "max_tokens": 5}


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch, valkey: Valkey) -> None:
    OperatorVoice(valkey).redis.flushall()
    monkeypatch.setattr(scaling_writer, "EVERY_S", 0.05)
    monkeypatch.setattr(scaling_writer, "AT_ONCE_PER_S", 100.0)


class Reader:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def all(self, model: str = KEY) -> dict[str, GatewayNews]:
        return {name: decode_news(raw, name) for name, raw in (await read_news(self._redis, model)).items()}

    async def until(self, condition: Any, model: str = KEY) -> GatewayNews:
        """The first news of the gateway that are so."""
        async with asyncio.timeout(10.0):
            while True:
                news = (await self.all(model)).get("gateway-test")
                if news is not None and condition(news):
                    return news
                await asyncio.sleep(0.01)

    async def gone(self, model: str = KEY) -> None:
        async with asyncio.timeout(10.0):
            while await self.all(model):  # noqa: ASYNC110  # it is in another process
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def reading(valkey: Valkey) -> AsyncIterator[Reader]:
    async with Redis.from_url(valkey.url, protocol=2) as redis:
        yield Reader(redis)


def worker(**options: Any) -> FakeWorker:
    return FakeWorker(byte_card(KEY), **options)


async def ask(running: RunningGateway, **changes: Any) -> Any:
    return await running.client.post("/v1/completions", json={**BODY, **changes})


async def half_cached(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.accept(submit.ref)
    await tokens(connection, submit, b"abcde"[: submit.sampling.max_tokens], cached_tokens=128)


async def test_a_request_is_told_with_its_lengths_and_latencies_and_who_spared_it_what(valkey: Valkey) -> None:
    async with running_gateway(worker(behaviour=half_cached), redis_url=valkey.url) as running, reading(valkey) as told:
        before_ms = time.time() * 1e3
        assert (await ask(running)).status_code == 200
        assert (await ask(running, n=2, max_tokens=1)).status_code == 200
        after_ms = time.time() * 1e3
        # What a worker spared a request is known when its last answer has ended.
        spared = 3 * 128
        news = await told.until(lambda news: sum(one.hit_tokens for one in news.workers) == spared and not news.streams)
        first, *others = news.samples
        assert (first.uncached_tokens, first.prompt_tokens, first.output_tokens, first.weight) == (72, 200, 5, 1.0)
        assert before_ms - 1 <= first.at_ms <= after_ms
        assert first.ttft_ms is not None
        assert first.tpot_ms is not None
        assert 0.0 < first.ttft_ms + 4 * first.tpot_ms <= after_ms - before_ms
        # Each answer is work of its own, and one of a single token has no time between tokens.
        assert [(one.output_tokens, one.tpot_ms) for one in others] == [(1, None)] * 2
        (said,) = news.workers
        assert (said.worker_id, said.hit_tokens) == ("worker-1", spared)


async def test_what_workers_said_and_what_waits_is_told(valkey: Valkey) -> None:
    busy = worker(role=pb.ROLE_BOTH, revision="r7")
    busy.queue.MergeFrom(
        pb.QueueState(
            running=3,
            waiting_tokens=100_000,
            kv_tokens=900,
            empty_blocks=10,
            chunk_tokens=512,
            max_sequences=48,
            step_model=pb.StepCoefficients(base_ms=5.0, per_new_token_ms=0.5, samples=1000),
        )
    )
    async with running_gateway(busy, redis_url=valkey.url) as running, reading(valkey) as told:
        waiting = [asyncio.create_task(ask(running)) for _ in range(2)]
        news = await told.until(lambda news: news.pools)
        (line,) = news.pools
        assert (line.role, line.queued_requests, line.queued_tokens) == (WorkerRole.BOTH, 2, 400)
        (said,) = news.workers
        assert (said.role, said.revision, said.running, said.waiting_tokens) == (WorkerRole.BOTH, "r7", 3, 100_000)
        assert (said.kv_tokens, said.chunk_tokens, said.max_sequences) == (900, 512, 48)
        assert (said.total_blocks, said.empty_blocks, said.block_tokens, said.draining) == (1000, 10, 64, False)
        assert said.step is not None
        assert (said.step.base_ms, said.step.per_new_token_ms) == (5.0, 0.5)
        assert abs(news.at_ms - said.said_ms) < 10_000
        # They are there already, with nothing known of how they will be served.
        assert [(one.prompt_tokens, one.ttft_ms) for one in news.samples] == [(200, None)] * 2
        busy.queue.waiting_tokens = 0
        await asyncio.gather(*waiting)
        news = await told.until(lambda news: not news.pools)
        assert news.pools == ()


async def test_an_answer_that_runs_has_the_length_that_is_expected_of_it(valkey: Valkey) -> None:
    fake = worker(behaviour=half_cached)
    async with running_gateway(fake, redis_url=valkey.url) as running, reading(valkey) as told:
        for _ in range(3):
            await ask(running, max_tokens=5)
        fake.behaviour = accept_and_hang
        silent = asyncio.create_task(ask(running, max_tokens=100))
        short = asyncio.create_task(ask(running, max_tokens=2))
        news = await told.until(lambda news: len(news.samples) == 5)
        # As the others were: 5 tokens, but never more than it may have; 72 of 200 to compute.
        assert sorted(one.output_tokens for one in news.samples[3:]) == [2, 5]
        assert news.streams == 0
        fake.behaviour = endless
        longer = asyncio.create_task(ask(running, max_tokens=100_000, ignore_eos=True))
        news = await told.until(lambda news: len(news.samples) == 6 and news.samples[5].output_tokens > 5)
        assert news.streams == 1
        assert news.samples[5].ttft_ms is not None
        for request in (silent, short, longer):
            request.cancel()
        await asyncio.gather(silent, short, longer, return_exceptions=True)
        await eventually(lambda: running.at_rest)
        # Whoever left was there all the same.
        news = await told.until(lambda news: not news.streams)
        assert len(news.samples) == 6


async def test_what_was_turned_away_counts_and_what_was_wrong_does_not(valkey: Valkey) -> None:
    fake = worker(behaviour=accept_and_hang)
    async with running_gateway(fake, redis_url=valkey.url, queue_size=1) as running, reading(valkey) as told:
        fake.queue.waiting_tokens = 100_000
        await eventually(lambda: running.gateway.fleet.workers()["worker-1"].queue.waiting_tokens > 0)
        waiting = asyncio.create_task(ask(running))
        await eventually(lambda: running.gateway.dispatcher.waiting == 1)
        assert (await ask(running)).status_code == 429
        assert (await ask(running, temperature=9)).status_code == 400
        assert (await ask(running, max_tokens=0, echo=True)).status_code == 200
        news = await told.until(lambda news: len(news.samples) >= 2)
        assert [one.ttft_ms for one in news.samples] == [None, None]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await eventually(lambda: running.at_rest)

        async def invalid(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
            connection.refuse(submit.ref, pb.REFUSAL_INVALID, "no")

        fake.behaviour, fake.queue.waiting_tokens = invalid, 0
        assert (await ask(running)).status_code == 400
        later_ms = time.time() * 1e3
        news = await told.until(lambda news: news.at_ms > later_ms)
        assert len(news.samples) == 2


async def test_a_model_that_nobody_asks_for_is_told_of_and_forgotten_with_its_last_word(valkey: Valkey) -> None:
    operator = OperatorVoice(valkey)
    async with running_gateway(redis_url=valkey.url) as running, reading(valkey) as told:
        operator.put(model_record())
        news = await told.until(lambda news: True)
        assert (news.samples, sum(news.arrivals.counts), news.workers) == ((), 0.0, ())
        assert news.since_ms <= news.at_ms
        # Also where it was asked for a moment ago.
        running.gateway.demand.window(KEY).arrived(time.time() * 1e3, 1)
        operator.put(model_record(deleted=True))
        await told.gone()
        assert running.gateway.fleet.catalogue.record(KEY) is None


async def test_a_request_for_a_model_that_sleeps_is_told_at_once(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = OperatorVoice(valkey)
    async with running_gateway(redis_url=valkey.url) as running, reading(valkey) as told:
        operator.put(model_record(waking=True))
        await told.until(lambda news: True)
        # From now on no round comes for long: what is told is told for its own sake.
        monkeypatch.setattr(scaling_writer, "EVERY_S", 3600.0)
        await told.until(lambda news: time.time() * 1e3 - news.at_ms > 300)
        asked = asyncio.create_task(ask(running, model="qwen", prompt="x" * 4000))
        news = await told.until(lambda news: news.held_requests)
        assert news.held_requests == 1
        assert 1000 <= news.held_tokens <= 1050
        assert news.samples == ()
        more = [asyncio.create_task(ask(running, model="qwen")) for _ in range(3)]
        await told.until(lambda news: news.held_requests == 4)
        for request in (asked, *more):
            request.cancel()
        await asyncio.gather(asked, *more, return_exceptions=True)


async def test_a_gateway_that_ends_takes_its_word_back(valkey: Valkey) -> None:
    async with reading(valkey) as told:
        async with running_gateway(worker(), redis_url=valkey.url, gateway_id="other"):
            async with running_gateway(worker(), redis_url=valkey.url):
                await told.until(lambda news: True)
            assert set(await told.all()) == {"other"}
        assert await told.all() == {}
        assert not OperatorVoice(valkey).redis.exists(ModelKeys(KEY).news)


async def test_without_redis_requests_are_served_and_news_come_again_with_it() -> None:
    with Valkey() as server:
        async with running_gateway(worker(), redis_url=server.url) as running, reading(server) as told:
            assert (await ask(running)).status_code == 200
            await told.until(lambda news: len(news.samples) == 1)
            server.kill()
            assert (await ask(running)).status_code == 200
            server.start()
            news = await told.until(lambda news: True)
            # Nothing of the time without it is missing.
            assert len(news.samples) == 2


async def test_a_fault_in_the_news_ends_neither_them_nor_any_request(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_gateway(worker(), redis_url=valkey.url) as running, reading(valkey) as told:
        await told.until(lambda news: True)
        with monkeypatch.context() as broken:
            broken.setattr(running.gateway.fleet, "served_models", lambda: 1 / 0)
            await eventually(lambda: "could not be told" in caplog.text)
            assert (await ask(running)).status_code == 200
        await told.until(lambda news: len(news.samples) == 1)
