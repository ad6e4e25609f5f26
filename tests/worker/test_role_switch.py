"""A running worker changes its role: what is asked for, what is answered, what stays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc.aio
import pytest
import pytest_asyncio
from antiphon_proto import worker_pb2 as wire
from antiphon_worker.role import ChangeOutdated, ChangeRefused, CurrentRole

from tests.support.workers import (
    TIMED,
    Answer,
    AttachClient,
    RequestRefusedByWorker,
    WorkerProcess,
    Workers,
    eventually,
    prompt_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL, DECODE = wire.Role.ROLE_PREFILL, wire.Role.ROLE_DECODE
SLOW = (*TIMED, "--timed-base-ms", "30")
"""An answer of some tokens takes long enough for something to happen meanwhile."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    async with Workers(tmp_path_factory.mktemp("roles"), *SLOW) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(workers: Workers) -> Sequence[WorkerProcess]:
    """A decode and a prefill worker, for tests that give them their roles back."""
    return await workers.start_all(("--role", "decode"), ("--role", "prefill"))


async def set_role(
    client: AttachClient, role: wire.Role.ValueType, *, version: int = 0, incarnation: str = ""
) -> tuple[wire.Role.ValueType, int]:
    reply = await client.stub.SetRole(
        wire.SetRoleRequest(role=role, expected_role_version=version, incarnation=incarnation)
    )
    return reply.role, reply.role_version


async def refusal(client: AttachClient, role: wire.Role.ValueType, **asked: str | int) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await set_role(client, role, **asked)  # type: ignore[arg-type]
    return refused.value.code(), refused.value.details() or ""


async def test_the_version_grows_and_blocks_and_incarnation_stay(pair: Sequence[WorkerProcess]) -> None:
    decode, prefill = pair
    prompt = prompt_of(640, seed=3)
    async with AttachClient(decode) as client, AttachClient(prefill) as other:
        await client.wire_up(prefill)
        await client.run(client.submission(prompt, prefill=[prefill], max_tokens=4))
        before = await decode.until_idle(), await prefill.until_idle()
        assert before[0]["indexed_blocks"] == before[1]["indexed_blocks"] == 10
        version = before[0]["role_version"]

        assert await set_role(client, PREFILL, version=version) == (PREFILL, version + 1)
        assert await set_role(other, DECODE) == (DECODE, before[1]["role_version"] + 1)
        # The stream's word and the call's answer travel apart.
        changed = (PREFILL, version + 1)
        await eventually(lambda: client.queue is not None and (client.queue.role, client.queue.role_version) == changed)

        # The other way round, on the same links: what each holds is used in its new role.
        answer = await other.run(other.submission(prompt, prefill=[decode], max_tokens=4))
        assert answer.usage.cached_tokens == 576  # all but the block of the last token, which is computed again
        after = await decode.until_idle(), await prefill.until_idle()
        for was, now in zip(before, after, strict=True):
            assert now["incarnation"] == was["incarnation"]
            assert now["indexed_blocks"] == was["indexed_blocks"]
            assert now["role"] != was["role"]
        assert await set_role(client, DECODE) == (DECODE, version + 2)
        await set_role(other, PREFILL)


async def test_it_is_idempotent_and_never_undoes_a_later_change(pair: Sequence[WorkerProcess]) -> None:
    async with AttachClient(pair[0]) as client:
        _, version = await set_role(client, DECODE)
        _, changed = await set_role(client, PREFILL, version=version)
        # A caller that did not hear the answer asks again.
        assert await set_role(client, PREFILL, version=version) == (PREFILL, changed)
        # One that knows of none of it does not win.
        code, why = await refusal(client, DECODE, version=version)
        assert code is grpc.StatusCode.ABORTED
        assert f"version {changed}" in why
        code, why = await refusal(client, DECODE, incarnation="another")
        assert code is grpc.StatusCode.ABORTED
        assert await set_role(client, DECODE, version=changed) == (DECODE, changed + 1)


async def test_answers_go_on_in_a_role_that_was_left_and_new_ones_are_refused(pair: Sequence[WorkerProcess]) -> None:
    decode, _ = pair
    async with AttachClient(decode) as client:
        submit = client.submission(prompt_of(40), max_tokens=60)
        await client.submit(submit)
        await set_role(client, PREFILL)
        with pytest.raises(RequestRefusedByWorker) as refused:
            await client.submit(client.submission(prompt_of(20)))
        assert refused.value.reason == wire.RefusalReason.REFUSAL_WRONG_ROLE
        assert client.queue is not None
        assert client.queue.role == PREFILL  # known before the refusal
        assert (await decode.status())["leaving_answers"] == 1
        answer = Answer()
        async for step in client.steps(submit):
            answer.take(step)
        assert len(answer.token_ids) == 60
        assert answer.finish == wire.Finish.FINISH_LENGTH
        assert (await decode.until_idle())["leaving_answers"] == 0
        await set_role(client, DECODE)


async def test_an_answer_that_does_not_end_in_time_is_given_back_to_its_gateway(workers: Workers) -> None:
    decode = await workers.start("--role", "decode", "--drain-timeout-s", "0.5")
    async with AttachClient(decode) as client:
        submit = client.submission(prompt_of(40), max_tokens=400)
        await client.submit(submit)
        await set_role(client, PREFILL)
        last = [step async for step in client.steps(submit)][-1]
        assert last.finish == wire.Finish.FINISH_MOVED
        assert "became a prefill worker" in last.error
        await decode.until_idle()


async def test_a_worker_that_is_back_in_its_role_keeps_what_runs(pair: Sequence[WorkerProcess]) -> None:
    async with AttachClient(pair[0]) as client:
        submit = client.submission(prompt_of(40), max_tokens=20)
        await client.submit(submit)
        await set_role(client, PREFILL)
        await set_role(client, DECODE)
        answer = Answer()
        async for step in client.steps(submit):
            answer.take(step)
        assert answer.finish == wire.Finish.FINISH_LENGTH


async def test_a_worker_of_a_models_pool_keeps_its_role(workers: Workers) -> None:
    worker = await workers.start("--role", "decode", "--revision", "r1")
    async with AttachClient(worker) as client:
        code, why = await refusal(client, PREFILL)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "replica of a Model's pool" in why
        assert await set_role(client, DECODE) == (DECODE, 1)


async def test_roles_that_cannot_be_taken_are_told_in_a_sentence() -> None:
    both, decode = CurrentRole("both"), CurrentRole("decode")
    with pytest.raises(ChangeRefused, match="start it with --role"):
        both.change(PREFILL, 0)
    for role in (wire.Role.ROLE_BOTH, wire.Role.ROLE_UNSPECIFIED):
        with pytest.raises(ChangeRefused, match="has to be prefill or decode"):
            decode.change(role, 0)
    with pytest.raises(ChangeOutdated):
        decode.change(PREFILL, 7)
    assert (decode.name, decode.version) == ("decode", 1)
