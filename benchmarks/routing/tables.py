"""The summary as Markdown tables: `results/tables.md`, from which the page takes its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.routing.study import BOUNDS, FILES, SHAPES
from benchmarks.routing.summary import OURS, PolicyCase, Spread, Summary, moderate_share

_EVEN = 1.15


def tables_of(summary: Summary) -> str:
    blocks = [
        _head(summary),
        _goodput(summary),
        _hits(summary),
        _busy(summary),
        _knees(summary),
        _differences(summary),
        _late(summary),
        _small(summary, "tight", "Tight pools: 1,024 blocks a worker, eight workers"),
        _small(summary, "order", "The waiting line, eight workers"),
        _small(summary, "aggregated", "Eight workers that do both"),
        _curves(summary),
    ]
    return "\n\n".join(blocks) + "\n"


def _head(summary: Summary) -> str:
    at = ", ".join(f"{commit}: {runs}" for commit, runs in summary.commits.items())
    reach = ", ".join(f"{case} x{scale:.3g}" for case, scale in summary.reach.items())
    best = ", ".join(f"{case}: {setting}" for case, setting in summary.best_settings.items())
    return (
        f"{summary.runs} runs (by commit: {at}), {summary.cpu_s:.0f} s of processor time.\n\n"
        f"Reach (rate scale): {reach}.\n\nBest settings of the sweeps: {best}."
    )


def _goodput(summary: Summary) -> str:
    rows = []
    for policy in _policies(summary):
        cells = [_goodput_cell(_case(summary, trace, workers, policy)) for trace, workers in _keys(summary)]
        rows.append([policy, *cells])
    header = ["policy", *(f"{trace} {workers}" for trace, workers in _keys(summary))]
    return (
        "### Goodput over the bound's\n\nMean (least to most; seeds). `<`: not even the lowest rate is kept; `>`: "
        "kept at the highest; `at most`: the bound keeps the highest rate too.\n\n" + _table(header, rows)
    )


def _goodput_cell(case: PolicyCase | None) -> str:
    if case is None or not case.seeds:
        return ""
    if case.goodput_over_bound is None:
        if case.crossing == "above":
            return f"> ({case.seeds})"
        if case.crossing == "below":
            return f"< {_least_share(case)} ({case.seeds})"
        if case.at_most_of_bound is not None:
            return f"at most {_told(case.at_most_of_bound, 3)}"
        return f"{case.crossing} ({case.seeds})"
    text = _told(case.goodput_over_bound, 3)
    return text if case.crossing == "found" else f"{text}, else {case.crossing}"


def _least_share(case: PolicyCase) -> str:
    return f"{min(map(float, case.inside)):g}" if case.inside else "?"


def _hits(summary: Summary) -> str:
    header = ["policy", *(f"{trace} {workers}" for trace, workers in _keys(summary))]
    rows = []
    for policy in _policies(summary):
        cells = []
        for trace, workers in _keys(summary):
            case = _case(summary, trace, workers, policy)
            found = case.hit_efficiency.get(f"{moderate_share(trace, workers):g}") if case else None
            cells.append(_told(found, 3) if found else "")
        rows.append([policy, *cells])
    return "### Hit efficiency at moderate load\n\n" + _table(header, rows)


def _busy(summary: Summary) -> str:
    rows = []
    for trace, workers in _keys(summary):
        case = _case(summary, trace, workers, OURS)
        if case is None:
            continue
        for share, spread in case.busy_loaded.items():
            rows.append(
                [
                    trace, str(workers), share, f"{case.utilisation[share].mean:.2f}",
                    _told(spread, 3), "yes" if spread.most <= _EVEN else f"no, at most {spread.most:.3f}",
                ]
            )  # fmt: skip
    header = ["trace", "workers", "rate (of the reach)", "utilisation", "busiest / mean, loaded windows", "<= 1.15"]
    return "### Evenness where a pool is used above 70 %: antiphon\n\n" + _table(header, rows)


def _knees(summary: Summary) -> str:
    rows = []
    for knee in summary.knees:
        others = sorted(
            ((spread.mean, policy) for policy, spread in knee.inside.items() if policy not in (OURS, *BOUNDS)),
            reverse=True,
        )
        rows.append(
            [
                knee.trace, str(knee.workers), f"{knee.share:g}", f"{knee.offered_rps:.2f}",
                _percent(knee.inside.get(OURS)),
                f"{knee.best_baseline} {_percent(knee.inside.get(knee.best_baseline))}",
                ", ".join(f"{name} {100 * mean:.1f}" for mean, name in others if name != knee.best_baseline),
                _percent(knee.inside.get("bound")),
            ]
        )  # fmt: skip
    header = ["trace", "workers", "rate", "requests/s", "antiphon", "best baseline", "others", "bound"]
    return "### Inside the SLA (%) where the best baseline begins to fail\n\n" + _table(header, rows)


def _differences(summary: Summary) -> str:
    worse = [one for one in summary.differences if one.worse]
    rows = [
        [
            one.trace, str(one.workers), f"{one.share:g}", one.policy, f"{100 * one.mean:+.2f}",
            f"{100 * one.two_standard_errors:.2f}" if one.seeds > 1 else "-", str(one.seeds),
            "yes" if one.worse_beyond_noise else ("no" if one.seeds > 1 else "one seed"),
        ]
        for one in worse
    ]  # fmt: skip
    better = sum(one.mean > one.two_standard_errors for one in summary.differences if one.seeds > 1)
    many = sum(one.seeds > 1 for one in summary.differences)
    header = ["trace", "workers", "rate", "baseline", "points", "2 standard errors", "seeds", "beyond noise"]
    return (
        f"### Where a baseline has more inside the SLA\n\n{len(summary.differences)} comparisons (rate, baseline), "
        f"{many} of them with several seeds, of which antiphon is better beyond noise in {better}. It is behind in "
        f"{len(worse)}:\n\n" + _table(header, rows)
    )


def _late(summary: Summary) -> str:
    rows = [
        [
            one.trace, str(one.workers), f"{one.share:g}", str(one.runs), str(one.late), str(one.late_ttft),
            _number(one.late_ttft_waited_share, 2), _number(one.late_ttft_prompt_tokens, 0), str(one.pulled),
            str(one.late_tpot), str(one.short_answers), _number(one.late_tpot_over_limit, 2), str(one.local),
        ]
        for one in summary.late
        if one.late
    ]  # fmt: skip
    header = [
        "trace", "workers", "rate", "runs", "late", "by first token", "of it in the line", "prompt tokens", "pulled",
        "by further tokens", "answers <= 16", "tpot / limit", "local prefill",
    ]  # fmt: skip
    return "### Antiphon's late requests (at most 40 a run)\n\n" + _table(header, rows)


def _small(summary: Summary, part: str, title: str) -> str:
    rows = [
        [
            one.trace, f"{one.share:g}", f"{one.offered_rps:.2f}",
            one.policy if one.manner == "default" else f"{one.policy}, {one.manner}",
            _percent(one.inside), _told(one.hit_efficiency, 3) if one.hit_efficiency else "",
            f"{one.ttft_p50_ms.mean:.0f}", f"{one.ttft_p99_ms.mean:.0f}", f"{one.utilisation.mean:.2f}",
        ]
        for one in sorted(
            (one for one in summary.small if one.part == part),
            key=lambda one: (one.trace, one.share, -one.inside.mean),
        )
    ]  # fmt: skip
    header = [
        "trace", "rate", "requests/s", "policy", "inside (%)", "hit efficiency", "ttft p50 ms", "p99 ms", "utilisation",
    ]  # fmt: skip
    return f"### {title}\n\n" + _table(header, rows)


def _curves(summary: Summary) -> str:
    blocks = []
    for trace, workers in _keys(summary):
        cases = [case for case in summary.cases if (case.trace, case.workers) == (trace, workers)]
        shares = sorted({float(share) for case in cases for share in case.inside})
        rows = [
            [case.policy, *(_percent(case.inside.get(f"{share:g}")) for share in shares)]
            for case in sorted(cases, key=lambda case: -math.fsum(spread.mean for spread in case.inside.values()))
        ]
        blocks.append(
            f"{trace}, {workers} workers:\n\n" + _table(["policy", *(f"{share:g}" for share in shares)], rows)
        )
    return "### Inside the SLA (%) by rate\n\n" + "\n\n".join(blocks)


def _keys(summary: Summary) -> list[tuple[str, int]]:
    known = {(case.trace, case.workers) for case in summary.cases}
    return [(trace, workers) for trace in FILES for workers in SHAPES if (trace, workers) in known]


def _policies(summary: Summary) -> Iterator[str]:
    yield from dict.fromkeys(case.policy for case in summary.cases)


def _case(summary: Summary, trace: str, workers: int, policy: str) -> PolicyCase | None:
    return next(
        (case for case in summary.cases if (case.trace, case.workers, case.policy) == (trace, workers, policy)), None
    )


def _told(spread: Spread, digits: int) -> str:
    if spread.seeds == 1:
        return f"{spread.mean:.{digits}f} (1)"
    return f"{spread.mean:.{digits}f} ({spread.least:.{digits}f} to {spread.most:.{digits}f}; {spread.seeds})"


def _percent(spread: Spread | None) -> str:
    if spread is None:
        return ""
    if spread.seeds == 1:
        return f"{100 * spread.mean:.1f}"
    return f"{100 * spread.mean:.1f} ({100 * spread.least:.1f} to {100 * spread.most:.1f})"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
