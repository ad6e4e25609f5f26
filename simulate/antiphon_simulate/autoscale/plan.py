"""How many workers a load needs, and whether pools are worth having for it.

Two looks at it. The whole load in the request-level cluster, with pools that never change: the fewest of each that keep
the goal. And its busiest minutes in the step-level cluster with Antiphon's routing, where workers that do both can be
looked at as well: the fewest in pools and the fewest that do both. The second decides, since both are in it under the
same rules; the reason is taken from its figures.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from antiphon_simulate.autoscale.calls import Call, Load
from antiphon_simulate.autoscale.capacity import profile
from antiphon_simulate.autoscale.cluster import run
from antiphon_simulate.autoscale.figures import attainment
from antiphon_simulate.autoscale.oracle import OracleSearch
from antiphon_simulate.autoscale.policies.static import Static
from antiphon_simulate.autoscale.records import Setting, Sizes
from antiphon_simulate.cluster import simulate
from antiphon_simulate.figures import Percentiles
from antiphon_simulate.policies.antiphon import AntiphonPolicy
from antiphon_simulate.records import ClusterShape, Ending, Outcome, Sla, TraceRequest

MOST_REQUESTS = 1500
"""Of the busiest minutes, that the step-level cluster runs."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Some workers on the busiest minutes; decode 0: those of prefill do both."""

    prefill: int
    decode: int
    inside: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles

    @property
    def workers(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class ScalePlan:
    load: Load
    setting: Setting
    whole: Sizes
    """Of the whole load."""
    whole_inside: float
    from_ms: float
    until_ms: float
    requests: int
    """Of the busiest minutes."""
    prefill_need: float
    decode_need: float
    """The busiest minutes' work over their time: workers, in fractions."""
    pools: Tried | None
    """The fewest that keep the goal there; None: none that are allowed do."""
    both: Tried | None
    is_worth_it: bool
    reason: str


def plan(
    load: Load,
    requests: Sequence[TraceRequest],
    setting: Setting,
    *,
    window_ms: float = 120_000.0,
    say: Callable[[str], None] = lambda line: None,
) -> ScalePlan:
    """`requests`: those that the load was made from."""
    whole = OracleSearch(load, setting, runs=1).peak()
    kept = attainment(run(load, setting, Static("plan", whole), whole), setting.goal)
    say(f"{load.name}: {whole.prefill} + {whole.decode} workers for all of it")
    busy = _busiest(load, setting, window_ms)
    window = [replace(requests[call.index], after=None, arrival_ms=call.arrival_ms) for call in busy]
    from_ms, until_ms = busy[0].arrival_ms, busy[-1].arrival_ms
    needs = _needs(busy, setting, max(1000.0, until_ms - from_ms))
    bench = _Bench(window, {call.index: call for call in busy}, setting, say)
    pools = bench.fewest_in_pools(_start(needs, setting))
    both = bench.fewest_that_do_both(max(1, int(sum(needs))))
    is_worth_it, reason = _verdict(pools, both, needs, setting)
    return ScalePlan(
        load=load,
        setting=setting,
        whole=whole,
        whole_inside=kept,
        from_ms=from_ms,
        until_ms=until_ms,
        requests=len(window),
        prefill_need=needs[0],
        decode_need=needs[1],
        pools=pools,
        both=both,
        is_worth_it=is_worth_it,
        reason=reason,
    )


class _Bench:
    """The step-level cluster on the busiest minutes, one shape after the other, none twice."""

    def __init__(
        self, window: Sequence[TraceRequest], calls: dict[int, Call], setting: Setting, say: Callable[[str], None]
    ) -> None:
        self._window = window
        self._calls = calls
        self._setting = setting
        self._say = say
        self._tried: dict[tuple[int, int], Tried] = {}

    def fewest_that_do_both(self, low: int) -> Tried | None:
        most = self._setting.site.most.total
        return next((tried for size in range(low, most + 1) if self._keeps(tried := self._try(size, 0))), None)

    def fewest_in_pools(self, begin: Sizes) -> Tried | None:
        """Grown where requests are late until they keep the goal, then with one less wherever they still do."""
        most = self._setting.site.most
        sizes = begin
        while not self._keeps(tried := self._try(sizes.prefill, sizes.decode)):
            more = Sizes(min(most.prefill, sizes.prefill + 1), min(most.decode, sizes.decode + 1))
            steps = [Sizes(more.prefill, sizes.decode), Sizes(sizes.prefill, more.decode)]
            steps = [one for one in steps if one != sizes]
            if not steps:
                return None
            sizes = max(steps, key=lambda one: self._try(one.prefill, one.decode).inside)
        best = tried
        while True:
            fewer = [(best.prefill - 1, best.decode), (best.prefill, best.decode - 1)]
            kept = [self._try(*one) for one in fewer if min(one) > 0 and self._keeps(self._try(*one))]
            if not kept:
                return best
            best = max(kept, key=lambda one: one.inside)

    def _keeps(self, tried: Tried) -> bool:
        return tried.inside >= self._setting.goal.target

    def _try(self, prefill: int, decode: int) -> Tried:
        if (prefill, decode) not in self._tried:
            goal, site = self._setting.goal, self._setting.site
            shape = ClusterShape(prefill, decode, site.kv_tokens // 512, site.max_running)
            sla = Sla(goal.ttft_ms, goal.ttft_ms_per_1k_uncached, goal.tpot_ms)
            outcomes = simulate(self._window, shape, self._setting.timing, AntiphonPolicy(), sla, seed=0).outcomes
            found = self._tried[prefill, decode] = self._found(prefill, decode, outcomes)
            self._say(f"  {_name(prefill, decode)}: {100.0 * found.inside:.2f} % inside")
        return self._tried[prefill, decode]

    def _found(self, prefill: int, decode: int, outcomes: Sequence[Outcome]) -> Tried:
        feasible = [outcome for outcome in outcomes if self._calls[outcome.request.index].feasible]
        inside = sum(
            outcome.ending is Ending.COMPLETE
            and outcome.ttft_ms <= self._calls[outcome.request.index].ttft_limit_ms
            and outcome.tpot_ms <= self._setting.goal.tpot_ms
            for outcome in feasible
        )
        return Tried(
            prefill,
            decode,
            inside / len(feasible) if feasible else 1.0,
            Percentiles.of([outcome.ttft_ms for outcome in outcomes]),
            Percentiles.of([outcome.tpot_ms for outcome in outcomes if outcome.request.output_tokens > 1]),
        )


def _busiest(load: Load, setting: Setting, window_ms: float) -> list[Call]:
    """The calls of the window with the most work, the last ones first left out where they are too many."""
    calls = sorted(load.calls, key=lambda call: call.arrival_ms)
    batch = profile(calls, setting).batch
    works = [call.prefill_ms + call.output_tokens * setting.goal.tpot_ms / batch for call in calls]
    sums = [0.0, *accumulate(works)]
    times = [call.arrival_ms for call in calls]
    ends = [min(bisect.bisect_left(times, time_ms + window_ms), at + MOST_REQUESTS) for at, time_ms in enumerate(times)]
    begin = max(range(len(calls)), key=lambda at: sums[ends[at]] - sums[at])
    return sorted(calls[begin : ends[begin]], key=lambda call: call.index)


def _needs(calls: Sequence[Call], setting: Setting, span_ms: float) -> tuple[float, float]:
    batch = profile(calls, setting).batch
    decode_ms = sum(call.output_tokens for call in calls) * setting.goal.tpot_ms / batch
    return sum(call.prefill_ms for call in calls) / span_ms, decode_ms / span_ms


def _start(needs: tuple[float, float], setting: Setting) -> Sizes:
    most = setting.site.most
    prefill, decode = (max(1, -int(-need // 1)) for need in needs)
    return Sizes(min(most.prefill, prefill), min(most.decode, decode))


def _verdict(pools: Tried | None, both: Tried | None, needs: tuple[float, float], setting: Setting) -> tuple[bool, str]:
    goal, timing = setting.goal, setting.timing
    work = f"the work is {needs[0]:.2f} prefill and {needs[1]:.2f} decode workers"
    if pools is None and both is None:
        return (
            False,
            "no workers that are allowed keep this goal: widen it, or allow more (--max-prefill, --max-decode)",
        )
    chunk_ms = timing.step.prefill_ms(new_tokens=timing.mixed_chunk_tokens, chunk_tokens=timing.mixed_chunk_tokens)
    pause = f"a step with a prompt's chunk of {timing.mixed_chunk_tokens} tokens takes {chunk_ms:.0f} ms and more"
    if both is None:
        return True, f"workers that do both do not keep it at any size: {pause}, of {goal.tpot_ms:g} ms for a token"
    if pools is None:
        return False, f"pools do not keep it at any size that is allowed, and {both.workers} workers that do both do"
    if pools.workers < both.workers:
        return True, (
            f"{pools.workers} workers in pools do what {both.workers} do that do both: {pause}, and with a worker less "
            f"they are late; {work}"
        )
    if pools.workers == both.workers:
        faster = pools.tpot_ms.p95 < both.tpot_ms.p95
        return False, (
            f"{both.workers} workers do it either way; pools would have TPOT p95 {pools.tpot_ms.p95:.1f} ms and TTFT "
            f"p95 {pools.ttft_ms.p95:.0f} ms, workers that do both {both.tpot_ms.p95:.1f} ms and "
            f"{both.ttft_ms.p95:.0f} ms" + ("; take pools for the steadier answers" if faster else "")
        )
    return False, (
        f"{both.workers} workers that do both do what {pools.workers} do in pools: {work}, and pools are of whole "
        "workers"
    )


def _name(prefill: int, decode: int) -> str:
    return f"{prefill} prefill + {decode} decode" if decode else f"{prefill} that do both"
