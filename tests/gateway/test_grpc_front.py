"""The gRPC front by itself: who may call, what calls carry beside their message, how they fail and how they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from antiphon_gateway import errors
from antiphon_gateway.grpc_front import from_json
from antiphon_gateway.grpc_front.failures import plain, status_of, trailing
from antiphon_proto import inference_pb2 as api
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Behaviour, Connection, FakeWorker, accept_and_hang, byte_card, endless
from tests.support.gateway import eventually
from tests.support.grpc_calls import LAST_WORDS_S, RunningFront, failure_of, message_of, rest_of, running_front, told_by

CHAT: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
LONG = {**CHAT, "max_tokens": 10**6}
CODE = grpc.StatusCode


def chat(**changes: Any) -> api.ChatCompletionRequest:
    made: api.ChatCompletionRequest = message_of(api.ChatCompletionRequest, {**CHAT, **changes})
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[RunningFront]:
    async with running_front(FakeWorker()) as front:
        yield front


def test_a_field_that_a_message_lacks_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """Better than no answer at all; the twin's tests find it."""
    token = {"token": "a", "logprob": -0.5, "bytes": [97, 255], "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [token]}, "finish_reason": None}
    event = json.dumps({"id": "c", "object": "o", "model": "m", "choices": [choice], "usage": None, "sparkle": [1]})
    made = from_json.chat_chunk(event.encode())
    assert isinstance(made, api.ChatCompletionChunk)
    assert made.choices[0].delta.content == "a"
    assert made.choices[0].logprobs.content[0].bytes == b"a\xff"
    assert "sparkle" in caplog.text


async def refuse_for_want_of_room(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.refuse(submit.ref, pb.REFUSAL_CAPACITY)


async def break_in_the_middle(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.accept(submit.ref)
    connection.step(submit.ref, token_ids=[97], text="a")
    await worker.until(lambda: worker.silent)
    connection.close()


# ------------------------------------------------------------------ metadata


async def test_metadata_are_http_s_headers() -> None:
    async with running_front(FakeWorker()) as front:
        call = front.stub.ChatCompletion(
            chat(extra='{"foo": 1, "user": "u"}'), metadata=(("x-request-id", "mine-1"), ("x-session-id", "s"))
        )
        await call
        told = dict(await call.initial_metadata())
        assert told["x-request-id"] == "mine-1"
        assert told["x-antiphon-ignored"] == "foo"
        assert told["x-antiphon-gateway"] == "gateway-test"
        assert told["x-antiphon-route"].startswith("decode=worker-1;")
        page = (await front.running.client.get("/v1/antiphon/explain/mine-1")).json()
        assert page["path"] == "/v1/chat/completions"
        streamed = front.stub.StreamChatCompletion(chat())
        assert [chunk async for chunk in streamed]
        assert dict(await streamed.initial_metadata())["x-request-id"].startswith("req-")


async def test_wishes_are_read_from_metadata_and_wrong_ones_are_named() -> None:
    async with running_front(FakeWorker()) as front:
        for metadata, sentence in (
            (("x-antiphon-priority", "urgent"), "x-antiphon-priority must be"),
            (("x-request-timeout-ms", "soon"), "x-request-timeout-ms must be"),
        ):
            error = await failure_of(front.stub.ChatCompletion(chat(), metadata=(metadata,), timeout=10))
            assert error.code() is CODE.INVALID_ARGUMENT
            assert sentence in str(error.details())


async def test_a_trace_is_continued_to_the_worker() -> None:
    worker = FakeWorker()
    async with running_front(worker) as front:
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        await front.stub.ChatCompletion(chat(), metadata=(("traceparent", f"00-{trace}-00f067aa0ba902b7-01"),))
        assert trace in worker.submits[-1].traceparent


async def test_a_key_is_asked_for_before_anything_is_read() -> None:
    async with running_front(FakeWorker(), keys={"k1": "t1"}) as front:
        stub = front.stub
        for call in (
            stub.ChatCompletion(chat()),
            stub.StreamCompletion(api.CompletionRequest(model="test-model")),
            stub.ListModels(api.ListModelsRequest()),
            stub.GetModel(api.GetModelRequest()),
            stub.Tokenize(api.TokenizeRequest(), metadata=(("authorization", "Bearer k2"),)),
        ):
            error = await failure_of(call)
            assert error.code() is CODE.UNAUTHENTICATED
            assert told_by(error)["x-antiphon-error-code"] == "invalid_api_key"
        for key in (("authorization", "Bearer k1"), ("x-api-key", "k1")):
            assert (await stub.GetModel(api.GetModelRequest(model="test-model"), metadata=(key,))).id == "test-model"
            assert (await stub.ChatCompletion(chat(), metadata=(key,))).choices


# ------------------------------------------------------------------ errors


def test_every_error_has_a_status_and_its_words() -> None:
    made = [
        (errors.invalid("no", param="top_p", code="out_of_range"), CODE.INVALID_ARGUMENT),
        (errors.context_too_long(limit=1, prompt_tokens=1, max_tokens=1, param="messages"), CODE.INVALID_ARGUMENT),
        (errors.unauthorized(), CODE.UNAUTHENTICATED),
        (errors.model_not_found("m"), CODE.NOT_FOUND),
        (errors.body_timeout(1.0), CODE.DEADLINE_EXCEEDED),
        (errors.body_too_large(1), CODE.RESOURCE_EXHAUSTED),
        (errors.queue_full(1, retry_after_s=7), CODE.RESOURCE_EXHAUSTED),
        (errors.too_many_held("m", 1, retry_after_s=7), CODE.RESOURCE_EXHAUSTED),
        (errors.deadline_unreachable(2.0, 1.0, retry_after_s=7), CODE.RESOURCE_EXHAUSTED),
        (errors.internal(), CODE.INTERNAL),
        (errors.cut_off("w"), CODE.UNAVAILABLE),
        (errors.moved_too_often(8, "w"), CODE.UNAVAILABLE),
        (errors.worker_failed("w", tokens_sent=True), CODE.UNAVAILABLE),
        (errors.worker_failed("w", tokens_sent=False), CODE.UNAVAILABLE),
        (errors.no_worker("m"), CODE.UNAVAILABLE),
        (errors.queue_timeout(1.0), CODE.UNAVAILABLE),
        (errors.draining(), CODE.UNAVAILABLE),
        (errors.busy_with_grammars(1.0), CODE.UNAVAILABLE),
        (errors.stalled(1.0), CODE.DEADLINE_EXCEEDED),
        (errors.client_too_slow(), CODE.RESOURCE_EXHAUSTED),
    ]
    for error, status in made:
        told = dict(trailing(error))
        assert status_of(error) is status, error.code
        assert told.get("x-antiphon-error-code") == error.code
        assert told.get("x-antiphon-error-param") == error.param
        assert told["x-antiphon-error-type"] == error.type
        if error.retry_after_s is not None:
            assert told["retry-after"] == str(error.retry_after_s)
            assert told["grpc-retry-pushback-ms"] == f"{error.retry_after_s}000"


def test_what_a_client_said_cannot_break_the_metadata() -> None:
    for text in ("a\nb", "\u00e9\u4e2d", "a" * 10_000, "\x00\x7f"):
        assert plain(text).isascii()
        assert plain(text).isprintable()
        assert len(plain(text)) < 3000


async def test_errors_before_the_first_token_say_what_http_says() -> None:
    async with running_front(FakeWorker(byte_card(context=1000))) as front:
        for changes in (
            {"temperature": 3.0},
            {"top_logprobs": 2},
            {"max_tokens": 2000},
            {"model": "nobody's"},
            {"stop": ["a", "b", "c", "d", "e"]},
            {"messages": [{"role": "nobody", "content": "x"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"response_format": {"type": "json_schema"}},
            {"tool_choice": "required"},
            {"suffix_of_nobody": 1, "n": 0},
            {"best_of": 3},
        ):
            http = await front.running.client.post("/v1/chat/completions", json={**CHAT, **changes})
            said = http.json()["error"]
            for method in (front.stub.ChatCompletion, front.stub.StreamChatCompletion):
                error = await failure_of(method(chat(**changes)))
                told = told_by(error)
                assert error.code() is (CODE.NOT_FOUND if http.status_code == 404 else CODE.INVALID_ARGUMENT)
                assert error.details() == said["message"]
                assert told["x-antiphon-error-type"] == said["type"]
                assert told.get("x-antiphon-error-code") == said["code"]
                assert told.get("x-antiphon-error-param") == said["param"]
                assert told["x-request-id"].startswith("req-")
        assert front.running.at_rest


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": float("nan")}, "temperature", "out_of_range"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias", "out_of_range"),
        ({"chat_template_kwargs": "{'a': 1}"}, "chat_template_kwargs", "invalid_json"),
        ({"chat_template_kwargs": '{"a": 1}, "n": 5'}, "chat_template_kwargs", "invalid_json"),
        ({"chat_template_kwargs": "[" * 5000}, "chat_template_kwargs", "invalid_json"),
        ({"chat_template_kwargs": "[]"}, "chat_template_kwargs", "invalid_type"),
        ({"tools": [{"function": {"name": "f", "parameters": "{"}}]}, "tools[0].function.parameters", "invalid_json"),
        ({"extra": "[]"}, "extra", "invalid_type"),
        ({"extra": '{"temperature": 1}'}, "extra", None),
        ({"extra": '{"stream": true}'}, "extra", None),
        ({"messages": [{"role": "user", "extra": '{"role": "system"}'}]}, "messages[0].extra", None),
        ({"messages": [{"role": "user", "content": "a", "content_parts": [{}]}]}, "messages[0].content", None),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_only_a_message_can_get_wrong(
    shared: RunningFront, fields: dict[str, Any], param: str, code: str | None
) -> None:
    request = chat()
    if "messages" in fields:
        del request.messages[:]
    request.MergeFrom(api.ChatCompletionRequest(**fields))
    error = await failure_of(shared.stub.ChatCompletion(request))
    assert error.code() is CODE.INVALID_ARGUMENT
    assert (told_by(error)["x-antiphon-error-param"], told_by(error).get("x-antiphon-error-code")) == (param, code)


@pytest.mark.asyncio(loop_scope="module")
async def test_fields_of_a_newer_client_are_named_as_ignored(shared: RunningFront) -> None:
    newer = b"\xa0\x3f\x01"  # the field 1012, with the number 1
    for name, kind, request in (
        ("ChatCompletion", api.ChatCompletionResponse, chat()),
        ("Completion", api.CompletionResponse, api.CompletionRequest(model="test-model", prompt=[{"text": "a"}])),
    ):
        raw: Any = shared.channel.unary_unary(f"/antiphon.v1.Inference/{name}", response_deserializer=kind.FromString)
        call = raw(request.SerializeToString() + newer)
        assert (await call).choices
        assert dict(await call.initial_metadata())["x-antiphon-ignored"] == "field_1012"


async def test_a_message_that_is_none_and_one_that_is_too_large() -> None:
    async with running_front(FakeWorker(), max_body_bytes=10_000) as front:
        raw: Any = front.channel.unary_unary("/antiphon.v1.Inference/ChatCompletion")
        for junk in (b"\xff\xff\xff", b"\x0a\x02\xff\xfe"):
            error = await failure_of(raw(junk))
            assert error.code() is CODE.INVALID_ARGUMENT
            assert "antiphon.v1.ChatCompletionRequest" in str(error.details())
        for large in ("a" * 20_000, "\n" * 6_000):
            error = await failure_of(front.stub.ChatCompletion(chat(messages=[{"role": "user", "content": large}])))
            assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert told_by(error)["x-antiphon-error-code"] == "request_too_large"
        assert (await front.stub.ChatCompletion(chat())).choices


async def test_compressed_messages_are_refused_as_http_refuses_them() -> None:
    async with running_front(FakeWorker(), max_body_bytes=100_000) as front:
        bomb = chat(messages=[{"role": "user", "content": "a" * 90_000}])
        error = await failure_of(front.stub.ChatCompletion(bomb, compression=grpc.Compression.Gzip))
        assert error.code() is CODE.UNIMPLEMENTED
        await eventually(lambda: front.running.at_rest)


async def test_a_call_without_its_message_ends_in_time() -> None:
    async with running_front(FakeWorker(), body_timeout_s=0.1) as front:
        call: Any = front.channel.stream_unary("/antiphon.v1.Inference/ChatCompletion")()
        error = await failure_of(call)
        assert error.code() is CODE.DEADLINE_EXCEEDED
        assert told_by(error)["x-antiphon-error-code"] == "request_timeout"


async def test_a_stream_that_fails_later_ends_with_the_status() -> None:
    worker = FakeWorker(behaviour=break_in_the_middle)
    async with running_front(worker) as front:
        call = front.stub.StreamChatCompletion(chat())
        chunks = [await call.read(), await call.read()]
        assert chunks[1].choices[0].delta.content == "a"
        worker.silent = True
        async with worker.changed:
            worker.changed.notify_all()
        error = await failure_of(call)
        assert error.code() is CODE.UNAVAILABLE
        assert told_by(error)["x-antiphon-error-code"] == "worker_failed"
        assert "in the middle of the answer" in str(error.details())
        await eventually(lambda: front.running.at_rest)


async def test_a_full_queue_says_when_to_come_again() -> None:
    async with running_front(FakeWorker(behaviour=refuse_for_want_of_room), queue_size=1) as front:
        waiting = front.stub.ChatCompletion(chat())
        await eventually(lambda: front.running.gateway.dispatcher.waiting == 1)
        error = await failure_of(front.stub.ChatCompletion(chat()))
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert int(told_by(error)["retry-after"]) >= 1
        waiting.cancel()
        await eventually(lambda: front.running.at_rest)


# ------------------------------------------------------------------ clients that go


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("behaviour", [accept_and_hang, endless, refuse_for_want_of_room])
async def test_a_call_that_is_cancelled_frees_everything(behaviour: Behaviour, stream: bool) -> None:
    """While queued, before the first token, and later: as of a client of HTTP that goes away."""
    worker = FakeWorker(behaviour=behaviour)
    async with running_front(worker) as front:
        call = (front.stub.StreamChatCompletion if stream else front.stub.ChatCompletion)(chat(**LONG))
        if behaviour is refuse_for_want_of_room:
            await eventually(lambda: front.running.gateway.dispatcher.waiting == 1)
        else:
            await worker.until(lambda: worker.running == 1)
        if behaviour is endless and stream:
            await call.read()
        call.cancel()
        await eventually(lambda: front.running.at_rest)
        await worker.until(lambda: worker.running == 0)
        assert front.running.metric("antiphon_gateway_cancelled_total") == 1
        assert front.running.metric("antiphon_gateway_requests_total") == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_the_call_s_deadline_is_the_request_s(stream: bool) -> None:
    worker = FakeWorker(behaviour=endless)
    async with running_front(worker) as front:
        method = front.stub.StreamChatCompletion if stream else front.stub.ChatCompletion
        error = await failure_of(method(chat(**LONG), timeout=0.5))
        assert error.code() is CODE.DEADLINE_EXCEEDED
        await eventually(lambda: front.running.at_rest)
        await worker.until(lambda: worker.running == 0)


async def test_a_deadline_that_cannot_be_kept_is_refused_at_once() -> None:
    """The gateway knows of the call's deadline what it knows of x-request-timeout-ms."""
    worker = FakeWorker(behaviour=refuse_for_want_of_room)
    worker.queue = pb.QueueState(free_blocks=1000, total_blocks=1000)
    async with running_front(worker) as front:
        call = front.stub.ChatCompletion(chat(), timeout=30.0, metadata=(("x-request-timeout-ms", "90000"),))
        await eventually(lambda: bool(front.running.gateway.generation.flights))
        (flight,) = front.running.gateway.generation.flights
        assert 25.0 < (flight.ticket.wishes.timeout_s or 0.0) <= 30.0
        sooner = front.stub.ChatCompletion(chat(), timeout=30.0, metadata=(("x-request-timeout-ms", "20000"),))
        await eventually(lambda: len(front.running.gateway.generation.flights) == 2)
        assert {flight.ticket.wishes.timeout_s for flight in front.running.gateway.generation.flights} >= {20.0}
        call.cancel()
        sooner.cancel()
        await eventually(lambda: front.running.at_rest)


# ------------------------------------------------------------------ clients that do not read


async def endless_big(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.accept(submit.ref)
    while True:
        connection.step(submit.ref, token_ids=[97], text="a" * 20_000)
        await asyncio.sleep(0.001)


async def test_a_slow_client_is_bounded_by_itself() -> None:
    """What it does not read is cut off, with a status; other calls on the same connection go on meanwhile."""
    worker = FakeWorker(behaviour=endless_big)
    async with running_front(worker, stream_buffer_steps=50) as front:
        call = front.stub.StreamChatCompletion(chat(**LONG))
        await worker.until(lambda: len(worker.cancelled) == 1, 20.0)
        worker.behaviour = FakeWorker().behaviour
        assert (await front.stub.ChatCompletion(chat())).choices
        error = await failure_of(call)
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert told_by(error)["x-antiphon-error-code"] == "client_too_slow"
        assert front.running.metric("antiphon_gateway_slow_clients_total") == 1
        await eventually(lambda: front.running.at_rest)


async def test_a_client_that_takes_nothing_is_given_up() -> None:
    worker = FakeWorker(behaviour=endless_big)
    async with running_front(worker, stream_buffer_steps=20, client_timeout_s=0.2) as front:
        call = front.stub.StreamChatCompletion(chat(**LONG))
        await worker.until(lambda: len(worker.submits) == 1)
        await eventually(lambda: bool(front.running.gateway.generation.flights))
        await eventually(lambda: front.running.at_rest, 20.0)
        await worker.until(lambda: worker.running == 0)
        # What is left of it is the status, behind what it has not read.
        error = await failure_of(call)
        assert error.code() is CODE.RESOURCE_EXHAUSTED


async def test_a_client_that_reads_late_gets_everything_in_order() -> None:
    steps = 80

    async def numbered(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        for number in range(steps):
            finish = pb.FINISH_STOP if number == steps - 1 else pb.FINISH_NONE
            connection.step(submit.ref, token_ids=[97], text=f"<{number}>" + "a" * 50_000, finish=finish)
            await asyncio.sleep(0)

    async with running_front(FakeWorker(behaviour=numbered), stream_buffer_steps=steps) as front:
        call = front.stub.StreamChatCompletion(chat(**LONG))
        await call.read()
        await eventually(lambda: any(flight.writing_since for flight in front.running.gateway.generation.flights))
        texts = [chunk.choices[0].delta.content for chunk in await rest_of(call)]
        assert [text.split(">")[0] for text in texts if text] == [f"<{number}" for number in range(steps)]
        await eventually(lambda: front.running.at_rest)


# ------------------------------------------------------------------ the end


class Gate:
    """Answers with a token, and with the rest when it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.step(submit.ref, token_ids=[97], text="a")
        await self.open.wait()
        connection.step(submit.ref, token_ids=[97], text="b", finish=pb.FINISH_STOP)


async def begun(front: RunningFront, worker: FakeWorker) -> Any:
    call = front.stub.StreamChatCompletion(chat())
    await call.read()
    await worker.until(lambda: worker.running == 1)
    return call


async def test_while_draining_new_calls_go_elsewhere_and_running_ones_end_well() -> None:
    gate = Gate()
    worker = FakeWorker(behaviour=gate)
    async with running_front(worker) as front:
        call = await begun(front, worker)
        front.running.gateway.drain()
        error = await failure_of(front.stub.ChatCompletion(chat()))
        assert error.code() is CODE.UNAVAILABLE
        assert told_by(error)["x-antiphon-error-code"] == "draining"
        assert told_by(error)["retry-after"] == "1"
        gate.open.set()
        await front.running.gateway.drained()
        await front.front.stop()
        assert "".join(chunk.choices[0].delta.content for chunk in await rest_of(call)) == "ab"


async def test_what_does_not_end_in_time_ends_with_a_status() -> None:
    worker = FakeWorker(behaviour=Gate())
    async with running_front(worker) as front:
        call = await begun(front, worker)
        front.running.gateway.drain()
        front.running.gateway.end_all()
        async with asyncio.timeout(LAST_WORDS_S + 10):
            await front.front.stop()
        error = await failure_of(call)
        assert error.code() is CODE.UNAVAILABLE
        assert told_by(error)["x-antiphon-error-code"] == "draining"
        await eventually(lambda: front.running.at_rest)


async def test_a_front_that_stops_leaves_no_call_behind() -> None:
    """Also one that nobody ended: it is cancelled, and its request with it."""
    worker = FakeWorker(behaviour=accept_and_hang)
    async with running_front(worker) as front:
        front.front._last_words_s = 0.1
        call = front.stub.ChatCompletion(chat())
        await worker.until(lambda: worker.running == 1)
        await front.front.stop()
        assert (await failure_of(call)).code() in (CODE.CANCELLED, CODE.UNAVAILABLE)
        await eventually(lambda: front.running.at_rest)
        await worker.until(lambda: worker.running == 0)
