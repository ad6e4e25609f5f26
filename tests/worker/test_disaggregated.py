"""Prefill and decode in separate processes: same tokens, where the blocks come from, first tokens, overlap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from antiphon_proto import worker_pb2 as wire

from tests.support.workers import Answer, AttachClient, WorkerProcess, Workers, assert_scores_of, prompt_of

BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
SMALL_BLOCKS = ("--block-tokens", str(BLOCK_TOKENS), "--max-batch-tokens", str(CHUNK_TOKENS))


pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Counters:
    """Of one worker, at one moment."""

    computed_tokens: float
    pulled_blocks: float
    remote_prefills: float

    def __sub__(self, before: Counters) -> Counters:
        return Counters(
            self.computed_tokens - before.computed_tokens,
            self.pulled_blocks - before.pulled_blocks,
            self.remote_prefills - before.remote_prefills,
        )


async def counters(worker: WorkerProcess) -> Counters:
    return Counters(
        await worker.metric("antiphon_engine_tokens_computed_total"),
        await worker.metric("antiphon_pulled_blocks_total"),
        await worker.metric("antiphon_remote_prefills_total", result="complete"),
    )


@dataclass
class Cluster:
    """A prefill worker, a decode worker wired up to it, and one that does both alone, for comparison.

    They serve all tests of this module; each test has a cache salt of its own, so that none finds another's blocks.
    """

    prefill: WorkerProcess
    decode: WorkerProcess
    alone: WorkerProcess
    client: AttachClient
    alone_client: AttachClient
    salt: bytes = b""

    async def remote(self, prompt: Sequence[int], **options: Any) -> Answer:
        """Prefill on `prefill`, decode on `decode`."""
        options = {"prefill": [self.prefill], "cache_salt": self.salt} | options
        return await self.client.run(self.client.submission(prompt, **options))

    async def local(self, prompt: Sequence[int], **options: Any) -> Answer:
        """All of it on `alone`."""
        options = {"cache_salt": self.salt} | options
        return await self.alone_client.run(self.alone_client.submission(prompt, **options))

    async def both_ways(self, prompt: Sequence[int], **options: Any) -> tuple[Answer, Answer]:
        return await asyncio.gather(self.remote(prompt, **options), self.local(prompt, **options))

    async def all_idle(self) -> None:
        for worker in (self.prefill, self.decode, self.alone):
            await worker.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with Workers(tmp_path_factory.mktemp("cluster")) as workers:
        prefill, decode, alone = await workers.start_all(
            ("--role", "prefill", *SMALL_BLOCKS), ("--role", "decode", *SMALL_BLOCKS), ("--role", "both", *SMALL_BLOCKS)
        )
        async with AttachClient(decode) as client, AttachClient(alone) as alone_client:
            await client.wire_up(prefill, alone)
            yield Cluster(prefill, decode, alone, client, alone_client)


@pytest.fixture
def cluster(running: Cluster, request: pytest.FixtureRequest) -> Cluster:
    running.salt = request.node.name.encode()
    return running


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 400, 1003])
async def test_tokens_equal_those_of_one_worker_alone(cluster, length):
    """Whatever the prompt's length is to blocks and chunks. The timed engine checks the content of each block."""
    before = await counters(cluster.prefill), await counters(cluster.decode)
    remote, alone = await cluster.both_ways(prompt_of(length), max_tokens=20, seed=5, logprobs=2)
    assert remote.token_ids == alone.token_ids
    assert remote.text == alone.text
    assert remote.finish == alone.finish == wire.Finish.FINISH_LENGTH
    assert [entry.token_id for entry in remote.logprobs] == alone.token_ids
    assert remote.usage.completion_tokens == 20
    assert remote.usage.cached_tokens == 0
    if length > BLOCK_TOKENS:
        assert remote.usage.prefill_worker_id == cluster.prefill.worker_id
        assert remote.usage.pulled_blocks == length // BLOCK_TOKENS
        prefill, decode = await counters(cluster.prefill) - before[0], await counters(cluster.decode) - before[1]
        assert decode.remote_prefills == 1
        assert prefill.computed_tokens == length
        assert decode.computed_tokens < 20 + BLOCK_TOKENS
    await cluster.all_idle()


@pytest.mark.parametrize("length", [1, 2, 16, 17, 65, 400])
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_prompts_log_probabilities_are_told_whatever_is_cached(cluster, length, max_tokens):
    """Cold, with all of it cached on both workers, and by one worker alone."""
    prompt = prompt_of(length)
    for _ in range(2):
        remote, alone = await cluster.both_ways(prompt, max_tokens=max_tokens, prompt_logprobs=2)
        for answer in (remote, alone):
            assert_scores_of(prompt, answer.prompt_logprobs)
            assert all(len(one.top_ids) == 2 and one.rank for one in answer.prompt_logprobs)
            assert answer.finish == wire.Finish.FINISH_LENGTH, answer.error
            assert answer.usage.completion_tokens == len(answer.token_ids) == max_tokens
            assert answer.usage.cached_tokens == 0
        assert remote.token_ids == alone.token_ids
        assert remote.usage.prefill_worker_id == (cluster.prefill.worker_id if length > BLOCK_TOKENS else "")
        plain = await cluster.remote(prompt, max_tokens=1)
        assert plain.usage.cached_tokens == (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS or max_tokens == 0
    await cluster.all_idle()


async def test_allowed_ids_and_bad_words_hold_from_the_first_token_on(cluster):
    plain = await cluster.local(prompt_of(100), max_tokens=12, seed=3)
    first, *_, last = plain.token_ids
    words = [wire.TokenIds(ids=[first]), wire.TokenIds(ids=plain.token_ids[-2:])]
    for sampling in ({"allowed_token_ids": [65, 66, 67]}, {"bad_words": words}):
        remote, alone = await cluster.both_ways(prompt_of(100), max_tokens=12, seed=3, logprobs=0, **sampling)
        assert remote.token_ids == alone.token_ids
        if "allowed_token_ids" in sampling:
            assert set(remote.token_ids) <= {65, 66, 67}
        else:
            assert first not in remote.token_ids
            assert (remote.token_ids[-2], remote.token_ids[-1]) != (plain.token_ids[-2], last)
        begun = await cluster.remote(prompt_of(100), output=alone.token_ids[:5], max_tokens=12, seed=3, **sampling)
        assert begun.token_ids == alone.token_ids[5:]
    await cluster.all_idle()


async def test_where_nothing_is_left_to_sample_a_request_ends_with_a_sentence(cluster):
    for ask in (cluster.remote, cluster.local):
        answer = await ask(prompt_of(100), allowed_token_ids=[65], bad_words=[wire.TokenIds(ids=[65])])
        assert answer.finish == wire.Finish.FINISH_ERROR
        assert answer.error.startswith("no token may be sampled")
    await cluster.all_idle()


async def test_many_at_once(cluster):
    answers = await asyncio.gather(
        *(cluster.both_ways(prompt_of(40 + 37 * number, seed=number), max_tokens=12) for number in range(12))
    )
    for remote, alone in answers:
        assert remote.token_ids == alone.token_ids
        assert remote.usage.prefill_worker_id == cluster.prefill.worker_id
    await cluster.all_idle()


async def test_hits_on_the_prefill_worker_are_not_computed_again(cluster):
    before = await counters(cluster.prefill)
    first = await cluster.remote(prompt_of(300), max_tokens=4)
    assert first.usage.cached_tokens == 0
    longer = prompt_of(300) + prompt_of(100, seed=9)
    second, alone = await cluster.both_ways(longer, max_tokens=4)
    assert second.token_ids == alone.token_ids
    assert second.usage.cached_tokens == 288
    assert (await counters(cluster.prefill) - before).computed_tokens == 300 + 400 - 288
    # What the decode worker has from the first turn it does not pull again.
    assert second.usage.pulled_blocks == 400 // BLOCK_TOKENS - 288 // BLOCK_TOKENS
    await cluster.all_idle()


@pytest.mark.parametrize("length", [300, 3000])
async def test_a_prompt_that_is_cached_on_the_decode_worker_needs_no_prefill_worker(cluster, length):
    await cluster.remote(prompt_of(length), max_tokens=4)
    before = await counters(cluster.decode)
    again, alone = await cluster.both_ways(prompt_of(length), max_tokens=4)
    assert again.token_ids == alone.token_ids
    assert again.usage.prefill_worker_id == ""
    assert again.usage.cached_tokens == length // BLOCK_TOKENS * BLOCK_TOKENS
    assert (await counters(cluster.decode) - before).remote_prefills == 0
    await cluster.all_idle()


async def test_a_second_turn_is_pulled_by_the_prefill_worker_from_the_decode_worker(cluster):
    """The first answer's KV is only where it was decoded; the prefill worker needs it for the second prompt."""
    prompt = prompt_of(200)
    first = await cluster.remote(prompt, max_tokens=100)
    before = await counters(cluster.prefill)
    second_prompt = prompt + first.token_ids + prompt_of(150, seed=4)
    held = (200 + 99) // BLOCK_TOKENS
    second = await cluster.remote(second_prompt, prefix_peers=[(cluster.decode, held)], max_tokens=6)
    alone = await cluster.local(second_prompt, max_tokens=6)
    assert second.token_ids == alone.token_ids
    assert second.usage.cached_tokens == held * BLOCK_TOKENS
    prefill = await counters(cluster.prefill) - before
    assert prefill.pulled_blocks == held - 200 // BLOCK_TOKENS
    assert prefill.computed_tokens == len(second_prompt) - held * BLOCK_TOKENS
    await cluster.all_idle()


async def test_a_worker_that_prefills_by_itself_pulls_a_prefix_from_a_peer(cluster):
    await cluster.local(prompt_of(500), max_tokens=2)
    answer = await cluster.remote(
        prompt_of(500), prefill=[], prefix_peers=[(cluster.alone, 500 // BLOCK_TOKENS)], max_tokens=5
    )
    alone = await cluster.local(prompt_of(500), max_tokens=5)
    assert answer.token_ids == alone.token_ids
    assert answer.usage.cached_tokens == 496
    assert answer.usage.pulled_blocks == 500 // BLOCK_TOKENS
    assert answer.usage.prefill_worker_id == ""
    await cluster.all_idle()


async def test_a_peer_that_no_longer_has_the_prefix_costs_nothing_but_the_asking(cluster):
    answer = await cluster.remote(prompt_of(200), prefill=[], prefix_peers=[(cluster.alone, 12)], max_tokens=5)
    assert len(answer.token_ids) == 5
    assert answer.usage.cached_tokens == 0
    await cluster.all_idle()


@pytest.mark.parametrize("ending", ["max_tokens", "stop id", "stop string"])
async def test_the_first_token_may_end_the_request(cluster, ending):
    """It was sampled on the prefill worker; the decode worker judges it before any KV has come."""
    plain = await cluster.local(prompt_of(700), max_tokens=4)
    sampling: dict[str, Any] = {
        "max_tokens": {"max_tokens": 1},
        "stop id": {"max_tokens": 9, "stop_token_ids": [plain.token_ids[0]]},
        "stop string": {"max_tokens": 9, "stop": [plain.text[0]]},
    }[ending]
    answer, alone = await cluster.both_ways(prompt_of(700), **sampling)
    assert answer.token_ids == alone.token_ids == plain.token_ids[:1]
    assert (answer.text, answer.finish, answer.stop_reason) == (alone.text, alone.finish, alone.stop_reason)
    assert answer.usage.completion_tokens == 1
    assert answer.usage.prompt_tokens == 700
    assert answer.usage.prefill_worker_id == cluster.prefill.worker_id
    await cluster.all_idle()


async def test_an_attempt_goes_on_where_an_earlier_one_stopped(cluster):
    """The prefill worker computes the prompt again; what was generated is not generated twice."""
    whole = await cluster.local(prompt_of(333), max_tokens=20)
    rest = await cluster.remote(prompt_of(333), output=whole.token_ids[:7], max_tokens=20)
    assert rest.token_ids == whole.token_ids[7:]
    assert rest.text == whole.text[7:]
    assert rest.usage.completion_tokens == 20
    await cluster.all_idle()


async def test_pulls_overlap_with_prefill(tmp_path):
    """Counted: when the prefill worker has finished a long prompt, at most one chunk is still to be pulled."""
    slow = (*SMALL_BLOCKS, "--timed-base-ms", "60")
    async with Workers(tmp_path) as workers:
        prefill, decode = await workers.start_all(("--role", "prefill", *slow), ("--role", "decode", *SMALL_BLOCKS))
        async with AttachClient(decode) as client:
            await client.wire_up(prefill)
            for number in range(2):
                submit = client.submission(prompt_of(20 * CHUNK_TOKENS, seed=number), prefill=[prefill], max_tokens=3)
                answer = await client.run(submit)
                assert answer.usage.pulled_blocks == 20 * CHUNK_TOKENS // BLOCK_TOKENS
                status = await decode.until(lambda status: status["unpulled_at_done"] is not None)
                assert status["unpulled_at_done"] <= CHUNK_TOKENS // BLOCK_TOKENS
            assert await decode.metric("antiphon_blocks_unpulled_at_done_count") == 2
            assert await decode.metric("antiphon_blocks_unpulled_at_done_sum") <= 2 * CHUNK_TOKENS // BLOCK_TOKENS


async def test_the_first_token_does_not_wait_for_the_transfer(cluster):
    """vllm-project/router#113, sgl-project/sglang#37961: it is passed on before the last blocks are pulled.

    Counted: the usage that comes with the first token says how many blocks are in by then.
    """
    answer, alone = await cluster.both_ways(prompt_of(500), max_tokens=5)
    assert answer.token_ids == alone.token_ids
    assert len(answer.steps[0].token_ids) == 1
    assert answer.first_usage.prefill_worker_id == cluster.prefill.worker_id
    assert answer.first_usage.pulled_blocks < 500 // BLOCK_TOKENS
    assert answer.usage.pulled_blocks == 500 // BLOCK_TOKENS
    await cluster.all_idle()


async def test_credit_bounds_how_far_a_prefill_worker_goes_ahead(tmp_path):
    """A decode worker without room does not make a prefill worker fill its pool."""
    async with Workers(tmp_path) as workers:
        prefill, decode = await workers.start_all(
            ("--role", "prefill", *SMALL_BLOCKS), ("--role", "decode", *SMALL_BLOCKS, "--kv-blocks", "40")
        )
        async with AttachClient(decode) as client:
            await client.wire_up(prefill)
            answers = await asyncio.gather(
                *(client.run(client.submission(prompt_of(600, seed=number), prefill=[prefill])) for number in range(4)),
                return_exceptions=True,
            )
            done = [answer for answer in answers if isinstance(answer, Answer)]
            assert done
            assert all(answer.finish == wire.Finish.FINISH_LENGTH for answer in done)
        await decode.until_idle()
        await prefill.until_idle()
