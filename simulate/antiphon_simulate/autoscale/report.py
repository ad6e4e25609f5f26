"""How a `Study` is told: a table, one JSON object, and a page that needs nothing but itself."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from antiphon_simulate.autoscale.figures import ScaleFigures
from antiphon_simulate.autoscale.study import Scaled, Study

_COLUMNS = (
    "policy",
    "inside",
    "GPU-hours",
    "of oracle",
    "replicas",
    "prefill",
    "decode",
    "reversals/10 min",
    "back in SLA s",
    "TTFT p95",
    "p99 ms",
    "TPOT p95",
    "p99 ms",
    "starts",
    "switches",
    "moved",
)


def to_json(study: Study) -> bytes:
    """One object; `docs/simulator.md` describes its fields."""
    feasible = sum(call.feasible for call in study.load.calls)
    document = {
        "load": {
            "name": study.load.name,
            "requests": len(study.load.calls),
            "feasible": feasible,
            "span_s": study.load.span_ms / 1000.0,
        },
        "goal": msgspec.to_builtins(study.setting.goal),
        "site": msgspec.to_builtins(study.setting.site),
        "timing": msgspec.to_builtins(study.setting.timing),
        "seed": study.seed,
        "begin": msgspec.to_builtins(study.begin),
        "oracle": {
            "key": study.reference.key,
            "gpu_hours": study.reference.gpu_hours,
            "bound_gpu_hours": study.reference.bound_gpu_hours,
            "reaches_target": study.reference.reaches,
            "slot_s": study.reference.slot_ms / 1000.0,
            **_figures(study.oracle_figures),
        },
        "allowed_gpu_hours": study.reference.allowed_gpu_hours,
        "causal_attainment": study.reference.causal_attainment,
        "jump_workers": study.jump_workers,
        "jumps": study.jumps,
        "asked_attainment": study.asked_attainment,
        "static_peak_sizes": msgspec.to_builtins(study.reference.peak),
        "policies": {one.name: _policy(one) for one in study.scaled},
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def _policy(one: Scaled) -> dict[str, Any]:
    return {
        **_figures(one.figures),
        "gpu_hours_over_oracle": one.gpu_hours_over_oracle,
        "gpu_hours_over_bound": one.gpu_hours_over_bound,
        "extra_replicas": one.extra_replicas,
        "within_cost": one.is_cheap,
        "keeps_promise": one.keeps,
    }


def _figures(figures: ScaleFigures) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(figures)
    return found


def table(study: Study) -> str:
    rows = [_COLUMNS, *_rows(study)]
    return "\n".join([*_inputs(study), "", *_aligned(rows), "", *_notes(study)]) + "\n"


def page(study: Study, plots_png: bytes) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in _COLUMNS)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in _rows(study))
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in (*_inputs(study), *_notes(study)))
    title = html.escape(f"antiphon simulate autoscale: {study.load.name}")
    image = base64.b64encode(plots_png).decode()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"</head><body><h1>{title}</h1>{lines}<table><tr>{head}</tr>{rows}</table>"
        f'<img alt="plots" src="data:image/png;base64,{image}"></body></html>\n'
    )


_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:90rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}img{max-width:100%}"
    "td,th{padding:.2rem .7rem;border-bottom:1px solid #ccc;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
)


def _inputs(study: Study) -> Iterator[str]:
    load, goal, site, timing = study.load, study.setting.goal, study.setting.site, study.setting.timing
    infeasible = sum(not call.feasible for call in load.calls)
    yield f"{load.name}: {len(load.calls)} requests in {load.span_ms / 1000.0:.0f} s, {infeasible} of them infeasible"
    yield (
        f"goal: {100.0 * goal.target:g} % of the feasible ones with TTFT {goal.ttft_ms:g} ms + "
        f"{goal.ttft_ms_per_1k_uncached:g} ms per 1,000 uncached tokens and TPOT {goal.tpot_ms:g} ms"
    )
    yield (
        f"workers start in {site.start_ms / 1000.0:g} s +- {100.0 * site.start_spread:g} %, drain for at most "
        f"{site.drain_ms / 1000.0:g} s, switch roles in {site.switch_ms / 1000.0:g} s; begin with "
        f"{study.begin.prefill} + {study.begin.decode}"
    )
    yield f"timing {timing.name}: {timing.source or 'no source given'}"


def _notes(study: Study) -> Iterator[str]:
    reference = study.reference
    yield (
        f"oracle: the cheapest schedule that was found of those that see the future; none costs less than "
        f"{reference.bound_gpu_hours:.2f} GPU-hours"
        + ("" if reference.reaches else ". No pools that are allowed keep this goal: widen it, or the largest sizes")
    )
    yield (
        f"causal: at most {100.0 * reference.causal_attainment:.2f} % inside for {reference.allowed_gpu_hours:.2f} "
        "GPU-hours (the larger of a tenth and one replica above the oracle) without seeing the future"
    )
    yield (
        f"asked of a law at that cost: {100.0 * study.asked_attainment:.2f} %"
        + (
            f"; arrivals jump by {study.jump_workers:.1f} workers faster than one starts: three points below the causal"
            if study.jumps
            else ""
        )
    )


def _rows(study: Study) -> Iterator[tuple[str, ...]]:
    for one in study.scaled:
        yield _row(one.name, one.figures, one.gpu_hours_over_oracle)
    yield _row("(oracle)", study.oracle_figures, 1.0)


def _row(name: str, found: ScaleFigures, over_oracle: float) -> tuple[str, ...]:
    return (
        name,
        "-" if found.attainment is None else f"{100.0 * found.attainment:.2f} %",
        f"{found.gpu_hours:.2f}",
        f"{over_oracle:.2f}",
        f"{found.mean_replicas:.2f}",
        f"{found.mean_prefill:.2f}",
        f"{found.mean_decode:.2f}",
        f"{found.reversals_per_10_min:.2f}",
        f"{found.seconds_back_in_sla:.0f}",
        f"{found.ttft_ms.p95:.0f}",
        f"{found.ttft_ms.p99:.0f}",
        f"{found.tpot_ms.p95:.1f}",
        f"{found.tpot_ms.p99:.1f}",
        str(found.starts),
        str(found.switches),
        str(found.moved_streams),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join((row[0].ljust(len(first)), *others))
