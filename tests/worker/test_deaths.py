"""Prefill and decode workers that die, stop, drain, or are replaced while a request is on its way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from antiphon_proto import worker_pb2 as wire

from tests.support.workers import (
    Answer,
    AttachClient,
    WorkerProcess,
    Workers,
    assert_scores_of,
    prompt_of,
    within,
)

SMALL_BLOCKS = ("--block-tokens", "16", "--max-batch-tokens", "64")
DECODE = ("--role", "decode", *SMALL_BLOCKS)
PREFILL = ("--role", "prefill", *SMALL_BLOCKS)
SLOW_PREFILL = (*PREFILL, "--timed-base-ms", "60")
ALONE = ("--role", "both", *SMALL_BLOCKS)
LONG = 1280
"""Tokens of a prompt that a slow prefill worker computes for more than a second, in 20 chunks."""


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    async with Workers(tmp_path) as started:
        yield started


async def answers_alone(worker: WorkerProcess, prompts: Sequence[Sequence[int]], **sampling: int) -> list[list[int]]:
    """What one undisturbed worker says."""
    async with AttachClient(worker) as client:
        answers = await asyncio.gather(*(client.run(client.submission(prompt, **sampling)) for prompt in prompts))
        return [answer.token_ids for answer in answers]


async def until_prefilling(worker: WorkerProcess) -> None:
    """A run is on its way and some of it is computed."""
    await worker.until(lambda status: status["prefill_runs"] > 0 and status["indexed_blocks"] > 0)


async def test_a_killed_prefill_worker_is_replaced_by_the_next(workers):
    first, second, decode, alone = await workers.start_all(SLOW_PREFILL, PREFILL, DECODE, ALONE)
    [expected] = await answers_alone(alone, [prompt_of(LONG)], max_tokens=10)
    async with AttachClient(decode) as client:
        await client.wire_up(first, second)
        running = asyncio.create_task(
            client.run(client.submission(prompt_of(LONG), prefill=[first, second], max_tokens=10))
        )
        await until_prefilling(first)
        await first.kill()
        answer = await within(20, running)
    assert answer.token_ids == expected
    # In mid-pull the decode worker computes the rest itself; otherwise the second one is asked.
    assert answer.usage.prefill_worker_id in (second.worker_id, "")
    assert answer.usage.completion_tokens == 10
    assert answer.usage.prompt_tokens == LONG
    await decode.until_idle()
    await second.until_idle()


@pytest.mark.parametrize("others", [0, 1])
async def test_a_prompts_log_probabilities_are_told_once_where_a_prefill_worker_dies(workers, others):
    prompt = prompt_of(LONG)
    first, second, decode = await workers.start_all(SLOW_PREFILL, PREFILL, DECODE)
    async with AttachClient(decode) as client:
        await client.wire_up(first, second)
        submit = client.submission(prompt, prefill=[first, second][: 1 + others], max_tokens=4, prompt_logprobs=1)
        await client.submit(submit)
        answer = Answer()
        async for step in client.steps(submit):
            if len(answer.steps) == 2:
                assert answer.prompt_logprobs
                await first.kill()
            answer.take(step)
    assert_scores_of(prompt, answer.prompt_logprobs)
    assert len(answer.token_ids) == 4
    await decode.until_idle()
    await second.until_idle()


async def test_without_another_prefill_worker_the_decode_worker_computes_the_prompt(workers):
    prefill, decode, alone = await workers.start_all(SLOW_PREFILL, DECODE, ALONE)
    [expected] = await answers_alone(alone, [prompt_of(LONG)], max_tokens=10)
    async with AttachClient(decode) as client:
        await client.wire_up(prefill)
        running = asyncio.create_task(client.run(client.submission(prompt_of(LONG), prefill=[prefill], max_tokens=10)))
        await until_prefilling(prefill)
        await prefill.kill()
        answer = await within(20, running)
        assert answer.token_ids == expected
        assert answer.usage.prefill_worker_id == ""
        assert await decode.metric("antiphon_prefill_fallbacks_total", to="local") == 1
        # The next one does not even try for long.
        again = await within(20, client.run(client.submission(prompt_of(300, seed=3), prefill=[prefill])))
        assert len(again.token_ids) == 8
    await decode.until_idle()


async def test_a_prefill_worker_killed_under_load_costs_no_request(workers):
    prefill, decode, alone = await workers.start_all((*PREFILL, "--timed-base-ms", "15"), DECODE, ALONE)
    prompts = [prompt_of(200 + 150 * number, seed=number) for number in range(10)]
    expected = await answers_alone(alone, prompts, max_tokens=30)
    async with AttachClient(decode) as client:
        await client.wire_up(prefill)
        running = [
            asyncio.create_task(client.run(client.submission(prompt, prefill=[prefill], max_tokens=30)))
            for prompt in prompts
        ]
        # Some have decoded for a while, some wait for blocks, some for their turn.
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await prefill.kill()
        answers: list[Answer] = await within(25, asyncio.gather(*running))
    assert [answer.token_ids for answer in answers] == expected
    assert {answer.finish for answer in answers} == {wire.Finish.FINISH_LENGTH}
    await decode.until_idle()


async def test_a_killed_decode_worker_leaves_nothing_on_the_prefill_worker(workers):
    """ai-dynamo/dynamo#13855, vllm-project/vllm#50425: blocks staged for a dead peer are freed."""
    prefill, decode = await workers.start_all(SLOW_PREFILL, DECODE)
    async with AttachClient(decode) as client:
        await client.wire_up(prefill)
        for number in range(4):
            await client.submit(client.submission(prompt_of(LONG, seed=number), prefill=[prefill]))
        await until_prefilling(prefill)
        await decode.kill()
        await prefill.until_idle(deadline_s=5)


async def test_a_stopped_decode_worker_is_given_up_and_comes_back(workers):
    """A stopped process sends no reset: only the missing heartbeats tell. Its own request still ends right."""
    prefill, decode, alone = await workers.start_all(SLOW_PREFILL, DECODE, ALONE)
    [expected] = await answers_alone(alone, [prompt_of(LONG)], max_tokens=10)
    async with AttachClient(decode, heartbeat_ms=2000) as client:
        await client.wire_up(prefill)
        running = asyncio.create_task(client.run(client.submission(prompt_of(LONG), prefill=[prefill], max_tokens=10)))
        await until_prefilling(prefill)
        decode.stop()
        try:
            await prefill.until_idle(deadline_s=6)
        finally:
            decode.cont()
        answer = await within(20, running)
        assert answer.token_ids == expected
    await decode.until_idle()
    await prefill.until_idle()


async def test_a_stopped_prefill_worker_is_given_up_and_comes_back(workers):
    prefill, decode, alone = await workers.start_all(SLOW_PREFILL, DECODE, ALONE)
    [expected, expected_later] = await answers_alone(alone, [prompt_of(LONG), prompt_of(500, seed=8)], max_tokens=10)
    async with AttachClient(decode) as client:
        await client.wire_up(prefill)
        running = asyncio.create_task(client.run(client.submission(prompt_of(LONG), prefill=[prefill], max_tokens=10)))
        await until_prefilling(prefill)
        prefill.stop()
        try:
            answer = await within(20, running)
        finally:
            prefill.cont()
        assert answer.token_ids == expected
        await decode.until_idle()
        await prefill.until_idle()
        await client.wire_up(prefill)
        later = await client.run(client.submission(prompt_of(500, seed=8), prefill=[prefill], max_tokens=10))
        assert later.token_ids == expected_later
        assert later.usage.prefill_worker_id == prefill.worker_id


async def test_a_gateway_that_vanishes_ends_the_prefill_too(workers):
    """ai-dynamo/dynamo#13691: nobody crunches a prompt that nobody waits for."""
    prefill, decode = await workers.start_all(SLOW_PREFILL, DECODE)
    async with AttachClient(decode) as client:
        await client.wire_up(prefill)
        await client.submit(client.submission(prompt_of(5000), prefill=[prefill]))
        await until_prefilling(prefill)
    await decode.until_idle()
    await prefill.until_idle()
    assert await prefill.metric("antiphon_engine_tokens_computed_total") < 5000


async def test_another_incarnation_than_the_one_meant_is_not_used(workers):
    prefill, decode = await workers.start_all(PREFILL, DECODE)
    async with AttachClient(decode) as client:
        former = wire.Peer(worker_id=prefill.worker_id, incarnation="0" * 16, address=prefill.ready.address)
        answer = await client.run(client.submission(prompt_of(200), prefill=[former]))
        assert len(answer.token_ids) == 8
        assert answer.usage.prefill_worker_id == ""
    assert await prefill.metric("antiphon_engine_tokens_computed_total") == 0
    await decode.until_idle()


async def test_a_draining_prefill_worker_finishes_its_runs_and_takes_no_new_ones(workers):
    prefill, decode = await workers.start_all(SLOW_PREFILL, DECODE)
    async with AttachClient(decode) as client:
        await client.wire_up(prefill)
        running = asyncio.create_task(client.run(client.submission(prompt_of(LONG), prefill=[prefill])))
        await until_prefilling(prefill)
        prefill.process.terminate()
        await prefill.until(lambda status: status["draining"])
        refused = await client.run(client.submission(prompt_of(200, seed=2), prefill=[prefill]))
        assert refused.usage.prefill_worker_id == ""
        assert len(refused.token_ids) == 8
        answer = await within(20, running)
        assert answer.usage.prefill_worker_id == prefill.worker_id
        assert await prefill.terminate() == 0
    await decode.until_idle()


async def test_cancelled_at_any_point_nothing_leaks(workers):
    """ai-dynamo/dynamo#13855, #7489, vllm-project/vllm#50425: queue, prefill, pull, decode; counts return to idle."""
    prefill, decode, alone = await workers.start_all((*PREFILL, "--timed-base-ms", "8"), DECODE, ALONE)
    chance = random.Random(5)
    prompts = [prompt_of(chance.randrange(20, 1200), seed=number) for number in range(40)]
    expected = await answers_alone(alone, prompts, max_tokens=24)
    async with AttachClient(decode) as client:
        await client.wire_up(prefill)

        async def one(number: int) -> list[int] | None:
            await asyncio.sleep(chance.random())  # arrivals are spread, so that cancels meet every phase
            submit = client.submission(prompts[number], prefill=[prefill], max_tokens=24)
            if number % 2:
                return (await client.run(submit)).token_ids
            await client.submit(submit)
            await asyncio.sleep(chance.random() ** 2)
            await client.cancel(submit)
            return None

        answers = await within(60, asyncio.gather(*(one(number) for number in range(len(prompts)))))
        for number, tokens in enumerate(answers):
            assert tokens is None or tokens == expected[number]
        await decode.until_idle()
        await prefill.until_idle()
        assert "Traceback" not in decode.log + prefill.log
        # And both still work.
        after = await client.run(client.submission(prompts[0], prefill=[prefill], cache_salt=b"new", max_tokens=24))
        assert after.token_ids == expected[0]
        assert after.usage.prefill_worker_id == prefill.worker_id
