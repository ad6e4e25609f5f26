"""`Prefill.Run` from the caller's side: credit, refusals, and that a run ends with its caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import PrefillStub

from tests.support.workers import WorkerProcess, Workers, eventually, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_TOKENS = 16
POOL_BLOCKS = 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerProcess]:
    folder: Path = tmp_path_factory.mktemp("prefill")
    async with Workers(folder) as workers:
        yield await workers.start(
            "--role", "prefill", "--block-tokens", str(BLOCK_TOKENS), "--max-batch-tokens", "64",
            "--kv-blocks", str(POOL_BLOCKS),
        )  # fmt: skip


class Caller:
    """A decode worker's end of one call, by hand."""

    def __init__(self, worker: WorkerProcess, prompt: Sequence[int], **start: Any) -> None:
        fields = {
            "request_id": f"run-{id(self)}",
            "incarnation": worker.ready.incarnation,
            "credit_blocks": 1000,
            "cache_salt": str(id(self)).encode(),
            "sampling": wire.Sampling(max_tokens=100),
        }
        self._start = wire.RunStart(prompt_token_ids=prompt, **(fields | start))
        self._worker = worker
        self.messages: list[wire.RunDown] = []
        self.beating = True

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._worker.ready.address)
        self.call = PrefillStub(self._channel).Run()
        await self.call.write(wire.RunUp(start=self._start))
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _read(self) -> None:
        while (message := await self.call.read()) is not grpc.aio.EOF:
            self.messages.append(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            if self.beating:
                await self.call.write(wire.RunUp(heartbeat=wire.Heartbeat()))

    def all_of(self, kind: str) -> list[Any]:
        return [getattr(message, kind) for message in self.messages if message.HasField(kind)]

    @property
    def blocks(self) -> int:
        """Blocks announced so far."""
        return max((chunk.blocks for chunk in self.all_of("chunk")), default=0)

    async def until(self, kind: str) -> Any:
        await eventually(lambda: bool(self.all_of(kind)))
        return self.all_of(kind)[0]


async def test_a_run_announces_chunks_then_the_first_token_and_the_end(worker):
    async with Caller(worker, prompt_of(200)) as caller:
        done = await caller.until("done")
        assert (done.blocks, done.partial_tokens) == (200 // BLOCK_TOKENS, 200 % BLOCK_TOKENS)
        assert [chunk.blocks for chunk in caller.all_of("chunk")] == [4, 8, 12]
        [first] = caller.all_of("first_token")
        assert first.cached_tokens == 0
        # The blocks stay for as long as the caller stays.
        status = await worker.status()
        assert status["used_blocks"] == 13
    await worker.until_idle()


async def test_it_computes_no_further_than_its_credit_while_others_go_on(worker):
    """At zero credit the scheduler passes a run over: neither pool fills with the other's waiting."""
    async with Caller(worker, prompt_of(640), credit_blocks=6) as waiting:
        await eventually(lambda: waiting.blocks == 6)
        async with Caller(worker, prompt_of(320, seed=1)) as other:
            await other.until("done")
        assert waiting.blocks == 6
        await waiting.call.write(wire.RunUp(credit=wire.Credit(blocks=20)))
        await eventually(lambda: waiting.blocks == 20)
        assert not waiting.all_of("first_token")
        await waiting.call.write(wire.RunUp(credit=wire.Credit(blocks=40)))
        await waiting.until("done")
    await worker.until_idle()


async def test_a_silent_caller_is_given_up(worker):
    """A lost node sends no reset; heartbeats bound how long blocks are held for it."""
    async with Caller(worker, prompt_of(200)) as caller:
        await caller.until("done")
        caller.beating = False
        await worker.until_idle(deadline_s=6)
        assert await caller.call.code() == grpc.StatusCode.ABORTED
        assert "the decode worker was not heard for 1.5 s" in await caller.call.details()


async def test_half_closing_frees_the_blocks(worker):
    async with Caller(worker, prompt_of(200)) as caller:
        await caller.until("done")
        caller.beating = False
        await caller.call.done_writing()
        await worker.until_idle()


async def test_heartbeats_come_while_nothing_else_does(worker):
    async with Caller(worker, prompt_of(640), credit_blocks=4) as caller:
        await eventually(lambda: len(caller.all_of("heartbeat")) >= 2)
    await worker.until_idle()


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ({"incarnation": "0" * 16}, wire.RefusalReason.REFUSAL_WRONG_ROLE),
        ({"prompt_token_ids": []}, wire.RefusalReason.REFUSAL_INVALID),
        ({"prompt_token_ids": [10**6]}, wire.RefusalReason.REFUSAL_INVALID),
        ({"prompt_token_ids": prompt_of(POOL_BLOCKS * BLOCK_TOKENS + 1)}, wire.RefusalReason.REFUSAL_INVALID),
    ],
)
async def test_refusals_name_their_reason(worker, start, reason):
    prompt = start.pop("prompt_token_ids", prompt_of(40))
    async with Caller(worker, prompt, **start) as caller:
        refused = await caller.until("refused")
        assert refused.reason == reason
        assert refused.message
    await worker.until_idle()


async def test_a_full_pool_refuses_for_now(worker):
    async with Caller(worker, prompt_of(150 * BLOCK_TOKENS), credit_blocks=1) as first:
        await eventually(lambda: first.blocks == 1)
        async with Caller(worker, prompt_of(100 * BLOCK_TOKENS, seed=1)) as second:
            refused = await second.until("refused")
            assert refused.reason == wire.RefusalReason.REFUSAL_CAPACITY
    await worker.until_idle()
