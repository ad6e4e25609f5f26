"""The work queue: each key once, one worker at a time per key, back-off, timers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from antiphon_operator.runtime.queue import Backoff, WorkFailedError, WorkQueue

from tests.support.eventually import eventually

NEVER_S = 3600.0


@asynccontextmanager
async def running(
    queue: WorkQueue, work: Callable[[str], Awaitable[float | None]], workers: int = 2
) -> AsyncIterator[None]:
    task = asyncio.create_task(queue.run(work, workers))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        queue.close()


async def test_a_key_that_is_added_often_is_worked_on_once() -> None:
    queue, done = WorkQueue(), []

    async def work(key: str) -> None:
        done.append(key)

    for _ in range(10):
        queue.add("a/1")
    queue.add("a/2")
    assert queue.depth() == 2
    async with running(queue, work):
        await eventually(lambda: len(done) >= 2)
        await asyncio.sleep(0)
    assert sorted(done) == ["a/1", "a/2"]


async def test_news_during_the_work_is_worked_on_afterwards_and_never_beside_it() -> None:
    queue = WorkQueue()
    begun: list[int] = []
    side_by_side = 0
    go_on = asyncio.Event()

    async def work(key: str) -> None:
        nonlocal side_by_side
        side_by_side += 1
        assert side_by_side == 1
        begun.append(1)
        await go_on.wait()
        side_by_side -= 1

    async with running(queue, work, workers=4):
        queue.add("a/1")
        await eventually(lambda: len(begun) == 1)
        queue.add("a/1")
        queue.add("a/1")
        await asyncio.sleep(0)
        assert len(begun) == 1
        go_on.set()
        await eventually(lambda: len(begun) == 2)
        await eventually(lambda: queue.busy() == 0)
    assert len(begun) == 2


async def test_keys_come_out_in_the_order_they_became_due() -> None:
    queue, done = WorkQueue(), []
    keys = [f"a/{number}" for number in range(300)]

    async def work(key: str) -> None:
        done.append(key)
        queue.add(keys[0])  # a busy one does not starve the others

    for key in keys:
        queue.add(key)
    async with running(queue, work, workers=1):
        await eventually(lambda: len(set(done)) == 300)
    assert done[:2] == keys[:2]
    assert list(dict.fromkeys(done)) == keys


async def test_the_plan_says_when_to_look_again_and_the_newest_plan_counts() -> None:
    queue, looks = WorkQueue(), []
    answers = [0.01, NEVER_S, None]

    async def work(key: str) -> float | None:
        looks.append(key)
        return answers[len(looks) - 1]

    async with running(queue, work):
        queue.add("a/1")
        await eventually(lambda: len(looks) == 2)
        queue.add("a/1")
        await eventually(lambda: len(looks) == 3)
        await eventually(lambda: queue.busy() == 0)
        assert not queue.planned(), "the timer of the plan before is dropped"


async def test_failures_wait_longer_each_time_and_success_forgets_them() -> None:
    backoff = Backoff(first_s=1.0, longest_s=10.0)
    waits = [backoff.delay_s(failures, chance=0.999999) for failures in range(1, 7)]
    assert waits == sorted(waits)
    assert waits[0] == pytest.approx(1.0, abs=0.01)
    assert waits[-1] == pytest.approx(10.0, abs=0.01)
    assert backoff.delay_s(1, chance=0.0) == 0.5, "jitter takes up to half"
    assert backoff.delay_s(1000, chance=0.0) == 5.0


async def test_a_failing_key_is_tried_again_and_the_others_go_on() -> None:
    queue, looks = WorkQueue(chance=lambda: 0.0), []

    async def work(key: str) -> None:
        looks.append(key)
        if key == "a/bad" and looks.count(key) < 3:
            raise WorkFailedError("refused", Backoff(first_s=0.01, longest_s=0.02))
        if key == "a/worse" and looks.count(key) < 2:
            raise ZeroDivisionError

    async with running(queue, work, workers=1):
        for key in ("a/bad", "a/worse", "a/good"):
            queue.add(key)
        await eventually(lambda: looks.count("a/bad") == 3 and looks.count("a/worse") == 2)
    assert looks.count("a/good") == 1


async def test_news_about_a_failing_key_shortens_its_wait_but_not_to_nothing() -> None:
    queue, looks = WorkQueue(), []

    async def work(key: str) -> None:
        looks.append(key)
        raise WorkFailedError("forbidden", Backoff(first_s=NEVER_S, longest_s=NEVER_S))

    async with running(queue, work):
        queue.add("a/1")
        await eventually(lambda: len(looks) == 1 and queue.busy() == 0)
        waits_before = queue.planned()["a/1"]
        queue.add("a/1")
        waits = queue.planned()["a/1"]
        assert 0 < waits < waits_before
        assert queue.depth() == 0
