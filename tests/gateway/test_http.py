"""Paths, bodies, parameters, keys and small pages."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from antiphon_gateway.auth import ApiKeys, ApiKeysError, cache_salt
from antiphon_proto import worker_pb2 as pb
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.fake_worker import FakeWorker, answer_bytes, byte_card, byte_tokenizer, tokens
from tests.support.gateway import RunningGateway, eventually, running_gateway

CHAT: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
COMPLETION: dict[str, Any] = {"model": "test-model", "prompt": "hello", "max_tokens": 4}


async def test_paths_and_methods_that_are_not_there_are_said_in_the_same_shape() -> None:
    async with running_gateway(FakeWorker()) as running:
        response = await running.client.get("/v1/nothing")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
        response = await running.client.get("/v1/chat/completions")
        assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
        assert response.headers["allow"] == "POST"
        assert (await running.client.post("/health")).status_code == 405


async def test_models() -> None:
    async with running_gateway(FakeWorker(byte_card("maker/model"))) as running:
        (model,) = (await running.client.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"]) == ("maker/model", "model")
        assert (await running.client.get("/v1/models/maker/model")).json() == model
        response = await running.client.get("/v1/models/other")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        response = await running.client.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_health_ready_and_metrics() -> None:
    async with running_gateway(FakeWorker(), FakeWorker(worker_id="p", role=pb.ROLE_PREFILL)) as running:
        assert (await running.client.get("/health")).status_code == 200
        page = (await running.client.get("/ready")).json()
        assert page["ready"]
        assert page["models"] == {
            "test-model": {"decode": 0, "prefill": 1, "both": 1, "revisions": {"": {"prefill": 1, "decode": 1}}}
        }
        await running.client.post("/v1/chat/completions", json=CHAT)
        await running.client.post("/v1/chat/completions", json={**CHAT, "n": 99})
        metrics = (await running.client.get("/metrics")).text
        assert 'antiphon_gateway_requests_total{endpoint="chat",model="test-model",status="200"} 1.0' in metrics
        assert 'antiphon_gateway_requests_total{endpoint="chat",model="",status="400"} 1.0' in metrics
        assert 'antiphon_gateway_completion_tokens_total{endpoint="chat",model="test-model"} 4.0' in metrics
        assert running.metric("antiphon_gateway_workers") == 2
        assert running.metric("antiphon_gateway_time_to_first_token_seconds_count") == 1
        assert running.metric("antiphon_gateway_inter_token_seconds_count") == 3


async def test_only_of_an_answer_that_is_sent_whole_may_steps_be_told_together() -> None:
    async def says_three_in_one(_: FakeWorker, connection: Any, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.step(submit.ref, token_ids=[97], text="a")
        connection.step(submit.ref, token_ids=[98, 99, 100], text="bcd", finish=pb.FINISH_LENGTH)

    worker = FakeWorker(behaviour=says_three_in_one)
    async with running_gateway(worker) as running:
        for more in ({}, {"stream": True}, {"logprobs": 1}):
            await running.client.post("/v1/completions", json=COMPLETION | more)
        assert [bool(submit.tell_every_ms) for submit in worker.submits] == [True, False, False]
        whole = (await running.client.post("/v1/completions", json=COMPLETION)).json()
        assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == ("abcd", 4)
        assert running.metric("antiphon_gateway_inter_token_seconds_count") == 4 * 3, "a token counts, however it came"


async def test_a_gateway_without_workers_lives_but_is_not_ready() -> None:
    async with running_gateway() as running:
        assert (await running.client.get("/health")).status_code == 200
        assert (await running.client.get("/ready")).status_code == 503


async def test_a_body_over_the_limit_is_413_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """sgl-project/sglang#10818: the limit is explicit, and crossing it is seen."""

    async def parts() -> Any:
        for _ in range(4):
            yield b" " * 500

    async with running_gateway(FakeWorker(), max_body_bytes=1000) as running:
        for content in (b" " * 1001, parts()):
            with caplog.at_level(logging.WARNING):
                response = await running.client.post("/v1/chat/completions", content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
            assert "1000 bytes" in caplog.text
        assert running.metric("antiphon_gateway_bodies_too_large_total") == 2
        assert (await running.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_compressed_body_is_415() -> None:
    async with running_gateway(FakeWorker()) as running:
        response = await running.client.post("/v1/chat/completions", content=b"x", headers={"content-encoding": "gzip"})
        assert response.status_code == 415


async def submitted(running: RunningGateway, worker: FakeWorker, path: str, body: dict[str, Any]) -> pb.Submit:
    response = await running.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return worker.submits[-1]


async def test_parameters_reach_the_worker() -> None:
    worker = FakeWorker()
    given = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "seed": -1,
        "min_tokens": 2,
        "stop": ["\u00e9nd"],
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logit_bias": {"65": -100, "66": 5},
        "logprobs": True,
        "top_logprobs": 2,
    }
    async with running_gateway(worker) as running:
        sampling = (await submitted(running, worker, "/v1/chat/completions", {**CHAT, **given})).sampling
        expected = pb.Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            presence_penalty=1.5,
            frequency_penalty=-1.5,
            repetition_penalty=1.25,
            seed=2**64 - 1,
            max_tokens=4,
            min_tokens=2,
            stop=["\u00e9nd"],
            stop_token_ids=[3, 4],
            ignore_eos=True,
            skip_special_tokens=False,
            include_stop_text=True,
            logit_bias={65: -100.0, 66: 5.0},
            logprobs=2,
        )
        assert sampling == expected


async def test_nulls_are_the_same_as_absent_fields() -> None:
    worker = FakeWorker()
    names = (
        "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty min_tokens stop "
        "stop_token_ids ignore_eos skip_special_tokens include_stop_str_in_output logit_bias logprobs top_logprobs n "
        "stream stream_options response_format tools tool_choice functions modalities audio max_completion_tokens user"
    )
    nulls: dict[str, Any] = dict.fromkeys(names.split())
    async with running_gateway(worker) as running:
        absent = await submitted(running, worker, "/v1/chat/completions", {**CHAT, "seed": 5})
        null = await submitted(running, worker, "/v1/chat/completions", {**CHAT, **nulls, "seed": 5})
        assert null.sampling == absent.sampling
        assert null.prompt_token_ids == absent.prompt_token_ids
        assert (absent.sampling.temperature, absent.sampling.top_p, absent.sampling.repetition_penalty) == (1, 1, 1)


async def test_choices_have_one_seed_and_numbers_of_their_own() -> None:
    worker = FakeWorker()
    async with running_gateway(worker) as running:
        await submitted(running, worker, "/v1/chat/completions", {**CHAT, "n": 3})
        assert len({submit.sampling.seed for submit in worker.submits}) == 1
        assert [submit.sampling.choice for submit in worker.submits] == [0, 1, 2]
        first = worker.submits[0].sampling.seed
        await submitted(running, worker, "/v1/chat/completions", CHAT)
        assert worker.submits[-1].sampling.seed != first
        worker.submits.clear()
        await submitted(running, worker, "/v1/completions", {**COMPLETION, "prompt": ["a", "b"], "n": 2, "best_of": 2})
        assert [submit.sampling.choice for submit in worker.submits] == [0, 1, 0, 1]
        assert [len(submit.prompt_token_ids) for submit in worker.submits] == [1, 1, 1, 1]


async def test_every_form_of_prompt() -> None:
    worker = FakeWorker()
    ids = byte_tokenizer().encode("hi").ids
    async with running_gateway(worker) as running:
        for prompt, count in (("hi", 1), (["hi"], 1), (ids, 1), ([ids, ids], 2), (["hi", "hi", "hi"], 3)):
            worker.submits.clear()
            response = await running.client.post("/v1/completions", json={**COMPLETION, "prompt": prompt})
            assert [choice["index"] for choice in response.json()["choices"]] == list(range(count))
            assert all(list(submit.prompt_token_ids) == ids for submit in worker.submits)
            assert response.json()["usage"]["prompt_tokens"] == 2 * count


async def test_echo_and_nothing_to_generate_need_no_worker() -> None:
    worker = FakeWorker()
    async with running_gateway(worker) as running:
        for stream in (False, True):
            body = {**COMPLETION, "max_tokens": 0, "echo": True, "stream": stream}
            response = await running.client.post("/v1/completions", json=body)
            answer = json.loads(response.text.removeprefix("data: ").split("\n\n")[0])
            assert answer["choices"][0]["text"] == "hello"
            assert answer["choices"][0]["finish_reason"] == "length"
        assert not worker.submits
        response = await running.client.post("/v1/completions", json={**COMPLETION, "echo": True})
        assert response.json()["choices"][0]["text"].startswith("hello")
        assert len(response.json()["choices"][0]["text"]) == 9


async def test_defaults_of_the_answers_length() -> None:
    worker = FakeWorker(byte_card(context=100))
    async with running_gateway(worker) as running:
        chat = {name: value for name, value in CHAT.items() if name != "max_tokens"}
        submit = await submitted(running, worker, "/v1/chat/completions", chat)
        assert len(submit.prompt_token_ids) + submit.sampling.max_tokens == 100
        completion = {name: value for name, value in COMPLETION.items() if name != "max_tokens"}
        submit = await submitted(running, worker, "/v1/completions", completion)
        assert submit.sampling.max_tokens == 16
        submit = await submitted(running, worker, "/v1/completions", {**completion, "prompt": "x" * 95})
        assert submit.sampling.max_tokens == 5


async def test_what_does_not_fit_the_context_is_said_with_numbers() -> None:
    worker = FakeWorker(byte_card(context=100))
    async with running_gateway(worker) as running:
        for path, body in (
            ("/v1/completions", {**COMPLETION, "prompt": "x" * 97}),
            ("/v1/completions", {"model": "test-model", "prompt": "x" * 100}),
            ("/v1/chat/completions", {**CHAT, "max_tokens": 99}),
            (
                "/v1/chat/completions",
                {**CHAT, "messages": [{"role": "user", "content": "x" * 100}], "max_tokens": None},
            ),
        ):
            response = await running.client.post(path, json=body)
            assert response.status_code == 400, body
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert "100 tokens" in response.json()["error"]["message"]


async def test_log_probabilities_of_completions() -> None:
    async with running_gateway(FakeWorker()) as running:
        body = {**COMPLETION, "logprobs": 2}
        whole = (await running.client.post("/v1/completions", json=body)).json()["choices"][0]
        logprobs = whole["logprobs"]
        assert "".join(logprobs["tokens"]) == whole["text"]
        assert logprobs["text_offset"] == [0, 1, 2, 3]
        assert all(-9999.0 <= value <= 0.0 for value in logprobs["token_logprobs"])
        assert all(token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
        streamed = (await running.client.post("/v1/completions", json={**body, "stream": True})).text
        chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n")[:-2]]
        offsets = [
            o for chunk in chunks for o in (chunk["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
        ]
        assert offsets == [0, 1, 2, 3]


async def test_bytes_of_partial_characters_in_log_probabilities() -> None:
    async with running_gateway(FakeWorker()) as running:
        messages = [{"role": "user", "content": "Repeat exactly: \u00e9"}]
        answer = (
            await running.client.post("/v1/chat/completions", json={**CHAT, "messages": messages, "logprobs": True})
        ).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "\u00e9"
        assert answer["choices"][0]["message"]["content"] == "\u00e9"


async def test_cached_tokens_are_told() -> None:
    async def behaviour(worker: FakeWorker, connection: Any, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        await tokens(connection, submit, answer_bytes(submit), cached_tokens=7)

    async with running_gateway(FakeWorker(behaviour=behaviour)) as running:
        usage = (await running.client.post("/v1/chat/completions", json={**CHAT, "n": 2})).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 7}
        assert usage["completion_tokens"] == 8
        await eventually(lambda: running.metric("antiphon_gateway_cached_tokens_total") == 7)


async def test_keys_name_tenants_and_tenants_have_salts() -> None:
    worker = FakeWorker()
    async with running_gateway(worker, keys={"k1": "tenant-1", "k2": "tenant-2", "k3": "tenant-1"}) as running:
        for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic k1"}, {"authorization": "k1"}):
            response = await running.client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            assert (await running.client.get("/v1/models", headers=headers)).status_code == 401
        assert (await running.client.get("/health")).status_code == 200
        for key in ("k1", "k2", "k3"):
            own = {"authorization": f"Bearer {key}"}
            response = await running.client.post("/v1/chat/completions", json=CHAT, headers=own)
            assert response.status_code == 200
        first, second, third = (submit.cache_salt for submit in worker.submits)
        assert first == third == cache_salt("tenant-1")
        assert second == cache_salt("tenant-2") != first


async def test_without_keys_there_is_one_tenant_with_the_empty_salt() -> None:
    worker = FakeWorker()
    async with running_gateway(worker) as running:
        assert (await submitted(running, worker, "/v1/chat/completions", CHAT)).cache_salt == b""


@pytest.mark.parametrize("content", ["", "[]", '{"k": 5}', '{"": "t"}', '{"k": ""}'])
def test_a_keys_file_that_is_wrong_is_said(content: str, tmp_path: Any) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ApiKeysError, match=r"keys\.json"):
        ApiKeys.load(str(path))


async def test_the_callers_trace_goes_on_to_the_worker() -> None:
    worker = FakeWorker()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with running_gateway(worker) as running:
        response = await running.client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": parent})
        assert response.status_code == 200
        assert worker.submits[0].traceparent.split("-")[1] == parent.split("-")[1]


async def test_a_request_is_one_span_with_its_story() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    worker = FakeWorker()
    async with running_gateway(worker) as running:
        running.gateway.generation.tracer = provider.get_tracer("test")
        await submitted(running, worker, "/v1/chat/completions", CHAT)
        await running.client.post("/v1/chat/completions", json={**CHAT, "n": 99})
        await eventually(lambda: len(exporter.get_finished_spans()) == 2)
    good, bad = exporter.get_finished_spans()
    assert [event.name for event in good.events] == ["submitted", "accepted", "first token"]
    assert good.events[0].attributes is not None
    assert good.events[0].attributes["decode"] == "worker-1"
    assert good.attributes is not None
    assert good.attributes["gen_ai.usage.output_tokens"] == 4
    assert good.attributes["http.response.status_code"] == 200
    assert good.context is not None
    assert worker.submits[0].traceparent.split("-")[1:3] == [
        format(good.context.trace_id, "032x"),
        format(good.context.span_id, "016x"),
    ]
    assert not bad.status.is_ok


async def test_many_streams_at_once_are_all_whole() -> None:
    async with running_gateway(FakeWorker(), FakeWorker(worker_id="w2")) as running:
        body = {**CHAT, "stream": True, "max_tokens": 50}
        responses = await asyncio.gather(
            *(running.client.post("/v1/chat/completions", json={**body, "seed": seed}) for seed in range(50))
        )
        for response in responses:
            assert response.text.endswith("data: [DONE]\n\n")
            assert response.text.count('"content":"') == 51
        await eventually(lambda: running.at_rest)
