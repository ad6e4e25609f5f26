"""A worker is stopped (SIGSTOP) in mid-pull, past its pins' expiry, and goes on later: nothing is corrupted.

While the reader stands still, the holder lets its pins lapse and gives the blocks to other prompts; when the reader
goes on, what it has read may be another prompt's KV. The timed engine's blocks hold a digest of all tokens up to their
end, and the engine checks the content of every block before it uses it: a wrong block that was published or used would
fail the step with KvCorruption. Each prompt is asked again afterwards, so that what was published is used.

See ai-dynamo/dynamo#7489 and vllm-project/vllm#50425 for what becomes of blocks when such a wait has no end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
from antiphon_proto import worker_pb2 as wire

from tests.support.installed import has_nixl
from tests.support.workers import (
    AttachClient,
    RequestRefusedByWorker,
    StreamBroken,
    WorkerProcess,
    Workers,
    prompt_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_TOKENS = 640
_OPTIONS = (
    *("--engine", "timed", "--block-tokens", "16", "--timed-block-bytes", str(1 << 20)),
    *("--max-batch-tokens", "64", "--timed-base-ms", "12"),
)
_STOPPED_S = 2.5
"""Longer than the 1.5 s after which pins lapse and peers are given up."""
_ROUNDS = 3


@pytest.fixture(params=[pytest.param("tcp", marks=pytest.mark.exhaustive), "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "ucx" and not has_nixl():
        pytest.skip("NIXL is not installed")
    return str(request.param)


async def _ask(decode: WorkerProcess, prefill: WorkerProcess, prompt: list[int]) -> list[int] | None:
    """One request on a stream of its own. None when the worker gave the stream up or refused."""
    with contextlib.suppress(StreamBroken, RequestRefusedByWorker):
        async with AttachClient(decode) as client:
            answer = await client.run(client.submission(prompt, prefill=[prefill], max_tokens=6))
            assert answer.finish == wire.Finish.FINISH_LENGTH, answer.error
            return answer.token_ids
    return None


async def _right_tokens(alone: WorkerProcess, prompt: list[int]) -> list[int]:
    async with AttachClient(alone) as client:
        return (await client.run(client.submission(prompt, max_tokens=6))).token_ids


@pytest.mark.parametrize("stopped", ["decode", pytest.param("prefill", marks=pytest.mark.exhaustive)])
async def test_stopped_in_mid_pull(transport: str, stopped: str, tmp_path: Path) -> None:
    dice = random.Random(f"{transport} {stopped}")
    async with Workers(tmp_path, *_OPTIONS, "--transport", transport) as workers:
        # The prefill worker's pool holds one prompt and a half: whatever comes next takes the blocks of the last one.
        prefill, decode, other, alone = await workers.start_all(
            ("--role", "prefill", "--kv-blocks", "64"),
            ("--role", "decode", "--kv-blocks", "256"),
            ("--role", "decode", "--kv-blocks", "128"),
            ("--role", "both", "--kv-blocks", "128"),
        )
        async with AttachClient(decode) as client, AttachClient(other) as second:
            await client.wire_up(prefill)
            await second.wire_up(prefill)
        victim = decode if stopped == "decode" else prefill
        for number in range(_ROUNDS):
            prompt = prompt_of(_TOKENS, seed=1 + number)
            expected = await _right_tokens(alone, prompt)
            asking = asyncio.create_task(_ask(decode, prefill, prompt))
            pulls_before = await decode.metric("antiphon_pulled_blocks_total")
            await asyncio.sleep(0.03 + 0.25 * dice.random())
            victim.stop()
            try:
                if stopped == "decode":
                    await asyncio.sleep(_STOPPED_S)
                    # Everything that was kept for the stopped reader is free again, and is taken by others.
                    await prefill.until(lambda status: status["pins"] == 0 and status["used_blocks"] == 0)
                    for seed in (101 + 2 * number, 102 + 2 * number):
                        churn = prompt_of(_TOKENS, seed=seed)
                        assert await _ask(other, prefill, churn) == await _right_tokens(alone, churn)
                else:
                    answer = await asking  # without the stopped worker
                    assert answer == expected
                    await asyncio.sleep(_STOPPED_S)
            finally:
                victim.cont()
            answer = await asking
            assert answer in (None, expected)
            print(f"{transport}, {stopped} stopped: answered {answer is not None}, pulled before {pulls_before:.0f}")
            await _healed(decode, prefill)
            assert await _ask(decode, prefill, prompt) == expected
        for worker in (prefill, decode, other, alone):
            await worker.until_idle()
            assert "KvCorruption" not in worker.log


async def _healed(decode: WorkerProcess, prefill: WorkerProcess) -> None:
    """Both are idle and wired up again."""
    async with AttachClient(decode) as client:
        await client.wire_up(prefill)
    await prefill.until_idle()
    await decode.until_idle()
