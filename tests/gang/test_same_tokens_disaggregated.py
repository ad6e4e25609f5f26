"""Prefill and decode workers of different shapes, over `ucx` and `tcp`: one rank's tokens, and nothing computed twice.

Every rank reads its part of each block from the ranks that have it; one that went missing would be computed instead.
Six workers serve all pairs, each transport's side by side. A pair's link has one transport because one of the two
offers no other. Without --exhaustive: two workers, one of two ranks, over one transport.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from antiphon_engine.gang import RayCluster
from antiphon_engine.interface import Sampling, TokenLogprob
from antiphon_proto import worker_pb2 as wire

from tests.support.gang import descendants, until_gone
from tests.support.installed import has_nixl
from tests.support.same_tokens import Answered, Asked, answered_by_one_rank, asked_of_all_kinds, report_comparison
from tests.support.workers import Answer, AttachClient, WorkerProcess, Workers
from tests.torch_engine.parallel.tiny_models import BLOCK_TOKENS, CONFIGS, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

MODEL = "qwen3"
MAX_TOKENS = 16
KV_BLOCKS = 128
OPTIONS = ("--dtype", "float32", "--threads", "1", "--block-tokens", str(BLOCK_TOKENS), "--max-batch-tokens", "64")
OPTIONS += ("--kv-blocks", str(KV_BLOCKS), "--no-self-measure", "--lost-after-ms", "15000")

TRANSPORTS = ("ucx", "tcp") if has_nixl() else ("tcp",)
TENSOR_2, TENSOR_4, PIPELINE_2 = ("--tensor-parallel", "2"), ("--tensor-parallel", "4"), ("--pipeline-parallel", "2")

SHARED = {104: 64, 100: 64}
"""Of prompts of that length, what the one with 70 tokens before it has left in both caches."""
HELD_BLOCKS = (150 + MAX_TOKENS - 1) // BLOCK_TOKENS
"""Of the longest prompt with its answer: one more than of the prompt alone."""

PAIRS = ("tensor 2 to one rank", "one rank to tensor 2", "tensor 2 to tensor 4", "pipeline 2 to one rank")
WAYS = [
    pytest.param(
        transport, name, marks=() if transport == TRANSPORTS[0] and name in PAIRS[:2] else pytest.mark.exhaustive
    )
    for transport, name in itertools.product(TRANSPORTS, PAIRS)
]


@dataclasses.dataclass(frozen=True)
class Pair:
    prefill: WorkerProcess
    decode: WorkerProcess
    client: AttachClient


@dataclasses.dataclass(frozen=True)
class House:
    workers: Sequence[WorkerProcess]
    pairs: dict[tuple[str, str], Pair]
    """By transport and name."""
    ranks: int
    """Of all workers that have several."""
    first_turns: tuple[list[Asked], list[Answered]]
    second_turn: tuple[Asked, Answered]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(
    roomy_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> AsyncIterator[House]:
    folder = write_model(tmp_path_factory.mktemp("ranks") / "model", CONFIGS[MODEL])
    ray = await asyncio.to_thread(roomy_cluster.ensure, 1, print, threading.Event())
    ranks = ("--ray-address", ray.address, "--ray-token-file", ray.token_file)
    everything = bool(pytestconfig.getoption("exhaustive"))
    transports = TRANSPORTS if everything else TRANSPORTS[:1]
    large = (("--role", "prefill", *PIPELINE_2), ("--role", "decode", *TENSOR_4)) if everything else ()
    async with (
        Workers(tmp_path_factory.mktemp("workers"), str(folder), *OPTIONS) as workers,
        AsyncExitStack() as clients,
    ):
        starting = asyncio.create_task(
            workers.start_all(
                *(("--role", "both", "--transport", name, *TENSOR_2, *ranks) for name in transports),
                *(("--role", "both", "--transport", name) for name in transports),
                *((*role_and_shape, "--transport", "auto", *ranks) for role_and_shape in large),
            )
        )
        turns = await asyncio.to_thread(_expected, folder)
        started = await starting
        pairs = {}
        for name, tensor_2, alone in zip(transports, started, started[len(transports) :], strict=False):
            ends = [(tensor_2, alone), (alone, tensor_2)]
            if everything:
                pipeline_2, tensor_4 = started[-2:]
                ends += [(tensor_2, tensor_4), (pipeline_2, alone)]
            for pair, (prefill, decode) in zip(PAIRS, ends, strict=False):
                client = await clients.enter_async_context(AttachClient(decode))
                pairs[name, pair] = Pair(prefill, decode, client)
        yield House(started, pairs, 2 * len(transports) + (2 + 4 if everything else 0), *turns)


def _expected(folder: Path) -> tuple[tuple[list[Asked], list[Answered]], tuple[Asked, Answered]]:
    firsts = asked_of_all_kinds(MAX_TOKENS)
    answers = answered_by_one_rank(folder, firsts)
    longest = max(range(len(firsts)), key=lambda index: len(firsts[index].prompt))
    prompt = (*firsts[longest].prompt, *answers[longest].ids, *firsts[0].prompt, *firsts[1].prompt[:40])
    second = Asked(prompt, dataclasses.replace(firsts[longest].sampling, temperature=0.0))
    return (firsts, answers), (second, answered_by_one_rank(folder, [second])[0])


@pytest.mark.parametrize(("transport", "name"), WAYS)
async def test_a_pair_of_shapes_gives_the_tokens_of_one_rank(house: House, transport: str, name: str) -> None:
    pair, salt = house.pairs[transport, name], f"{transport} {name}".encode()
    await pair.client.wire_up(pair.prefill)
    assert await _transport(pair.decode, pair.prefill) == transport
    before = await _counts(pair.prefill), await _counts(pair.decode)

    # One by one, so that it is known what is found and what is pulled.
    requests, expected = house.first_turns
    answers = [await _run(pair, asked, salt) for asked in requests]
    _compare(f"{name} over {transport}", answers, expected)
    pulled = computed_in_prefill = computed_in_decode = 0
    for asked, answer in zip(requests, answers, strict=True):
        tokens, usage = len(asked.prompt), answer.usage
        assert usage is not None
        assert usage.cached_tokens == SHARED.get(tokens, 0)
        if tokens <= BLOCK_TOKENS:
            assert usage.prefill_worker_id == ""
            computed_in_decode += tokens
        else:
            assert usage.prefill_worker_id == pair.prefill.worker_id
            assert usage.pulled_blocks == (tokens - usage.cached_tokens) // BLOCK_TOKENS
            computed_in_prefill += tokens - usage.cached_tokens
            pulled += -(-(tokens - usage.cached_tokens) // BLOCK_TOKENS)  # the last one is not full
        computed_in_decode += MAX_TOKENS - 1
    prefill, decode = await _counts(pair.prefill) - before[0], await _counts(pair.decode) - before[1]
    assert prefill == Counts(computed_in_prefill, 0)
    assert decode == Counts(computed_in_decode, pulled)


@pytest.mark.parametrize(("transport", "name"), WAYS)
async def test_a_second_turn_is_read_the_other_way_too(house: House, transport: str, name: str) -> None:
    """What the decode worker has generated, the prefill worker reads from it."""
    pair, salt = house.pairs[transport, name], f"second turn, {transport} {name}".encode()
    requests, _ = house.first_turns
    asked, answered = house.second_turn
    await _run(pair, max(requests, key=lambda first: len(first.prompt)), salt)
    before = await _counts(pair.prefill), await _counts(pair.decode)
    answer = await _run(pair, asked, salt, prefix_peers=[(pair.decode, HELD_BLOCKS)])
    _compare(f"{name} over {transport}, second turn", [answer], [answered])
    usage, tokens = answer.usage, len(asked.prompt)
    assert usage is not None
    assert usage.cached_tokens == HELD_BLOCKS * BLOCK_TOKENS
    prefill, decode = await _counts(pair.prefill) - before[0], await _counts(pair.decode) - before[1]
    assert prefill == Counts(tokens - usage.cached_tokens, 1)
    assert decode == Counts(MAX_TOKENS - 1, -(-tokens // BLOCK_TOKENS) - HELD_BLOCKS)


async def test_nothing_is_left_behind(house: House, roomy_cluster: RayCluster) -> None:
    for worker in house.workers:
        status = await worker.until_idle()
        assert (status["integrity"], status["pins"]) == ("ok", 0)
    node = roomy_cluster.node_pid
    assert node is not None
    ranks = [process for process in descendants(node) if "RankProcess" in " ".join(process.cmdline())]
    helpers = [process for worker in house.workers for process in descendants(worker.process.pid)]
    assert len(ranks) == house.ranks
    assert await asyncio.gather(*(worker.terminate() for worker in house.workers)) == [0] * len(house.workers)
    until_gone([*ranks, *helpers])


async def _run(pair: Pair, asked: Asked, salt: bytes, **options: Any) -> Answer:
    wanted: Sampling = asked.sampling
    return await pair.client.run(
        pair.client.submission(
            asked.prompt,
            prefill=[pair.prefill],
            cache_salt=salt,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            presence_penalty=wanted.presence_penalty,
            frequency_penalty=wanted.frequency_penalty,
            repetition_penalty=wanted.repetition_penalty,
            seed=wanted.seed,
            max_tokens=wanted.max_tokens,
            ignore_eos=wanted.ignore_eos,
            **({} if wanted.logprobs is None else {"logprobs": wanted.logprobs}),
            **options,
        )
    )


def _compare(what: str, answers: Sequence[Answer], expected: Sequence[Answered]) -> None:
    compared = 0
    for answer, answered in zip(answers, expected, strict=True):
        assert answer.finish == wire.Finish.FINISH_LENGTH, answer.error
        logprobs = [
            TokenLogprob(one.token_id, one.logprob, tuple(zip(one.top_ids, one.top_logprobs, strict=True)))
            for one in answer.logprobs
        ]
        compared += answered.compare(answer.token_ids, logprobs)
    report_comparison(what, compared, expected)


async def _transport(worker: WorkerProcess, peer: WorkerProcess) -> str:
    [link] = [link for link in (await worker.status())["links"] if link["peer_worker_id"] == peer.worker_id]
    assert link["up"]
    return str(link["transport"])


@dataclasses.dataclass(frozen=True)
class Counts:
    """Of one worker, so far."""

    computed_tokens: float
    pulled_blocks: float

    def __sub__(self, before: Counts) -> Counts:
        return Counts(self.computed_tokens - before.computed_tokens, self.pulled_blocks - before.pulled_blocks)


async def _counts(worker: WorkerProcess) -> Counts:
    return Counts(
        await worker.metric("antiphon_engine_tokens_computed_total"),
        await worker.metric("antiphon_pulled_blocks_total"),
    )
