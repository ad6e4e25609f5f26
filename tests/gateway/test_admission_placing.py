"""What a worker's load is taken to be between its reports, and where a choice would go by it. Nothing is sent here."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from antiphon_gateway.groups import Group
from antiphon_gateway.load import SUBMIT_WINDOW, Pledge, WorkerLoad
from antiphon_gateway.placing import Placing, Plan
from antiphon_gateway.sessions import Sessions
from antiphon_policy.latency import StepModel
from antiphon_policy.routing import NoWorker, WorkerRole
from antiphon_proto import worker_pb2 as pb

GROUP = Group("m", "", "card")
BLOCK = 64
CONFIRMED_IN_S = 3.0


class Fleet:
    """What `Placing` asks of a fleet."""

    def __init__(self) -> None:
        self.leading: dict[str, int] = {}
        self.away: tuple[str, ...] = ()
        self.catalogue = SimpleNamespace(draining=lambda model: self.away, record=lambda model: None)

    def leading_blocks(self, model: Any, chain: Any) -> dict[str, int]:
        return self.leading

    def evicted_reuse(self, model: str) -> float:
        return 0.0


def load(worker_id: str, role: WorkerRole = WorkerRole.BOTH, *, tokens: int = 0, running: int = 0) -> WorkerLoad:
    client: Any = SimpleNamespace(
        attachment=SimpleNamespace(worker_id=worker_id, role=role, group=GROUP),
        queue=pb.QueueState(waiting_tokens=tokens, running=running, free_blocks=10_000, total_blocks=10_000),
        step_model=StepModel(),
    )
    return WorkerLoad(client, 0.0, confirmed_in_s=CONFIRMED_IN_S)


def says(one: WorkerLoad, now: float, **figures: Any) -> None:
    one.client.queue.MergeFrom(pb.QueueState(**figures))
    one.settle(now)


class Scene:
    def __init__(self, *loads: WorkerLoad) -> None:
        self.fleet = Fleet()
        self.sessions = Sessions()
        self.draw = 0.0
        self.block_bytes = 1000
        fleet: Any = self.fleet
        self.placing = Placing(GROUP, fleet, self.sessions, self._next)
        for one in loads:
            self.placing.joined(one)

    def _next(self) -> float:
        self.draw = (self.draw + 0.618) % 1.0
        return self.draw

    def plan(self, now: float, prompt_tokens: int = 1000, excluded: tuple[str, ...] = ()) -> Plan:
        choice: Any = SimpleNamespace(
            flight=SimpleNamespace(
                model=SimpleNamespace(block_tokens=BLOCK, block_bytes=self.block_bytes),
                ticket=SimpleNamespace(tenant="", wishes=SimpleNamespace(session="")),
            ),
            prompt=SimpleNamespace(token_ids=[0] * prompt_tokens),
            chain=(),
            output=[],
            sampling=SimpleNamespace(max_tokens=16),
            excluded=set(excluded),
            prompt_at="",
        )
        return self.placing.plan(choice, now)

    def look(self, now: float) -> None:
        self.placing.refresh({}, now)

    def send(self, now: float, **fields: Any) -> Plan:
        self.look(now)
        plan = self.plan(now, **fields)
        self.placing.pledge(plan, now)
        return plan


# -- what a load is taken to be


def test_what_was_just_routed_counts_at_once_and_until_the_worker_says_so_itself() -> None:
    """vllm-project/router#178: what was polled, and the dispatches since."""
    one = load("a", tokens=100)
    pledge = Pledge(tokens=500, blocks=8, decodes=True, made_at=0.0)
    one.pledge(pledge)
    assert one.queued_tokens(0.0) == 600
    pledge.accepted_at = 0.01
    says(one, 0.02, waiting_tokens=600, running=1)
    assert one.queued_tokens(0.02) == 600
    assert one.view(0.02, draining=False).running == 1


def test_what_nobody_confirms_ends_by_itself() -> None:
    """vllm-project/aibrix#1246: a count that stays up for ever after its request is gone."""
    one = load("a")
    one.pledge(Pledge(tokens=500, blocks=8, decodes=True, made_at=0.0))
    assert one.queued_tokens(CONFIRMED_IN_S - 0.1) == 500
    assert one.queued_tokens(CONFIRMED_IN_S + 0.1) == 0
    one.settle(CONFIRMED_IN_S + 0.1)
    assert not one.pledges


def test_pledges_end_in_any_order_and_each_once() -> None:
    one = load("a")
    first, second, third = (
        Pledge(tokens, 2, decodes=True, made_at=at) for tokens, at in ((100, 0.0), (30, 1.0), (7, 1.0))
    )
    for pledge in (first, second, third):
        one.pledge(pledge)
    assert (one.queued_tokens(1.0), one.view(1.0, draining=False).running) == (137, 3)
    # Nobody confirmed the first one in time, and nobody has said so yet.
    assert one.queued_tokens(CONFIRMED_IN_S) == 37
    one.release(second)
    one.release(second)
    assert one.queued_tokens(1.0) == 107
    one.settle(CONFIRMED_IN_S)
    one.release(first)
    view = one.view(CONFIRMED_IN_S, draining=False)
    assert (view.queued_tokens, view.running, view.free_blocks) == (7, 1, 10_000 - 2)


def test_a_prefill_worker_hears_of_a_request_by_way_of_another_so_its_pledge_lasts_longer() -> None:
    one = load("p", WorkerRole.PREFILL)
    pledge = Pledge(tokens=500, blocks=8, decodes=False, made_at=0.0, accepted_at=0.01)
    one.pledge(pledge)
    one.settle(0.05)
    assert one.queued_tokens(0.05) == 500
    one.settle(0.2)
    assert one.queued_tokens(0.2) == 0


def test_between_reports_the_queue_drains_as_the_step_model_says() -> None:
    """512 tokens take 258 ms: 2,000 reported at 0 are about 1,008 half a second later, and none after two seconds."""
    one = load("a", tokens=2000)
    assert one.queued_tokens(0.5) == pytest.approx(2000 - 500 * 512 / 258.15, abs=1)
    assert one.queued_tokens(2.0) == 0


def test_the_round_trip_and_the_time_between_reports_are_measured() -> None:
    one = load("a", running=1)
    for at in range(1, 200):
        says(one, at * 0.05)
    assert one.report_ms == pytest.approx(50.0, rel=0.01)
    one.unanswered = 100
    for _ in range(100):
        one.answered(0.004)
    assert one.unanswered == 0
    assert one.round_trip_ms == pytest.approx(4.0, rel=0.01)


# -- where it would go


def test_a_burst_spreads_although_nobody_reports_in_between() -> None:
    """llm-d/llm-d-router#298, #1599: bursts that read one snapshot herd to one pod; each pick must see those before."""
    scene = Scene(*(load(f"w{at}") for at in range(8)))
    picks = Counter(scene.send(0.0).decision.decode for _ in range(32))
    assert set(picks.values()) == {4}


def test_what_is_held_reserves_its_worker_for_those_looked_at_after_it() -> None:
    scene = Scene(load("a", tokens=600), load("b", tokens=700))
    scene.look(0.0)
    picks = []
    for _ in range(4):
        plan = scene.plan(0.0)
        assert plan.hold_ms > 0.0
        picks.append(plan.decision.decode)
        scene.placing.reserve(plan)
    assert Counter(picks) == {"a": 2, "b": 2}
    # The next look begins without what was reserved.
    scene.look(0.0)
    assert scene.plan(0.0).decision.decode == "a"


def test_a_miss_goes_by_load_not_to_the_smallest_cache() -> None:
    """sgl-project/sglang#14305, #14532: the worker with the smallest tree got all misses, though it was the busiest."""
    scene = Scene(load("new", tokens=400), load("old", tokens=0))
    assert scene.send(0.0).decision.decode == "old"


def test_a_prefix_wins_within_a_window_of_load_and_loses_beyond_it() -> None:
    """sgl-project/sglang#32195: any imbalance dropped affinity wholly."""
    scene = Scene(load("warm", tokens=200), load("idle"))
    # Too much to be worth pulling.
    scene.block_bytes = 100_000_000
    scene.fleet.leading = {"warm": 14}
    scene.look(0.0)
    assert scene.plan(0.0).decision.decode == "warm"
    busy = Scene(load("warm", tokens=5000), load("idle"))
    busy.block_bytes = scene.block_bytes
    busy.fleet.leading = {"warm": 14}
    busy.look(0.0)
    assert busy.plan(0.0).decision.decode == "idle"


def test_with_no_figures_or_only_stale_ones_everything_is_open() -> None:
    """llm-d/llm-d-router#2547: all metrics stale made saturation 1.0, and all was blocked with healthy back ends."""
    scene = Scene(load("silent"), load("stale", tokens=50_000))
    for load_of in ("silent", "stale"):
        scene.look(3600.0)
        plan = scene.plan(3600.0, excluded=("silent",) if load_of == "stale" else ("stale",))
        assert plan.decision.decode == load_of
        assert plan.hold_ms == 0.0


def test_a_worker_that_others_fill_is_not_left_to_them() -> None:
    """It says 5,000 tokens again and again. When they should be done, one request is sent; then it is held again."""
    one = load("a", tokens=5000)
    scene = Scene(one)
    scene.look(0.0)
    assert scene.plan(0.0).hold_ms > 0.0
    for now in (1.0, 2.0):
        says(one, now)
        scene.placing.changed(one)
        scene.look(now)
        assert scene.plan(now).hold_ms > 0.0
    says(one, 2.6)
    scene.placing.changed(one)
    scene.look(2.6)
    plan = scene.plan(2.6)
    assert plan.hold_ms == 0.0
    scene.placing.pledge(plan, 2.6)
    assert scene.plan(2.6).hold_ms > 0.0


def test_who_is_full_or_leaves_gets_no_answer_to_make() -> None:
    full, leaving = load("full"), load("leaving")
    full.unanswered = SUBMIT_WINDOW
    scene = Scene(full, leaving)
    scene.fleet.away = ("leaving",)
    scene.look(0.0)
    with pytest.raises(NoWorker):
        scene.plan(0.0)
    assert scene.placing.anybody()
    assert not scene.placing.anybody(excluded=("full",))


def test_room_is_news_once() -> None:
    """A worker whose report shows room that it had not is reason to look; one that had it already is not."""
    one = load("a", tokens=5000)
    scene = Scene(one, load("b"))
    scene.look(0.0)
    assert not scene.placing.became_free(one, 0.1)
    one.client.queue.waiting_tokens = 10
    one.settle(0.2)
    assert scene.placing.became_free(one, 0.2)
    scene.placing.changed(one)
    scene.look(0.2)
    assert not scene.placing.became_free(one, 0.3)


def test_what_a_look_gave_is_seen_by_it_so_that_room_is_news_again() -> None:
    one = load("a")
    scene = Scene(one)
    scene.send(0.0)
    scene.placing.put_changed(0.0)
    for pledge in one.pledges:
        pledge.accepted_at = 0.01
    says(one, 0.1)
    assert scene.placing.became_free(one, 0.1)


def test_how_long_something_takes_is_no_reason_to_hold_while_the_worker_never_said_how_fast_it_is() -> None:
    """What it says itself that waits is. And where others go, what was routed to it counts all the same."""
    one = load("a")
    scene = Scene(one, load("b"))
    assert all(scene.send(0.0).hold_ms == 0.0 for _ in range(20))
    assert one.queued_tokens(0.0) == 10_000
    says(one, 0.0, waiting_tokens=5000)
    assert one.keeps_back(one.queue_ms(0.0), 0.0) > 0.0
    silent = load("c")
    silent.pledge(Pledge(tokens=5000, blocks=80, decodes=True, made_at=0.0))
    assert silent.keeps_back(silent.queue_ms(0.0), 0.0) == 0.0
    says(silent, 0.0, step_model=pb.StepCoefficients(base_ms=2.1, per_new_token_ms=0.5))
    assert silent.keeps_back(silent.queue_ms(0.0), 0.0) > 0.0


def test_a_worker_that_has_left_stays_away_whatever_is_said_of_it_after() -> None:
    one = load("a")
    scene = Scene(one, load("b"))
    scene.look(0.0)
    scene.placing.left(one)
    scene.placing.changed(one)
    scene.look(0.1)
    assert {scene.send(0.1).decision.decode for _ in range(4)} == {"b"}
