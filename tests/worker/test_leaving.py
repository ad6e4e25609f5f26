"""Workers that are told to end while requests run: what does not end in time goes on elsewhere, with its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from antiphon_proto import worker_pb2 as wire

from tests.support.workers import Answer, AttachClient, WorkerProcess, Workers, prompt_of, within

SMALL_BLOCKS = ("--block-tokens", "16", "--max-batch-tokens", "64")
BOTH = ("--role", "both", *SMALL_BLOCKS, "--timed-base-ms", "10")
LONG = 1280


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    async with Workers(tmp_path) as started:
        yield started


async def ends_well(worker: WorkerProcess) -> None:
    assert await within(15, worker.process.wait()) == 0
    assert "Traceback" not in worker.log


@pytest.mark.parametrize(("drain_timeout_s", "signals"), [("0.3", 1), ("60", 2)])
async def test_an_answer_is_given_back_and_its_blocks_are_pulled_from_the_worker_that_ends(
    workers: Workers, drain_timeout_s: str, signals: int
) -> None:
    """At the end of the time of a drain, or at once when told a second time. ai-dynamo/dynamo#13565: nothing is cut."""
    ending, other = await workers.start_all((*BOTH, "--drain-timeout-s", drain_timeout_s), BOTH)
    prompt = prompt_of(400)
    async with AttachClient(ending) as client, AttachClient(other) as next_client:
        await next_client.wire_up(ending)
        right = await next_client.run(next_client.submission(prompt, max_tokens=300, cache_salt=b"right", logprobs=1))
        submit = client.submission(prompt, max_tokens=300, logprobs=1)
        await client.submit(submit)
        begun, told = Answer(), 0
        async for step in client.steps(submit):
            begun.take(step)
            # Signals are not counted where two are waiting: the second is sent when the first was heard.
            is_heard = told == 1 and client.queue is not None and client.queue.draining
            if told < signals and (is_heard or told == 0) and len(begun.token_ids) >= 20:
                told += 1
                ending.process.terminate()
        assert (begun.finish, begun.error) == (wire.Finish.FINISH_MOVED, f"{ending.worker_id} is draining")
        assert 20 <= len(begun.token_ids) < 300
        assert client.queue is not None
        assert client.queue.draining
        blocks = (len(prompt) + len(begun.token_ids) - 1) // 16
        ended = await next_client.run(
            next_client.submission(
                prompt, output=begun.token_ids, prefix_peers=[(ending, blocks)], max_tokens=300, logprobs=1
            )
        )
        assert ended.usage is not None
        assert ended.usage.pulled_blocks == blocks
        assert (ended.usage.completion_tokens, ended.usage.prompt_tokens) == (300, 400)
        assert begun.token_ids + ended.token_ids == right.token_ids
        assert begun.text + ended.text == right.text
        assert [one.token_id for one in [*begun.logprobs, *ended.logprobs]] == right.token_ids
        assert ended.finish == wire.Finish.FINISH_LENGTH
        await ends_well(ending)
    await other.until_idle()


async def test_a_continued_answer_without_its_blocks_has_them_computed_by_a_prefill_worker(workers: Workers) -> None:
    """Prompt and output: the first token that the prefill worker samples is none of the answer's."""
    prefill, decode = await workers.start_all(("--role", "prefill", *SMALL_BLOCKS), ("--role", "decode", *SMALL_BLOCKS))
    prompt = prompt_of(200)
    async with AttachClient(decode) as client:
        await client.wire_up(prefill)
        right = await client.run(client.submission(prompt, max_tokens=150, cache_salt=b"right"))
        # With 40: fifteen full blocks. With 41: one token more, in a block that is no part of the index.
        for kept in (40, 41, 149):
            answer = await client.run(
                client.submission(
                    prompt,
                    output=right.token_ids[:kept],
                    prefill=[prefill],
                    cache_salt=str(kept).encode(),
                    max_tokens=150,
                )
            )
            assert right.token_ids[:kept] + answer.token_ids == right.token_ids
            assert answer.usage is not None
            assert answer.usage.pulled_blocks == (200 + kept) // 16
    await decode.until_idle()
    await prefill.until_idle()


async def test_a_prompt_that_a_prefill_worker_gives_back_is_computed_by_the_next_one(workers: Workers) -> None:
    """What was being pulled still comes in, so the next one is asked also then: it goes on where the other stopped."""
    slow = ("--role", "prefill", *SMALL_BLOCKS, "--timed-base-ms", "60", "--drain-timeout-s", "0.2")
    ending, other, decode = await workers.start_all(
        slow, ("--role", "prefill", *SMALL_BLOCKS), ("--role", "decode", *SMALL_BLOCKS)
    )
    async with AttachClient(decode) as client:
        await client.wire_up(ending, other)
        right = await client.run(client.submission(prompt_of(LONG), max_tokens=10, cache_salt=b"right"))
        running = asyncio.create_task(
            client.run(client.submission(prompt_of(LONG), prefill=[ending, other], max_tokens=10))
        )
        await ending.until(lambda status: status["prefill_runs"] > 0 and status["indexed_blocks"] > 0)
        ending.process.terminate()
        answer = await within(20, running)
        assert answer.token_ids == right.token_ids
        assert answer.usage is not None
        assert answer.usage.prefill_worker_id == other.worker_id
        assert answer.usage.pulled_blocks == LONG // 16
        assert await decode.metric("antiphon_prefill_fallbacks_total", to="peer") == 1
        assert await decode.metric("antiphon_prefill_fallbacks_total", to="local") == 0
        await ends_well(ending)
    await decode.until_idle()
    await other.until_idle()
