"""Why a request went where it went: the header, the record that can be asked for, and who may ask."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import msgspec
import pytest
from antiphon_gateway.explain import OutcomeState
from antiphon_gateway.explain_document import Attempt, Explanation
from antiphon_gateway.explain_replay import replay
from antiphon_proto import worker_pb2 as pb
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.fake_worker import Connection, FakeWorker, accept_and_hang, answer_bytes, tokens
from tests.support.gateway import RunningGateway, eventually, running_gateway

BODY: dict[str, Any] = {"model": "test-model", "prompt": "x" * 1000, "max_tokens": 5, "seed": 3}
ROUTE = re.compile(
    r"^decode=[\w.:/-]+(;prefill=[\w.:/-]+)?;reason=\w+;cached=\d+/\d+;ttft-ms=\d+\.\d;tpot-ms=\d+\.\d(;attempt=\d+)?$"
)


async def ask(running: RunningGateway, request_id: str = "", key: str = "", **changes: Any) -> httpx.Response:
    headers = ({"x-request-id": request_id} if request_id else {}) | _authorization(key)
    return await running.client.post("/v1/completions", json={**BODY, **changes}, headers=headers)


async def look(running: RunningGateway, request_id: str, accept: str = "*/*", key: str = "") -> httpx.Response:
    headers = {"accept": accept} | _authorization(key)
    return await running.client.get(f"/v1/antiphon/explain/{request_id}", headers=headers)


async def explained(running: RunningGateway, request_id: str) -> Explanation:
    response = await look(running, request_id)
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=Explanation)


def _authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def busy(worker_id: str, **options: Any) -> FakeWorker:
    """One that is chosen only where there is no other."""
    worker = FakeWorker(worker_id=worker_id, **options)
    worker.queue.waiting_tokens = 400
    return worker


async def caching(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.accept(submit.ref)
    begin = len(submit.output_token_ids)
    await tokens(connection, submit, answer_bytes(submit)[begin:], cached_tokens=64)


async def breaking(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    """Two tokens, then the stream is gone."""
    connection.accept(submit.ref)
    await tokens(connection, submit, answer_bytes(submit)[:2], finish=False)
    connection.close()


async def full(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.refuse(submit.ref, pb.REFUSAL_CAPACITY, "no <b>room</b>")


def only_attempt(found: Explanation) -> Attempt:
    (choice,) = found.choices
    (attempt,) = choice.attempts
    return attempt


# -- what is said


async def test_the_answer_names_its_route_and_the_record_tells_it_all() -> None:
    decode = FakeWorker(worker_id="d", role=pb.ROLE_DECODE, behaviour=caching)
    prefill = FakeWorker(worker_id="p", role=pb.ROLE_PREFILL)
    async with running_gateway(decode, prefill, busy("p2", role=pb.ROLE_PREFILL)) as running:
        for stream in (False, True):
            response = await ask(running, f"mine-{stream}", stream=stream)
            route = response.headers["x-antiphon-route"]
            assert ROUTE.match(route), route
            assert route.startswith("decode=d;prefill=p;reason=prefill_remote;cached=0/15;")
            assert response.headers["x-antiphon-gateway"] == "gateway-test"
        found = await explained(running, "mine-True")
        assert (found.model, found.path, found.status, found.running) == ("test-model", "/v1/completions", 200, False)
        assert found.gateway == "gateway-test"
        attempt = only_attempt(found)
        decision, outcome = attempt.decision, attempt.outcome
        assert (decision.decode, decision.prefill, decision.fallbacks) == ("d", "p", ["p2"])
        assert (attempt.prompt_tokens, decision.blocks, decision.cached_blocks) == (1000, 15, 0)
        assert decision.chosen is not None
        assert decision.chosen.cost.compute_ms > 0
        assert ("d", "p2") in [(option.decode, option.prefill) for option in decision.alternatives]
        assert (outcome.state, outcome.finish, outcome.tokens) == (OutcomeState.FINISHED, "length", 5)
        assert (outcome.cached_tokens, outcome.prefill_worker) == (64, "d")
        assert outcome.ttft_ms is not None
        assert outcome.tpot_ms is not None
        assert outcome.ttft_error_ms == pytest.approx(outcome.ttft_ms - decision.predicted_ttft_ms, abs=0.01)
        known = {view.worker_id: view.queued_tokens for view in attempt.inputs.workers}
        # It is taken to compute some of them before it says so.
        assert 0 < known.pop("p2") <= 400
        assert known == {"d": 0, "p": 0}


async def test_a_request_is_found_by_any_of_its_ids() -> None:
    worker = FakeWorker()
    async with running_gateway(worker) as running:
        answer = (await ask(running, "mine:1")).json()["id"]
        chat = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        other = await running.client.post("/v1/chat/completions", json=chat)
        first, second = worker.submits
        for request_id in ("mine:1", answer, first.request_id):
            assert f"cmpl-{(await explained(running, request_id)).request_id}" == answer
        for request_id in (other.json()["id"], second.request_id, other.headers["x-request-id"]):
            assert f"chatcmpl-{(await explained(running, request_id)).request_id}" == other.json()["id"]


async def test_a_failover_shows_both_attempts_and_why() -> None:
    async with running_gateway(FakeWorker(worker_id="dying", behaviour=breaking), busy("other")) as running:
        response = await ask(running, "mine")
        assert "attempt=2" in response.headers["x-antiphon-route"]
        (choice,) = (await explained(running, "mine")).choices
        first, second = choice.attempts
        assert (first.decision.decode, first.outcome.state, first.outcome.tokens) == ("dying", OutcomeState.FAILED, 2)
        assert "stream" in first.outcome.why
        assert (second.decision.decode, second.outcome.state) == ("other", OutcomeState.FINISHED)
        assert (second.number, second.prompt_tokens, second.output_tokens) == (2, 1000, 2)
        assert [view.worker_id for view in second.inputs.workers] == ["other"]
        assert second.outcome.tokens == 5


async def test_a_refusal_shows_and_so_does_a_wait_without_end() -> None:
    async with running_gateway(FakeWorker(worker_id="full", behaviour=full), queue_timeout_s=0.3) as running:
        response = await ask(running, "mine")
        assert response.status_code == 503
        assert ROUTE.match(response.headers["x-antiphon-route"])
        found = await explained(running, "mine")
        assert (found.status, found.running) == (503, False)
        assert "No worker had room" in found.error
        (choice,) = found.choices
        assert {attempt.outcome.state for attempt in choice.attempts} == {OutcomeState.REFUSED}
        assert all("REFUSAL_CAPACITY: no <b>room</b>" in attempt.outcome.why for attempt in choice.attempts)
        # It was asked again and again; the first and the last attempts are kept.
        assert choice.attempts[0].number == 1
        assert choice.attempts[1].number == 2 + choice.attempts_left_out
        page = (await look(running, "mine", accept="text/html")).text
        assert "no &lt;b&gt;room&lt;/b&gt;" in page
        assert "<b>room" not in page


async def test_a_running_request_and_one_whose_client_left_are_told_apart() -> None:
    worker = FakeWorker(behaviour=accept_and_hang)
    async with running_gateway(worker) as running:
        asking = asyncio.create_task(ask(running, "mine"))
        await worker.until(lambda: worker.running == 1)
        await eventually(lambda: _state(running, "mine") is OutcomeState.ACCEPTED)
        found = await explained(running, "mine")
        assert (found.running, found.status) == (True, None)
        asking.cancel()
        await eventually(lambda: running.at_rest)
        found = await explained(running, "mine")
        assert (found.running, found.status) == (False, None)
        assert only_attempt(found).outcome.state is OutcomeState.WITHDRAWN


def _state(running: RunningGateway, request_id: str) -> OutcomeState | None:
    trail = running.gateway.explain.find(request_id, "")
    record = trail.current() if trail is not None else None
    return record.outcome.state if record is not None else None


async def test_each_choice_has_its_own_attempts() -> None:
    async with running_gateway(FakeWorker(worker_id="a"), FakeWorker(worker_id="b")) as running:
        await ask(running, "mine", n=3)
        found = await explained(running, "mine")
        assert [(choice.index, len(choice.attempts)) for choice in found.choices] == [(0, 1), (1, 1), (2, 1)]
        await ask(running, "many", prompt=["hello"] * 20)
        found = await explained(running, "many")
        assert (len(found.choices), found.choices_left_out) == (16, 4)


async def test_the_page_is_for_browsers_and_json_for_everybody_else() -> None:
    async with running_gateway(FakeWorker()) as running:
        await ask(running, "mine")
        browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
        for accept, kind in (
            (browser, "text/html"),
            ("*/*", "application/json"),
            ("text/html;q=0.5, application/json", "application/json"),
            ("application/json, text/html", "application/json"),
        ):
            response = await look(running, "mine", accept)
            assert response.headers["content-type"].startswith(kind), accept
            assert response.headers["vary"] == "accept"
        page = (await look(running, "mine", browser)).text
        assert "Decode on worker-1" in page
        assert "It ended (length)" in page


# -- who may ask, and for how long


async def test_a_tenant_sees_its_own_requests_only() -> None:
    keys = {"key-a": "a-tenant", "key-b": "b-tenant"}
    async with running_gateway(FakeWorker(), keys=keys) as running:
        answer = (await ask(running, "mine", key="key-a")).json()["id"]
        await ask(running, "mine", key="key-b", max_tokens=2)
        assert (await look(running, "mine")).status_code == 401
        own = await look(running, answer, key="key-a")
        assert own.status_code == 200
        assert "tenant" not in own.text
        assert own.json()["choices"][0]["attempts"][0]["outcome"]["tokens"] == 5
        # The same name for a request of its own hides neither.
        assert (await look(running, "mine", key="key-a")).json()["request_id"] == own.json()["request_id"]
        others = await look(running, answer, key="key-b")
        nobodys = await look(running, answer.replace(answer[-4:], "0000"), key="key-b")
        assert (others.status_code, others.json()["error"]["code"]) == (404, "request_not_known")
        assert others.json()["error"]["message"].split(":", 1)[1] == nobodys.json()["error"]["message"].split(":", 1)[1]


async def test_what_is_not_known_is_said_with_what_is_kept() -> None:
    async with running_gateway(FakeWorker(), explain_requests=2) as running:
        for name in ("one", "two", "three"):
            await ask(running, name)
        response = await look(running, "one")
        assert response.status_code == 404
        assert "the last 2 are kept" in response.json()["error"]["message"]
        assert (await explained(running, "two")).status == 200
        assert (await explained(running, "three")).status == 200
        assert (await running.client.get("/v1/antiphon/explain/")).status_code == 404
        assert (await running.client.post("/v1/antiphon/explain/two")).status_code == 405


async def test_nothing_is_kept_where_nothing_is_to_be_kept_and_the_header_stays() -> None:
    async with running_gateway(FakeWorker(), explain_requests=0) as running:
        response = await ask(running, "mine")
        assert ROUTE.match(response.headers["x-antiphon-route"])
        assert (await look(running, "mine")).status_code == 404


async def test_an_answer_that_no_worker_made_has_no_route() -> None:
    async with running_gateway(FakeWorker()) as running:
        response = await ask(running, "mine", max_tokens=0)
        assert response.status_code == 200
        assert "x-antiphon-route" not in response.headers
        assert (await explained(running, "mine")).choices == []
        assert "x-antiphon-route" not in (await ask(running, "bad", max_tokens=-1)).headers
        assert (await look(running, "bad")).status_code == 404


# -- what else is made of it


async def test_a_decision_is_made_again_from_what_was_recorded() -> None:
    workers = [FakeWorker(worker_id=f"w{number}") for number in range(6)]
    prefill = [FakeWorker(worker_id=f"p{number}", role=pb.ROLE_PREFILL) for number in range(3)]
    async with running_gateway(*workers, *prefill) as running:
        for number in range(8):
            await ask(running, f"mine-{number}", prompt=chr(97 + number) * (200 + 400 * number))
        for number in range(8):
            attempt = only_attempt(await explained(running, f"mine-{number}"))
            again = replay(attempt)
            assert again.same, again.differences
            assert again.whole
        # Without the worker that was chosen, another one comes out, and it is said that one is missing.
        chosen = attempt.decision.decode
        attempt.inputs.workers = [view for view in attempt.inputs.workers if view.worker_id != chosen]
        again = replay(attempt)
        assert not again.same
        assert not again.whole
        assert any(difference.startswith("decode") for difference in again.differences)


async def test_the_span_of_the_request_has_the_decision_and_what_came_of_it() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with running_gateway(FakeWorker(worker_id="a"), busy("b")) as running:
        running.gateway.generation.tracer = provider.get_tracer("test")
        response = await ask(running)
        await eventually(lambda: len(exporter.get_finished_spans()) == 1)
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["antiphon.route"] == response.headers["x-antiphon-route"]
    assert span.attributes["antiphon.outcome"] == "finished"
    assert span.attributes["antiphon.ttft_ms"] > 0  # type: ignore[operator]
    submitted = next(event for event in span.events if event.name == "submitted")
    assert submitted.attributes is not None
    assert (submitted.attributes["decode"], submitted.attributes["blocks"]) == ("a", 15)
    assert "decode=b;prefill=-;cost-ms=" in submitted.attributes["alternatives"][0]  # type: ignore[index,operator]
