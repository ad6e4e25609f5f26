"""Requests through real gateways to real worker processes (timed engine), and what is told of them for scaling; and a
Model that sleeps until its worker starts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from antiphon_gateway import scaling_writer
from antiphon_kvtransfer.scaling_news import read_news
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling.assembly import ModelSetup, PoolSetup, merged, workers_of
from antiphon_policy.scaling.history import History
from antiphon_policy.scaling.news import GatewayNews, decode_news
from antiphon_policy.scaling.records import Promise, ScalingMemory
from redis.asyncio import Redis

from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.model_records import OperatorVoice, model_record
from tests.support.valkey import Valkey
from tests.support.workers import TIMED, Workers

MODEL = "timed-model"
REQUESTS = 200
BASE_MS, PER_TOKEN_MS = 3.0, 0.01
SETUP = ModelSetup(
    Promise(),
    (PoolSetup(WorkerRole.PREFILL, 1, 1), PoolSetup(WorkerRole.DECODE, 1, 1)),
)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


def workers(folder: Path, valkey: Valkey) -> Workers:
    steps = ("--timed-base-ms", str(BASE_MS), "--timed-per-new-token-ms", str(PER_TOKEN_MS))
    return Workers(folder, *TIMED, "--name", MODEL, "--redis-url", valkey.url, *steps, "--max-sequences", "96")


@dataclass
class Served:
    """One request as its client saw it."""

    ttft_ms: float
    total_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


async def ask(client: httpx.AsyncClient, number: int) -> Served:
    """Prompts of several lengths; some share their beginning. Answers of several lengths."""
    prompt = [11 + number % 5] * 128 + [30 + number] * (number % 7 * 40)
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 1 + number % 4,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, usage = time.monotonic(), 0.0, {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic()
                usage = json.loads(line[6:]).get("usage") or usage
    ended = time.monotonic()
    return Served(
        (first - began) * 1e3,
        (ended - began) * 1e3,
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
    )


async def told(valkey: Valkey, after_ms: float) -> dict[str, GatewayNews]:
    """What both gateways say later than that."""
    async with asyncio.timeout(20.0), Redis.from_url(valkey.url, protocol=2) as redis:
        while True:
            found = {name: decode_news(raw, name) for name, raw in (await read_news(redis, MODEL)).items()}
            if len(found) == 2 and all(news.at_ms > after_ms for news in found.values()):
                return found
            await asyncio.sleep(0.02)


async def test_what_two_gateways_tell_adds_up_to_what_their_clients_saw(
    tmp_path: Path, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling_writer, "EVERY_S", 0.5)
    async with workers(tmp_path, valkey) as started:
        await started.start_all(("--role", "prefill"), ("--role", "decode"))
        async with (
            running_gateway(redis_url=valkey.url, gateway_id="one") as one,
            running_gateway(redis_url=valkey.url, gateway_id="two") as two,
        ):
            for running in (one, two):
                await eventually(lambda running=running: len(running.gateway.fleet.workers()) == 2)  # type: ignore[misc]
            before_ms = time.time() * 1e3
            served: list[Served] = []
            for first in range(0, REQUESTS, 50):
                # Of every three, two to the one and one to the other.
                batch = [ask((two if number % 3 else one).client, number) for number in range(first, first + 50)]
                served += await asyncio.gather(*batch)
            await eventually(lambda: one.at_rest and two.at_rest)
            after_ms = time.time() * 1e3
            news = await told(valkey, after_ms)
            assert {name: len(told.samples) for name, told in news.items()} == {"one": 67, "two": 133}
            inputs = merged(
                list(news.values()), SETUP, History().heard(list(news.values())), ScalingMemory(), time.time() * 1e3
            )
            samples = inputs.samples
            assert all(before_ms - 1 <= sample.at_ms <= after_ms for sample in samples)
            assert sum(one.weight for one in samples) == REQUESTS
            assert sum(one.prompt_tokens for one in samples) == sum(one.prompt_tokens for one in served)
            assert sum(one.output_tokens for one in samples) == sum(one.output_tokens for one in served)
            cached = sum(one.cached_tokens for one in served)
            assert sum(one.prompt_tokens - one.uncached_tokens for one in samples) == cached > 0
            assert sum(worker.hit_tokens for worker in workers_of(news.values()).values()) == cached
            _check_latencies(served, [(one.ttft_ms or 0.0, one.tpot_ms, one.output_tokens) for one in samples])
            _check_workers(news)


def _check_latencies(served: list[Served], samples: list[tuple[float, float | None, int]]) -> None:
    """No gateway saw a request longer than its client did, and none was served faster than its steps take."""
    assert all(
        ours <= theirs
        for ours, theirs in zip(
            sorted(ttft for ttft, _, _ in samples), sorted(one.ttft_ms for one in served), strict=True
        )
    )
    totals = sorted(ttft + (tpot or 0.0) * (tokens - 1) for ttft, tpot, tokens in samples)
    assert all(
        ours <= theirs + 0.01 for ours, theirs in zip(totals, sorted(one.total_ms for one in served), strict=True)
    )
    assert all(ttft >= BASE_MS for ttft, _, _ in samples)
    assert all((tpot is None) == (tokens == 1) for _, tpot, tokens in samples)
    tpots = [tpot for _, tpot, _ in samples if tpot is not None]
    assert sum(tpots) / len(tpots) >= BASE_MS


def _check_workers(news: dict[str, GatewayNews]) -> None:
    said = workers_of(news.values()).values()
    assert {worker.role for worker in said} == {WorkerRole.PREFILL, WorkerRole.DECODE}
    for worker in said:
        assert worker.max_sequences == 96
        assert worker.step is not None
        assert worker.step.base_ms > 0.0
        assert min(worker.chunk_tokens, worker.block_tokens, worker.total_blocks) > 0


async def test_a_request_for_a_model_that_sleeps_is_held_told_of_and_served_when_its_worker_starts(
    tmp_path: Path, valkey: Valkey
) -> None:
    """As scaling to zero and back: whoever scales reads the news and starts a worker; nobody has to ask twice."""
    OperatorVoice(valkey).redis.flushall()
    OperatorVoice(valkey).put(model_record(MODEL, names=("sleeper",), waking=True, retry_after_s=7))
    # Waiting for a place is far shorter than for a worker's start: who was held is not turned away for it.
    async with (
        workers(tmp_path, valkey) as started,
        running_gateway(redis_url=valkey.url, queue_timeout_s=0.5, queue_size=3) as running,
    ):
        await eventually(lambda: running.gateway.fleet.catalogue.record(MODEL) is not None)
        held = [asyncio.create_task(_answer(running, stream=stream)) for stream in (True, False)]
        leaver = asyncio.create_task(_answer(running, stream=True))
        await eventually(lambda: len(running.gateway.dispatcher.lobby) == 3)
        refused = await running.client.post("/v1/completions", json=_body(False))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
        leaver.cancel()
        await eventually(lambda: len(running.gateway.dispatcher.lobby) == 2)
        early = await running.client.post("/v1/completions", json=_body(False), headers={"x-request-timeout-ms": "300"})
        assert (early.status_code, early.headers["retry-after"]) == (503, "7")
        assert "it is starting, and this request has waited 0.3 s" in early.json()["error"]["message"]
        async with asyncio.timeout(10.0), Redis.from_url(valkey.url, protocol=2) as redis:
            # Here somebody would start one.
            while [decode_news(raw, "").held_requests for raw in (await read_news(redis, MODEL)).values()] != [2]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await started.start("--role", "both")
        assert await asyncio.gather(*held) == [4, 4]
        await eventually(lambda: running.at_rest)


def _body(stream: bool) -> dict[str, Any]:
    return {"model": "sleeper", "prompt": [5] * 64, "max_tokens": 4, "ignore_eos": True, "stream": stream}


async def _answer(running: RunningGateway, *, stream: bool) -> int:
    """Its tokens."""
    response = await running.client.post("/v1/completions", json=_body(stream))
    assert response.status_code == 200, response.text
    if not stream:
        return int(response.json()["usage"]["completion_tokens"])
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert response.text.rstrip().endswith("[DONE]")
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return 4
