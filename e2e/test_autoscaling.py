"""A promise that is kept: Models with an SLA in a cluster, its gateway, operator, Valkey and workers as real processes.

Workers are of the timed engine: what they do takes as long as it says, and how many are needed can be counted on one's
fingers. A worker that computes prompts takes half a second for each, so one is too few for five in two seconds.
Whatever happens, no request is lost; answers inside the promise are counted, and no time is measured.

The tests are stations of one day: the load of the first ends, and while the autoscaler waits for the minute without
requests after which it believes that, the others go on beside it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_operator import names
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import ScalingMemory
from antiphon_policy.scaling.records import PoolMemory
from antiphon_policy.scaling.remembered import PoolPast, Remembered, encode_remembered
from redis.asyncio import Redis

from tests.cluster.history import MODELS, POOLS, History, condition
from tests.support.clients import Clients
from tests.support.promised_models import (
    DEADLINE_S,
    MOST,
    NAMESPACE,
    TTFT_MS,
    PromisedModels,
    is_so,
    ready_replicas,
    recommended_decode,
)
from tests.support.served_cluster import GATEWAY_LABELS, VALKEY_LABELS, ServedCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def day(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PromisedModels]:
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(ServedCluster(tmp_path_factory.mktemp("day")))
        await served.cluster.namespace(NAMESPACE)
        yield PromisedModels(served, await stack.enter_async_context(History.of(served.cluster)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def after_a_step(day: PromisedModels) -> PromisedModels:
    """A load came that one worker for prompts cannot bear, was borne, and is gone."""
    bounds = {"min": 1, "max": MOST}
    await day.create("step", prefill={}, autoscaling={"mode": "Enforce", "prefill": bounds, "decode": bounds})
    await day.until_serving("step", prefill=1, decode=1)
    since = await day.history.version()
    async with day.load("step") as load:

        async def a_worker_is_made() -> bool:
            return len(await day.replica_sets("step")) > 2

        await day.eventually("another worker is made", a_worker_is_made)
        day.served.operator.kill()
        await day.served.operator.restart()
        await day.until("step", "more than one worker for prompts", lambda model: ready_replicas(model, "prefill") > 1)

        def inside() -> bool:
            return len(load.answers) >= 5 and all(one.ttft_ms <= TTFT_MS for one in load.answers[-5:])

        await load.until(inside)
        settled_at = time.monotonic()
        await load.until(lambda: len(load.since(settled_at)) >= 16)
    answers = load.since(settled_at)
    late = [round(one.ttft_ms) for one in answers if one.ttft_ms > TTFT_MS]
    print(
        f"{len(load.answers)} answers, {len(answers)} of them after it had settled, {len(late)} of these late: {late}"
    )
    assert load.failures == []
    assert len(late) <= len(answers) // 10
    await day.never_more_than("step", "prefill", MOST, since)
    await day.never_more_than("step", "decode", MOST, since)
    return day


async def test_a_load_step_is_answered_with_workers(after_a_step: PromisedModels, tmp_path: Path) -> None:
    """Though the operator was killed when the first of them had just been made."""
    event = await after_a_step.until_event("step", "ScaledUp")
    assert "prefill " in event["message"]
    assert f"promised: TTFT {TTFT_MS:.0f} ms" in event["message"]
    assert await after_a_step.wanted("step", "prefill") > 1
    assert "add" in await _decided_again(after_a_step, tmp_path)


async def test_advice_changes_nothing_and_a_promise_touches_no_pod(after_a_step: PromisedModels) -> None:
    day = after_a_step
    await day.create("advised", autoscaling={"mode": "Advise", "decode": {"min": 1, "max": MOST}})
    await day.until_serving("advised", decode=1)
    pods = await day.pods("advised")
    async with day.load("advised") as load:
        await day.until("advised", "more workers are advised", lambda model: recommended_decode(model) > 1)
        event = await day.until_event("advised", "ScalingAdvised")
        assert "decode 1 -> " in event["message"] or "both 1 -> " in event["message"], event["message"]
        await day.edit("advised", sla={"ttft": {"p95": "30s"}})
        told = await day.until("advised", "the promise is seen", lambda model: is_so(model, "Ready"))
        assert told["status"]["sla"]["ttft"]["summary"].endswith("/30s")
    assert load.failures == []
    assert (await day.wanted("advised", "decode"), await day.pods("advised")) == (1, pods)

    # Another writes the number.
    await day.edit("advised", autoscaling={"mode": "External"})
    pool, two = names.pool_name("advised", "decode"), {"spec": {"replicas": 2}}
    await day.cluster.client.merge_patch(POOLS, NAMESPACE, pool, two, subresource="scale")
    told = await day.until_serving("advised", decode=2)
    assert "autoscaler" not in told["status"]
    assert pods < await day.pods("advised")
    await day.cluster.delete(MODELS, NAMESPACE, "advised")


async def test_killed_in_mid_action_it_is_completed_and_never_doubled(after_a_step: PromisedModels) -> None:
    """Valkey while workers start, the gateway while they go."""
    day = after_a_step
    await day.create("killed", autoscaling={"mode": "Enforce", "decode": {"min": 1, "max": MOST}})
    await day.until_serving("killed", decode=1)
    since = await day.history.version()

    async def replicas() -> int:
        return len(await day.replica_sets("killed"))

    async def more_than_one() -> bool:
        return await replicas() > 1

    async with Clients(day.served.url, "killed", count=2) as clients:
        await clients.until_answered(2)
        await day.edit("killed", autoscaling={"decode": {"min": MOST}})
        await day.eventually("another worker is made", more_than_one)
        await day.kill(VALKEY_LABELS)
        await day.until_serving("killed", decode=MOST)
        await clients.until_answered(4)
        clients.stop_asking()
        await clients.finish()
        assert clients.failures == []

    await day.edit("killed", autoscaling={"decode": {"min": 1, "max": 1}})

    async def drains() -> bool:
        return any(
            names.DRAINING_SINCE_ANNOTATION in (one["metadata"].get("annotations") or {})
            for one in await day.replica_sets("killed")
        )

    await day.eventually("a worker drains", drains)
    await day.kill(GATEWAY_LABELS)
    await day.until_serving("killed", decode=1)

    async def nothing_is_left() -> bool:
        return await replicas() == 1 and len(await day.pods("killed")) == 1

    await day.eventually("no other worker is left", nothing_is_left)
    await day.never_more_than("killed", "decode", MOST, since)
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:

        async def answers() -> bool:
            body = {"model": "killed", "prompt": "Why?", "max_tokens": 2}
            try:
                return (await http.post(f"{day.served.url}/v1/completions", json=body)).status_code == 200
            except httpx.HTTPError:
                return False

        await day.eventually("the gateway that was killed answers again", answers)
    await day.cluster.delete(MODELS, NAMESPACE, "killed")


async def test_a_model_sleeps_and_the_request_that_wakes_it_is_answered(after_a_step: PromisedModels) -> None:
    day = after_a_step
    made = await day.create("sleeper")
    await day.until_serving("sleeper", decode=1)
    # It is hours ago that anybody asked for it.
    long_ago_ms = time.time() * 1000.0 - 7_200_000.0
    remembered = Remembered(
        owner=made["metadata"]["uid"],
        memory=ScalingMemory((PoolMemory(WorkerRole.BOTH, since_ms=long_ago_ms, edits=0),), long_ago_ms),
        pools=(PoolPast(WorkerRole.BOTH, (2000.0,), (1000.0,)),),
    )
    async with Redis.from_url(day.served.redis_url) as redis:
        await redis.set(ModelKeys(names.model_key(NAMESPACE, "sleeper")).scaling, encode_remembered(remembered))
    await day.edit("sleeper", autoscaling={"mode": "Enforce", "decode": {"min": 0, "max": MOST}})
    asleep = await day.until("sleeper", "it sleeps", lambda model: model["status"].get("phase") == "Sleeping")
    assert condition(asleep, "Ready")["reason"] == "ScaledToZero"

    async def no_pod() -> bool:
        return not await day.pods("sleeper")

    await day.eventually("no pod is left", no_pod)
    async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as http:
        body = {"model": "sleeper", "prompt": "Are you there?", "max_tokens": 3, "ignore_eos": True}
        answer = await http.post(f"{day.served.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    await day.until_event("sleeper", "Woken")
    await day.until_serving("sleeper", decode=1)
    await day.cluster.delete(MODELS, NAMESPACE, "sleeper")


async def test_after_the_load_it_shrinks_and_each_decision_is_made_again_elsewhere(
    after_a_step: PromisedModels, tmp_path: Path
) -> None:
    day = after_a_step
    await day.until_serving("step", prefill=1, decode=1)
    await day.until_event("step", "ScaledDown")

    async def two_pods() -> bool:
        return len(await day.pods("step")) == len(await day.replica_sets("step")) == 2

    await day.eventually("no other worker is left", two_pods)
    assert "remove" in await _decided_again(day, tmp_path)


async def _decided_again(day: PromisedModels, folder: Path) -> set[str]:
    """What is kept of the decisions about the first Model is made again by another process. Their actions."""
    written, made = folder / "decisions.jsonl", folder / "replayed.json"
    key = names.model_key(NAMESPACE, "step")
    await _antiphon(written, "decisions", key, "--redis-url", day.served.redis_url, "--json")
    decisions = [json.loads(line) for line in written.read_text().splitlines()]
    await _antiphon(made, "simulate", "replay", str(written), "--json")
    told = json.loads(made.read_text())
    assert (told["decisions"], told["differences"]) == (len(decisions), []), told
    return {decision["action"] for decision in decisions}


async def _antiphon(output: Path, *words: str) -> None:
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "antiphon", *words, stdout=file)
        assert await process.wait() == 0
