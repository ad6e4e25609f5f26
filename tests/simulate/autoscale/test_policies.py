"""The baselines, each by the figures of its published formula."""

from __future__ import annotations

import pytest
from antiphon_policy.routing import WorkerRole
from antiphon_simulate.autoscale.calls import Call
from antiphon_simulate.autoscale.capacity import Profile, batch_within, mean_sizes
from antiphon_simulate.autoscale.policies.dynamo_loops import DynamoLoops
from antiphon_simulate.autoscale.policies.hpa import Hpa
from antiphon_simulate.autoscale.policies.llm_d import LlmD
from antiphon_simulate.autoscale.records import PoolSeen, Seen, Serving, Sizes
from antiphon_simulate.autoscale.registry import NAMES, UnknownScalerError, describe

from tests.support.scaling import GOAL, SETTING, TIMING, load

PROFILE = Profile(prefill_ms=50.0, uncached_tokens=500.0, prompt_tokens=500.0, output_tokens=100.0, batch=20.0)
"""So HPA's targets are 0.8 prompts and 16 answers a worker."""


def pool(role: WorkerRole, size: int, *, queued: int = 0, running: int = 0, starting: int = 0) -> PoolSeen:
    return PoolSeen(role, size, size - starting, (9.0,) * starting, 0, queued, 500 * queued, running, 600 * running)


def seen(
    at_s: float, prefill: PoolSeen, decode: PoolSeen, served: tuple[tuple[float, float], ...] = (), came: int = 0
) -> Seen:
    """`served`: (TTFT ms, TPOT ms) of requests that ended."""
    servings = [serving(*latencies) for latencies in served]
    arrived = [serving(0.0, 0.0) for _ in range(came)]
    return Seen(1000.0 * at_s, 0.0, prefill, decode, arrived, servings, servings)


def serving(ttft_ms: float, tpot_ms: float) -> Serving:
    call = Call(0, 0.0, 500, 500, 101, 55.0, 500.0, True)
    return Serving(call, 500, 101, 500, 0.0, first_ms=ttft_ms, ended_ms=ttft_ms + 100.0 * tpot_ms)


P, D = WorkerRole.PREFILL, WorkerRole.DECODE


def test_hpa_follows_its_formula_within_its_tolerance() -> None:
    hpa = Hpa(PROFILE)
    # 2 prompts on 2 workers of 0.8: 1.25 of the target; 34 answers on 2 of 16: 1.06, within a tenth.
    assert hpa.decide(seen(15, pool(P, 2, queued=2), pool(D, 2, running=34))).sizes == Sizes(3, 2)
    # 2 prompts while the third starts: it counts as idle, and three are what 2 need.
    assert hpa.decide(seen(30, pool(P, 3, queued=2, starting=1), pool(D, 2, running=34))).sizes == Sizes(3, 2)
    # A flood: by four workers, or to the double.
    assert hpa.decide(seen(45, pool(P, 3, queued=400), pool(D, 2, running=34))).sizes == Sizes(7, 2)


def test_hpa_goes_by_the_mean_of_what_it_saw_since_it_last_decided() -> None:
    hpa = Hpa(PROFILE)
    hpa.decide(seen(0, pool(P, 2), pool(D, 2, running=32)))
    # 3 prompts at one instant of three are 1.7 in the mean: what two workers have at once.
    assert hpa.decide(seen(5, pool(P, 2, queued=3), pool(D, 2, running=32))).sizes == Sizes(2, 2)
    assert hpa.decide(seen(10, pool(P, 2, queued=1), pool(D, 2, running=32))).sizes == Sizes(2, 2)
    assert hpa.decide(seen(15, pool(P, 2, queued=1), pool(D, 2, running=32))).sizes == Sizes(2, 2)


def test_hpa_shrinks_to_the_highest_of_its_recommendations_of_five_minutes() -> None:
    hpa = Hpa(PROFILE)
    assert hpa.decide(seen(0, pool(P, 5, queued=4), pool(D, 1, running=16))).sizes.prefill == 5
    assert hpa.decide(seen(15, pool(P, 5, queued=1), pool(D, 1, running=16))).sizes.prefill == 5
    assert hpa.decide(seen(299, pool(P, 5, queued=1), pool(D, 1, running=16))).sizes.prefill == 5
    assert hpa.decide(seen(314, pool(P, 5, queued=1), pool(D, 1, running=16))).sizes.prefill == 2


def test_llm_d_grows_above_055_and_shrinks_below_040_of_the_limit() -> None:
    slow, between, fast = (450.0, 9.0), (250.0, 9.0), (100.0, 9.0)
    law = LlmD(SETTING)
    # TTFT P90 at 0.9 of its limit: 4 + ceil(4 x (0.9 / 0.55 - 1)) = 7, from the first look on.
    assert law.decide(seen(15, pool(P, 4), pool(D, 2), (slow,) * 10)).sizes == Sizes(7, 2)
    # What starts is credited: 4 of 7 are ready, 0.9 x 4 / 7 is below 0.55, and nothing is added.
    assert law.decide(seen(30, pool(P, 7, starting=3), pool(D, 2), (slow,) * 10)).sizes.prefill == 7
    steady = LlmD(SETTING)
    for at_s in range(15, 400, 15):
        kept = steady.decide(seen(at_s, pool(P, 4), pool(D, 2), (between,) * 10))
    assert kept.sizes == Sizes(4, 2)
    # 0.2: the highest advice of three minutes counts, so first nothing goes, then one worker in two minutes.
    assert steady.decide(seen(480, pool(P, 4), pool(D, 2), (fast,) * 10)).sizes.prefill == 4
    size, sizes = 4, []
    for at_s in range(495, 900, 15):
        size = steady.decide(seen(at_s, pool(P, size), pool(D, 2), (fast,) * 10)).sizes.prefill
        sizes.append(size)
    assert sizes.index(3) >= 8
    assert sizes.index(2) - sizes.index(3) >= 8


def test_llm_d_caps_a_flood_and_grows_to_the_double_in_a_minute() -> None:
    law, flood = LlmD(SETTING), ((50_000.0, 9.0),) * 10
    # Clamped to 2: 2 + ceil(2 x (2 / 0.55 - 1)) = 8, of which four more may come in this minute.
    assert law.decide(seen(15, pool(P, 2), pool(D, 2), flood)).sizes.prefill == 6
    assert law.decide(seen(30, pool(P, 6), pool(D, 2), flood)).sizes.prefill == 6
    assert law.decide(seen(90, pool(P, 6), pool(D, 2), flood)).sizes.prefill == 12


def test_dynamo_sizes_by_throughput() -> None:
    law = DynamoLoops(SETTING, PROFILE)
    # 20 prompts a second of 55.55 ms: 1.1 workers. 20 x 101 tokens a second in the largest batches within the limit.
    sizes = law.decide(seen(180, pool(P, 1), pool(D, 1, running=5), came=3600)).sizes
    assert sizes.prefill == 2
    batch = int(batch_within(TIMING, GOAL.tpot_ms, 550.5))
    step_ms = 5.0 + 0.6 * batch + 0.0001 * 550.5 * batch
    assert sizes.decode == -int(-20 * 101 * step_ms / batch / 1000.0 // 1)
    # That is a floor: an idle pool shrinks to it, one worker at a time.
    assert law.decide(seen(185, pool(P, 4), pool(D, 9))).sizes == Sizes(3, 8)
    assert law.decide(seen(190, pool(P, 2), pool(D, sizes.decode))).sizes == sizes


def test_dynamo_adds_one_by_load_where_the_next_one_would_be_late() -> None:
    law = DynamoLoops(SETTING, PROFILE)
    # 500 ms for a prompt of 500 tokens: 4,000 more that wait for each worker are 8 chunks' worth and too many.
    assert law.decide(seen(5, pool(P, 2, queued=17), pool(D, 1))).sizes.prefill == 2
    assert law.decide(seen(10, pool(P, 2, queued=20), pool(D, 1))).sizes.prefill == 3
    assert law.decide(seen(15, pool(P, 3, queued=90, starting=1), pool(D, 1))).sizes.prefill == 3
    # Shrinks where the survivors' lines would take less than 0.8 of what the limit leaves: 0.8 x 444 ms.
    assert law.decide(seen(20, pool(P, 3, queued=15), pool(D, 1))).sizes.prefill == 2
    assert law.decide(seen(25, pool(P, 3, queued=18), pool(D, 1))).sizes.prefill == 3
    # Steps: 5 + 0.6 for each of 22 answers + 13,750 tokens of context are 19.6 ms, and of 24 are 20.9 of 20.
    assert law.decide(seen(30, pool(P, 1), pool(D, 1, running=21))).sizes.decode == 1
    assert law.decide(seen(35, pool(P, 1), pool(D, 1, running=24))).sizes.decode == 2


def test_static_mean_is_the_work_over_the_time_rounded_up() -> None:
    # 30 a second of 55.55 ms: 1.67 workers.
    even = load([at / 30.0 for at in range(900)], output_tokens=2)
    assert mean_sizes(even.calls, even.span_ms, SETTING) == Sizes(2, 1)


def test_every_policy_has_a_line_and_others_are_refused_with_the_names() -> None:
    assert all(describe(name) for name in NAMES)
    with pytest.raises(UnknownScalerError, match="use antiphon, static_peak"):
        describe("magic")
