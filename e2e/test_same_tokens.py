"""The tokens of `transformers`' `generate`, whichever way a request takes through real worker processes.

The demo model in fp32, twenty prompts of 1 to 500 tokens (see tests/support/reference.py), 64 tokens each, prefill and
decode in separate processes over `tcp` and over `ucx`: cold, with the prompt cached on the prefill worker, pulled from
decode to prefill on a second turn, and with preemption on the decode worker. What crosses no link, or is sampled from
what has crossed it, is seen with one of the two. Without --exhaustive: every fourth prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from antiphon_proto import worker_pb2 as wire

from tests.support.installed import has_nixl
from tests.support.models import demo_model
from tests.support.prompt_scores import assert_scores, scores_of_folder, told_by_a_worker
from tests.support.reference import (
    OUTPUT_TOKENS,
    Reference,
    assert_same,
    greedy_references,
    report,
    sampled_references,
    sampling_of,
)
from tests.support.second_turn import TURNS, second_turn_references
from tests.support.workers import Answer, AttachClient, RequestRefusedByWorker, WorkerProcess, Workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK_TOKENS = 64
LATER_TOKENS = 24
"""Of answers to prompts that were answered whole before: what is new is how the prompt came to be there."""
_REAL = ("--engine", "torch", "--dtype", "float32", "--threads", "1", "--max-batch-tokens", "128")


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_model()


@pytest.fixture(params=["tcp", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "ucx" and not has_nixl():
        pytest.skip("NIXL is not installed")
    return str(request.param)


async def _run(client: AttachClient, prompt: Sequence[int], *, patience_s: float = 240.0, **options: object) -> Answer:
    """Submit until there is room, as a gateway would, and collect the answer."""
    async with asyncio.timeout(patience_s):
        while True:
            submission = client.submission(prompt, **options)
            try:
                return await client.run(submission)
            except RequestRefusedByWorker as refused:
                if refused.reason != wire.RefusalReason.REFUSAL_CAPACITY:
                    raise
                await asyncio.sleep(0.05)


async def _compare(
    kind: str,
    client: AttachClient,
    references: Sequence[Reference],
    *,
    prefill: Sequence[WorkerProcess] = (),
    prefix_peers: Sequence[tuple[WorkerProcess, int]] = (),
    sampled_every: int = 0,
    tokens: int = OUTPUT_TOKENS,
) -> list[Answer]:
    """`sampled_every`: greedy if 0, else the stride of the references, each of which has a sampling of its own."""
    references = [replace(one, ids=one.ids[:tokens], gaps=one.gaps[:tokens]) for one in references]
    answers = await asyncio.gather(
        *(
            _run(
                client,
                reference.prompt,
                prefill=prefill,
                prefix_peers=prefix_peers,
                max_tokens=tokens,
                ignore_eos=True,
                **_sampling(index * sampled_every if sampled_every else None),
            )
            for index, reference in enumerate(references)
        )
    )
    compared = 0
    for answer, reference in zip(answers, references, strict=True):
        assert answer.finish == wire.Finish.FINISH_LENGTH, answer.error
        assert len(answer.token_ids) == tokens
        compared += assert_same(answer.token_ids, reference)
    report(kind, references, compared)
    return answers


def _sampling(index: int | None) -> dict[str, float]:
    if index is None:
        return {"temperature": 0.0}
    wanted = sampling_of(index)
    return {"temperature": wanted.temperature, "seed": wanted.seed, "choice": wanted.choice}


async def test_every_way_gives_the_reference_tokens(transport: str, every: int, folder: Path, tmp_path: Path) -> None:
    # Before anything runs: computing them keeps this process's event loop busy.
    scored = [greedy_references(folder)[8].prompt]
    greedy, sampled = greedy_references(folder)[::every], sampled_references(folder)[::every]
    turns = [turn for index, turn in zip(TURNS, second_turn_references(folder), strict=True) if index % every == 0]
    scores = scores_of_folder(folder, scored, 3) if transport == "tcp" else []
    async with Workers(tmp_path, *_REAL, "--transport", transport) as workers:
        prefill, decode, second_decode, second_prefill = await workers.start_all(
            ("--role", "prefill", "--kv-blocks", "400"),
            ("--role", "decode", "--kv-blocks", "400"),
            ("--role", "decode", "--kv-blocks", "400"),
            ("--role", "prefill", "--kv-blocks", "400"),
        )
        async with AttachClient(decode) as client, AttachClient(second_decode) as second_client:
            await client.wire_up(prefill, second_prefill)
            await second_client.wire_up(prefill)
            status = await decode.status()
            assert {link["transport"] for link in status["links"]} == {transport}

            cold = await _compare(f"{transport}, cold", client, greedy, prefill=[prefill])
            for answer, reference in zip(cold, greedy, strict=True):
                if len(reference.prompt) > BLOCK_TOKENS:
                    assert answer.usage is not None
                    assert answer.usage.prefill_worker_id == prefill.worker_id
                    assert answer.usage.pulled_blocks > 0

            on_prefill = await _compare(
                f"{transport}, prompt cached on P", second_client, greedy, prefill=[prefill], tokens=LATER_TOKENS
            )
            for answer, reference in zip(on_prefill, greedy, strict=True):
                if len(reference.prompt) > BLOCK_TOKENS:
                    assert answer.usage is not None
                    assert answer.usage.prefill_worker_id == prefill.worker_id
                    assert answer.usage.cached_tokens >= (len(reference.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

            if transport == "tcp":
                on_decode = await _compare(
                    f"{transport}, prompt cached on D", client, greedy, prefill=[prefill], tokens=LATER_TOKENS
                )
                for answer, reference in zip(on_decode, greedy, strict=True):
                    assert answer.usage is not None
                    assert answer.usage.cached_tokens >= (len(reference.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                    assert answer.usage.pulled_blocks == 0
                await _compare(f"{transport}, sampled", second_client, sampled, prefill=[prefill], sampled_every=every)
                for prompt, expected in zip(scored, scores, strict=True):
                    # All of it is cached on both; cold; and by the decode worker alone.
                    for prefills, salt in (([prefill], b""), ([prefill], b"cold"), ([], b"cold")):
                        told = await _run(
                            client, prompt, prefill=prefills, cache_salt=salt, max_tokens=2, prompt_logprobs=3
                        )
                        # In a thread: the workers count on hearing from this process.
                        await asyncio.to_thread(assert_scores, told_by_a_worker(told.prompt_logprobs), expected)
                        assert told.usage is not None
                        assert told.usage.cached_tokens == 0
                        assert told.usage.prefill_worker_id == (prefills[0].worker_id if prefills else "")

            pulled_before = await second_prefill.metric("antiphon_pulled_blocks_total")
            second = await _compare(
                f"{transport}, second turn, prefix pulled from D to P",
                client,
                turns,
                prefill=[second_prefill],
                prefix_peers=[(decode, 7)],
                tokens=LATER_TOKENS,
            )
            assert await second_prefill.metric("antiphon_pulled_blocks_total") > pulled_before
            for answer in second:
                assert answer.usage is not None
                assert answer.usage.prefill_worker_id == second_prefill.worker_id
                assert answer.usage.cached_tokens > 0
        for worker in (prefill, decode, second_decode, second_prefill):
            await worker.until_idle()


@pytest.mark.exhaustive  # tests/torch_engine/test_same_tokens.py has preemption in one process
async def test_preemption_on_the_decode_worker_changes_no_token(transport: str, folder: Path, tmp_path: Path) -> None:
    """A pool that holds the prompts of a few requests, but not their growth. Greedy over tcp, sampled over ucx."""
    is_sampled = transport == "ucx"
    references = sampled_references(folder) if is_sampled else greedy_references(folder)
    async with Workers(tmp_path, *_REAL, "--transport", transport, "--block-tokens", "16") as workers:
        prefill, decode = await workers.start_all(
            ("--role", "prefill", "--kv-blocks", "200"), ("--role", "decode", "--kv-blocks", "42")
        )
        async with AttachClient(decode) as client:
            await client.wire_up(prefill)
            await _compare(
                f"{transport}, preempted", client, references, prefill=[prefill], sampled_every=int(is_sampled)
            )
            assert await decode.metric("antiphon_engine_preemptions_total") > 0
        for worker in (prefill, decode):
            await worker.until_idle()


async def test_a_first_token_that_ends_the_request(transport: str, folder: Path, tmp_path: Path) -> None:
    """max_tokens 1, EOS, a stop id and a stop string, each on the token that the prefill worker samples."""
    reference = greedy_references(folder)[19]
    async with Workers(tmp_path, *_REAL, "--transport", transport, "--kv-blocks", "64") as workers:
        prefill, decode = await workers.start_all(("--role", "prefill"), ("--role", "decode"))
        async with AttachClient(decode) as client:
            await client.wire_up(prefill)
            card = await client.card()
            [eos] = card.eos_token_ids

            async def answer(salt: bytes, **options: object) -> Answer:
                # A salt of its own keeps each prompt cold, so that the prefill worker is asked.
                found = await _run(client, reference.prompt, prefill=[prefill], cache_salt=salt, **options)
                assert found.usage is not None
                assert found.usage.prefill_worker_id == prefill.worker_id
                await prefill.until_idle()
                await decode.until_idle()
                return found

            one = await answer(b"1", max_tokens=1)
            assert one.token_ids == list(reference.ids[:1])
            assert one.finish == wire.Finish.FINISH_LENGTH

            stopped = await answer(b"2", stop_token_ids=[reference.ids[0]])
            assert stopped.token_ids == list(reference.ids[:1])
            assert stopped.finish == wire.Finish.FINISH_STOP

            ended = await answer(b"3", logit_bias={eos: 100.0})
            assert ended.token_ids == [eos]
            assert ended.finish == wire.Finish.FINISH_STOP
            assert ended.text == ""

            assert one.text
            cut = await answer(b"4", stop=[one.text])
            assert cut.finish == wire.Finish.FINISH_STOP
            assert cut.text == ""
            assert cut.stop_reason == one.text
