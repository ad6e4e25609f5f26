"""From a decision to what is done, and from a command line to what is promised."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from antiphon.autoscale.goals import goals_of
from antiphon.autoscale.moves import Moves, Worker, moves_of
from antiphon.options import ServeOptions
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import (
    PoolSize,
    Promise,
    RoleSwitch,
    ScalingAction,
    ScalingDecision,
    ScalingMemory,
    ScalingReason,
    TpotTarget,
    TtftTarget,
)

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


def decided(prefill: int, decode: int, switch: RoleSwitch | None = None) -> ScalingDecision:
    """The sizes are all that counts here."""
    return ScalingDecision(
        at_ms=0.0,
        sizes=(PoolSize(PREFILL, prefill, 0), PoolSize(DECODE, decode, 0)),
        action=ScalingAction.NONE,
        reason=ScalingReason.ENOUGH,
        sentence="",
        memory=ScalingMemory(),
        switch=switch,
    )


def workers(**roles: WorkerRole) -> list[Worker]:
    return [Worker(name, role, ready=True, born=number) for number, (name, role) in enumerate(roles.items())]


FOUR = workers(p0=PREFILL, p1=PREFILL, d0=DECODE, d1=DECODE)


def test_where_all_is_as_decided_nothing_is_done() -> None:
    assert not moves_of(decided(2, 2), FOUR, {})


def test_a_role_changes_where_the_least_is_lost() -> None:
    switch = RoleSwitch(DECODE, PREFILL, 1)
    assert moves_of(decided(3, 1, switch), FOUR, {"d0": 10.0, "d1": 900.0}) == Moves(switch=(("d0", PREFILL),))
    assert moves_of(decided(3, 1, switch), FOUR, {"d0": 900.0, "d1": 10.0}) == Moves(switch=(("d1", PREFILL),))


def test_what_roles_do_not_give_is_started_and_who_cannot_change_is_ended() -> None:
    switch = RoleSwitch(DECODE, PREFILL, 1)
    assert moves_of(decided(5, 1, switch), FOUR, {"d0": 5.0}) == Moves(
        switch=(("d1", PREFILL),), start=(PREFILL, PREFILL)
    )
    fixed = [dataclasses.replace(worker, keeps_role=True) for worker in FOUR]
    assert moves_of(decided(3, 1, switch), fixed, {"d1": 5.0}) == Moves(start=(PREFILL,), end=("d0",))
    starting = [dataclasses.replace(worker, ready=False) for worker in FOUR]
    assert not moves_of(decided(3, 1, switch), starting, {}).switch


def test_those_that_are_not_ready_go_first_and_then_those_with_least_to_lose() -> None:
    young = Worker("d2", DECODE, ready=False, born=9)
    lost_ms = {"d0": 3.0, "d1": 2.0, "d2": 99.0}
    assert moves_of(decided(2, 2), [*FOUR, young], lost_ms) == Moves(end=("d2",))
    assert moves_of(decided(2, 1), [*FOUR, young], lost_ms) == Moves(end=("d2", "d1"))


def test_a_place_that_is_missing_is_filled_and_one_too_many_is_never_both() -> None:
    assert moves_of(decided(2, 2), FOUR[:3], {}) == Moves(start=(DECODE,))
    # Asked again before anything has started: what starts counts as there.
    again = [*FOUR[:3], Worker("d9", DECODE, ready=False, born=9)]
    assert not moves_of(decided(2, 2), again, {})


def options(**given: Any) -> ServeOptions:
    return ServeOptions(autoscale=True, **given)


def test_options_become_a_promise_and_bounds() -> None:
    goals = goals_of(
        options(sla_ttft_ms=500.0, sla_ttft_per_thousand_tokens_ms=60.0, sla_tpot_ms=40.0, sla_window_s=60.0)
    )
    assert goals.promise == Promise(TtftTarget(500.0, 60.0), TpotTarget(40.0), window_s=60.0)
    assert goals.most_workers == 2
    assert [(pool.role, pool.least, pool.most) for pool in goals.pools] == [(PREFILL, 1, 1), (DECODE, 1, 1)]
    assert goals.may_switch


def test_bounds_leave_room_for_the_floor_of_the_other_pool() -> None:
    goals = goals_of(options(sla_tpot_ms=40.0, max_workers=6, min_decode=2, max_prefill=9, max_decode=3))
    assert [(pool.least, pool.most) for pool in goals.pools] == [(1, 4), (2, 3)]
    assert goals.promise.ttft is None


def test_workers_that_do_both_are_one_pool_without_roles_to_change() -> None:
    goals = goals_of(options(sla_tpot_ms=40.0, prefill=0, decode=2, max_workers=5))
    assert [(pool.role, pool.least, pool.most) for pool in goals.pools] == [(WorkerRole.BOTH, 1, 5)]
    assert not goals.may_switch


def test_pools_of_other_shapes_do_not_change_roles() -> None:
    assert not goals_of(options(sla_tpot_ms=40.0, decode_tensor_parallel=2)).may_switch


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "--autoscale keeps a promise, and none was given"),
        ({"sla_tpot_ms": 40.0, "sla_ttft_per_thousand_tokens_ms": 6.0}, "adds to --sla-ttft-ms, which was not given"),
        ({"sla_tpot_ms": -1.0}, "cannot be negative"),
        ({"sla_tpot_ms": 40.0, "prefill": 2, "max_workers": 2}, "--prefill and --decode ask for 3 at the start"),
        ({"sla_tpot_ms": 40.0, "min_decode": 0}, "--min-decode 0"),
        ({"sla_tpot_ms": 40.0, "min_decode": 3, "max_decode": 2}, "--min-decode 3 --max-decode 2"),
        ({"sla_tpot_ms": 40.0, "min_decode": 3}, "ask for 4 workers, and there may be 2"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_sentence(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        options(**given)
