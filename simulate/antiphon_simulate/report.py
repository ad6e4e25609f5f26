"""How a `Summary` is told: a table for the terminal, one JSON object, and a page that needs nothing but itself.

Shares are in per cent in the table and the page, and in [0, 1] in the JSON.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from antiphon_simulate.goodput import TARGET_SHARE, Crossing
from antiphon_simulate.summary import AtRate, Means, Summary, VariantSummary

_COLUMNS = (
    "policy",
    "goodput rps",
    "of bound",
    "inside SLA",
    "TTFT p50",
    "p99 ms",
    "TPOT p50",
    "p99 ms",
    "hit rate",
    "of ideal",
    "max/mean busy",
    "loaded",
    "utilised",
)


def to_json(summary: Summary) -> bytes:
    """One object; `docs/simulator.md` describes its fields."""
    plan = summary.plan
    document = {
        "trace": {
            "name": plan.trace.name,
            "sha256": plan.trace.sha256,
            "format": plan.trace.format.value,
            "requests": len(plan.trace.requests),
            "rps": summary.trace_rps,
        },
        "shape": msgspec.to_builtins(plan.shape),
        "gateways": plan.gateways,
        "timing": msgspec.to_builtins(plan.timing),
        "sla": msgspec.to_builtins(plan.sla),
        "seeds": list(summary.seeds),
        "rate_scales": list(summary.rate_scales),
        "goodput_share": TARGET_SHARE,
        "policies": {one.variant.label: _policy(one) for one in summary.variants},
        "best": {
            policy: {"setting": one.variant.setting, "goodput_rps": one.goodput_rps}
            for policy, one in summary.best().items()
        },
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def _policy(one: VariantSummary) -> dict[str, Any]:
    return {
        "policy": one.variant.policy,
        "setting": one.variant.setting,
        "rate_scale": one.at[0].rate_scale,
        "offered_rps": one.at[0].offered_rps,
        **msgspec.to_builtins(one.at[0].means),
        "goodput_rps": one.goodput_rps,
        "goodput_over_bound": one.goodput_over_bound,
        "goodput": [
            {
                "seed": each.seed,
                "rps": each.goodput.rps,
                "crossing": each.goodput.crossing.value,
                "over_bound": each.over_bound,
            }
            for each in one.goodput
        ],
        "at": [msgspec.to_builtins(at) for at in one.at],
        "runs": [
            {
                "rate_scale": run.cell.rate_scale,
                "offered_rps": run.offered_rps,
                "seed": run.cell.seed,
                "to_the_end": run.cell.to_the_end,
                **msgspec.to_builtins(run.figures),
            }
            for run in one.runs
        ],
    }


def table(summary: Summary) -> str:
    """What was run, then for each rate a table with the policies as rows."""
    parts = [*_inputs(summary)]
    for at, scale in enumerate(summary.rate_scales):
        offered = summary.variants[0].at[at].offered_rps
        rows = [_COLUMNS, *(_row(one, one.at[at]) for one in summary.variants)]
        parts += ["", f"rate x{scale:g}: {offered:.3g} requests/s", *_aligned(rows)]
    parts += list(_notes(summary))
    return "\n".join(parts) + "\n"


def page(summary: Summary, plots_png: bytes) -> str:
    """An HTML page with the same and the plots in it."""
    tables = []
    for at, scale in enumerate(summary.rate_scales):
        head = "".join(f"<th>{html.escape(name)}</th>" for name in _COLUMNS)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _row(one, one.at[at])) + "</tr>"
            for one in summary.variants
        )
        offered = summary.variants[0].at[at].offered_rps
        tables.append(f"<h2>rate x{scale:g}: {offered:.3g} requests/s</h2><table><tr>{head}</tr>{rows}</table>")
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in (*_inputs(summary), *_notes(summary)) if line)
    image = base64.b64encode(plots_png).decode()
    title = html.escape(f"antiphon simulate route: {summary.plan.trace.name}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"</head><body><h1>{title}</h1>{lines}{''.join(tables)}"
        f'<img alt="plots" src="data:image/png;base64,{image}"></body></html>\n'
    )


_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}img{max-width:100%}"
    "td,th{padding:.2rem .7rem;border-bottom:1px solid #ccc;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
)


def _inputs(summary: Summary) -> Iterator[str]:
    plan, shape, sla = summary.plan, summary.plan.shape, summary.plan.sla
    pools = f"{shape.prefill} prefill + {shape.decode} decode workers" if shape.decode else f"{shape.prefill} workers"
    if plan.gateways > 1:
        pools += f" and {plan.gateways} gateways"
    infeasible = summary.variants[0].at[0].means.infeasible
    yield f"{plan.trace.name}: {len(plan.trace.requests)} requests, sha256 {plan.trace.sha256[:12]}"
    yield f"{pools} of {shape.pool_blocks} blocks; timing {plan.timing.name}: {plan.timing.source or 'no source given'}"
    yield (
        f"SLA: TTFT {sla.ttft_ms:g} ms + {sla.ttft_ms_per_1k_prompt_tokens:g} ms per 1,000 prompt tokens, "
        f"TPOT {sla.tpot_ms:g} ms; {infeasible:.0f} infeasible requests left out of `inside SLA`"
    )
    yield "one seed" if len(summary.seeds) == 1 else f"{len(summary.seeds)} seeds; figures are means over them"


def _row(one: VariantSummary, at: AtRate) -> tuple[str, ...]:
    found: Means = at.means
    return (
        one.variant.label,
        _goodput(one),
        _share(one.goodput_over_bound),
        _share(found.inside_sla_share),
        f"{found.ttft_ms.p50:.0f}",
        f"{found.ttft_ms.p99:.0f}",
        f"{found.tpot_ms.p50:.1f}",
        f"{found.tpot_ms.p99:.1f}",
        _share(found.prefill_hit_rate),
        _share(found.hit_efficiency),
        _ratio(found.max_over_mean_busy),
        _ratio(found.max_over_mean_busy_loaded),
        _share(found.mean_utilisation),
    )


def _goodput(one: VariantSummary) -> str:
    if not one.goodput:
        return "-"
    crossings = {each.goodput.crossing for each in one.goodput}
    if one.goodput_rps is None:
        return "none"
    return f"{'>= ' if Crossing.ABOVE in crossings else ''}{one.goodput_rps:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100.0 * value:.1f} %"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _notes(summary: Summary) -> Iterator[str]:
    crossings = {each.goodput.crossing for one in summary.variants for each in one.goodput}
    if Crossing.NO_FEASIBLE_REQUEST in crossings:
        yield ""
        yield "No request is feasible: no worker of this timing keeps this SLA, however idle. Give a wider SLA."
    if Crossing.ABOVE in crossings:
        yield ""
        yield "`>=`: the SLA is kept at the highest rate that was tried; try higher ones (--rate-scale) or --goodput."
    if Crossing.BELOW in crossings:
        yield ""
        yield "`none`: the SLA is not kept at the lowest rate that was tried; try lower ones, or --goodput."
    sweeps = {one.variant.policy for one in summary.variants if one.variant.setting is not None}
    for policy, one in summary.best().items():
        if policy in sweeps:
            yield f"best of {policy}: {one.variant.label}, {one.goodput_rps:.3g} requests/s"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join((row[0].ljust(len(first)), *others))
