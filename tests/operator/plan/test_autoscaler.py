"""What comes of the autoscaler's word: sizes, hand edits beside it, who goes, and what status and Events say."""

from __future__ import annotations

from typing import Any

import msgspec
from antiphon_operator import names
from antiphon_operator.plan.advice import (
    LIMITED_FOR_MS,
    SAID_FOR_MS,
    LimitSeen,
    limit_of,
    percentile,
    said_lately,
    view_of,
)
from antiphon_operator.plan.observed import AutoscalerView, Limit
from antiphon_operator.plan.scaled_records import ScaledModel, ScalingPart
from antiphon_operator.resource.reasons import Reason
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import (
    GatewayNews,
    ModelSetup,
    PoolSetup,
    RequestSample,
    RoleSwitch,
    ScalingAction,
    ScalingReason,
    decide,
    merged,
)
from antiphon_policy.scaling.history import History
from antiphon_policy.scaling.records import ScalingDecision, ScalingMemory
from antiphon_policy.scaling.remembered import Told, told_after

from tests.operator.plan.cluster import Cluster

ENFORCE = {"mode": "Enforce", "prefill": {"min": 0, "max": 6}, "decode": {"min": 0, "max": 6}}
PROMISE = {"ttft": {"p95": "500ms", "perThousandTokens": "60ms"}, "tpot": {"p95": "40ms"}}
AT_MS = 1_750_000_000_000.0
ADDED = Told(AT_MS, ScalingAction.ADD, ScalingReason.QUEUE, "decode 2 -> 3: needs 3", (1, 3))


def view(prefill: int = 1, decode: int = 2, **fields: Any) -> AutoscalerView:
    return AutoscalerView({"prefill": prefill, "decode": decode}, **fields)


def enforced(**spec: Any) -> Cluster:
    cluster = Cluster({"autoscaling": ENFORCE, "sla": PROMISE, **spec})
    cluster.settle()
    return cluster


def sizes(cluster: Cluster) -> tuple[int, int]:
    return len(cluster.sets("prefill", draining=False)), len(cluster.sets("decode", draining=False))


def scaled(cluster: Cluster) -> ScaledModel:
    assert cluster.last is not None
    assert cluster.last.scaled is not None
    return cluster.last.scaled


def hand_sets(cluster: Cluster, role: str, replicas: int) -> None:
    pool = cluster.objects["Pool", f"qwen-{role}"]
    pool["spec"] = {**pool["spec"], "replicas": replicas}


def test_enforce_begins_with_the_models_numbers_and_follows_the_autoscaler() -> None:
    cluster = enforced()
    assert sizes(cluster) == (1, 2)
    for told in ((2, 4), (1, 1), (0, 0), (1, 1)):
        cluster.autoscaler = view(*told)
        cluster.settle()
        assert sizes(cluster) == told
    cluster.autoscaler = None
    cluster.settle()
    assert sizes(cluster) == (1, 1), "a new operator that has decided nothing yet changes nothing"


def test_advise_and_disabled_change_nothing_and_a_hand_is_put_back() -> None:
    cluster = Cluster({"autoscaling": {"mode": "Advise"}})
    cluster.settle()
    cluster.autoscaler = view(4, 4)
    hand_sets(cluster, "decode", 5)
    cluster.settle()
    assert sizes(cluster) == (1, 2)
    assert scaled(cluster).pools[1].edits == 0
    cluster.edit(autoscaling={"mode": "Disabled"})
    cluster.settle()
    assert cluster.last is not None
    assert scaled(cluster).part is ScalingPart.MEASURE
    assert "autoscaler" not in cluster.model["status"]
    assert cluster.condition("ScalingLimited") == {}


def test_what_a_hand_sets_under_enforce_stands_until_the_autoscaler_knows_of_it() -> None:
    cluster = enforced()
    cluster.autoscaler = view(1, 2)
    cluster.settle()
    hand_sets(cluster, "decode", 4)
    cluster.settle()
    assert sizes(cluster) == (1, 4), "what was said before is void"
    assert [(pool.size, pool.edits) for pool in scaled(cluster).pools] == [(1, 0), (4, 1)]
    cluster.forget_statuses()
    cluster.settle()
    assert scaled(cluster).pools[1].edits == 1, "counted once, whoever looks"
    cluster.autoscaler = view(1, 3, edits={"decode": 1})
    cluster.settle()
    assert sizes(cluster) == (1, 3)
    hand_sets(cluster, "decode", 50)
    cluster.settle()
    assert sizes(cluster) == (1, 6), "bounds hold for hands too"
    assert scaled(cluster).pools[1].edits == 2


def test_changing_bounds_or_mode_is_no_hand_edit() -> None:
    cluster = enforced()
    cluster.autoscaler = view(2, 4)
    cluster.settle()
    cluster.edit(autoscaling={"decode": {"min": 1, "max": 3}})
    cluster.settle()
    assert sizes(cluster) == (2, 3)
    cluster.edit(autoscaling={"mode": "External"})
    cluster.settle()
    hand_sets(cluster, "decode", 1)
    cluster.settle()
    cluster.edit(autoscaling={"mode": "Enforce"})
    cluster.autoscaler = None
    cluster.settle()
    assert sizes(cluster) == (2, 1), "a mode that hands over keeps the number"
    assert [pool.edits for pool in scaled(cluster).pools] == [0, 0]


def test_an_operator_killed_before_it_could_write_the_size_comes_to_the_same_size_again() -> None:
    cluster = enforced()
    cluster.autoscaler = view(2, 4)
    for after in range(12):
        cluster.tick(killed_after=after)
        assert sizes(cluster)[1] <= 4
    cluster.settle()
    assert sizes(cluster) == (2, 4)
    assert [pool.edits for pool in scaled(cluster).pools] == [0, 0]


def test_the_autoscaler_is_shown_promise_pools_and_replicas() -> None:
    cluster = enforced(prefill={"replicas": 1, "parallelism": {"tensor": 2}})
    seen = scaled(cluster)
    assert seen.part is ScalingPart.ENFORCE
    assert seen.promise.ttft is not None
    assert seen.promise.tpot is not None
    assert (seen.promise.ttft.base_ms, seen.promise.ttft.per_thousand_tokens_ms) == (500.0, 60.0)
    assert seen.promise.tpot.limit_ms == 40.0
    prefill, decode = seen.pools
    assert (prefill.does, prefill.devices, prefill.floor, prefill.ceiling) == (WorkerRole.PREFILL, 2, 0, 6)
    assert (decode.does, decode.devices, decode.size) == (WorkerRole.DECODE, 1, 2)
    assert prefill.shape != decode.shape
    assert decode.revision == cluster.revision()
    assert [(replica.role, replica.ready) for replica in seen.replicas].count(("decode", True)) == 2
    assert cluster.last is not None
    assert cluster.last.record is not None
    assert cluster.last.record.ttft_per_thousand_tokens_ms == 60.0
    alone = Cluster({"autoscaling": {"mode": "Advise"}, "prefill": None})
    del alone.model["spec"]["prefill"]
    alone.settle()
    assert [pool.does for pool in scaled(alone).pools] == [WorkerRole.BOTH]


def test_the_replica_goes_whose_loss_costs_least_and_the_newest_where_nobody_tells() -> None:
    def left(lost_ms: dict[int, float]) -> list[int]:
        cluster = enforced(decode={"replicas": 3})
        made = sorted(cluster.sets("decode"), key=ordinal)
        workers = {number: f"{thing['metadata']['name']}-0" for number, thing in enumerate(made)}
        cluster.busy = set(workers.values())
        cluster.autoscaler = view(1, 2, lost_ms={workers[number]: cost for number, cost in lost_ms.items()})
        cluster.run(2)
        return [made.index(thing) for thing in cluster.sets("decode", draining=False)]

    assert left({}) == [0, 1]
    assert left({0: 10.0, 1: 500.0, 2: 400.0}) == [1, 2]
    assert left({0: 10.0, 2: 400.0}) == [0, 2], "of the one in the middle no gateway knows anything"


def ordinal(thing: Any) -> int:
    return int(thing["metadata"]["annotations"][names.ORDINAL_ANNOTATION])


def test_a_drain_goes_on_whatever_the_losses_become() -> None:
    cluster = enforced(decode={"replicas": 2})
    first, second = (thing["metadata"]["name"] for thing in sorted(cluster.sets("decode"), key=ordinal))
    cluster.busy = {f"{first}-0", f"{second}-0"}
    for first_ms, second_ms in ((1.0, 9.0), (9.0, 1.0), (5.0, 0.0)):
        cluster.autoscaler = view(1, 1, lost_ms={f"{first}-0": first_ms, f"{second}-0": second_ms})
        cluster.run(2)
        assert [thing["metadata"]["name"] for thing in cluster.sets("decode", draining=False)] == [second]


# -- status, conditions, events


def test_the_status_tells_the_promise_as_it_is_kept_and_the_last_decision() -> None:
    cluster = enforced()
    assert cluster.reason("ScalingLimited") == ("Unknown", "Waiting")
    cluster.autoscaler = view(
        1, 3, told=ADDED, attainment=0.9874, ttft_p95_ms=480.4, tpot_p95_ms=31.0, advice="One could do otherwise."
    )
    cluster.settle()
    status = cluster.model["status"]
    assert status["sla"]["ttft"]["summary"] == "480ms/500ms"
    assert status["sla"]["tpot"]["p95"] == "31ms"
    assert (status["sla"]["attainment"], status["sla"]["window"]) == ("98.7%", "5m")
    assert status["autoscaler"] == {
        "lastDecision": {
            "at": "2025-06-15T15:06:40Z",
            "action": "add",
            "reason": "queue",
            "sentence": "decode 2 -> 3: needs 3",
        },
        "recommendation": {"prefill": 1, "decode": 3},
        "advice": "One could do otherwise.",
    }
    assert cluster.reason("ScalingLimited") == ("False", "WithinLimits")


def test_a_decision_is_one_event_in_the_words_of_the_mode() -> None:
    cluster = enforced()
    cluster.autoscaler = view(1, 3, told=ADDED)
    cluster.run(5)
    assert [event.message for event in cluster.events if event.reason == "ScaledUp"] == [ADDED.sentence]
    adviser = Cluster({"autoscaling": {"mode": "Advise"}})
    adviser.autoscaler = view(1, 3, told=ADDED)
    adviser.run(5)
    assert [event.message for event in adviser.events if event.reason == "ScalingAdvised"] == [ADDED.sentence]


def test_limits_and_silence_are_conditions_that_say_what_to_do() -> None:
    cluster = enforced()
    cluster.autoscaler = view(limit=Limit(Reason.CEILING, "raise spec.autoscaling.decode.max"))
    cluster.settle()
    assert cluster.reason("ScalingLimited") == ("True", "Ceiling")
    cluster.autoscaler = view(silent=True)
    cluster.settle()
    assert cluster.reason("ScalingLimited") == ("Unknown", "NoNews")
    assert "Redis" in cluster.condition("ScalingLimited")["message"]
    assert cluster.reason("Ready") == ("True", "Serving")


def test_a_model_that_sleeps_says_that_a_request_wakes_it_and_gateways_hold_requests() -> None:
    cluster = enforced()
    cluster.autoscaler = view(0, 0)
    cluster.settle()
    assert cluster.reason("Ready") == ("False", "ScaledToZero")
    assert "wakes" in cluster.condition("Ready")["message"]
    assert cluster.last is not None
    assert cluster.last.record is not None
    assert cluster.last.record.waking


# -- from decisions to views

NOW = 1_700_000_000_000.0


def decided(model: ScaledModel, samples: int = 0, queued: int = 0, **fields: Any) -> ScalingDecision:
    pools = tuple(
        PoolSetup(pool.does, pool.size, pool.size, floor=pool.floor, ceiling=pool.ceiling, shape="one")
        for pool in model.pools
    )
    told = tuple(RequestSample(NOW - 100.0 * at, 500, 500, 50, ttft_ms=400.0, tpot_ms=10.0) for at in range(samples))
    news = [GatewayNews("g", "m", NOW, samples=told, held_requests=queued)]
    setup = ModelSetup(model.promise, pools, **fields)
    return decide(merged(news, setup, History(), ScalingMemory(), NOW))


def test_what_holds_a_pool_back_is_named_with_what_to_raise() -> None:
    cluster = enforced(autoscaling={"mode": "Enforce", "prefill": {"max": 2}, "decode": {"max": 2}})
    model = scaled(cluster)
    crowded = decided(model, samples=2000)
    ceiling = limit_of(crowded, model)
    assert ceiling is not None
    assert ceiling.reason is Reason.CEILING
    assert "spec.autoscaling.prefill.max" in ceiling.sentence
    cluster.edit(autoscaling={"mode": "Enforce", "gpuBudget": 3, "prefill": {"max": 8}, "decode": {"max": 8}})
    cluster.settle()
    model = scaled(cluster)
    assert model.budget_devices == 3
    budget = limit_of(decided(model, samples=2000, budget_devices=3), model)
    assert budget is not None
    assert budget.reason is Reason.BUDGET
    assert limit_of(decided(model), model) is None


def test_a_limit_is_said_for_a_while_after_it_was_last_so() -> None:
    model = scaled(enforced())
    decision = decided(model)
    limit = Limit(Reason.CEILING, "raise it")
    for age_ms, said in ((0.0, limit), (LIMITED_FOR_MS - 1.0, limit), (LIMITED_FOR_MS, None)):
        shown = view_of(
            decision, model, told_after(None, decision), LimitSeen(limit, decision.at_ms - age_ms), None, {}
        )
        assert shown.limit == said


def test_measured_percentiles_count_what_a_sample_stands_for() -> None:
    assert percentile([]) is None
    assert percentile([(None, 1.0)]) is None
    assert percentile([(float(value), 1.0) for value in range(1, 101)]) == 95.0
    assert percentile([(10.0, 99.0), (900.0, 1.0)]) == 10.0


def test_only_what_changes_something_is_told() -> None:
    model = scaled(enforced())
    rests, grows = decided(model), decided(model, samples=2000)
    assert (rests.action, grows.action) == (ScalingAction.NONE, ScalingAction.ADD)
    first = told_after(None, rests)
    assert first.action is ScalingAction.NONE
    told = told_after(first, grows)
    assert told.action is ScalingAction.ADD
    assert told_after(told, grows) is told, "advice that nobody takes is no news"
    assert told_after(told, rests).action is ScalingAction.NONE, "that it is not needed any more is"
    done = msgspec.structs.replace(rests, sizes=grows.sizes)
    assert told_after(told, done) is told, "rest after what was done is none"
    silent = told_after(told, msgspec.structs.replace(done, action=ScalingAction.FREEZE))
    assert silent.action is ScalingAction.FREEZE
    assert told_after(silent, done).action is ScalingAction.NONE, "that there are news again is"


def test_less_is_advised_only_after_a_while_and_more_at_once() -> None:
    model = scaled(enforced())
    less, more = decided(model), decided(model, samples=2000)

    def at(decision: ScalingDecision, after_ms: float, **fields: Any) -> ScalingDecision:
        return msgspec.structs.replace(decision, at_ms=NOW + after_ms, **fields)

    advised = told_after(None, more)
    assert said_lately(advised, at(less, SAID_FOR_MS - 1.0))
    assert not said_lately(advised, at(less, SAID_FOR_MS))
    assert not said_lately(told_after(None, less), at(more, 2000.0))
    assert not said_lately(advised, at(less, 2000.0, action=ScalingAction.FREEZE))
    assert not said_lately(advised, at(less, 2000.0, sizes=less.sizes[1:])), "it has other pools now"


def test_a_switch_of_roles_that_would_do_is_said() -> None:
    model = scaled(enforced())
    decision = decided(model)
    told = told_after(None, decision)
    assert view_of(decision, model, told, None, decision, {}).advice == ""
    switch = RoleSwitch(WorkerRole.DECODE, WorkerRole.PREFILL, 1)
    switched = msgspec.structs.replace(decision, switch=switch)
    said = view_of(decision, model, told, None, switched, {}).advice
    assert "1 worker of the decode pool could do prefill" in said
