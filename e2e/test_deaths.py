"""kill -9 of each part of a running house, under load.

Workers are real processes with the timed engine: its tokens are a function of the prompt, so every answer has one right
text, and it checks the content of every KV block that it uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest
from antiphon_kvtransfer.cluster import ClusterMirror

from tests.support.house import House, Streamed
from tests.support.workers import TIMED, WorkerProcess, prompt_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_SLOW_STEPS = ("--timed-base-ms", "15", "--max-batch-tokens", "128", "--kv-blocks", "1024")
"""A prompt of 1,000 tokens takes eight steps of prefill: long enough to be hit in the middle."""


def _prompts(count: int, *, seed: int) -> list[list[int]]:
    return [prompt_of(100 + 150 * (number % 7), seed=seed + number) for number in range(count)]


async def _texts(house: House, prompts: list[list[int]], max_tokens: int) -> list[str]:
    """What the answers are when nothing dies."""
    answers = [await house.complete(prompt, max_tokens=max_tokens) for prompt in prompts]
    return [answer.json()["choices"][0]["text"] for answer in answers]


async def _all_idle(*workers: WorkerProcess) -> None:
    for worker in workers:
        await worker.until_idle(20)


async def test_a_prefill_worker_is_killed(tmp_path: Path) -> None:
    """Every request completes with the right tokens; a new prefill worker is used as soon as it is there.

    See ai-dynamo/dynamo#7489 (a kill during a transfer leaves blocks held) and sgl-project/sglang#37961.
    """
    async with House(tmp_path, *TIMED, *_SLOW_STEPS) as house:
        prefill, decode = await house.start_workers(("--role", "prefill"), ("--role", "decode"))
        await house.start_gateway()
        await house.until_ready(prefill=1, decode=1)
        prompts = _prompts(24, seed=1)
        expected = await _texts(house, prompts, 24)
        assert await decode.metric("antiphon_remote_prefills_total", result="complete") > 0

        # Other tenants' prompts would be cold; a prefix that nobody has seen makes these so.
        cold = [[201 + index % 20, *prompt] for index, prompt in enumerate(prompts)]
        running = [asyncio.create_task(house.stream(prompt, max_tokens=24)) for prompt in cold]
        await decode.until(lambda status: status["active_requests"] >= 8)
        await prefill.kill()
        answers = await asyncio.gather(*running)
        assert all(answer.complete or answer.refused_before_the_first_token for answer in answers), [
            (answer.status, answer.error) for answer in answers
        ]
        assert sum(answer.complete for answer in answers) >= len(answers) // 2
        await _all_idle(decode)

        [fresh] = await house.start_workers(("--role", "prefill"))
        await house.until_ready(prefill=1, decode=1)
        runs = await decode.metric("antiphon_remote_prefills_total", result="complete")
        again = [[221 + index % 20, *prompt] for index, prompt in enumerate(prompts)]
        await asyncio.gather(*(house.stream(prompt, max_tokens=4) for prompt in again))
        assert await decode.metric("antiphon_remote_prefills_total", result="complete") > runs
        assert await fresh.metric("antiphon_engine_tokens_computed_total") > 0

        right = await _texts(house, cold, 24)
        assert [answer.text for answer in answers if answer.complete] == [
            text for text, answer in zip(right, answers, strict=True) if answer.complete
        ]
        assert await _texts(house, prompts, 24) == expected
        await house.until_gateway_is_at_rest()
        await _all_idle(decode, fresh)


async def test_a_decode_worker_is_killed(tmp_path: Path) -> None:
    """Open streams end with an error event, never in silence; the prefill worker lets go of everything within 2 s.

    See smg, sglang-router and vllm-router, which cut the body without a word when a worker dies.
    """
    async with House(tmp_path, *TIMED, *_SLOW_STEPS) as house:
        prefill, decode = await house.start_workers(("--role", "prefill"), ("--role", "decode"))
        await house.start_gateway()
        await house.until_ready(prefill=1, decode=1)
        answers = [Streamed() for _ in range(12)]
        running = [
            asyncio.create_task(house.stream(prompt, answer, max_tokens=400))
            for prompt, answer in zip(_prompts(12, seed=50), answers, strict=True)
        ]
        await asyncio.wait_for(answers[0].first_text.wait(), 30)
        await prefill.until(lambda status: status["used_blocks"] > 0)
        await decode.kill()
        killed_at = time.monotonic()
        status = await prefill.until_idle(20)
        freed_after_s = time.monotonic() - killed_at
        print(f"the prefill worker was idle {freed_after_s:.2f} s after the kill")
        assert status["pins"] == 0
        await asyncio.gather(*running)
        for answer in answers:
            assert answer.error is not None, "a stream ended without an error"
            assert not answer.done, "[DONE] after an error"
            assert answer.status == 200 or answer.refused_before_the_first_token
        assert any(answer.text for answer in answers)
        await house.until_gateway_is_at_rest()

        # With no decode worker the model is known and cannot be served: 503, at once and in words.
        refused = await house.complete(prompt_of(20), max_tokens=4)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        await house.start_workers(("--role", "decode"))
        await house.until_ready(prefill=1, decode=1)
        assert (await house.complete(prompt_of(20), max_tokens=4)).status_code == 200


async def test_a_frozen_decode_worker_holds_nothing_on_the_prefill_worker(tmp_path: Path) -> None:
    """A lost node sends no reset: only heartbeats end what it holds."""
    async with House(tmp_path, *TIMED, *_SLOW_STEPS) as house:
        prefill, decode = await house.start_workers(("--role", "prefill"), ("--role", "decode"))
        await house.start_gateway()
        await house.until_ready(prefill=1, decode=1)
        running = [asyncio.create_task(house.stream(prompt, max_tokens=50)) for prompt in _prompts(8, seed=80)]
        await prefill.until(lambda status: status["used_blocks"] > 0)
        decode.stop()
        stopped_at = time.monotonic()
        status = await prefill.until_idle(20)
        print(f"the prefill worker was idle {time.monotonic() - stopped_at:.2f} s after the decode worker had frozen")
        assert status["pins"] == 0
        answers = await asyncio.gather(*running)
        assert all(answer.error is not None for answer in answers)
        decode.cont()
        await decode.until_idle(20)
        await house.until_ready(prefill=1, decode=1)
        answer = await house.stream(prompt_of(300, seed=80), max_tokens=10)
        assert answer.complete


async def test_redis_is_killed_and_comes_back_empty(tmp_path: Path) -> None:
    """No request fails, and the mirror is the workers' true contents again."""
    async with House(tmp_path, *TIMED, "--timed-base-ms", "4", "--kv-blocks", "512") as house:
        workers = await house.start_workers(("--role", "prefill"), ("--role", "decode"), ("--role", "decode"))
        await house.start_gateway()
        await house.until_ready(prefill=1, decode=2)
        mirror = ClusterMirror(house.valkey.url, on_change=lambda: None)
        mirroring = asyncio.create_task(mirror.run())
        stop = asyncio.Event()
        failures: list[str] = []
        served = 0

        async def load(lane: int) -> None:
            nonlocal served
            number = 0
            while not stop.is_set():
                number += 1
                answer = await house.stream(prompt_of(80 + 60 * (number % 5), seed=lane * 1000 + number), max_tokens=8)
                served += 1
                if not answer.complete:
                    failures.append(f"{answer.status} {answer.error}")

        async def mirror_is_true(deadline_s: float = 5.0) -> None:
            started = time.monotonic()
            while True:
                true = {worker.worker_id: await _true_contents(worker) for worker in workers}
                mirrored = {name: mirror.blocks.contents(house.model, name) for name in true}
                if mirrored == true and set(mirror.workers()) == set(true):
                    return
                assert time.monotonic() - started < deadline_s, {
                    name: (len(mirrored[name]), len(true[name])) for name in true
                }
                await asyncio.sleep(0.05)

        try:
            lanes = [asyncio.create_task(load(lane)) for lane in range(6)]
            await asyncio.sleep(1.0)
            house.valkey.kill()
            served_before = served
            await asyncio.sleep(2.0)
            assert served > served_before + 6, "nothing is served without Redis"
            house.valkey.start()
            restarted_at = time.monotonic()
            await asyncio.sleep(1.0)
            stop.set()
            await asyncio.gather(*lanes)
            assert failures == []
            await mirror_is_true()
            after_s = time.monotonic() - restarted_at
            print(f"{served} requests served; {after_s:.2f} s after Valkey's restart the mirror was seen to be true")
            assert all(len(mirror.blocks.contents(house.model, worker.worker_id)) > 0 for worker in workers)
        finally:
            stop.set()
            mirroring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await mirroring
        await _all_idle(*workers)


async def _true_contents(worker: WorkerProcess) -> frozenset[bytes]:
    """The block hashes in the worker's own index."""
    page = json.loads(await worker.page("/blocks"))
    return frozenset(bytes.fromhex(block) for block in page["blocks"])
