"""Goodput from runs at some rates, and the search that chooses the rates."""

from __future__ import annotations

import pytest
from antiphon_simulate.goodput import Crossing, Goodput, GoodputSearch, Point, goodput


def found_by(search: GoodputSearch, holds_until: float) -> list[float]:
    """The scales it asked for, where everything is inside the SLA up to a scale and half of it beyond."""
    asked = []
    while (scale := search.next_scale()) is not None:
        asked.append(scale)
        search.learn(scale, 1.0 if scale <= holds_until else 0.5)
        assert len(asked) < 30
    return asked


def test_it_is_where_the_line_between_the_neighbours_crosses() -> None:
    points = [Point(1.0, 1.0), Point(4.0, 0.90), Point(2.0, 0.995), Point(3.0, 0.975)]
    # From 0.995 at 2 down by 0.02 to 3: 0.99 after a quarter of the way.
    found = goodput(points)
    assert found.crossing is Crossing.FOUND
    assert found.rps == pytest.approx(2.25)


def test_a_dip_below_a_rate_that_keeps_the_target_does_not_count() -> None:
    found = goodput([Point(1.0, 0.98), Point(2.0, 0.99), Point(3.0, 0.5)])
    assert found.rps == pytest.approx(2.0)


def test_without_a_crossing_it_says_on_which_side_it_is() -> None:
    assert goodput([Point(1.0, 1.0), Point(2.0, 0.99)]) == Goodput(2.0, Crossing.ABOVE)
    assert goodput([Point(1.0, 0.9)]) == Goodput(None, Crossing.BELOW)
    assert goodput([Point(1.0, None)]) == Goodput(None, Crossing.NO_FEASIBLE_REQUEST)


@pytest.mark.parametrize("holds_until", [0.11, 0.9, 1.0, 3.7, 50.0])
def test_the_search_ends_with_the_crossing_between_two_close_rates(holds_until: float) -> None:
    asked = found_by(GoodputSearch(tolerance=0.04), holds_until)
    kept = max(scale for scale in asked if scale <= holds_until)
    missed = min(scale for scale in asked if scale > holds_until)
    assert 1.0 < missed / kept <= 1.04
    assert len(asked) <= 12


def test_the_search_starts_where_it_is_told_and_uses_what_is_known() -> None:
    search = GoodputSearch(2.0)
    assert search.next_scale() == 2.0
    search.learn(2.0, 1.0)
    search.learn(2.1, 0.5)
    assert search.next_scale() == pytest.approx((2.0 * 2.1) ** 0.5)


@pytest.mark.parametrize("holds_until", [0.0, 1e9])
def test_the_search_gives_up_at_its_ends(holds_until: float) -> None:
    asked = found_by(GoodputSearch(widest=64.0), holds_until)
    assert min(asked) >= 1 / 64
    assert max(asked) <= 64
    assert len(asked) <= 7


def test_there_is_nothing_to_search_where_no_request_is_feasible() -> None:
    search = GoodputSearch()
    search.learn(1.0, None)
    assert search.next_scale() is None
