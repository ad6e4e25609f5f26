"""From runs to what is told: means over seeds, goodput and its share of the bound's, table, JSON, page and plots."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from antiphon_policy.latency import StepModel
from antiphon_simulate.busy import PoolBusy
from antiphon_simulate.cells import Cell, CellResult, Plan, Series, Variant
from antiphon_simulate.figures import Percentiles, RunFigures
from antiphon_simulate.plots import draw
from antiphon_simulate.records import ClusterShape, Sla, Timing, TraceRequest
from antiphon_simulate.report import page, table, to_json
from antiphon_simulate.summary import Summary, summarise
from antiphon_simulate.traces import Trace, TraceFormat

PLAN = Plan(
    trace=Trace("day.jsonl", "ab" * 32, TraceFormat.MOONCAKE, (TraceRequest(0, 0.0, 10, 2, (1,)),)),
    shape=ClusterShape(2, 3, 64),
    timing=Timing(step=StepModel(), name="mine", source="measured <here>"),
    sla=Sla(),
)
RUN = RunFigures(
    requests=100,
    completed=100,
    unfinished=0,
    infeasible=4,
    inside_sla=96,
    late_ttft=0,
    late_tpot=0,
    inside_sla_share=1.0,
    prefill_hit_rate=0.25,
    ideal_hit_rate=0.5,
    hit_efficiency=0.5,
    transfer_hit_rate=None,
    pulled_blocks=3,
    completed_rps=4.0,
    ttft_ms=Percentiles(10.0, 20.0, 30.0, 40.0),
    tpot_ms=Percentiles(1.0, 2.0, 3.0, 4.0),
    max_over_mean_busy=1.25,
    max_over_mean_busy_loaded=None,
    mean_utilisation=0.5,
    busy={},
)
MINE, BEST, BOUND = Variant("mine"), Variant("mine", 2.0), Variant("bound")


def run(variant: Variant, scale: float, share: float | None, seed: int = 0, **other: object) -> CellResult:
    found = replace(RUN, inside_sla_share=share, **other)  # type: ignore[arg-type]
    return CellResult(Cell(variant, scale, seed), 10.0 * scale, found, 1.0)


def summed(*results: CellResult, seeds: int = 1, scales: tuple[float, ...] = (1.0,), goodput: bool = True) -> Summary:
    variants = list(dict.fromkeys(result.cell.variant for result in results))
    return summarise(PLAN, variants, list(range(seeds)), scales, list(results), trace_rps=10.0, with_goodput=goodput)


def crossing(variant: Variant, last_kept: float, seed: int = 0) -> list[CellResult]:
    """Kept up to that scale; 0.98 at the next, so that goodput lies halfway."""
    return [run(variant, 1.0, 1.0, seed), run(variant, last_kept, 1.0, seed), run(variant, last_kept + 1.0, 0.98, seed)]


def test_figures_are_means_over_the_seeds_of_the_rate_that_was_asked_for() -> None:
    one = run(MINE, 1.0, 1.0, 0, ttft_ms=Percentiles(10.0, 20.0, 30.0, 40.0), prefill_hit_rate=0.2)
    two = run(MINE, 1.0, 0.5, 1, ttft_ms=Percentiles(30.0, 40.0, 50.0, 80.0), prefill_hit_rate=0.4)
    other_rate = run(MINE, 2.0, 0.1, 1, prefill_hit_rate=0.9)
    means = summed(one, two, other_rate, seeds=2).variants[0].at[0].means
    assert means.prefill_hit_rate == pytest.approx(0.3)
    assert means.inside_sla_share == pytest.approx(0.75)
    assert means.ttft_ms == Percentiles(20.0, 30.0, 40.0, 60.0)
    assert means.transfer_hit_rate is None


def test_goodput_and_its_share_of_the_bounds_are_taken_seed_by_seed() -> None:
    results = [*crossing(MINE, 2.0, 0), *crossing(MINE, 3.0, 1), *crossing(BOUND, 4.0, 0), *crossing(BOUND, 6.0, 1)]
    mine, bound = summed(*results, seeds=2).variants
    assert [each.goodput.rps for each in mine.goodput] == pytest.approx([25.0, 35.0])
    assert mine.goodput_rps == pytest.approx(30.0)
    assert mine.goodput_over_bound == pytest.approx((25 / 45 + 35 / 65) / 2)
    assert bound.goodput_over_bound == pytest.approx(1.0)


def test_without_a_crossing_there_is_nothing_to_divide() -> None:
    told = table(summed(run(MINE, 1.0, 1.0), *crossing(BOUND, 4.0)))
    assert ">= 10" in told
    assert "try higher ones" in told
    assert summed(run(MINE, 1.0, 1.0), *crossing(BOUND, 4.0)).variants[0].goodput_over_bound is None
    assert "none" in table(summed(run(MINE, 1.0, 0.5)))


def test_a_timing_that_keeps_no_promise_is_said() -> None:
    assert "No request is feasible" in table(summed(run(MINE, 1.0, None)))


def test_the_table_has_a_row_for_each_policy_at_each_rate() -> None:
    told = table(
        summed(run(MINE, 1.0, 1.0), run(MINE, 2.0, 0.5), *crossing(BOUND, 4.0), run(BOUND, 2.0, 1.0), scales=(1.0, 2.0))
    )
    rows = [line for line in told.splitlines() if line.startswith(("mine", "bound"))]
    assert [row.split()[0] for row in rows] == ["mine", "bound", "mine", "bound"]
    assert "rate x2: 20 requests/s" in told
    assert "4 infeasible requests" in told
    assert "measured <here>" in told


def test_the_best_of_a_sweep_is_named() -> None:
    summary = summed(*crossing(MINE, 2.0), *crossing(BEST, 3.0), *crossing(BOUND, 4.0))
    assert summary.best()["mine"].variant == BEST
    assert "best of mine: mine=2, 35 requests/s" in table(summary)
    assert json.loads(to_json(summary))["best"]["mine"] == {"setting": 2.0, "goodput_rps": pytest.approx(35.0)}


def test_the_json_object_has_the_figures_by_policy_and_all_that_went_in() -> None:
    told = json.loads(to_json(summed(*crossing(MINE, 2.0), *crossing(BOUND, 4.0))))
    assert told["trace"] == {"name": "day.jsonl", "sha256": "ab" * 32, "format": "mooncake", "requests": 1, "rps": 10.0}
    assert told["shape"]["prefill"] == 2
    assert told["timing"]["source"] == "measured <here>"
    assert told["sla"]["tpot_ms"] == 50.0
    mine = told["policies"]["mine"]
    assert mine["ttft_ms"] == {"p50": 10.0, "p90": 20.0, "p95": 30.0, "p99": 40.0}
    assert mine["goodput_rps"] == pytest.approx(25.0)
    assert mine["goodput_over_bound"] == pytest.approx(25 / 45)
    assert mine["max_over_mean_busy"] == 1.25
    assert [each["rate_scale"] for each in mine["runs"]] == [1.0, 2.0, 3.0]


def test_without_goodput_there_is_none() -> None:
    told = json.loads(to_json(summed(run(MINE, 1.0, 1.0), goodput=False)))
    assert told["policies"]["mine"]["goodput_rps"] is None
    assert told["best"] == {}


def test_the_page_needs_nothing_else_and_escapes_what_people_wrote() -> None:
    told = page(summed(*crossing(MINE, 2.0)), b"\x89PNG")
    assert "measured &lt;here&gt;" in told
    assert 'src="data:image/png;base64,iVBORw=="' in told
    assert "http" not in told


def test_plots_are_drawn_from_all_runs() -> None:
    busy = {"prefill": PoolBusy(2, 0.5, None, None, (0.5, 0.0), (0.6, 0.0))}
    summary = summed(*(replace(each, figures=replace(each.figures, busy=busy)) for each in crossing(MINE, 2.0)))
    assert draw(summary).startswith(b"\x89PNG\r\n")


def test_a_series_runs_what_was_asked_for_and_then_what_the_search_wants() -> None:
    series = Series(MINE, 3, (1.0, 2.0), search=True)
    asked = []
    while (cell := series.next_cell()) is not None:
        asked.append((cell.rate_scale, cell.to_the_end))
        assert cell.seed == 3
        figures = replace(RUN, inside_sla_share=1.0 if cell.rate_scale <= 1.0 else 0.0)
        series.learn(CellResult(cell, cell.rate_scale, figures, 0.1))
    assert asked[:3] == [(1.0, True), (2.0, True), (pytest.approx(2**0.5), False)]
    assert min(scale for scale, _ in asked if scale > 1) < 1.05


def test_a_series_without_a_search_ends_with_what_was_asked_for() -> None:
    series = Series(MINE, 0, (1.0,), search=False)
    assert series.next_cell() is not None
    assert series.next_cell() is None
