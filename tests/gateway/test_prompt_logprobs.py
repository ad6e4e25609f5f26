"""Log-probabilities of prompts as clients get them, limits on what is sampled as workers get them; and that neither is
told twice, or lost, where a worker is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from antiphon_gateway.rare_sampling import MAX_PROMPT_SCORES
from antiphon_gateway.schema import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORDS
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import (
    Behaviour,
    Connection,
    FakeWorker,
    answer_bytes,
    generate,
    prompt_scores,
    token_ids_of_bytes,
    tokens,
)
from tests.support.gateway import RunningGateway, eventually, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "one two"
COMPLETION: dict[str, Any] = {"model": "test-model", "prompt": TEXT, "max_tokens": 4, "seed": 5}
CHAT: dict[str, Any] = {
    "model": "test-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 5
}  # fmt: skip
IDS = [token_ids_of_bytes()[byte] for byte in TEXT.encode()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> FakeWorker:
    return FakeWorker()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(worker: FakeWorker) -> AsyncIterator[RunningGateway]:
    async with running_gateway(worker) as gateway:
        yield gateway


async def ask(running: RunningGateway, body: dict[str, Any], **changes: Any) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return await running.client.post(path, json={**body, **changes})


async def answer(running: RunningGateway, body: dict[str, Any], **changes: Any) -> Any:
    response = await ask(running, body, **changes)
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(running: RunningGateway, body: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    response = await ask(running, body, stream=True, **changes)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def expected_entries(ids: list[int], top: int) -> list[dict[str, Any] | None]:
    """As vLLM tells what the double says (ids and numbers; texts are looked at elsewhere)."""
    entries: list[dict[str, Any] | None] = [None]
    for place, token_id in enumerate(ids[1:], start=1):
        best = {str((token_id + step) % 256): (-0.125 * step, step) for step in range(1, top + 1)}
        entries.append({str(token_id): (-place / 8, top + place), **best})
    return entries


def numbers(entries: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    return [
        None if entry is None else {key: (value["logprob"], value["rank"]) for key, value in entry.items()}
        for entry in entries
    ]


# ------------------------------------------------------------------ prompt_logprobs


@pytest.mark.parametrize("top", [0, 2])
async def test_completions_tell_them_in_each_choice_and_one_choice_computes_them(
    running: RunningGateway, worker: FakeWorker, top: int
) -> None:
    before = len(worker.submits)
    told = await answer(running, COMPLETION, prompt_logprobs=top, n=3)
    plain = await answer(running, COMPLETION, n=3)
    for choice, other in zip(told["choices"], plain["choices"], strict=True):
        assert numbers(choice.pop("prompt_logprobs")) == expected_entries(IDS, top)
        assert choice == other
    wanted = [submit.sampling.HasField("prompt_logprobs") for submit in worker.submits[before : before + 3]]
    assert sorted(wanted) == [False, False, True]


async def test_tokens_have_their_texts(running: RunningGateway) -> None:
    told = await answer(running, COMPLETION, prompt_logprobs=0)
    entries = told["choices"][0]["prompt_logprobs"][1:]
    assert "".join(value["decoded_token"] for entry in entries for value in entry.values()) == TEXT[1:]


async def test_a_chat_tells_them_once(running: RunningGateway, worker: FakeWorker) -> None:
    told = await answer(running, CHAT, prompt_logprobs=1, n=2, logprobs=True)
    entries = numbers(told.pop("prompt_logprobs"))
    assert entries == expected_entries(list(worker.submits[-1].prompt_token_ids), 1)
    assert all("prompt_logprobs" not in choice for choice in told["choices"])


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True, "stream_options": {"continuous_usage_stats": True}}])
async def test_streams_tell_them_in_the_first_chunk_of_the_first_choice(
    running: RunningGateway, worker: FakeWorker, more: dict[str, Any]
) -> None:
    of_text = await chunks(running, COMPLETION, prompt_logprobs=1, **more)
    first, *rest = [chunk["choices"][0] for chunk in of_text]
    assert numbers(first["prompt_logprobs"]) == expected_entries(IDS, 1)
    assert all("prompt_logprobs" not in choice for choice in rest)
    of_chat = await chunks(running, CHAT, prompt_logprobs=1, n=2, **more)
    ids = list(worker.submits[-1].prompt_token_ids)
    [told] = [chunk["prompt_logprobs"] for chunk in of_chat if "prompt_logprobs" in chunk]
    assert numbers(told) == expected_entries(ids, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_with_max_tokens_0_a_worker_is_asked_for_the_prompt_alone(running: RunningGateway, stream: bool) -> None:
    body = {**COMPLETION, "max_tokens": 0, "prompt_logprobs": 1}
    if stream:
        [choice] = [chunk["choices"][0] for chunk in await chunks(running, body)]
    else:
        [choice] = (await answer(running, body))["choices"]
    assert numbers(choice["prompt_logprobs"]) == expected_entries(IDS, 1)
    assert (choice["text"], choice["finish_reason"]) == ("", "length")


async def test_a_list_of_prompts_has_each_ones_own(running: RunningGateway) -> None:
    told = await answer(running, COMPLETION, prompt=[TEXT, "x"], prompt_logprobs=0, n=2)
    found = [numbers(choice["prompt_logprobs"]) for choice in told["choices"]]
    assert found == [expected_entries(IDS, 0)] * 2 + [[None]] * 2


# ------------------------------------------------------------------ echo with logprobs


async def test_echo_tells_the_prompts_tokens_before_the_answers(running: RunningGateway) -> None:
    told = await answer(running, COMPLETION, echo=True, logprobs=1)
    plain = await answer(running, COMPLETION, logprobs=1)
    [choice], [other] = told["choices"], plain["choices"]
    text, logprobs, behind = other["text"], choice["logprobs"], other["logprobs"]
    assert choice["text"] == TEXT + text
    assert logprobs["tokens"] == [*TEXT, *behind["tokens"]]
    own = [-place / 8 for place in range(1, len(TEXT))]
    assert logprobs["token_logprobs"] == [None, *own, *behind["token_logprobs"]]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][len(TEXT) :] == behind["top_logprobs"]
    assert logprobs["text_offset"] == list(range(len(TEXT) + len(text)))


async def test_echo_with_max_tokens_0_tells_the_prompt_alone(running: RunningGateway) -> None:
    """As evaluation harnesses ask: a list of prompts as token ids."""
    told = await answer(running, COMPLETION, prompt=[IDS, IDS[:3]], max_tokens=0, echo=True, logprobs=0)
    for choice, length in zip(told["choices"], (len(IDS), 3), strict=True):
        assert choice["text"] == TEXT[:length]
        assert choice["logprobs"]["tokens"] == list(TEXT[:length])
        assert choice["logprobs"]["token_logprobs"] == [None, *[-place / 8 for place in range(1, length)]]
        assert choice["finish_reason"] == "length"
    assert told["usage"]["completion_tokens"] == 0


async def test_a_streamed_echo_is_the_whole_ones(running: RunningGateway) -> None:
    body = {**COMPLETION, "echo": True, "logprobs": 1}
    whole = (await answer(running, body))["choices"][0]
    told = [chunk["choices"][0] for chunk in await chunks(running, body)]
    assert "".join(choice["text"] for choice in told) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        lists = [choice["logprobs"][name] for choice in told if choice["logprobs"] is not None]
        assert [item for one in lists for item in one] == whole["logprobs"][name]


# ------------------------------------------------------------------ limits


async def test_words_and_ids_go_to_the_worker(running: RunningGateway, worker: FakeWorker) -> None:
    await answer(running, COMPLETION, allowed_token_ids=[9, 3, 9], bad_words=["ab", " ab"])
    sampling = worker.submits[-1].sampling
    letters = [token_ids_of_bytes()[byte] for byte in b" ab"]
    assert list(sampling.allowed_token_ids) == [3, 9]
    assert [list(word.ids) for word in sampling.bad_words] == [letters[1:], letters]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [0] * (MAX_ALLOWED_TOKEN_IDS + 1)}, "allowed_token_ids"),
        ({"allowed_token_ids": "ab"}, "allowed_token_ids"),
        ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["a" * 65]}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt": [[5] * 2000] * 2, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [[5] * 2000] * 2, "echo": True, "logprobs": 20}, "logprobs"),
    ],
)
async def test_what_is_out_of_bounds_is_refused_by_name(
    running: RunningGateway, changes: dict[str, Any], param: str
) -> None:
    assert MAX_PROMPT_SCORES < 4000 * 21
    raw = json.dumps({**COMPLETION, **changes}).encode()
    response = await running.client.post("/v1/completions", content=raw)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


async def test_where_nothing_is_left_to_sample_the_client_is_told_at_once() -> None:
    async def nothing(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.step(submit.ref, finish=pb.FINISH_ERROR, error="no token may be sampled: because")

    failing = FakeWorker(behaviour=nothing)
    async with running_gateway(failing, FakeWorker(worker_id="other", behaviour=nothing)) as running:
        response = await ask(running, COMPLETION, allowed_token_ids=[3], bad_words=["a"])
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "nothing_left_to_sample"
        assert running.metric("antiphon_gateway_retries_total") == 0


# ------------------------------------------------------------------ moves


def lost_after(scores: int, output: int) -> Behaviour:
    """Tells so many of the prompt's tokens and generates so many, then gives the request back."""

    async def behaviour(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        told = prompt_scores(submit)[:scores]
        for score in told:
            connection.step(submit.ref, prompt_logprobs=[score])
            await asyncio.sleep(0)
        if output:
            await tokens(connection, submit, answer_bytes(submit)[:output], finish=False)
        worker.queue.draining = True
        connection.step(submit.ref, finish=pb.FINISH_MOVED, error="it drains", queue=worker.queue)

    return behaviour


async def go_on(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    if submit.output_token_ids:
        connection.accept(submit.ref)
        connection.step(submit.ref, text="!", finish=pb.FINISH_LENGTH)
    else:
        await generate(worker, connection, submit)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("scores", "output", "asked_again"),
    [(0, 0, True), (3, 0, True), (len(IDS) - 1, 0, False), (len(IDS) - 1, 2, False)],
)
async def test_a_worker_that_is_lost_in_the_middle_costs_and_doubles_none(
    scores: int, output: int, asked_again: bool, stream: bool
) -> None:
    first, second = FakeWorker(worker_id="first", behaviour=lost_after(scores, output)), FakeWorker(behaviour=go_on)
    second.queue.waiting_tokens = 400
    async with running_gateway(first, second) as running:
        if stream:
            told = (await chunks(running, COMPLETION, prompt_logprobs=1))[0]["choices"][0]
        else:
            [told] = (await answer(running, COMPLETION, prompt_logprobs=1))["choices"]
        assert numbers(told["prompt_logprobs"]) == expected_entries(IDS, 1)
        [submit] = second.submits
        assert submit.sampling.HasField("prompt_logprobs") is asked_again
        await eventually(lambda: running.at_rest)
