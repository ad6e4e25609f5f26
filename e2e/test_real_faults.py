"""Faults in mid-transfer on the real model in fp32: the tokens are the reference's, whatever was killed or stopped.

The timed engine's tests of the same faults check every block; here the proof is in the tokens: KV of another prompt, or
half of a block, would give others.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from antiphon_proto import worker_pb2 as wire

from tests.support.installed import has_nixl
from tests.support.models import demo_model
from tests.support.reference import Reference, assert_same, greedy_references
from tests.support.workers import AttachClient, RequestRefusedByWorker, StreamBroken, WorkerProcess, Workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_REAL = ("--engine", "torch", "--dtype", "float32", "--threads", "1", "--max-batch-tokens", "128")
_STOPPED_S = 2.5
_PATIENCE_S = 120.0
_TOKENS = 24
"""Of an answer. A fault is in the prompt's KV, and KV that is wrong shows in the first tokens."""
_LONG = (14, 15, 16, 17, 18, 19)
"""Prompts of 390 and 500 tokens: four chunks."""


@pytest.fixture(params=[pytest.param("tcp", marks=pytest.mark.exhaustive), "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "ucx" and not has_nixl():
        pytest.skip("NIXL is not installed")
    return str(request.param)


def _references() -> list[Reference]:
    everything = greedy_references(demo_model())
    return [everything[index] for index in _LONG]


async def _ask(decode: WorkerProcess, prefill: WorkerProcess, reference: Reference, salt: bytes) -> list[int] | None:
    """The answer's tokens, on a stream of its own. None when the worker gave the stream up or had no room."""
    with contextlib.suppress(StreamBroken, RequestRefusedByWorker):
        async with asyncio.timeout(_PATIENCE_S), AttachClient(decode) as client:
            answer = await client.run(
                client.submission(
                    reference.prompt,
                    prefill=[prefill],
                    max_tokens=_TOKENS,
                    temperature=0.0,
                    ignore_eos=True,
                    cache_salt=salt,
                )
            )
            assert answer.finish == wire.Finish.FINISH_LENGTH, answer.error
            return answer.token_ids
    return None


async def _pulled(worker: WorkerProcess, blocks: int) -> None:
    """Return when the worker has read so many blocks from peers."""
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            if await worker.metric("antiphon_pulled_blocks_total") >= blocks:
                return
            await asyncio.sleep(0.005)


async def test_a_prefill_worker_is_killed_under_load(transport: str, tmp_path: Path) -> None:
    references = _references()
    async with Workers(tmp_path, *_REAL, "--transport", transport) as workers:
        prefill, decode = await workers.start_all(
            ("--role", "prefill", "--kv-blocks", "128"), ("--role", "decode", "--kv-blocks", "128")
        )
        async with AttachClient(decode) as client:
            await client.wire_up(prefill)
            asked = [asyncio.create_task(_ask(decode, prefill, reference, b"kill")) for reference in references]
            await _pulled(decode, 4)
            await prefill.kill()
            for reference, tokens in zip(references, await asyncio.gather(*asked), strict=True):
                assert tokens is not None
                assert len(tokens) == _TOKENS
                assert_same(tokens, reference)
        await decode.until_idle(30)


async def test_a_decode_worker_is_stopped_in_mid_pull(transport: str, tmp_path: Path) -> None:
    first, *others = _references()
    async with Workers(tmp_path, *_REAL, "--transport", transport) as workers:
        # The prefill worker's pool holds one prompt and a half: the next ones take the blocks of the last.
        prefill, decode, other = await workers.start_all(
            ("--role", "prefill", "--kv-blocks", "12"),
            ("--role", "decode", "--kv-blocks", "64"),
            ("--role", "decode", "--kv-blocks", "64"),
        )
        async with AttachClient(decode) as client, AttachClient(other) as second:
            await client.wire_up(prefill)
            await second.wire_up(prefill)
        asked = asyncio.create_task(_ask(decode, prefill, first, b"stop"))
        await _pulled(decode, 1)
        decode.stop()
        try:
            await asyncio.sleep(_STOPPED_S)
            await prefill.until(lambda status: status["pins"] == 0 and status["used_blocks"] == 0, 30)
            for reference in others[:3]:
                tokens = await _ask(other, prefill, reference, b"churn")
                assert tokens is not None
                assert_same(tokens, reference)
        finally:
            decode.cont()
        tokens = await asked
        if tokens is not None:
            assert_same(tokens, first)
        async with AttachClient(decode) as client:
            await client.wire_up(prefill)
        await decode.until_idle(30)
        again = await _ask(decode, prefill, first, b"stop")
        assert again is not None
        assert_same(again, first)
        for worker in (prefill, decode, other):
            await worker.until_idle(30)
