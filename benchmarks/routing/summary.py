"""What the rows say together. `tables.py` makes it readable.

Goodput is taken seed by seed from a series' own rates (`antiphon_simulate.goodput`) and divided by the bound's of the
same seed. Differences between Antiphon and a baseline are taken run by run, at the same rate and seed, where arrivals
are the same: a case is *beyond noise* where the mean difference is more than two standard errors of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from antiphon_simulate.goodput import TARGET_SHARE, Crossing, Goodput, Point, goodput

from benchmarks.routing.rows import Row
from benchmarks.routing.study import BOUNDS, CLOSED_LOOPS, FILES, SHAPES, Part, ends_below

OURS, BOUND = "antiphon", "bound"


class Spread(msgspec.Struct, frozen=True):
    """Of one figure over the seeds."""

    mean: float
    least: float
    most: float
    seeds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        found = list(values)
        return cls(math.fsum(found) / len(found), min(found), max(found), len(found)) if found else None


class PolicyCase(msgspec.Struct, frozen=True):
    """One policy on one trace and number of workers."""

    trace: str
    workers: int
    policy: str
    seeds: int
    """Whose series are whole."""
    goodput_rps: Spread | None
    goodput_over_bound: Spread | None
    at_most_of_bound: Spread | None
    """Of the seeds in which the bound keeps the promises at the highest rate too: what the ratio is at most."""
    crossing: str
    """`found` for all seeds, or what the others are: `below` the lowest rate, `above` the highest."""
    inside: Mapping[str, Spread]
    """Share of requests inside the SLA, by share of the reach."""
    hit_efficiency: Mapping[str, Spread]
    busy_loaded: Mapping[str, Spread]
    """Busiest worker over the mean, of windows above 70 % utilisation, the worse pool."""
    utilisation: Mapping[str, Spread]
    ttft_p50_ms: Mapping[str, Spread]
    ttft_p99_ms: Mapping[str, Spread]


class Difference(msgspec.Struct, frozen=True):
    """Antiphon's share inside the SLA minus a baseline's, at one rate, over the seeds that have both."""

    trace: str
    workers: int
    share: float
    policy: str
    mean: float
    two_standard_errors: float
    seeds: int

    @property
    def worse(self) -> bool:
        return self.mean < 0.0

    @property
    def worse_beyond_noise(self) -> bool:
        return self.seeds > 1 and self.mean < -self.two_standard_errors


class Knee(msgspec.Struct, frozen=True):
    """The lowest rate at which the best baseline no longer keeps 99 %."""

    trace: str
    workers: int
    share: float
    offered_rps: float
    best_baseline: str
    inside: Mapping[str, Spread]
    """By policy; those that are missing were hopeless below already."""


class Late(msgspec.Struct, frozen=True):
    """What Antiphon's late requests at one rate were late by."""

    trace: str
    workers: int
    share: float
    late: int
    runs: int
    late_ttft: int
    late_tpot: int
    short_answers: int
    """Of those late by their further tokens: with answers of at most 16."""
    local: int
    """Of all late ones: prompt computed by the worker that answered."""
    pulled: int
    """Of those late by their first token: pulled a prefix."""
    late_ttft_waited_share: float | None
    """Of those late by their first token: the mean share of the time to it that was spent in the gateway."""
    late_ttft_prompt_tokens: float | None
    late_tpot_over_limit: float | None
    """Mean of tpot / limit of those late by it."""


class Small(msgspec.Struct, frozen=True):
    """A policy in one of the small parts, at one rate."""

    part: str
    trace: str
    policy: str
    manner: str
    share: float
    offered_rps: float
    inside: Spread
    hit_efficiency: Spread | None
    ttft_p50_ms: Spread
    ttft_p99_ms: Spread
    utilisation: Spread
    busy_loaded: Spread | None


class Summary(msgspec.Struct, frozen=True):
    commits: Mapping[str, int]
    """Commit -> runs."""
    runs: int
    cpu_s: float
    reach: Mapping[str, float]
    cases: Sequence[PolicyCase]
    knees: Sequence[Knee]
    differences: Sequence[Difference]
    late: Sequence[Late]
    small: Sequence[Small]
    best_settings: Mapping[str, str]


def label(row: Row) -> str:
    return row.policy if row.setting is None else f"{row.policy}={row.setting:g}"


def role(row: Row, best: Mapping[str, str]) -> str:
    """The name under which a case's rows stand: a family's best is one line, whatever its setting."""
    name = label(row)
    families = {"dynamo_credit": "dynamo", "cache_aware": "cache_aware", "cache_aware_balance": "cache_aware"}
    if row.policy in families and name == best.get(f"{row.trace} {families[row.policy]}") and name != row.policy:
        return f"{families[row.policy]}, best setting"
    return name


def summary_of(rows: Sequence[Row], best: Mapping[tuple[str, str], tuple[str, float]]) -> Summary:
    settings = {
        f"{trace} {family}": policy if setting is None else f"{policy}={setting:g}"
        for (trace, family), (policy, setting) in best.items()
    }
    commits: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        commits[row.commit] += 1
    main: defaultdict[tuple[str, int], defaultdict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.part == Part.MAIN.value:
            main[row.trace, row.workers][role(row, settings)].append(row)
    ordered = [(trace, workers) for trace in FILES for workers in SHAPES if (trace, workers) in main]
    cases = [case for key in ordered for case in _cases(key, main[key])]
    return Summary(
        commits=dict(commits),
        runs=len(rows),
        cpu_s=math.fsum(row.cpu_s for row in rows),
        reach={f"{trace} {workers}": _reach(main[trace, workers]) for trace, workers in ordered},
        cases=cases,
        knees=[knee for key in ordered if (knee := _knee(key, main[key], cases)) is not None],
        differences=[one for key in ordered for one in _differences(key, main[key])],
        late=[one for key in ordered for one in _late(key, main[key][OURS])],
        small=_small(rows),
        best_settings=settings,
    )


def _reach(policies: Mapping[str, Sequence[Row]]) -> float:
    return next(row.rate_scale / row.share for rows in policies.values() for row in rows)


def _by_seed(rows: Iterable[Row]) -> dict[int, list[Row]]:
    found: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.seed].append(row)
    return dict(found)


def _goodputs(rows: Sequence[Row], highest: float) -> dict[int, Goodput]:
    """By seed, where the series is whole: it came to the highest rate, or to one that it ends at."""
    found = {}
    for seed, its in _by_seed(rows).items():
        if any(row.share >= highest or row.inside < ends_below(row.policy, seed) for row in its):
            found[seed] = goodput([Point(row.offered_rps, row.figures.inside_sla_share) for row in its])
    return found


def _spreads(rows: Sequence[Row], figure: str) -> dict[str, Spread]:
    found: defaultdict[float, list[float]] = defaultdict(list)
    for row in rows:
        value = row.inside if figure == "inside" else getattr(row.figures, figure)
        if value is not None:
            found[row.share].append(value)
    return {f"{share:g}": spread for share in sorted(found) if (spread := Spread.of(found[share])) is not None}


def _ttft(rows: Sequence[Row], percentile: str) -> dict[str, Spread]:
    found: defaultdict[float, list[float]] = defaultdict(list)
    for row in rows:
        found[row.share].append(getattr(row.figures.ttft_ms, percentile))
    return {f"{share:g}": spread for share in sorted(found) if (spread := Spread.of(found[share])) is not None}


def _cases(key: tuple[str, int], policies: Mapping[str, Sequence[Row]]) -> Iterable[PolicyCase]:
    highest = max(row.share for rows in policies.values() for row in rows)
    bounds = _goodputs(policies.get(BOUND, ()), highest)
    for policy, rows in policies.items():
        found = _goodputs(rows, highest)
        crossings = sorted({one.crossing.value for one in found.values()})
        known = [one.rps for one in found.values() if one.rps is not None]
        yield PolicyCase(
            trace=key[0],
            workers=key[1],
            policy=policy,
            seeds=len(found),
            goodput_rps=Spread.of(known) if len(known) == len(found) else None,
            goodput_over_bound=Spread.of(_ratios(found, bounds, Crossing.FOUND)),
            at_most_of_bound=Spread.of(_ratios(found, bounds, Crossing.ABOVE)),
            crossing=", ".join(crossings),
            inside=_spreads(rows, "inside"),
            hit_efficiency=_spreads(rows, "hit_efficiency"),
            busy_loaded=_spreads(rows, "max_over_mean_busy_loaded"),
            utilisation=_spreads(rows, "mean_utilisation"),
            ttft_p50_ms=_ttft(rows, "p50"),
            ttft_p99_ms=_ttft(rows, "p99"),
        )


def _ratios(found: Mapping[int, Goodput], bounds: Mapping[int, Goodput], crossing: Crossing) -> Iterable[float]:
    """To the bound's, of the seeds whose bound crosses 99 % like that."""
    for seed, its in found.items():
        bound = bounds.get(seed)
        if its.crossing is Crossing.FOUND and its.rps and bound and bound.crossing is crossing and bound.rps:
            yield its.rps / bound.rps


def _knee(key: tuple[str, int], policies: Mapping[str, Sequence[Row]], cases: Sequence[PolicyCase]) -> Knee | None:
    its = [case for case in cases if (case.trace, case.workers) == key and case.policy not in (OURS, *BOUNDS)]
    if not its:
        return None
    best = max(its, key=lambda case: (case.goodput_rps.mean if case.goodput_rps else 0.0, _total_inside(case)))
    failing = [float(share) for share, spread in best.inside.items() if spread.mean < TARGET_SHARE]
    if not failing:
        return None
    share = min(failing)
    offered = next(row.offered_rps for row in policies[best.policy] if row.share == share)
    inside = {
        policy: spread
        for policy, rows in policies.items()
        if (spread := Spread.of(row.inside for row in rows if row.share == share)) is not None
    }
    return Knee(key[0], key[1], share, offered, best.policy, inside)


def _total_inside(case: PolicyCase) -> float:
    return math.fsum(spread.mean for spread in case.inside.values())


def _differences(key: tuple[str, int], policies: Mapping[str, Sequence[Row]]) -> Iterable[Difference]:
    ours = {(row.seed, row.share): row.inside for row in policies.get(OURS, ())}
    for policy, rows in policies.items():
        if policy in (OURS, *BOUNDS):
            continue
        found: defaultdict[float, list[float]] = defaultdict(list)
        for row in rows:
            if (row.seed, row.share) in ours:
                found[row.share].append(ours[row.seed, row.share] - row.inside)
        for share, values in sorted(found.items()):
            mean = math.fsum(values) / len(values)
            deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1))
            yield Difference(key[0], key[1], share, policy, mean, 2.0 * deviation / math.sqrt(len(values)), len(values))


def _late(key: tuple[str, int], rows: Sequence[Row]) -> Iterable[Late]:
    for share in sorted({row.share for row in rows}):
        its = [row for row in rows if row.share == share]
        late = [one for row in its for one in row.late]
        first = [one for one in late if one.ttft_ms > one.ttft_limit_ms]
        further = [one for one in late if one.ttft_ms <= one.ttft_limit_ms]
        yield Late(
            trace=key[0],
            workers=key[1],
            share=share,
            late=len(late),
            runs=len(its),
            late_ttft=len(first),
            late_tpot=len(further),
            short_answers=sum(one.output_tokens <= 16 for one in further),
            local=sum(one.local for one in late),
            pulled=sum(one.pulled_blocks > 0 for one in first),
            late_ttft_waited_share=_mean(one.waited_ms / one.ttft_ms for one in first),
            late_ttft_prompt_tokens=_mean(one.prompt_tokens for one in first),
            late_tpot_over_limit=_mean(one.tpot_ms / 50.0 for one in further),
        )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def _small(rows: Sequence[Row]) -> list[Small]:
    groups: defaultdict[tuple[str, str, float, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.part in (Part.TIGHT.value, Part.ORDER.value, Part.AGGREGATED.value):
            groups[row.part, row.trace, row.share, label(row), row.manner].append(row)
    found = []
    for (part, trace, share, policy, manner), its in sorted(groups.items()):
        found.append(
            Small(
                part=part,
                trace=trace,
                policy=policy,
                manner=manner,
                share=share,
                offered_rps=its[0].offered_rps,
                inside=_spread(row.inside for row in its),
                hit_efficiency=Spread.of(
                    row.figures.hit_efficiency for row in its if row.figures.hit_efficiency is not None
                ),
                ttft_p50_ms=_spread(row.figures.ttft_ms.p50 for row in its),
                ttft_p99_ms=_spread(row.figures.ttft_ms.p99 for row in its),
                utilisation=_spread(row.figures.mean_utilisation for row in its),
                busy_loaded=Spread.of(
                    row.figures.max_over_mean_busy_loaded
                    for row in its
                    if row.figures.max_over_mean_busy_loaded is not None
                ),
            )
        )
    return found


def _spread(values: Iterable[float]) -> Spread:
    found = Spread.of(values)
    assert found is not None  # groups are never empty
    return found


MODERATE: Mapping[int, float] = {4: 0.6, 8: 0.6, 16: 0.5}
"""Workers -> share of the reach at which hits are looked at."""


def moderate_share(trace: str, workers: int) -> float:
    if trace in CLOSED_LOOPS:
        return {4: 0.6, 8: 0.12, 16: 0.12}[workers]
    return MODERATE[workers]
