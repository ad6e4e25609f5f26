"""What the planner wants beside the caches is fetched, kept while it is wanted, and wakes the Model when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from antiphon_operator.plan.observed import GatewayView, GatewayViews, Object, WorkerView
from antiphon_operator.plan.planned import Wants
from antiphon_operator.runtime.wants import Looks, Paces, Shown

from tests.support.eventually import eventually
from tests.support.kube_objects import model, pod_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
QUICK = Paces(events_s=0.01, logs_s=0.01, workers_s=0.01, gateways_s=0.01)


class Answers:
    """Sources that answer what the test says, and count."""

    def __init__(self) -> None:
        self.asked = 0
        self.idle = False
        self.fails = False
        self.prefill = 1

    async def warning_events(self, namespace: str, uid: str) -> tuple[Object, ...]:
        assert namespace == "chat"
        return ({"reason": "FailedCreate", "about": uid},)

    async def crash_line(self, pod: Object) -> str:
        return f"last words of {pod['metadata']['name']}"

    async def worker(self, pod: Object) -> WorkerView | None:
        self.asked += 1
        if self.fails:
            raise OSError("connection refused")
        return WorkerView(asked_at=NOW + timedelta(seconds=self.asked), idle=self.idle)

    async def gateways(self, key: str) -> GatewayViews | None:
        view = GatewayView("gateway-0:8000", prefill={"a1b2c3": self.prefill}, decode={})
        return GatewayViews(asked_at=NOW, views=(view,))


@asynccontextmanager
async def looking() -> AsyncIterator[tuple[Looks, Answers, list[str], dict[str, Any]]]:
    answers, woken = Answers(), []
    pods = {"qwen-0": pod_of(model(), "qwen-0")}
    looks = Looks(answers, lambda key: pods, woken.append, paces=QUICK)
    try:
        yield looks, answers, woken, pods
    finally:
        await looks.close()


async def test_answers_are_shown_to_the_next_look_which_they_wake() -> None:
    async with looking() as (looks, _, woken, pods):
        uid = pods["qwen-0"]["metadata"]["uid"]
        assert looks.shown("chat/qwen") == Shown()
        wants = Wants(
            events_of=frozenset({"u1"}), log_of=frozenset({"qwen-0"}), workers=frozenset({"qwen-0"}), gateways=True
        )
        looks.want("chat/qwen", wants)
        await eventually(lambda: bool(woken))
        shown = looks.shown("chat/qwen")
        assert shown.events == {"u1": ({"reason": "FailedCreate", "about": "u1"},)}
        assert shown.log_lines == {uid: "last words of qwen-0"}
        assert not shown.workers["qwen-0"].idle
        assert shown.gateways is not None


async def test_only_an_answer_that_says_something_else_wakes_again() -> None:
    async with looking() as (looks, answers, woken, _):
        looks.want("chat/qwen", Wants(workers=frozenset({"qwen-0"})))
        await eventually(lambda: answers.asked > 5)
        assert woken == ["chat/qwen"], "the same answer, later, is no news"
        answers.idle = True
        await eventually(lambda: len(woken) == 2)
        assert looks.shown("chat/qwen").workers["qwen-0"].idle


async def test_what_is_not_wanted_any_more_is_neither_asked_for_nor_shown() -> None:
    async with looking() as (looks, answers, woken, _):
        looks.want("chat/qwen", Wants(workers=frozenset({"qwen-0"}), gateways=True))
        await eventually(lambda: len(looks.shown("chat/qwen").workers) == 1)
        looks.want("chat/qwen", Wants(gateways=True))
        assert looks.shown("chat/qwen").workers == {}
        looks.want("chat/qwen", Wants())
        asked, woken[:] = answers.asked, []
        answers.prefill = 2
        for _ in range(20):
            await asyncio.sleep(0)
        assert answers.asked == asked
        assert looks.shown("chat/qwen") == Shown()
        assert woken == []


async def test_a_source_that_fails_leaves_the_last_answer_and_is_asked_again() -> None:
    async with looking() as (looks, answers, woken, _):
        looks.want("chat/qwen", Wants(workers=frozenset({"qwen-0", "no-such-pod"})))
        await eventually(lambda: bool(woken))
        answers.fails = True
        asked = answers.asked
        await eventually(lambda: answers.asked > asked + 2)
        assert "qwen-0" in looks.shown("chat/qwen").workers
        answers.fails, answers.idle = False, True
        await eventually(lambda: looks.shown("chat/qwen").workers["qwen-0"].idle)
