"""What gateways tell, put together: nothing twice, nothing lost, and a silent gateway stops nobody."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from antiphon_policy.latency import StepModel
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import (
    ArrivalCounts,
    GatewayNews,
    PoolNews,
    Promise,
    RequestSample,
    ScalingMemory,
    TtftTarget,
    WorkerNews,
    decide,
)
from antiphon_policy.scaling.assembly import (
    SILENT_MS,
    ModelSetup,
    PoolSetup,
    WorkerFigures,
    merged,
    thinned,
)
from antiphon_policy.scaling.history import MOST_RECENT, SLOT_MS, History
from antiphon_policy.scaling.records import MOST_SAMPLES, PoolView
from antiphon_policy.scaling.remembered import (
    PoolPast,
    Remembered,
    RememberedError,
    decode_decision,
    decode_remembered,
    encode_decision,
    encode_remembered,
    most_decisions,
)

NOW = 1_700_000_000_000.0
FAST = StepModel(base_ms=5.0, per_new_token_ms=0.05)
SLOW = StepModel(base_ms=50.0, per_new_token_ms=0.5)
PAIR = ModelSetup(
    Promise(TtftTarget(500.0)),
    (PoolSetup(WorkerRole.PREFILL, 2, 2), PoolSetup(WorkerRole.DECODE, 3, 3)),
)


def gateway(name: str, age_ms: float = 0.0, **fields: object) -> GatewayNews:
    return GatewayNews(name, "ns/m", NOW - age_ms, **fields)  # type: ignore[arg-type]


def worker(name: str, role: WorkerRole = WorkerRole.DECODE, **fields: object) -> WorkerNews:
    return WorkerNews(name, role, **fields)  # type: ignore[arg-type]


def sample(at_ms: float, weight: float = 1.0) -> RequestSample:
    return RequestSample(at_ms, 100, 200, 50, weight)


def put(
    news: list[GatewayNews], setup: ModelSetup = PAIR, history: History | None = None
) -> dict[WorkerRole, PoolView]:
    inputs = merged(news, setup, history or History(), ScalingMemory(), NOW)
    return {pool.role: pool for pool in inputs.pools}


def test_requests_and_lines_of_all_gateways_are_added_up() -> None:
    news = [
        gateway("a", samples=(sample(NOW - 9),), pools=(PoolNews(WorkerRole.PREFILL, 2, 300),)),
        gateway("b", samples=(sample(NOW - 10), sample(NOW - 8)), pools=(PoolNews(WorkerRole.PREFILL, 1, 50),)),
    ]
    inputs = merged(news, PAIR, History(), ScalingMemory(), NOW)
    assert [one.at_ms for one in inputs.samples] == [NOW - 10, NOW - 9, NOW - 8]
    assert (inputs.pools[0].queued_requests, inputs.pools[0].queued_tokens) == (3, 350)
    assert inputs.pools[1].queued_requests == 0


def test_of_a_worker_that_two_gateways_know_the_newer_word_counts_once() -> None:
    news = [
        gateway("a", workers=(worker("w", said_ms=5.0, running=7, waiting_tokens=100, kv_tokens=900),)),
        gateway("b", workers=(worker("w", said_ms=6.0, running=4, waiting_tokens=40, kv_tokens=500),)),
    ]
    for order in (news, news[::-1]):
        decode = put(order)[WorkerRole.DECODE]
        assert (decode.running, decode.kv_tokens, decode.queued_tokens) == (4, 500, 40)


def test_a_silent_gateway_says_nothing_of_now_and_its_requests_stay() -> None:
    old = SILENT_MS + 1.0
    news = [
        gateway("gone", old, samples=(sample(NOW - 20_000),), pools=(PoolNews(WorkerRole.DECODE, 9, 0),)),
        gateway("here", 500.0, samples=(sample(NOW - 1000),), workers=(worker("w", running=1),)),
    ]
    inputs = merged(news, PAIR, History(), ScalingMemory(), NOW)
    assert len(inputs.samples) == 2
    assert inputs.pools[1].queued_requests == 0
    assert inputs.pools[1].running == 1
    assert inputs.news_age_ms == 500.0


def test_without_any_gateway_there_are_no_news() -> None:
    assert merged([], PAIR, History(), ScalingMemory(), NOW).news_age_ms is None


def test_the_worker_in_the_middle_speaks_for_its_pool() -> None:
    stalled = StepModel(base_ms=9000.0)
    told: dict[str, Any] = {"max_sequences": 64, "block_tokens": 16, "total_blocks": 100, "chunk_tokens": 2048}
    workers = tuple(worker(f"w{at}", step=step, **told) for at, step in enumerate((FAST, stalled, FAST)))
    decode = put([gateway("a", workers=workers)])[WorkerRole.DECODE]
    assert decode.step == FAST
    assert (decode.max_sequences, decode.kv_capacity_tokens, decode.chunk_tokens) == (64, 1600, 2048)


def test_only_workers_of_the_current_revision_say_how_fast_one_is() -> None:
    pools = (msgspec.structs.replace(PAIR.pools[1], revision="new", role=WorkerRole.BOTH),)
    setup = ModelSetup(PAIR.promise, pools)
    old = worker("o", WorkerRole.BOTH, revision="old", step=SLOW, running=3)
    both = put([gateway("a", workers=(old, worker("n", WorkerRole.BOTH, revision="new", step=FAST)))], setup)
    assert both[WorkerRole.BOTH].step == FAST
    assert both[WorkerRole.BOTH].running == 3, "what the old ones do is work all the same"


def test_where_no_worker_has_spoken_what_was_last_known_counts() -> None:
    known = WorkerFigures(step=SLOW, max_sequences=8)
    setup = ModelSetup(PAIR.promise, (msgspec.structs.replace(PAIR.pools[0], figures=known), PAIR.pools[1]))
    pools = put([gateway("a", workers=(worker("w", WorkerRole.PREFILL),))], setup)
    assert (pools[WorkerRole.PREFILL].step, pools[WorkerRole.PREFILL].max_sequences) == (SLOW, 8)
    assert pools[WorkerRole.DECODE].step == StepModel()


def test_requests_that_wait_for_a_model_that_sleeps_want_both_its_pools_and_wake_them() -> None:
    asleep = tuple(msgspec.structs.replace(pool, size=0, ready=0, floor=0) for pool in PAIR.pools)
    setup = ModelSetup(PAIR.promise, asleep)
    news = [gateway("a", held_requests=2, held_tokens=700), gateway("b", held_requests=1, held_tokens=50)]
    pools = put(news, setup)
    assert (pools[WorkerRole.PREFILL].queued_requests, pools[WorkerRole.PREFILL].queued_tokens) == (3, 750)
    assert (pools[WorkerRole.DECODE].queued_requests, pools[WorkerRole.DECODE].queued_tokens) == (3, 0)
    decision = decide(merged(news, setup, History(), ScalingMemory(), NOW))
    assert [size.size for size in decision.sizes] == [1, 1]


def test_many_samples_are_thinned_and_stand_for_as_many_requests() -> None:
    samples = [sample(NOW - at, weight=1.0 + at % 3) for at in range(3 * MOST_SAMPLES)]
    kept = thinned(samples)
    assert len(kept) == MOST_SAMPLES
    assert sum(one.weight for one in kept) == pytest.approx(sum(one.weight for one in samples))
    assert list(kept) == sorted(kept, key=lambda one: one.at_ms)
    assert thinned(samples[:5]) == tuple(sorted(samples[:5], key=lambda one: one.at_ms))


# -- history


def counted(name: str, end_ms: float, *counts: float, bucket_ms: float = SLOT_MS) -> GatewayNews:
    return GatewayNews(name, "ns/m", end_ms, arrivals=ArrivalCounts(end_ms, bucket_ms, counts))


def test_buckets_are_counted_once_however_often_they_are_told() -> None:
    history = History().heard([counted("a", 50_000.0, 1.0, 2.0, 3.0)])
    again = history.heard([counted("a", 60_000.0, 2.0, 3.0, 4.0)]).heard([counted("a", 60_000.0, 2.0, 3.0, 4.0)])
    assert again.arrivals().counts == (1.0, 2.0, 3.0, 4.0)
    assert again.arrivals().end_ms == 60_000.0
    carried = msgspec.json.decode(msgspec.json.encode(again), type=History)
    assert carried.heard([counted("a", 60_000.0, 2.0, 3.0, 4.0)]) == again, "also by the next one who looks"


def test_gateways_are_added_up_as_far_as_all_of_them_have_told() -> None:
    history = History().heard([counted("a", 30_000.0, 5.0, 5.0, 5.0), counted("b", 20_000.0, 1.0, 1.0)])
    assert history.arrivals().counts == (6.0, 6.0)
    assert history.arrivals().end_ms == 20_000.0
    history = history.heard([counted("a", 40_000.0, 5.0, 5.0), counted("b", 40_000.0, 1.0, 1.0, 1.0)])
    assert history.arrivals().counts == (6.0, 6.0, 6.0, 6.0)


def test_what_was_whole_once_stays_so_when_a_gateway_comes_late() -> None:
    history = History().heard([counted("a", 40_000.0, 5.0, 5.0, 5.0, 5.0)])
    late = history.heard([counted("a", 40_000.0, 5.0), counted("b", 20_000.0, 1.0)])
    assert late.arrivals().end_ms == 40_000.0
    assert late.arrivals().counts == (5.0, 6.0, 5.0, 5.0)


def test_buckets_of_another_length_are_spread() -> None:
    history = History().heard([counted("a", 60_000.0, 6.0, 12.0, bucket_ms=30_000.0)])
    assert history.arrivals().counts == (2.0, 2.0, 2.0, 4.0, 4.0, 4.0)


def test_a_time_nobody_looked_at_is_no_time_without_requests() -> None:
    history = History().heard([counted("a", 20_000.0, 9.0, 9.0)])
    later = history.heard([counted("a", 80_000.0, 4.0, 4.0, 4.0)])
    assert later.arrivals().counts == (9.0, 9.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0)
    much_later = history.heard([counted("a", 1e9, 4.0, 4.0)])
    assert much_later.end_ms == 1e9
    assert set(much_later.recent[1:]) == {4.0}
    assert len(much_later.recent) < 10


def test_days_are_kept_coarsely_and_told_once_there_are_two() -> None:
    history = History()
    per_day = round(86_400_000 / SLOT_MS)
    end_ms = 0.0
    for _ in range(52):
        end_ms += 3_600_000.0
        history = history.heard([counted("a", end_ms, *([3.0] * 360))])
    assert len(history.recent) <= MOST_RECENT
    told = history.arrivals()
    assert len(told.counts) >= 2 * per_day
    assert set(told.counts) == {3.0}
    assert told.end_ms == end_ms
    assert len(msgspec.json.encode(history)) < 20_000
    young = History()
    for hour in range(30):
        young = young.heard([counted("a", 3_600_000.0 * (hour + 1), *([3.0] * 360))])
    assert len(young.arrivals().counts) <= MOST_RECENT, "one day says nothing of the next"


def test_a_clock_that_is_wrong_by_hours_spoils_nothing_for_ever() -> None:
    right = [counted("a", 40_000.0, 1.0, 1.0)]
    assert History().heard([*right, counted("b", 9e12, 1.0)]).heard(right).arrivals().counts == (1.0, 1.0)
    ahead = GatewayNews("b", "ns/m", 40_000.0, arrivals=ArrivalCounts(9e12, SLOT_MS, (7.0,)))
    assert History().heard([*right, ahead]).arrivals().counts == (1.0, 1.0), "no bucket ends after it was told"


def test_counts_that_are_no_numbers_are_no_counts() -> None:
    nan = float("nan")
    assert History().heard([counted("a", nan, 1.0), counted("b", 10.0, 1.0, bucket_ms=0.0)]) == History()
    assert History().heard([counted("a", 20_000.0, nan, 2.0)]).arrivals().counts == (0.0, 2.0)


# -- what is kept


def test_what_is_remembered_comes_back_and_strange_bytes_are_refused() -> None:
    past = PoolPast(WorkerRole.DECODE)
    assert (past.start_ms, past.drain_ms) == (60_000.0, 30_000.0)
    for took in (9.0, 2.0, 3.0):
        past = past.started(took * 1000).drained(took * 100)
    assert (past.start_ms, past.drain_ms) == (3000.0, 300.0)
    kept = Remembered(owner="u", history=History().heard([counted("a", 20_000.0, 1.0)])).with_pool(past)
    assert decode_remembered(encode_remembered(kept)) == kept
    assert kept.of(WorkerRole.DECODE) == past
    with pytest.raises(RememberedError, match="begin anew"):
        decode_remembered(b"[]")
    with pytest.raises(RememberedError, match="newer version"):
        decode_remembered(b'{"format": 99}')


def test_a_written_decision_is_made_again_of_its_inputs() -> None:
    news = [gateway("a", samples=tuple(sample(NOW - 100 * at) for at in range(200)), workers=(worker("w", step=FAST),))]
    decision = decide(merged(news, PAIR, History(), ScalingMemory(), NOW))
    read = decode_decision(encode_decision(decision))
    assert read.inputs is not None
    assert decide(read.inputs) == decision
    with pytest.raises(RememberedError):
        decode_decision(b"{}")
    assert most_decisions(1000) == 200
    assert most_decisions(1_000_000) == 16
