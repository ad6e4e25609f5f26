"""Routing decisions, each from a snapshot written out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest
from antiphon_policy.latency import StepModel
from antiphon_policy.routing import (
    NoWorker,
    NoWorkerReason,
    RouteDecision,
    RouteReason,
    RouteRequest,
    RoutingSnapshot,
    WorkerRole,
    WorkerView,
    route,
)
from hypothesis import given
from hypothesis import strategies as st

REQUEST = RouteRequest(prompt_tokens=1000, block_tokens=64, block_bytes=1_000_000, max_tokens=16)


def worker(worker_id: str, **fields: object) -> WorkerView:
    """Role by the id's first letter: p, d or b."""
    role = {"p": WorkerRole.PREFILL, "d": WorkerRole.DECODE, "b": WorkerRole.BOTH}[worker_id[0]]
    view = WorkerView(
        worker_id=worker_id,
        role=role,
        leading_blocks=0,
        queued_tokens=0,
        running=0,
        kv_tokens=0,
        free_blocks=1000,
        total_blocks=1000,
        step=StepModel(),
    )
    return msgspec.structs.replace(view, **fields)  # type: ignore[arg-type]


def decide(
    *workers: WorkerView,
    request: RouteRequest = REQUEST,
    tie_break: float = 0.0,
    links: Mapping[tuple[str, str], float] | None = None,
) -> RouteDecision:
    return route(RoutingSnapshot(workers, links or {}), request, tie_break)


# -- who may be chosen


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ((), NoWorkerReason.NO_WORKERS),
        ((worker("p0"),), NoWorkerReason.NO_DECODE_WORKER),
        ((worker("d0", draining=True), worker("p0", draining=True)), NoWorkerReason.ALL_DRAINING),
        ((worker("d0", draining=True), worker("p0")), NoWorkerReason.NO_DECODE_WORKER),
    ],
)
def test_nobody(workers: tuple[WorkerView, ...], reason: NoWorkerReason) -> None:
    with pytest.raises(NoWorker) as raised:
        decide(*workers)
    assert raised.value.reason is reason
    assert str(raised.value)


def test_idle_pools_disaggregate() -> None:
    """The worked example of `WorkerTable.choose`."""
    decision = decide(worker("d0"), worker("p0"))
    assert (decision.decode, decision.prefill) == ("d0", "p0")
    assert decision.reason is RouteReason.PREFILL_REMOTE
    assert decision.predicted_ttft_ms == pytest.approx(504.85, abs=0.01)
    assert decision.cost is not None
    assert decision.cost.total_ms == pytest.approx(553.56, abs=0.01)
    local = decision.alternatives[0]
    assert (local.prefill, round(local.cost_ms, 1)) == (None, 1049.2)


def test_without_a_live_prefill_worker_the_decode_worker_prefills() -> None:
    """vllm-project/aibrix#2289: no dispatch that depends on a prefill worker that is not there."""
    decision = decide(worker("d0"), worker("p0", draining=True))
    assert (decision.prefill, decision.prefill_fallbacks) == (None, ())
    assert decision.reason is RouteReason.LOCAL_NO_PREFILL_WORKER


def test_both_roles_prefill_locally() -> None:
    decision = decide(worker("b0", running=4), worker("b1"))
    assert (decision.decode, decision.prefill) == ("b1", None)


def test_almost_all_cached_on_the_decode_worker_is_local() -> None:
    """What is left to compute on D is less than the way to P and back."""
    request = msgspec.structs.replace(REQUEST, prompt_tokens=64 * 15 + 1)
    decision = decide(worker("d0", leading_blocks=15), worker("p0"), request=request, links={("p0", "d0"): 1.0})
    assert (decision.prefill, decision.reason) == (None, RouteReason.LOCAL_CHEAPER)


@pytest.mark.parametrize(("left", "prefill"), [(104, "p0"), (34, "p0"), (26, None)])
def test_the_second_worked_example_of_the_docs(left: int, prefill: str | None) -> None:
    """docs/routing.md: 14 blocks cached on D; the crossing lies at about 27 tokens left to compute."""
    request = msgspec.structs.replace(REQUEST, prompt_tokens=14 * 64 + left)
    decision = decide(worker("d0", leading_blocks=14), worker("p0"), request=request)
    assert decision.prefill == prefill
    if left == 104:
        assert decision.cost is not None
        assert (round(decision.cost.total_ms, 1), round(decision.alternatives[0].cost_ms, 1)) == (111.6, 148.9)


def test_busy_prefill_pool_and_idle_decode_pool() -> None:
    decision = decide(worker("d0"), worker("p0", queued_tokens=50_000))
    assert (decision.prefill, decision.reason) == (None, RouteReason.LOCAL_CHEAPER)
    assert decide(worker("d0", running=200), worker("p0", queued_tokens=50_000)).prefill == "p0"


# -- cache against load


def test_the_best_prefix_wins_among_equals() -> None:
    assert decide(worker("d0"), worker("p0"), worker("p1", leading_blocks=10)).prefill == "p1"
    assert decide(worker("b0"), worker("b1", leading_blocks=10)).decode == "b1"


def test_a_prefix_is_not_worth_any_queue_and_a_queue_not_any_prefix() -> None:
    """sgl-project/sglang#32195: some imbalance must not throw away affinity; #14305: nor affinity all balance."""
    links = {("p1", "p0"): 0.001}  # so slow that nobody pulls
    for queued, expected in ((300, "p0"), (900, "p1")):
        cached = worker("p0", leading_blocks=10, queued_tokens=queued)
        assert decide(worker("d0", running=50), cached, worker("p1"), links=links).prefill == expected


def test_a_miss_goes_by_load() -> None:
    """sgl-project/sglang#14305: misses went to the worker with the smallest cache even if it was the busiest."""
    busy = worker("b0", queued_tokens=5000, running=8, free_blocks=1000)
    idle = worker("b1", free_blocks=200)
    assert decide(busy, idle).decode == "b1"


def test_load_is_tokens_not_requests() -> None:
    """smg-project/smg#1621: a few long contexts fill an engine as much as many short ones."""
    step = StepModel(per_kv_token_ms=0.0005)
    few_long = worker("d0", running=4, kv_tokens=120_000, step=step)
    many_short = worker("d1", running=5, kv_tokens=2_500, step=step)
    assert decide(few_long, many_short, worker("p0")).decode == "d1"


def test_short_of_blocks_costs_recompute() -> None:
    decision = decide(worker("d0", free_blocks=3), worker("d1", running=3), worker("p0"))
    assert decision.decode == "d1"
    other = next(option for option in decision.alternatives if option.decode == "d0" and option.prefill)
    assert other.cost.recompute_ms > 0


def test_a_slow_link_counts() -> None:
    links = {("d0", "p0"): 0.01, ("d0", "p1"): 10.0}
    assert decide(worker("d0"), worker("p0"), worker("p1", queued_tokens=100), links=links).prefill == "p1"


def test_a_slow_worker_counts() -> None:
    slow = worker("p0", step=StepModel(per_new_token_ms=5.0))
    decision = decide(worker("d0", running=20), slow, worker("p1", queued_tokens=600))
    assert decision.prefill == "p1"
    assert decision.prefill_fallbacks == ("p0",)


# -- bursts


def burst(workers: list[WorkerView], count: int) -> Counter[str]:
    """Route `count` requests, each counted at once into its worker, as the caller does."""
    chosen: Counter[str] = Counter()
    for number in range(count):
        decision = decide(*workers, tie_break=(number * 0.618) % 1)
        prefiller = decision.prefill or decision.decode
        chosen[prefiller] += 1
        for at, view in enumerate(workers):
            if view.worker_id == prefiller:
                view = msgspec.structs.replace(view, queued_tokens=view.queued_tokens + REQUEST.prompt_tokens)
            if view.worker_id == decision.decode:
                view = msgspec.structs.replace(view, running=view.running + 1, kv_tokens=view.kv_tokens + 1000)
            workers[at] = view
    return chosen


@pytest.mark.parametrize("role", ["b", "p"])
def test_a_burst_spreads(role: str) -> None:
    """llm-d/llm-d-router#298 and vllm-project/router#178: a burst on one snapshot herds to one worker."""
    workers = [worker(f"{role}{number}") for number in range(8)]
    if role == "p":
        workers += [worker(f"d{number}", running=30) for number in range(2)]
    chosen = burst(workers, 80)
    assert sum(chosen[f"{role}{number}"] for number in range(8)) == 80
    assert max(chosen.values()) <= 11
    assert min(chosen[f"{role}{number}"] for number in range(8)) >= 9


def test_equal_workers_are_all_chosen() -> None:
    """Gateways that know nothing of each other must not all pick the first of a list."""
    views = [worker(f"d{number}") for number in range(40)] + [worker(f"p{number}") for number in range(40)]
    decisions = [decide(*views, tie_break=number / 400) for number in range(400)]
    assert len({decision.decode for decision in decisions}) > 30
    assert len({decision.prefill for decision in decisions}) > 30


def test_near_ties_go_to_the_less_loaded() -> None:
    for tie_break in (0.0, 0.3, 0.6, 0.99):
        decision = decide(worker("b0", queued_tokens=20), worker("b1", queued_tokens=10), tie_break=tie_break)
        assert decision.decode == "b1"


# -- prefix peers


def test_second_turn_prefix_is_pulled_from_the_decode_worker() -> None:
    decision = decide(worker("d0", leading_blocks=12, running=9), worker("p0"), links={("p0", "d0"): 1.0})
    assert (decision.decode, decision.prefill) == ("d0", "p0")
    assert decision.prefix_peers == (("d0", 12),)


def test_nothing_is_pulled_where_computing_is_cheaper() -> None:
    decision = decide(worker("d0", leading_blocks=12, running=9), worker("p0"), links={("p0", "d0"): 0.02})
    assert decision.prefix_peers == ()


def test_peers_are_ranked_and_exclude_the_prefiller_and_the_shorter() -> None:
    workers = (
        worker("d0", running=9),
        worker("d1", leading_blocks=14, running=500),
        worker("p0", leading_blocks=4),
        worker("p1", leading_blocks=15, queued_tokens=90_000),
        worker("p2", leading_blocks=3, queued_tokens=90_000),
        worker("p3", leading_blocks=15, draining=True),
    )
    decision = decide(*workers, links={("p0", "p1"): 0.05, ("p0", "d1"): 10.0})
    assert decision.prefill == "p0"
    assert decision.prefix_peers == (("d1", 14), ("p1", 15))
    assert decision.prefill_fallbacks == ("p1", "p2")


def test_a_full_hit_still_computes_the_last_token() -> None:
    request = msgspec.structs.replace(REQUEST, prompt_tokens=128)
    decision = decide(worker("b0", leading_blocks=2), request=request)
    assert decision.cost is not None
    assert decision.cost.compute_ms == pytest.approx(StepModel().prefill_ms(new_tokens=64, cached_tokens=64))


# -- whatever the snapshot says


def test_the_decision_explains_itself() -> None:
    decision = decide(worker("d0"), worker("p0", leading_blocks=7))
    for part in ("d0", "p0", "first token", "transfer", "7 (prefill) 0 (decode) of 15", "next:"):
        assert part in decision.explanation


def test_the_same_inputs_give_the_same_decision() -> None:
    views = [worker(f"b{number}", running=number % 3) for number in range(20)]
    assert decide(*views, tie_break=0.4) == decide(*views, tie_break=0.4)


VIEWS = st.lists(
    st.builds(
        WorkerView,
        worker_id=st.just(""),
        role=st.sampled_from(WorkerRole),
        leading_blocks=st.integers(0, 50),
        queued_tokens=st.integers(0, 100_000),
        running=st.integers(0, 300),
        kv_tokens=st.integers(0, 10**6),
        free_blocks=st.integers(0, 2000),
        total_blocks=st.sampled_from([0, 1, 2000]),
        step=st.sampled_from([StepModel(), StepModel(0, 0, 0, 0, 0), StepModel(1, 0.01, 1e-7, 0.1, 1e-5)]),
        draining=st.booleans(),
    ),
    max_size=24,
)
REQUESTS = st.builds(
    RouteRequest,
    prompt_tokens=st.integers(0, 5000),
    block_tokens=st.sampled_from([0, 16, 64]),
    block_bytes=st.sampled_from([0, 1000, 10**7]),
    max_tokens=st.integers(0, 10**6),
)


@given(VIEWS, REQUESTS, st.floats(0, 1, exclude_max=True), st.sampled_from([-1.0, 0.0, 0.5, 50.0]))
def test_any_snapshot_gives_a_valid_decision(
    views: list[WorkerView], request: RouteRequest, tie_break: float, speed: float
) -> None:
    """ai-dynamo/dynamo#6985 and llm-d/llm-d-router#2547: zeros and unknowns neither become NaN nor block anything."""
    views = [msgspec.structs.replace(view, worker_id=f"w{at}") for at, view in enumerate(views)]
    by_id = {view.worker_id: view for view in views}
    links = {(one, other): speed for one in by_id for other in by_id}
    try:
        decision = route(RoutingSnapshot(tuple(views), links), request, tie_break)
    except NoWorker:
        assert not any(not view.draining and view.role is not WorkerRole.PREFILL for view in views)
        return
    assert by_id[decision.decode].role is not WorkerRole.PREFILL
    named = {decision.decode, *decision.prefill_fallbacks, *(holder for holder, _ in decision.prefix_peers)}
    if decision.prefill is not None:
        named.add(decision.prefill)
        assert by_id[decision.prefill].role is WorkerRole.PREFILL
        assert decision.prefill not in decision.prefill_fallbacks
    assert not any(by_id[name].draining for name in named)
    assert all(by_id[name].role is WorkerRole.PREFILL for name in decision.prefill_fallbacks)
    prefiller = by_id[decision.prefill or decision.decode]
    assert all(held > prefiller.leading_blocks for _, held in decision.prefix_peers)
    assert prefiller.worker_id not in {holder for holder, _ in decision.prefix_peers}
    assert math.isfinite(decision.predicted_ttft_ms)
    assert decision.predicted_ttft_ms >= 0
    assert decision.cost is not None
    assert all(option.cost_ms >= decision.cost.total_ms * 0.97 - 0.5 for option in decision.alternatives)


def test_a_thousand_workers_are_priced_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass and a few pairs, counted: not every prefill worker with every decode worker."""
    calls = 0
    original = StepModel.prefill_ms

    def counted(self: StepModel, *, new_tokens: int, cached_tokens: int = 0, chunk_tokens: int = 512) -> float:
        nonlocal calls
        calls += 1
        return original(self, new_tokens=new_tokens, cached_tokens=cached_tokens, chunk_tokens=chunk_tokens)

    monkeypatch.setattr(StepModel, "prefill_ms", counted)
    views = [worker(f"{'pd'[number % 2]}{number}", queued_tokens=number) for number in range(1000)]
    decide(*views)
    assert calls < 4000
