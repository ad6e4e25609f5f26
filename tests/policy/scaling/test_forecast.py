"""The load that is to be expected when a worker that is asked for now is ready."""

from __future__ import annotations

import math
import random

import pytest
from antiphon_policy.scaling import ArrivalCounts, Forecast, forecast

START_MS = 60_000.0


def counts(*values: float, bucket_ms: float = 10_000.0, period_ms: float = 86_400_000.0) -> ArrivalCounts:
    return ArrivalCounts(len(values) * bucket_ms, bucket_ms, values, period_ms)


def test_nothing_is_foreseen_of_nothing() -> None:
    assert forecast(ArrivalCounts(), START_MS) == Forecast(horizon_ms=START_MS)
    still = forecast(counts(*[0.0] * 100), START_MS)
    assert still.now_rps == still.ahead_rps == 0.0


def test_a_constant_load_goes_on_and_the_band_is_its_scatter() -> None:
    draws = random.Random(4)
    exact = forecast(counts(*[50.0] * 90), START_MS)
    assert exact.ahead_rps == pytest.approx(5.0)
    assert exact.upper_rps == pytest.approx(5.0)
    noisy = forecast(counts(*[draws.gauss(50.0, 7.0) for _ in range(300)]), START_MS)
    assert noisy.ahead_rps == pytest.approx(5.0, rel=0.15)
    assert noisy.ahead_rps < noisy.upper_rps < 6.5


def test_with_no_past_the_band_is_that_of_chance() -> None:
    assert forecast(counts(10.0, 10.0, 10.0), START_MS).upper_rps > 1.2


def test_a_ramp_is_followed_ahead_and_one_that_stopped_is_not() -> None:
    ramp = [2.0 * at for at in range(60)]
    seen = forecast(counts(*ramp), START_MS)
    assert seen.now_rps == pytest.approx(11.5, rel=0.1)
    assert seen.upper_rps > 12.5
    after = forecast(counts(*ramp, *[120.0] * 60), START_MS)
    assert after.ahead_rps == pytest.approx(12.0, rel=0.03)


def test_a_jump_is_seen_with_its_first_count_and_is_no_ramp() -> None:
    calm = [20.0] * 60
    assert forecast(counts(*calm, 100.0), START_MS).ahead_rps == pytest.approx(9.0)
    later = forecast(counts(*calm, *[100.0] * 9), START_MS)
    assert later.ahead_rps <= 10.0
    # What comes every now and then is no news, and is in the band or is not.
    bursts = [100.0 if at % 20 == 10 else 20.0 for at in range(60)]
    assert forecast(counts(*bursts, 100.0), START_MS).upper_rps < 7.0


def test_a_load_that_comes_in_bursts_goes_back_to_its_mean_and_a_step_does_not() -> None:
    draws = random.Random(1)
    bursts = [200.0 if draws.random() < 0.25 else 0.0 for _ in range(180)]
    quiet, busy = forecast(counts(*bursts, *[0.0] * 6), START_MS), forecast(counts(*bursts, *[100.0] * 6), START_MS)
    mean = sum(bursts) / len(bursts) / 10.0
    assert quiet.ahead_rps == pytest.approx(mean, rel=0.4)
    assert busy.ahead_rps == pytest.approx(mean, rel=0.4)
    step = forecast(counts(*[20.0] * 100, *[100.0] * 40), START_MS)
    assert step.ahead_rps == pytest.approx(10.0, rel=0.05)


def test_what_may_come_is_the_middle_and_the_errors_above_it_but_for_the_one_that_came_once() -> None:
    step = forecast(counts(*[20.0] * 100, *[100.0] * 40), START_MS)
    assert sum(share for share, _ in step.spread) == pytest.approx(1.0)
    rates = [rps for _, rps in step.spread]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 12.0
    twice = [20.0] * 60 + [100.0] * 12 + [20.0] * 30 + [100.0] * 12 + [20.0] * 40
    assert forecast(counts(*twice), START_MS).spread[0][1] > 2.5


def test_it_never_says_less_than_the_load_is() -> None:
    falling = forecast(counts(*[400.0 - 4.0 * at for at in range(90)]), START_MS)
    assert falling.ahead_rps < falling.now_rps
    assert falling.upper_rps >= falling.now_rps


def test_what_comes_every_hour_is_foreseen_from_the_third_on() -> None:
    def load(bucket: int) -> float:
        return 30.0 if (bucket % 60) < 40 else 300.0

    periods = [load(bucket) for bucket in range(60 * 3 + 39)]
    seen = forecast(counts(*periods, bucket_ms=60_000.0, period_ms=3_600_000.0), START_MS)
    assert seen.seasonal
    assert seen.upper_rps > 2.0
    first = forecast(counts(*periods[:99], bucket_ms=60_000.0, period_ms=3_600_000.0), START_MS)
    assert not first.seasonal


def test_a_season_that_no_longer_holds_is_not_trusted() -> None:
    periods = [100.0 + 90.0 * math.sin(bucket * bucket) for bucket in range(60 * 4)]
    seen = forecast(counts(*periods, bucket_ms=60_000.0, period_ms=3_600_000.0), START_MS)
    assert not seen.seasonal


def test_a_jump_is_believed_as_far_as_those_before_it_lasted() -> None:
    calm = [20.0] * 120
    first = forecast(counts(*calm, 100.0), START_MS)
    gone = [*calm, *[100.0] * 6, *[20.0] * 54]
    second = forecast(counts(*gone, 100.0), START_MS)
    stayed = [*calm, *[60.0] * 60]
    next_step = forecast(counts(*stayed, 180.0), START_MS)
    assert first.ahead_rps > 8.0
    assert second.ahead_rps < 0.5 * first.ahead_rps
    assert next_step.ahead_rps > 15.0


def test_a_burst_that_came_and_went_is_remembered_for_half_an_hour_and_a_step_is_none() -> None:
    gone = [*[20.0] * 120, *[100.0] * 6]
    burst = forecast(counts(*gone, *[20.0] * 90), START_MS)
    assert burst.burst_rps == pytest.approx(10.0, rel=0.05)
    assert forecast(counts(*gone, *[20.0] * 240), START_MS).burst_rps == 0.0
    assert forecast(counts(*[20.0] * 120, *[100.0] * 60), START_MS).burst_rps == 0.0
