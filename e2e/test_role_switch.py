"""Workers change their roles back and forth while clients stream from them: nothing is lost, altered, or forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_kvtransfer.records import decode_record
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import WorkerStub
from redis import Redis

from tests.support.house import House, Streamed
from tests.support.workers import TIMED, WorkerProcess, prompt_of

PREFILL, DECODE = wire.Role.ROLE_PREFILL, wire.Role.ROLE_DECODE
ROUNDS = 4
CLIENTS = 10
PROMPTS = 12
TOKENS = 40


async def set_role(worker: WorkerProcess, role: wire.Role.ValueType) -> int:
    async with grpc.aio.insecure_channel(worker.ready.address) as channel:
        return int((await WorkerStub(channel).SetRole(wire.SetRoleRequest(role=role))).role_version)


def prompts() -> list[list[int]]:
    """Some share their beginning, so that caches matter."""
    shared = prompt_of(256, seed=5)
    return [[*(shared if number % 2 else []), *prompt_of(200 + 40 * number, seed=number)] for number in range(PROMPTS)]


async def test_roles_go_back_and_forth_under_streaming_load(tmp_path: Path) -> None:
    async with House(tmp_path, *TIMED, "--timed-base-ms", "4", "--kv-blocks", "2048") as house:
        workers = await house.start_workers(
            *[("--role", role, "--worker-id", f"{role}-{n}") for role in ("prefill", "decode") for n in range(2)]
        )
        await house.start_gateway()
        await house.until_ready(prefill=2, decode=2)
        first = await asyncio.gather(*(house.stream(prompt, max_tokens=TOKENS) for prompt in prompts()))
        expected = [answer.text for answer in first]
        assert all(len(text) == TOKENS for text in expected)

        stop = asyncio.Event()
        clients = [asyncio.create_task(_ask(house, expected, first, stop)) for first in range(CLIENTS)]
        try:
            for number in range(ROUNDS):
                await _turn(house, workers, number)
        finally:
            stop.set()
            answered = await asyncio.gather(*clients)
        assert sum(answered) > 2 * ROUNDS
        await house.until_gateway_is_at_rest()
        states = [await worker.until_idle() for worker in workers]
        assert [state["role"] for state in states] == ["prefill", "prefill", "decode", "decode"]
        assert all(state["role_version"] == 1 + ROUNDS for state in states)
        assert [state["incarnation"] for state in states] == [worker.ready.incarnation for worker in workers]

        records = Redis.from_url(house.valkey.url)
        for state in states:
            raw = records.get(ModelKeys(house.model).record(state["worker_id"]))
            record = decode_record(raw, state["worker_id"])
            assert (record.role, record.role_version) == (state["role"], state["role_version"])
            assert record.incarnation == state["incarnation"]

        # At rest: what each worker holds is the same after a change, and is used in the new role.
        blocks = [state["indexed_blocks"] for state in states]
        await _turn(house, workers, ROUNDS)
        assert [(await worker.until_idle())["indexed_blocks"] for worker in workers] == blocks
        again = await house.complete(prompts()[4], max_tokens=TOKENS)
        assert again.json()["choices"][0]["text"] == expected[4]
        cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(prompts()[4]) // 64 * 64
        assert await house.gateway_metric("antiphon_gateway_workers_lost_total") == 0


async def _turn(house: House, workers: Sequence[WorkerProcess], number: int) -> None:
    """Everybody takes the other role, one after the other, so that somebody always decodes."""
    prefills, decodes = workers[:2], workers[2:]
    if number % 2:
        prefills, decodes = decodes, prefills
    for one, other in zip(decodes, prefills, strict=True):
        await set_role(other, DECODE)
        await set_role(one, PREFILL)
    await house.until_ready(prefill=2, decode=2)


async def _ask(house: House, expected: Sequence[str], first: int, stop: asyncio.Event) -> int:
    """Stream one answer after the other; how many there were."""
    answered = 0
    for number in itertools.count(first):
        if stop.is_set():
            return answered
        answer = Streamed()
        await house.stream(prompts()[number % PROMPTS], answer, max_tokens=TOKENS)
        assert answer.complete, answer
        assert answer.text == expected[number % PROMPTS]
        assert answer.events[-1]["usage"]["completion_tokens"] == TOKENS
        answered += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.01)
    return answered
