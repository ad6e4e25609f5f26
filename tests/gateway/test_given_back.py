"""A worker that gives answers back (it drains, or changes its role): they go on elsewhere, and it is no failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest
from antiphon_gateway.dispatch import MAX_MOVES
from antiphon_gateway.explain import OutcomeState
from antiphon_gateway.explain_document import Explanation
from antiphon_gateway.explain_text import happened
from antiphon_gateway.models import Model
from antiphon_kvtransfer.identity import chain_hashes, chain_root
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import (
    Behaviour,
    Connection,
    FakeWorker,
    answer_bytes,
    byte_card,
    token_ids_of_bytes,
    tokens,
)
from tests.support.gateway import RunningGateway, eventually, running_gateway

BODY: dict[str, Any] = {"model": "test-model", "prompt": "p" * 200, "max_tokens": 12, "seed": 3}
WHY = "worker-1 is draining"


def giving_back_after(count: int, *, stays: bool = False) -> Behaviour:
    """Goes on with `count` tokens, the first of them with usage, and gives the rest back. `stays`: for no reason."""

    async def behaviour(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        begin = len(submit.output_token_ids)
        await tokens(connection, submit, answer_bytes(submit)[begin : begin + count], finish=False, cached_tokens=64)
        worker.queue.draining = not stays
        connection.step(submit.ref, finish=pb.FINISH_MOVED, error=WHY, queue=worker.queue)

    return behaviour


async def to_the_end(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.accept(submit.ref)
    alphabet = token_ids_of_bytes()
    data = answer_bytes(submit)
    for position in range(len(submit.output_token_ids), len(data)):
        finish = pb.FINISH_LENGTH if position == len(data) - 1 else pb.FINISH_NONE
        connection.step(
            submit.ref, token_ids=[alphabet[data[position]]], text=chr(data[position]), finish=finish, usage=pb.Usage()
        )
        await asyncio.sleep(0)


def busy(worker_id: str, behaviour: Behaviour) -> FakeWorker:
    """One that is chosen only where there is no other."""
    worker = FakeWorker(worker_id=worker_id, behaviour=behaviour)
    worker.queue.waiting_tokens = 400
    return worker


async def ask(running: RunningGateway, **changes: Any) -> httpx.Response:
    headers = {"x-request-id": "asked"}
    return await running.client.post("/v1/completions", json={**BODY, **changes}, headers=headers)


def last_event(response: httpx.Response) -> Any:
    return json.loads(response.text.rstrip().split("\n\n")[-1].removeprefix("data: "))


def moves(running: RunningGateway) -> dict[str, float]:
    page = running.gateway.metrics.page().decode()
    return {reason: _sample(page, reason) for reason in ("drained", "lost", "failed")}


def _sample(page: str, reason: str) -> float:
    series = f'antiphon_gateway_moves_total{{reason="{reason}"}} '
    return next(float(line.removeprefix(series)) for line in page.splitlines() if line.startswith(series))


async def test_it_goes_on_elsewhere_and_its_blocks_are_pulled_from_where_they_are() -> None:
    giver, other = FakeWorker(worker_id="worker-1", behaviour=giving_back_after(5)), busy("other", to_the_end)
    async with running_gateway(giver, other) as running:
        response = await ask(running)
        answer = response.json()
        assert answer["choices"][0]["text"] == answer_bytes(giver.submits[0]).decode()
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        (submit,) = other.submits
        assert len(submit.output_token_ids) == 5
        assert submit.sampling == giver.submits[0].sampling
        # Of 200 + 5 tokens the last one has no KV yet: three full blocks of 64.
        assert [(peer.peer.worker_id, peer.blocks) for peer in submit.prefix_peers] == [("worker-1", 3)]
        assert moves(running) == {"drained": 1, "lost": 0, "failed": 0}
        assert running.metric("antiphon_gateway_retries_total") == 0
        assert running.metric("antiphon_gateway_workers_lost_total") == 0
        await eventually(lambda: running.at_rest)


async def test_the_explanation_shows_the_move_and_why() -> None:
    giver, other = FakeWorker(worker_id="worker-1", behaviour=giving_back_after(5)), busy("other", to_the_end)
    async with running_gateway(giver, other) as running:
        await ask(running)
        page = await running.client.get("/v1/antiphon/explain/asked")
        first, second = msgspec.json.decode(page.content, type=Explanation).choices[0].attempts
        assert (first.outcome.state, first.outcome.why, first.outcome.tokens) == (OutcomeState.MOVED, WHY, 5)
        assert f"5 tokens: {WHY}." in happened(first)
        assert (second.decision.decode, second.output_tokens) == ("other", 5)


async def test_before_the_first_token_it_is_a_request_like_any_other() -> None:
    giver, other = FakeWorker(worker_id="worker-1", behaviour=giving_back_after(0)), busy("other", to_the_end)
    async with running_gateway(giver, other) as running:
        assert (await ask(running)).status_code == 200
        assert not other.submits[0].output_token_ids
        assert not other.submits[0].prefix_peers
        assert moves(running)["drained"] == 1


async def test_an_answer_moves_a_bounded_number_of_times() -> None:
    workers = [FakeWorker(worker_id=f"w{number}", behaviour=giving_back_after(1, stays=True)) for number in range(2)]
    async with running_gateway(*workers) as running:
        response = await ask(running, stream=True, max_tokens=100)
        error = last_event(response)["error"]
        assert error["code"] == "moved_too_often"
        assert str(MAX_MOVES) in error["message"]
        assert sum(len(worker.submits) for worker in workers) == MAX_MOVES + 1
        assert moves(running)["drained"] == MAX_MOVES
        await eventually(lambda: running.at_rest)


async def test_where_nobody_can_go_on_the_stream_ends_with_a_clear_error() -> None:
    async with running_gateway(FakeWorker(worker_id="worker-1", behaviour=giving_back_after(5))) as running:
        response = await ask(running, stream=True)
        error = last_event(response)["error"]
        assert (error["code"], "[DONE]" in response.text) == ("answer_cut_off", False)
        assert WHY in error["message"]


@pytest.mark.parametrize("lost", [True, False])
async def test_log_probabilities_of_held_back_text_reach_whoever_goes_on(lost: bool) -> None:
    """A stop string's possible beginning is held back with its log-probabilities; the worker dies with both."""
    ids = token_ids_of_bytes()

    def told(byte: int) -> pb.TokenLogprob:
        return pb.TokenLogprob(token_id=ids[byte], logprob=-byte / 100)

    async def holding(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.step(submit.ref, token_ids=[ids[ord("a")]], text="a", logprobs=[told(ord("a"))])
        connection.step(submit.ref, token_ids=[ids[ord("S")]], held_logprobs=[told(ord("S"))])
        connection.step(submit.ref, token_ids=[ids[ord("T")]], held_logprobs=[told(ord("T"))])
        # The first of them can be sent after all, and another is held.
        connection.step(
            submit.ref, token_ids=[ids[ord("S")]], text="S", logprobs=[told(ord("S"))], held_logprobs=[told(ord("S"))]
        )
        if lost:
            connection.close()
        else:
            connection.step(submit.ref, finish=pb.FINISH_MOVED, error=WHY, queue=pb.QueueState(draining=True))

    async def ends(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        held = list(submit.held_logprobs)
        connection.step(submit.ref, text="TS", logprobs=held, finish=pb.FINISH_LENGTH, usage=pb.Usage())

    first, other = FakeWorker(worker_id="worker-1", behaviour=holding), busy("other", ends)
    async with running_gateway(first, other) as running:
        choice = (await ask(running, logprobs=0)).json()["choices"][0]
        assert choice["text"] == "aSTS"
        assert choice["logprobs"]["tokens"] == ["a", "S", "T", "S"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx([-0.97, -0.83, -0.84, -0.83])


async def test_an_answer_that_has_begun_is_not_refused_for_a_full_queue_and_waits_for_nobody() -> None:
    """New requests fill the queue; what a draining worker gives back is no new load."""
    given_back = asyncio.Event()

    async def gives_back_when_told(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        await tokens(connection, submit, answer_bytes(submit)[:5], finish=False)
        await given_back.wait()
        connection.step(submit.ref, finish=pb.FINISH_MOVED, error=WHY, queue=pb.QueueState(draining=True))

    async def full_for_new_ones(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        if submit.output_token_ids:
            await to_the_end(worker, connection, submit)
        else:
            connection.refuse(submit.ref, pb.REFUSAL_CAPACITY)

    giver = FakeWorker(worker_id="worker-1", behaviour=gives_back_when_told)
    other = busy("other", full_for_new_ones)
    async with running_gateway(giver, other, queue_size=2) as running:
        begun = asyncio.create_task(ask(running))
        await giver.until(lambda: bool(giver.submits))
        giver.behaviour = full_for_new_ones
        waiting = [asyncio.create_task(ask(running, seed=number)) for number in range(3)]
        await eventually(lambda: any(task.done() for task in waiting))  # one too many
        given_back.set()
        assert (await begun).json()["usage"]["completion_tokens"] == 12
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize(("prompt", "output"), [(0, 5), (10, 53), (10, 54), (64, 1), (64, 63), (64, 64), (200, 130)])
def test_what_goes_on_elsewhere_is_looked_for_by_prompt_and_output(prompt: int, output: int) -> None:
    card = byte_card()
    model = Model(card)
    ids: Sequence[int] = [(7 * number) % 250 for number in range(prompt + output)]
    made = model.prompt(list(ids[:prompt]), b"tenant")
    root = chain_root(
        model=card.model, revision=card.revision, adapter=card.adapter, kv_format=card.kv_format, salt=b"tenant"
    )
    assert model.chain_with(made, ids[prompt:], b"tenant") == tuple(chain_hashes(root, ids, card.block_tokens))
