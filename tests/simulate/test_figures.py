"""The figures of a run, on runs made by hand with figures worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from antiphon_policy.latency import StepModel
from antiphon_simulate.busy import Evenness, pools_busy
from antiphon_simulate.figures import Percentiles, figures
from antiphon_simulate.ideal import ideal_cached_tokens, infeasible
from antiphon_simulate.records import Ending, Outcome, Placement, RunResult, Sla, Timing, TraceRequest

TIMING = Timing(step=StepModel(1.0, 0.1, 0.0, 0.0, 0.001), chunk_tokens=1024)
"""1,000 tokens with nothing cached: 1 ms, 100 ms, and 1 ms for a context of 1,000: 102 ms."""
SLA = Sla(ttft_ms=200.0, ttft_ms_per_1k_prompt_tokens=0.0, tpot_ms=10.0)
REMOTE = Placement(decode="decode-0", prefill="prefill-0")
LOCAL = Placement(decode="decode-0")


def request(index: int, tokens: int, *blocks: int, output: int = 11) -> TraceRequest:
    return TraceRequest(index, 0.0, tokens, output, blocks)


def outcome(
    of: TraceRequest,
    *,
    arrived: float = 0.0,
    first: float = 100.0,
    ended: float = 200.0,
    computed: int = 0,
    moved: int = 0,
    placement: Placement = REMOTE,
    ending: Ending = Ending.COMPLETE,
) -> Outcome:
    return Outcome(
        request=of,
        arrived_ms=arrived,
        placement=placement,
        first_token_ms=first,
        ended_ms=ended,
        computed_tokens=computed,
        moved_blocks=moved,
        ending=ending,
    )


def run_of(*outcomes: Outcome, busy: Mapping[str, Sequence[float]] | None = None, span: float = 180_000.0) -> RunResult:
    return RunResult("hand-made", outcomes, busy or {}, 60_000.0, span, SLA)


def test_the_ideal_cache_has_all_that_came_before_partial_blocks_too() -> None:
    one, longer, same = request(0, 1100, 1, 2, 3), request(1, 1600, 1, 2, 4, 5), request(2, 1100, 1, 2, 3)
    assert ideal_cached_tokens([one, longer, same]) == [0, 1024, 1100]


def test_hit_rates_count_prompt_tokens_of_completed_requests() -> None:
    found = figures(
        run_of(
            outcome(request(0, 1024, 1, 2), computed=1024),
            outcome(request(1, 1536, 1, 2, 3), computed=1024),  # one of two blocks was there
            outcome(request(2, 1536, 1, 2, 3), computed=1536, ending=Ending.UNFINISHED),
        ),
        TIMING,
    )
    assert (found.requests, found.completed, found.unfinished) == (3, 2, 1)
    assert found.prefill_hit_rate == pytest.approx(512 / 2560)
    assert found.ideal_hit_rate == pytest.approx(1024 / 2560)
    assert found.hit_efficiency == pytest.approx(0.5)


def test_what_was_computed_twice_counts_twice() -> None:
    found = figures(run_of(outcome(request(0, 1000, 1, 2), computed=1500)), TIMING)
    assert found.prefill_hit_rate == pytest.approx(-0.5)
    assert found.hit_efficiency is None


def test_transfers_are_counted_where_the_prompt_was_computed_elsewhere() -> None:
    found = figures(
        run_of(
            outcome(request(0, 1025, 1, 2, 3), moved=3),
            outcome(request(1, 512, 1), moved=0),
            outcome(request(2, 5120, 7), placement=LOCAL),
        ),
        TIMING,
    )
    assert found.transfer_hit_rate == pytest.approx(1 / 4)
    assert figures(run_of(outcome(request(0, 10), placement=LOCAL)), TIMING).transfer_hit_rate is None


def test_each_feasible_request_is_inside_or_outside_the_sla() -> None:
    at_the_limit = outcome(request(0, 1000, 1, 2), arrived=50.0, first=250.0, ended=350.0)
    late = outcome(request(1, 1000, 11, 12), first=200.1, ended=250.0)
    slow = outcome(request(2, 1000, 21, 22), first=100.0, ended=200.1)
    cut = outcome(request(3, 1000, 31, 32), first=100.0, ended=0.0, ending=Ending.UNFINISHED)
    never_began = outcome(request(4, 1000, 41, 42), first=0.0, ended=0.0, ending=Ending.UNFINISHED)
    hopeless = outcome(request(5, 3000, 51, 52, 53, 54, 55, 56))
    found = figures(run_of(at_the_limit, late, slow, cut, never_began, hopeless), TIMING)
    assert found.infeasible == 1
    assert found.inside_sla == 1
    assert found.inside_sla_share == pytest.approx(1 / 5)
    assert (found.late_ttft, found.late_tpot) == (2, 3)


def test_an_answer_of_one_token_has_no_time_per_token_to_keep() -> None:
    found = figures(run_of(outcome(request(0, 10, output=1), ended=9999.0)), TIMING)
    assert found.inside_sla_share == 1.0
    assert found.tpot_ms == Percentiles(0.0, 0.0, 0.0, 0.0)


def test_infeasible_is_what_an_idle_worker_with_everything_cached_serves_too_late() -> None:
    long = request(0, 3000, 1, 2, 3, 4, 5, 6)  # 3 steps, 300 ms, contexts of 1024, 2048 and 3000, 1 ms to the client
    again = request(1, 3000, 1, 2, 3, 4, 5, 6)  # its last token only
    assert infeasible([long, again], TIMING, SLA) == {0}
    assert infeasible([long, again], TIMING, Sla(310.1, 0.0, 10.0)) == set()
    assert infeasible([long, again], TIMING, Sla(310.0, 0.0, 10.0)) == {0}
    # Each further token: 1 ms, 0.1 ms, and 3.006 ms for a context of 3,006 in the middle of the answer.
    assert infeasible([long], TIMING, Sla(1e6, 0.0, 4.107)) == set()
    assert infeasible([long], TIMING, Sla(1e6, 0.0, 4.105)) == {0}


def test_a_ttft_limit_grows_with_the_prompt() -> None:
    assert infeasible([request(0, 1000, 1, 2)], TIMING, Sla(50.0, 53.1, 10.0)) == set()
    assert infeasible([request(0, 1000, 1, 2)], TIMING, Sla(50.0, 52.9, 10.0)) == {0}


def test_percentiles_lie_between_neighbours() -> None:
    hundred = Percentiles.of([float(value) for value in range(100, -1, -1)])
    assert hundred == Percentiles(50.0, 90.0, 95.0, 99.0)
    assert Percentiles.of([1.0, 2.0]).p90 == pytest.approx(1.9)
    assert Percentiles.of([]) == Percentiles(0.0, 0.0, 0.0, 0.0)


def test_completed_requests_per_second_are_from_the_first_arrival_to_the_last_end() -> None:
    found = figures(
        run_of(
            outcome(request(0, 10), arrived=1000.0, ended=2000.0), outcome(request(1, 10), arrived=1500.0, ended=5000.0)
        ),
        TIMING,
    )
    assert found.completed_rps == pytest.approx(0.5)


def test_evenness_is_weighted_by_how_busy_the_windows_were() -> None:
    busy = {"prefill-0": [60_000.0, 10_000.0, 0.0], "prefill-1": [40_000.0, 0.0, 0.0], "decode-0": [30_000.0] * 3}
    pools = pools_busy(run_of(outcome(request(0, 10)), busy=busy))
    # Means 50,000 and 5,000; the third window is idle. Loaded: the first only.
    assert pools["prefill"].workers == 2
    assert pools["prefill"].mean_utilisation == pytest.approx(55 / 180)
    assert pools["prefill"].windows == Evenness(2, pytest.approx(70 / 55), pytest.approx(2.0))
    assert pools["prefill"].loaded == Evenness(1, pytest.approx(1.2), pytest.approx(1.2))
    assert pools["decode"].windows == Evenness(3, pytest.approx(1.0), pytest.approx(1.0))
    assert pools["decode"].loaded is None


def test_a_run_says_the_evenness_of_its_worse_pool() -> None:
    busy = {"prefill-0": [60_000.0], "prefill-1": [30_000.0], "decode-0": [10_000.0], "decode-1": [50_000.0]}
    found = figures(run_of(outcome(request(0, 10)), busy=busy, span=60_000.0), TIMING)
    assert found.max_over_mean_busy == pytest.approx(5 / 3)
    assert found.max_over_mean_busy_loaded == pytest.approx(4 / 3)
    assert found.mean_utilisation == pytest.approx(150 / 240)


def test_windows_after_the_last_arrival_do_not_count() -> None:
    busy = {"prefill-0": [60_000.0, 60_000.0, 60_000.0], "prefill-1": [60_000.0, 0.0, 0.0]}
    found = pools_busy(run_of(outcome(request(0, 10)), busy=busy, span=119_000.0))["prefill"]
    assert found.windows == Evenness(1, pytest.approx(1.0), pytest.approx(1.0))


def test_a_run_shorter_than_a_window_has_one() -> None:
    busy = {"worker-0": [5_000.0], "worker-1": [2_500.0]}
    found = pools_busy(run_of(outcome(request(0, 10), ended=10_000.0), busy=busy, span=8_000.0))["worker"]
    assert found.mean_utilisation == pytest.approx(0.375)
    assert found.windows == Evenness(1, pytest.approx(4 / 3), pytest.approx(4 / 3))
