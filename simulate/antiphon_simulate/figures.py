"""What is said about one run. `docs/simulator.md` has the same definitions.

| figure | what it is |
|---|---|
| `prefill_hit_rate` | 1 - prompt tokens computed / prompt tokens, of completed requests; computed twice counts twice |
| `ideal_hit_rate` | the same with one cache shared by all that is never full (`ideal.ideal_cached_tokens`) |
| `hit_efficiency` | `prefill_hit_rate / ideal_hit_rate` |
| `transfer_hit_rate` | 1 - blocks moved to decode workers / blocks of prompts computed elsewhere |
| `infeasible` | requests that an idle worker with that ideal cache could not serve in time (`ideal.infeasible`) |
| `inside_sla_share` | of the feasible requests: those complete, with TTFT and TPOT inside the SLA |
| `max_over_mean_busy` | see `busy.py` |
| `ttft_ms`, `tpot_ms` | over completed requests, feasible or not; TPOT over answers of two tokens and more |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from antiphon_simulate.busy import PoolBusy, pools_busy
from antiphon_simulate.ideal import ideal_cached_tokens, infeasible
from antiphon_simulate.records import Ending, Outcome, RunResult, Sla, Timing
from antiphon_simulate.traces import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Between two values the percentile lies on the line between them."""

    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        ordered = sorted(values)
        return cls(*(_quantile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99)))


def _quantile(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return 0.0
    low, rest = divmod(share * (len(ordered) - 1), 1.0)
    at = int(low)
    above = ordered[min(at + 1, len(ordered) - 1)]
    return ordered[at] + rest * (above - ordered[at])


@dataclass(frozen=True, slots=True)
class RunFigures:
    """See the module's table. None: there was nothing to take it from."""

    requests: int
    completed: int
    unfinished: int
    infeasible: int
    inside_sla: int
    late_ttft: int
    """Of the feasible ones, completed or not: those whose first token was late."""
    late_tpot: int
    inside_sla_share: float | None
    prefill_hit_rate: float
    ideal_hit_rate: float
    hit_efficiency: float | None
    transfer_hit_rate: float | None
    pulled_blocks: int
    completed_rps: float
    """From the first arrival to the last answer's end."""
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    max_over_mean_busy: float | None
    """The worse of the pools'."""
    max_over_mean_busy_loaded: float | None
    """The same in windows of high mean utilisation only."""
    mean_utilisation: float
    busy: Mapping[str, PoolBusy]
    """By pool."""


def figures(result: RunResult, timing: Timing) -> RunFigures:
    """The figures of a run."""
    outcomes = sorted(result.outcomes, key=lambda outcome: outcome.request.index)
    requests = [outcome.request for outcome in outcomes]
    hopeless = infeasible(requests, timing, result.sla)
    feasible = [outcome for outcome in outcomes if outcome.request.index not in hopeless]
    completed = [outcome for outcome in outcomes if outcome.ending is Ending.COMPLETE]
    late_ttft = sum(1 for outcome in feasible if not _ttft_kept(outcome, result.sla))
    late_tpot = sum(1 for outcome in feasible if not _tpot_kept(outcome, result.sla))
    inside = sum(1 for outcome in feasible if _ttft_kept(outcome, result.sla) and _tpot_kept(outcome, result.sla))
    hit_rate, ideal_rate = _hit_rates(outcomes)
    busy = pools_busy(result)
    workers = sum(pool.workers for pool in busy.values())
    return RunFigures(
        requests=len(outcomes),
        completed=len(completed),
        unfinished=len(outcomes) - len(completed),
        infeasible=len(hopeless),
        inside_sla=inside,
        late_ttft=late_ttft,
        late_tpot=late_tpot,
        inside_sla_share=inside / len(feasible) if feasible else None,
        prefill_hit_rate=hit_rate,
        ideal_hit_rate=ideal_rate,
        hit_efficiency=hit_rate / ideal_rate if ideal_rate > 0.0 else None,
        transfer_hit_rate=_transfer_hit_rate(completed),
        pulled_blocks=sum(outcome.pulled_blocks for outcome in completed),
        completed_rps=_completed_rps(outcomes, completed),
        ttft_ms=Percentiles.of([outcome.ttft_ms for outcome in completed]),
        tpot_ms=Percentiles.of([outcome.tpot_ms for outcome in completed if outcome.request.output_tokens > 1]),
        max_over_mean_busy=_worst(pool.windows.max_over_mean for pool in busy.values() if pool.windows),
        max_over_mean_busy_loaded=_worst(pool.loaded.max_over_mean for pool in busy.values() if pool.loaded),
        mean_utilisation=sum(pool.workers * pool.mean_utilisation for pool in busy.values()) / workers
        if workers
        else 0.0,
        busy=busy,
    )


def _ttft_kept(outcome: Outcome, sla: Sla) -> bool:
    return outcome.first_token_ms > 0.0 and outcome.ttft_ms <= sla.ttft_limit_ms(outcome.request.prompt_tokens)


def _tpot_kept(outcome: Outcome, sla: Sla) -> bool:
    return outcome.ending is Ending.COMPLETE and outcome.tpot_ms <= sla.tpot_ms


def _hit_rates(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """(prefill, ideal) of the completed ones; others count only as those who brought blocks first."""
    ideal = ideal_cached_tokens(outcome.request for outcome in outcomes)
    prompt = computed = cached = 0
    for outcome, tokens in zip(outcomes, ideal, strict=True):
        if outcome.ending is Ending.COMPLETE:
            prompt += outcome.request.prompt_tokens
            computed += outcome.computed_tokens
            cached += tokens
    return (1.0 - computed / prompt, cached / prompt) if prompt else (0.0, 0.0)


def _transfer_hit_rate(completed: Sequence[Outcome]) -> float | None:
    wanted = moved = 0
    for outcome in completed:
        if outcome.placement is not None and outcome.placement.prefill is not None:
            wanted += -(-outcome.request.prompt_tokens // BLOCK_TOKENS)
            moved += outcome.moved_blocks
    return 1.0 - moved / wanted if wanted else None


def _completed_rps(outcomes: Sequence[Outcome], completed: Sequence[Outcome]) -> float:
    if not completed:
        return 0.0
    first_ms = min(outcome.arrived_ms for outcome in outcomes)
    last_ms = max(outcome.ended_ms for outcome in completed)
    return 1000.0 * len(completed) / (last_ms - first_ms) if last_ms > first_ms else 0.0


def _worst(ratios: Iterable[float]) -> float | None:
    return max(ratios, default=None)
