"""The plots of a `Study`, as one PNG: the load, each pool's workers, and what was kept, over time.

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from antiphon_simulate.autoscale.records import Moment, ScaleRun
from antiphon_simulate.autoscale.study import Study

_POINTS = 360
"""Times at which something is drawn, at most."""


def draw(study: Study) -> bytes:
    """PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 14), layout="constrained")
    load, prefill, decode, ttft, inside = figure.subplots(5, 1, sharex=True)
    span_ms = study.load.span_ms or 1.0
    width_ms = max(10_000.0, span_ms / _POINTS)
    times = [at * width_ms / 60_000.0 for at in range(int(span_ms // width_ms) + 1)]
    load.plot(times, [1000.0 * count / width_ms for count in _counts(study.oracle_run, len(times), width_ms)])
    runs = [(one.name, one.run, "-") for one in study.scaled] + [("oracle", study.oracle_run, ":")]
    for at, (name, run, style) in enumerate(runs):
        colour = "black" if name == "oracle" else f"C{at % 10}"
        minutes = [moment.at_ms / 60_000.0 for moment in run.moments]
        alive = run.moments
        prefill.step(minutes, _sizes(alive, 0), where="post", color=colour, linestyle=style, label=name)
        decode.step(minutes, _sizes(alive, 1), where="post", color=colour, linestyle=style)
        late, p95 = _kept(run, study, len(times), width_ms)
        ttft.plot(times, p95, color=colour, linestyle=style, linewidth=1.0)
        inside.plot(times, late, color=colour, linestyle=style, linewidth=1.0)
    ttft.set_yscale("log")
    for axes, title, up in (
        (load, f"{study.load.name}: arrivals", "requests/s"),
        (prefill, "Prefill workers that are paid for", "workers"),
        (decode, "Decode workers that are paid for", "workers"),
        (ttft, "TTFT over its limit, p95 of the feasible requests that came then", "ratio"),
        (inside, "Share of the feasible requests inside the promise", "share"),
    ):
        axes.set_title(title)
        axes.set_ylabel(up)
        axes.grid(alpha=0.3)
    inside.set_xlabel("minutes")
    inside.axhline(study.setting.goal.target, color="black", linestyle="--", linewidth=0.8)
    ttft.axhline(1.0, color="black", linestyle="--", linewidth=0.8)
    prefill.set_xlim(0.0, span_ms / 60_000.0)
    prefill.legend(ncols=4)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=90)
    return image.getvalue()


def _sizes(moments: Sequence[Moment], pool: int) -> list[int]:
    return [(moment.alive.prefill, moment.alive.decode)[pool] for moment in moments]


def _counts(run: ScaleRun, buckets: int, width_ms: float) -> list[int]:
    found = [0] * buckets
    for serving in run.servings:
        found[min(int(serving.arrived_ms // width_ms), buckets - 1)] += 1
    return found


def _kept(run: ScaleRun, study: Study, buckets: int, width_ms: float) -> tuple[list[float], list[float]]:
    """Of each bucket the share inside, and the 95th percentile of TTFT over its limit; nan: nobody came."""
    inside = [0] * buckets
    ratios: list[list[float]] = [[] for _ in range(buckets)]
    for serving in run.servings:
        if serving.call.feasible:
            at = min(int(serving.arrived_ms // width_ms), buckets - 1)
            inside[at] += serving.is_inside(study.setting.goal)
            ratios[at].append((serving.ttft_ms or 0.0) / serving.call.ttft_limit_ms)
    nothing = float("nan")
    shares = [count / len(came) if came else nothing for count, came in zip(inside, ratios, strict=True)]
    highs = [sorted(came)[int(0.95 * (len(came) - 1))] if came else nothing for came in ratios]
    return shares, highs
