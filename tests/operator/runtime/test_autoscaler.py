"""The autoscaler alone, with a shelf that a test fills: what it decides, shows, keeps and writes down."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from antiphon_operator.plan.scaled_records import ScaledModel, ScaledPool, ScaledReplica, ScalingPart
from antiphon_operator.runtime.autoscaler import Autoscaler
from antiphon_operator.runtime.metrics import ScalingMetrics
from antiphon_operator.runtime.scaling_store import Shelf, StoreError
from antiphon_operator.runtime.start_times import StartTimes
from antiphon_policy.latency import StepModel
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import (
    ArrivalCounts,
    GatewayNews,
    Promise,
    RequestSample,
    ScalingAction,
    ScalingDecision,
    TpotTarget,
    TtftTarget,
    WorkerNews,
    decide,
)
from antiphon_policy.scaling.remembered import Remembered
from prometheus_client import CollectorRegistry

KEY = "chat/qwen"
STEP = StepModel(base_ms=5.0, per_new_token_ms=0.5)
POOLS = (
    ScaledPool("prefill", WorkerRole.PREFILL, 1, 0, 4, 1, "one", "rev", 0),
    ScaledPool("decode", WorkerRole.DECODE, 1, 0, 4, 1, "one", "rev", 0),
)
MODEL = ScaledModel(
    uid="u1",
    part=ScalingPart.ENFORCE,
    promise=Promise(TtftTarget(1500.0), TpotTarget(50.0)),
    budget_devices=None,
    pools=POOLS,
    replicas=(
        ScaledReplica("p0", "prefill", 0.0, True),
        ScaledReplica("d0", "decode", 0.0, True),
    ),
)


class Bench:
    """An autoscaler, its clock, and what stands in Redis."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000.0
        self.news: list[GatewayNews] = []
        self.remembered: Remembered | None = None
        self.decisions: list[ScalingDecision] = []
        self.works = True
        self.woken = 0
        self.begin()

    def begin(self) -> None:
        """A new operator."""
        self.registry = CollectorRegistry()
        self.autoscaler = Autoscaler(self, self._wake, ScalingMetrics(self.registry), now_ms=lambda: self.now_ms)

    async def look(self, model: ScaledModel = MODEL, after_ms: float = 2000.0) -> None:
        self.now_ms += after_ms
        self.autoscaler.tell(KEY, model)
        await self.autoscaler.look(KEY)

    def load(self, requests: int, **fields: object) -> None:
        """So many in the last 300 s."""
        samples = tuple(
            RequestSample(self.now_ms - 300_000.0 * (at + 1) / (requests + 1), 2000, 2000, 50)
            for at in reversed(range(requests))
        )
        workers = tuple(
            WorkerNews(f"{name}-0", role, "rev", self.now_ms, STEP, max_sequences=64)
            for name, role in (("p0", WorkerRole.PREFILL), ("d0", WorkerRole.DECODE))
        )
        news = GatewayNews("g", KEY, self.now_ms, samples=samples, workers=workers)
        self.news = [msgspec.structs.replace(news, **fields)]

    def size(self, role: str) -> int:
        view = self.autoscaler.view(KEY)
        assert view is not None
        return view.sizes[role]

    def action(self) -> ScalingAction:
        view = self.autoscaler.view(KEY)
        assert view is not None
        assert view.told is not None
        return view.told.action

    # -- the shelf

    async def read(self, model_key: str, *, with_memory: bool) -> Shelf:
        if not self.works:
            raise StoreError("Redis is away")
        return Shelf(tuple(self.news), self.remembered if with_memory else None)

    async def keep(self, model_key: str, remembered: Remembered, decision: ScalingDecision | None) -> None:
        if not self.works:
            raise StoreError("Redis is away")
        self.remembered = remembered
        if decision is not None:
            self.decisions.append(decision)

    def _wake(self, model_key: str) -> None:
        self.woken += 1


async def test_a_load_that_needs_more_is_decided_shown_kept_and_written_down() -> None:
    bench = Bench()
    bench.load(600)
    await bench.look()
    assert bench.size("prefill") > 1
    assert bench.woken == 1
    assert bench.remembered is not None
    assert bench.remembered.owner == "u1"
    (written,) = bench.decisions
    assert written.action is ScalingAction.ADD
    assert written.inputs is not None
    assert decide(written.inputs) == written
    assert written.inputs.pools[0].step == STEP


async def test_nothing_is_decided_again_before_the_pools_have_what_was_decided() -> None:
    bench = Bench()
    bench.load(600)
    await bench.look()
    wanted = bench.size("prefill")
    bench.now_ms += 2000.0
    await bench.autoscaler.look(KEY)
    assert len(bench.decisions) == 1
    applied = of_size(prefill=wanted, decode=bench.size("decode"))
    bench.load(600)
    await bench.look(applied)
    assert bench.size("prefill") == wanted, "workers that start are part of the size"
    assert len(bench.decisions) == 1


def of_size(**sizes: int) -> ScaledModel:
    return replace(MODEL, pools=tuple(replace(pool, size=sizes[pool.role]) for pool in POOLS))


async def test_one_that_goes_on_after_another_has_its_memory() -> None:
    bench = Bench()
    bench.load(1, arrivals=ArrivalCounts(bench.now_ms // 10_000 * 10_000, 10_000.0, (4.0, 5.0)))
    await bench.look()
    before = bench.remembered
    assert before is not None
    assert before.memory.of(WorkerRole.DECODE).since_ms == bench.now_ms
    bench.begin()
    await bench.look(after_ms=20_000.0)
    after = bench.remembered
    assert after is not None
    assert after.memory.of(WorkerRole.DECODE).since_ms == before.memory.of(WorkerRole.DECODE).since_ms
    assert after.history.recent == (4.0, 5.0)
    assert after.of(WorkerRole.DECODE).figures.step == STEP
    bench.begin()
    await bench.look(replace(MODEL, uid="u2"), after_ms=20_000.0)
    assert bench.remembered is not None
    assert bench.remembered.owner == "u2"
    assert bench.remembered.history.recent == (), "a namesake begins anew"


async def test_without_redis_nothing_is_decided_and_later_all_stays_as_it_is() -> None:
    bench = Bench()
    bench.works = False
    await bench.look()
    assert bench.autoscaler.view(KEY) is None, "its memory may say that it must not shrink"
    bench.works = True
    bench.load(600)
    await bench.look()
    wanted = bench.size("prefill")
    bench.works = False
    model = of_size(prefill=wanted, decode=bench.size("decode"))
    for _ in range(20):
        await bench.look(model)
    view = bench.autoscaler.view(KEY)
    assert view is not None
    assert view.silent
    assert bench.size("prefill") == wanted
    bench.works = True
    bench.load(600)
    await bench.look(model)
    assert bench.action() is ScalingAction.NONE


async def test_held_requests_wake_a_model_that_sleeps_and_none_let_it_sleep() -> None:
    bench = Bench()
    bench.load(0)
    asleep = of_size(prefill=0, decode=0)
    await bench.look(asleep)
    assert (bench.size("prefill"), bench.size("decode")) == (0, 0)
    bench.load(0, held_requests=1, held_tokens=50)
    await bench.look(asleep)
    assert (bench.size("prefill"), bench.size("decode")) == (1, 1)
    assert bench.action() is ScalingAction.WAKE
    awake = of_size(prefill=1, decode=1)
    for _ in range(400):
        bench.load(0)
        await bench.look(awake)
        if bench.size("decode") == 0:
            break
    assert bench.action() is ScalingAction.TO_ZERO


async def test_quiet_minutes_write_one_decision_each_and_a_failure_with_one_model_is_its_own() -> None:
    bench = Bench()
    for _ in range(60):
        bench.load(3)
        await bench.look()
    assert 2 <= len(bench.decisions) <= 4
    assert bench.woken <= 6, "the planner looks for figures by the half minute"
    page = bench.registry.get_sample_value
    assert page("antiphon_operator_scaling_decisions_total", {"action": "none"}) == 60.0


async def test_where_sizes_are_others_concern_the_promise_is_measured_and_nothing_is_kept() -> None:
    bench = Bench()
    model = replace(MODEL, part=ScalingPart.MEASURE)
    bench.load(9)
    bench.news = [
        msgspec.structs.replace(
            one,
            samples=tuple(
                msgspec.structs.replace(s, ttft_ms=1600.0 if at == 4 else 900.0) for at, s in enumerate(one.samples)
            ),
        )
        for one in bench.news
    ]
    await bench.look(model)
    view = bench.autoscaler.view(KEY)
    assert view is not None
    assert view.sizes == {}
    assert view.ttft_p95_ms == 1600.0
    assert view.attainment == pytest.approx(8 / 9)
    assert set(view.lost_ms) == {"p0-0", "d0-0"}
    assert (bench.woken, bench.remembered, bench.decisions) == (1, None, [])
    await bench.look(MODEL)
    assert bench.size("decode") >= 1, "from the next look on it has a say"


async def test_a_model_that_is_no_concern_any_more_is_forgotten() -> None:
    bench = Bench()
    bench.load(3)
    await bench.look()
    bench.autoscaler.tell(KEY, None)
    assert bench.autoscaler.view(KEY) is None
    assert await bench.autoscaler.look(KEY) == 0.0


# -- start and drain times


def replicas(*found: ScaledReplica) -> ScaledModel:
    return replace(MODEL, replicas=found)


def test_starts_and_drains_are_measured_from_the_objects_as_they_are_seen() -> None:
    times = StartTimes()
    old = ScaledReplica("d0", "decode", 1000.0, True)
    times.looked(replicas(old, ScaledReplica("d1", "decode", 5000.0, False)), 6000.0)
    times.looked(replicas(old, ScaledReplica("d1", "decode", 5000.0, True)), 17_000.0)
    times.looked(replicas(old, ScaledReplica("d1", "decode", 5000.0, False)), 60_000.0)
    times.looked(replicas(old, ScaledReplica("d1", "decode", 5000.0, True)), 90_000.0)
    times.looked(replicas(ScaledReplica("d0", "decode", 1000.0, True, 91_000.0)), 92_000.0)
    times.looked(replicas(), 95_000.0)
    past = times.added_to(Remembered()).of(WorkerRole.DECODE)
    assert past.starts_ms == (12_000.0,), "not what was ready already, nor a pod that was unready for a while"
    assert past.drains_ms == (4000.0,), "and no drain of one that went without"
    assert times.added_to(Remembered()) == Remembered()


@pytest.mark.parametrize("created_ms", [None, 0.0])
async def test_one_that_starts_is_expected_by_what_starts_took(created_ms: float | None) -> None:
    bench = Bench()
    bench.load(3)
    starting = ScaledReplica("d1", "decode", None if created_ms is None else bench.now_ms + 2000.0 - 12_000.0, False)
    await bench.look(replace(of_size(prefill=1, decode=2), replicas=(*MODEL.replicas, starting)))
    inputs = bench.decisions[-1].inputs
    assert inputs is not None
    assert inputs.pools[1].starting_ms == ((60_000.0,) if created_ms is None else (48_000.0,))
    assert (inputs.pools[1].ready, inputs.pools[1].draining) == (1, 0)
