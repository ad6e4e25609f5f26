"""One look at a Model: what it writes, what it leaves alone, and what it says when it is refused.

The reconciler with all its parts, over the test API server in the same process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from antiphon_kvtransfer.model_record import ModelRecord
from antiphon_operator.kube import resources
from antiphon_operator.kube.errors import ApiUnavailable, Forbidden
from antiphon_operator.names import MODEL_LABEL
from antiphon_operator.options import OperatorContext
from antiphon_operator.plan.observed import Observed
from antiphon_operator.plan.planned import Plan
from antiphon_operator.runtime.announcer import Announcer
from antiphon_operator.runtime.applier import Applier
from antiphon_operator.runtime.caches import Caches
from antiphon_operator.runtime.gang_tokens import GangTokens
from antiphon_operator.runtime.metrics import OperatorMetrics
from antiphon_operator.runtime.queue import WorkFailedError
from antiphon_operator.runtime.reconcile import Parts, Planner, Reconciler
from antiphon_operator.runtime.status_writer import StatusWriter
from antiphon_operator.runtime.trouble import SLOW
from antiphon_operator.runtime.wants import Looks
from prometheus_client import CollectorRegistry

from tests.support.kube.resources import NAMESPACES, SECRETS, SERVICES, STATEFULSETS
from tests.support.kube_in_process import InProcessClient, api_with_models, served
from tests.support.small_operator import REVISION, small_plan

MODELS = served(resources.MODELS)
CONTEXT = OperatorContext(version="1", worker_image="worker:1", worker_redis_url="", endpoint="http://gateway")
KEY = "chat/qwen"


class RecordsKept:
    def __init__(self) -> None:
        self.records: dict[str, ModelRecord] = {}
        self.removed: list[str] = []

    def put(self, record: ModelRecord) -> None:
        self.records[record.model] = record

    def remove(self, model_key: str) -> None:
        self.removed.append(model_key)


class Bench:
    """A reconciler, and a cluster whose every change its caches hear of at once."""

    def __init__(self, plan: Planner = small_plan, *, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.api = api_with_models()
        self.api.create(NAMESPACES, None, {"metadata": {"name": "chat"}})
        self.client = InProcessClient(self.api)
        self.caches = Caches()
        self.records = RecordsKept()
        self.hears = True
        self.api.subscribe(self._hear)
        client, metrics = self.client.as_client(), OperatorMetrics(CollectorRegistry())
        parts = Parts(
            caches=self.caches,
            applier=Applier(client, self.caches, metrics, _now),
            status=StatusWriter(client, self.caches, clock=clock),
            looks=Looks(None, lambda key: {}, lambda key: None),  # type: ignore[arg-type]  # nothing is wanted
            announcer=Announcer(client, clock=clock),
            metrics=metrics,
            gang_tokens=GangTokens(_token_secret, self._create_secret, _now),
            records=self.records,
        )
        self.reconciler = Reconciler(plan, CONTEXT, parts, _now)

    def create(self, name: str = "qwen", replicas: int = 1, **metadata: Any) -> None:
        spec = {"source": {"uri": "demo"}, "decode": {"replicas": replicas}}
        self.api.create(MODELS, "chat", {"metadata": {"name": name, **metadata}, "spec": spec})

    async def settle(self, key: str = KEY) -> None:
        for _ in range(10):
            before = len(self.client.writes)
            await self.reconciler.look(key)
            if len(self.client.writes) == before:
                return
        raise AssertionError(f"never at rest: {self.client.writes[-10:]}")

    def sets(self) -> list[str]:
        return [found["metadata"]["name"] for found in self.api.list(STATEFULSETS, "chat")]

    def condition(self, kind: str) -> dict[str, Any]:
        conditions = self.api.get(MODELS, "chat", "qwen")["status"]["conditions"]
        return next(condition for condition in conditions if condition["type"] == kind)

    async def _create_secret(self, manifest: Any) -> None:
        await self.client.create(resources.SECRETS, "chat", manifest)

    def _hear(self, event: str, resource: Any, thing: Any) -> None:
        if not self.hears:
            return
        named = {"apiVersion": resource.api_version, "kind": resource.kind} | thing
        if event == "DELETED":
            self.caches.remove(resource.kind, named)
        else:
            self.caches.put(resource.kind, named)


def _token_secret(model: Any, token: str) -> dict[str, Any]:
    return {"metadata": {"name": f"{model['metadata']['name']}-ray", "namespace": "chat"}, "data": {"token": token}}


def _now() -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC)


async def test_a_model_gets_its_objects_and_then_costs_nothing() -> None:
    bench = Bench()
    bench.create(replicas=2)
    assert await bench.reconciler.look(KEY) is not None, "a look that wrote is followed by another"
    await bench.settle()
    assert bench.sets() == [f"qwen-decode-{REVISION}-r000", f"qwen-decode-{REVISION}-r001"]
    assert bench.condition("Ready")["status"] == "True"
    written = len(bench.client.writes)
    assert await bench.reconciler.look(KEY) is None
    assert len(bench.client.writes) == written


async def test_a_model_with_gangs_has_a_token_before_its_pods_and_no_other_has_one() -> None:
    gangs, single = Bench(lambda *seen: replace(small_plan(*seen), gang_secret="qwen-ray")), Bench()
    for bench in (gangs, single):
        bench.create()
        await bench.settle()
    writes = [write for write in gangs.client.writes if write.split()[1] in ("Secret", "StatefulSet")]
    assert writes == ["create Secret qwen-ray", f"apply StatefulSet qwen-decode-{REVISION}-r000"]
    assert single.api.list(SECRETS, "chat") == []


async def test_a_token_that_may_not_be_written_is_said_in_the_status() -> None:
    bench = Bench(lambda *seen: replace(small_plan(*seen), gang_secret="qwen-ray"))
    bench.create()
    bench.client.refuse["Secret"] = Forbidden("create Secret", 403, "Forbidden", "no secrets here")
    with pytest.raises(WorkFailedError):
        await bench.reconciler.look(KEY)
    assert "Secret qwen-ray" in bench.condition("Ready")["message"]


async def test_answers_count_before_any_watch_tells_of_them() -> None:
    bench = Bench()
    bench.create(replicas=3)
    bench.hears = False
    await bench.settle()
    assert len(bench.sets()) == 3
    assert [write for write in bench.client.writes if write.startswith("apply StatefulSet")] == [
        f"apply StatefulSet qwen-decode-{REVISION}-r{number:03d}" for number in range(3)
    ]


async def test_what_the_plan_does_not_want_is_deleted_once() -> None:
    bench = Bench()
    bench.create(replicas=2)
    await bench.settle()
    bench.hears = False
    bench.api.merge_patch(MODELS, "chat", "qwen", {"spec": {"decode": {"replicas": 1}}})
    model = {"apiVersion": "antiphon.dev/v1alpha1", "kind": "Model"} | bench.api.get(MODELS, "chat", "qwen")
    bench.caches.put("Model", model)
    for _ in range(3):
        await bench.reconciler.look(KEY)
    assert bench.sets() == [f"qwen-decode-{REVISION}-r000"]
    assert len([write for write in bench.client.writes if write.startswith("delete")]) == 1


async def test_a_hand_edit_is_put_back_and_an_event_names_the_field() -> None:
    bench = Bench()
    bench.create()
    await bench.settle()
    name = "qwen-workers"
    bench.api.merge_patch(SERVICES, "chat", name, {"spec": {"selector": {MODEL_LABEL: "another"}}})
    await bench.settle()
    assert bench.api.get(SERVICES, "chat", name)["spec"]["selector"] == {MODEL_LABEL: "qwen"}
    (event,) = [write for write in bench.client.writes if write.startswith("event HandEditPutBack")]
    assert "Service qwen-workers" in event
    assert "spec.selector" in event


async def test_a_field_that_is_not_ours_is_left_to_others() -> None:
    bench = Bench()
    bench.create()
    await bench.settle()
    written = len(bench.client.writes)
    foreign = {"metadata": {"labels": {"team": "x"}}, "spec": {"sessionAffinity": "ClientIP"}}
    bench.api.merge_patch(SERVICES, "chat", "qwen-workers", foreign)
    await bench.reconciler.look(KEY)
    assert len(bench.client.writes) == written
    assert bench.api.get(SERVICES, "chat", "qwen-workers")["metadata"]["labels"]["team"] == "x"


async def test_what_the_server_refuses_is_said_in_the_status_and_tried_slowly() -> None:
    bench = Bench()
    bench.create()
    bench.client.refuse["StatefulSet"] = Forbidden("apply StatefulSet", 403, "Forbidden", "exceeded quota: sets")
    with pytest.raises(WorkFailedError) as failed:
        await bench.reconciler.look(KEY)
    assert failed.value.backoff is SLOW
    said = bench.condition("Ready")
    assert said["reason"] == "ApplyFailed"
    assert "exceeded quota: sets" in said["message"]
    bench.client.refuse.clear()
    await bench.settle()
    assert bench.condition("Ready")["status"] == "True"


async def test_later_kinds_wait_for_what_they_rest_on() -> None:
    bench = Bench()
    bench.create()
    bench.client.refuse["Pool"] = ApiUnavailable("apply Pool", 503, "", "not now")
    with pytest.raises(WorkFailedError):
        await bench.reconciler.look(KEY)
    assert bench.sets() == []
    assert bench.api.list(SERVICES, "chat") != []


async def test_a_plan_that_raises_says_so_and_touches_nothing() -> None:
    bench = Bench()
    bench.create()
    await bench.settle()
    bench.api.merge_patch(MODELS, "chat", "qwen", {"metadata": {"labels": {"raises": "1"}}})
    written = len(bench.client.writes)
    for _ in range(3):
        with pytest.raises(WorkFailedError):
            await bench.reconciler.look(KEY)
    assert bench.client.writes[written:] == ["status Model qwen"], "once, not each time"
    said = bench.condition("Ready")
    assert (said["status"], said["reason"]) == ("Unknown", "InternalError")
    assert "ZeroDivisionError" in said["message"]
    assert len(bench.sets()) == 1
    bench.api.merge_patch(MODELS, "chat", "qwen", {"metadata": {"labels": {"raises": None}}})
    await bench.settle()
    assert bench.condition("Ready")["status"] == "True"


class Telling:
    """A plan whose status says what a test wants to be said."""

    def __init__(self) -> None:
        self.measured = "410ms"
        self.message = "0 of 3 replicas, for 5 s"
        self.reason = "Starting"
        self.seconds = 0.0

    def plan(self, observed: Observed, context: OperatorContext, now: datetime) -> Plan:
        planned = small_plan(observed, context, now)
        (condition,) = planned.status["conditions"]
        told = condition | {"message": self.message, "reason": self.reason}
        status = {**planned.status, "sla": {"ttft": {"p95": self.measured}}, "conditions": [told]}
        return replace(planned, status=status)

    async def settled(self) -> Bench:
        bench = Bench(self.plan, clock=lambda: self.seconds)
        bench.create()
        await bench.settle()
        return bench


async def test_numbers_of_the_promise_are_written_twice_a_minute_and_the_rest_at_once() -> None:
    telling = Telling()
    bench = await telling.settled()
    telling.seconds, telling.measured = 10.0, "420ms"
    written = len(bench.client.writes)
    assert await bench.reconciler.look(KEY) == pytest.approx(20.0)
    assert len(bench.client.writes) == written
    telling.reason = "Scaling"
    await bench.reconciler.look(KEY)
    assert bench.condition("Ready")["reason"] == "Scaling"
    telling.seconds, telling.measured = 41.0, "430ms"
    await bench.reconciler.look(KEY)
    assert bench.api.get(MODELS, "chat", "qwen")["status"]["sla"]["ttft"]["p95"] == "430ms"


async def test_numbers_within_messages_do_not_make_it_write_more_often() -> None:
    telling = Telling()
    bench = await telling.settled()
    before = len(bench.client.writes)
    for second in range(1, 121):
        telling.seconds = float(second)
        telling.message, telling.measured = f"{second % 3} of 3 replicas, for {second + 5}.5 s", f"{400 + second}ms"
        await bench.reconciler.look(KEY)
    assert bench.client.writes[before:] == ["status Model qwen"] * 4
    assert bench.condition("Ready")["message"] == "0 of 3 replicas, for 125.5 s"


async def test_other_words_under_the_same_reason_are_told_at_once_but_not_again_and_again() -> None:
    telling = Telling()
    bench = await telling.settled()
    telling.seconds, telling.message = 1.0, "qwen-0 ended (1 restarts): out of blocks"
    await bench.reconciler.look(KEY)
    assert bench.condition("Ready")["message"] == telling.message
    before = len(bench.client.writes)
    for second in range(2, 62):
        telling.seconds, telling.message = float(second), f"it leans {('north', 'west', 'south', 'east')[second % 4]}"
        await bench.reconciler.look(KEY)
    assert len(bench.client.writes) - before == 2, "at 31 s and at 61 s"


async def test_the_words_that_follow_a_change_of_state_are_told_at_once() -> None:
    telling = Telling()
    bench = await telling.settled()
    telling.seconds, telling.message = 1.0, "qwen-0 is starting"
    await bench.reconciler.look(KEY)
    telling.seconds, telling.reason, telling.message = 2.0, "EngineCrash", "qwen-0 ended: exit code 1"
    await bench.reconciler.look(KEY)
    telling.seconds, telling.message = 3.0, "qwen-0 ended: out of blocks"
    await bench.reconciler.look(KEY)
    assert bench.condition("Ready")["message"] == telling.message


async def test_a_status_field_that_the_cluster_does_not_keep_is_not_written_for_ever() -> None:
    def plan(observed: Observed, context: OperatorContext, now: datetime) -> Plan:
        planned = small_plan(observed, context, now)
        return replace(planned, status={**planned.status, "ofANewerOperator": {"x": 1}})

    bench = Bench(plan)
    bench.create()
    await bench.settle()
    assert bench.condition("Ready")["status"] == "True"


async def test_a_model_that_is_gone_leaves_its_record_and_nothing_is_written() -> None:
    bench = Bench()
    bench.create()
    await bench.settle()
    bench.api.delete(MODELS, "chat", "qwen")
    bench.records.removed.clear()
    written = len(bench.client.writes)
    assert await bench.reconciler.look(KEY) is None
    assert bench.records.removed == [KEY]
    assert len(bench.client.writes) == written


async def test_a_namesake_made_at_once_gets_objects_of_its_own() -> None:
    bench = Bench()
    bench.create()
    await bench.settle()
    first = bench.api.list(STATEFULSETS, "chat")[0]["metadata"]["uid"]
    bench.api.delete(MODELS, "chat", "qwen")
    bench.create()
    await bench.settle()
    assert [found["metadata"]["uid"] != first for found in bench.api.list(STATEFULSETS, "chat")] == [True]
