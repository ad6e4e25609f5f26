"""The plots of a `Summary`, as one PNG: who keeps the SLA up to which rate, and what that follows from.

matplotlib is imported when something is drawn: nobody waits a second for it who wants a table.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from antiphon_simulate.cells import CellResult
from antiphon_simulate.goodput import TARGET_SHARE
from antiphon_simulate.summary import Means, Summary, VariantSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(summary: Summary) -> bytes:
    """PNG. Points are means over the seeds of all runs at a rate, those that the search for goodput made too."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 10), layout="constrained")
    (inside, ttft), (hits, busy) = figure.subplots(2, 2)
    for at, one in enumerate(summary.variants):
        colour = f"C{at % 10}"
        style = "-" if at < 10 else "--"
        rates = _by_rate(one)
        shares = [(rps, run.inside_sla_share) for rps, run in _means(rates) if run.inside_sla_share is not None]
        inside.plot(*_axes(shares), marker=".", color=colour, linestyle=style, label=one.variant.label)
        for name, width in (("p50", 1.0), ("p99", 2.0)):
            points = [(rps, getattr(run.ttft_ms, name)) for rps, run in _means(rates)]
            ttft.plot(*_axes(points), marker=".", color=colour, linestyle=style, linewidth=width)
        hits.plot(
            *_axes([(rps, run.prefill_hit_rate) for rps, run in _means(rates)]),
            marker=".",
            color=colour,
            linestyle=style,
        )
        _draw_windows(busy, one, colour, style)
    hits.axhline(summary.variants[0].at[0].means.ideal_hit_rate, color="black", linestyle=":", label="ideal")
    inside.axhline(TARGET_SHARE, color="black", linestyle=":")
    ttft.set_yscale("log")
    for axes, title, across, up in (
        (inside, "Goodput: share of feasible requests inside the SLA", "requests/s", "share"),
        (ttft, "TTFT: p50 thin, p99 thick", "requests/s", "ms"),
        (hits, "Prompt tokens not computed", "requests/s", "share"),
        (busy, f"Busiest worker over the mean, rate x{summary.rate_scales[0]:g}, first seed", "window", "ratio"),
    ):
        axes.set_title(title)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.grid(alpha=0.3)
    inside.legend()
    hits.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()


def _draw_windows(axes: Axes, one: VariantSummary, colour: str, style: str) -> None:
    """Of the pool that computes prompts."""
    run = next(run for run in one.runs if run.cell.rate_scale == one.at[0].rate_scale)
    name = "prefill" if "prefill" in run.figures.busy else next(iter(run.figures.busy))
    pool = run.figures.busy[name]
    ratios = [
        (at, busiest / mean)
        for at, (mean, busiest) in enumerate(zip(pool.mean_by_window, pool.busiest_by_window, strict=True))
        if mean > 0.0
    ]
    axes.plot(*_axes(ratios), marker=".", markersize=3.0, color=colour, linestyle=style, linewidth=1.0)


def _means(rates: dict[float, list[CellResult]]) -> list[tuple[float, Means]]:
    return [(rps, Means.of([run.figures for run in runs])) for rps, runs in sorted(rates.items())]


def _by_rate(one: VariantSummary) -> dict[float, list[CellResult]]:
    rates: defaultdict[float, list[CellResult]] = defaultdict(list)
    for run in one.runs:
        rates[run.offered_rps].append(run)
    return rates


def _axes(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
