"""Events are said once, counted, and bounded."""

from __future__ import annotations

from typing import Any, cast

from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.errors import Forbidden
from antiphon_operator.plan.planned import Announce
from antiphon_operator.runtime.announcer import Announcer

from tests.support.kube_objects import model

GPUS = Announce("Warning", "InsufficientGpus", "2 of 4 GPUs are free: add nodes.")


class Poster:
    """Takes Events only."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, int]] = []
        self.refuses = False

    async def post_event(self, about: object, kind: str, reason: str, message: str, *, count: int = 1) -> None:
        if self.refuses:
            raise Forbidden("create Event", 403, "Forbidden", "no")
        self.posted.append((reason, count))


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def announcer() -> tuple[Announcer, Poster, Clock]:
    poster, clock = Poster(), Clock()
    return Announcer(cast(KubeClient, cast(Any, poster)), clock=clock), poster, clock


async def test_what_plan_after_plan_says_is_one_event() -> None:
    events, poster, clock = announcer()
    for _ in range(20):
        await events.announce(model(), (GPUS,))
        clock.now_s += 100
    assert poster.posted == [("InsufficientGpus", 1)]


async def test_what_comes_and_goes_is_counted_and_posted_once_a_minute() -> None:
    events, poster, clock = announcer()
    for _ in range(5):
        await events.announce(model(), (GPUS,))
        await events.announce(model(), ())
        clock.now_s += 1
    assert poster.posted == [("InsufficientGpus", 1)]
    clock.now_s += 60
    await events.announce(model(), (GPUS,))
    assert poster.posted == [("InsufficientGpus", 1), ("InsufficientGpus", 5)], "the ones between are counted"


async def test_one_model_cannot_flood_the_cluster() -> None:
    events, poster, clock = announcer()
    for number in range(100):
        await events.once(model(), Announce("Normal", f"Reason{number}", "x"))
    assert len(poster.posted) == 10
    clock.now_s += 60
    for number in range(100):
        await events.once(model(), Announce("Normal", f"Later{number}", "x"))
    assert len(poster.posted) == 14
    await events.once(model("other"), GPUS)
    assert poster.posted[-1] == ("InsufficientGpus", 1), "others are not held up by it"


async def test_an_event_that_is_refused_holds_nothing_up() -> None:
    events, poster, clock = announcer()
    poster.refuses = True
    await events.announce(model(), (GPUS,))
    poster.refuses = False
    await events.announce(model(), ())
    clock.now_s += 61
    await events.announce(model(), (GPUS,))
    assert poster.posted == [("InsufficientGpus", 2)]
