"""What the study of routing's quality runs: cases, policies, rates and seeds. One setting for all of them.

    reach        the looser bound only: up to which rate it keeps the promises of each trace
    sweep        the settings of the baselines that have one; eight workers, seed 0
    main         all policies, each family at its default and at its best of the sweep; 4, 8, 16 workers, five seeds
    tight        pools that cannot hold the prefixes: hits against goodput
    order        Antiphon's waiting line against first come first served, and without holding back
    aggregated   workers that do both

Rates are shares of a case's reach, so they are a part of the workload and no setting of a policy: the reach is found on
eight workers and taken to grow with their number. Only in closed loops it does not, since clients wait for answers:
there it is found on four workers too, and with more workers rates are further apart, since twice as fast is not twice
the load. A series goes up in rate and ends once a run has too few of its requests inside their promises (`ends_below`):
the rates above it have nothing to tell.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from antiphon_simulate.goodput import TARGET_SHARE
from antiphon_simulate.policies import registry
from antiphon_simulate.policies.cache_aware import CacheAwareBalancePolicy, CacheAwarePolicy
from antiphon_simulate.policies.dynamo_cost import DynamoCreditPolicy

HOPELESS = 0.95
LIMIT = 1000
"""Requests of each trace, from its beginning."""
ROOMY_BLOCKS = 10_000
"""Of 512 tokens, a worker: prefill workers could hold the prefixes of a whole head."""
TIGHT_BLOCKS = 1_024
SEEDS = range(5)

FILES: Mapping[str, str] = {
    "conversation": "mooncake_conversation_first10min.jsonl",
    "synthetic": "mooncake_synthetic.jsonl.gz",
    "arxiv": "mooncake_arxiv_first1000.jsonl",
    "agentic": "agentic_coding_sessions.jsonl.gz",
}
SHAPES: Mapping[int, tuple[int, int]] = {4: (3, 1), 8: (6, 2), 16: (12, 4)}
"""Workers -> (prefill, decode): prompts are most of the work in all of these traces."""

CLOSED_LOOPS = ("agentic",)
REACH_FOUND: Mapping[str, tuple[int, ...]] = {name: (4, 8) if name in CLOSED_LOOPS else (8,) for name in FILES}
"""Numbers of workers on which the reach of a trace is searched for."""
RATES: Mapping[int, tuple[float, ...]] = {
    4: (0.45, 0.6, 0.75, 0.85, 0.95, 1.1),
    8: (0.45, 0.6, 0.75, 0.85, 0.95, 1.1),
    16: (0.5, 0.75, 0.95, 1.1),
}
"""Shares of the reach."""
CLOSED_LOOP_RATES: Mapping[int, tuple[float, ...]] = {
    4: RATES[4],
    8: (0.03, 0.12, 0.4, 0.85, 1.1),
    16: (0.12, 0.4, 1.1),
}
SWEEP_RATES = (0.45, 0.6, 0.75)
CLOSED_LOOP_SWEEP_RATES = (0.03, 0.12, 0.4)
TIGHT_RATES = (0.6, 0.85)
ORDER_RATES = (0.75, 0.95, 1.1)
AGGREGATED_RATES = (0.5, 0.8)

BOUNDS = ("bound", "bound_chunked")
PLAIN = ("round_robin", "least_queued", "power_of_two", "lmetric", "llm_d")
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "dynamo": ("dynamo_credit",),
    "cache_aware": ("cache_aware", "cache_aware_balance"),
}
"""Policies whose sweeps look for the best of one family. With two pools `dynamo_cost` at its default is `dynamo_credit`
at its default, and its weight changes nothing (`docs/baselines.md`), so it is not run a second time."""
SWEPT: Mapping[str, tuple[float, ...]] = {
    "dynamo_credit": (0.5, 1.0, 1.5, 2.0),
    "cache_aware": (0.1, 0.3, 0.8),
    "cache_aware_balance": (0.0, 2.0, 8.0),
}
"""A part of the published sweeps; `cache_aware_balance` at 64 is `cache_aware` at 0.3."""


LEADERS = ("antiphon", "bound", "lmetric", "dynamo")
"""Those that come close to each other, and the bound: the first to be run with more seeds."""
Best = Mapping[tuple[str, str], tuple[str, float]]
"""(trace, family) -> policy and setting."""

_SWEPT_POLICIES: Mapping[str, type[CacheAwarePolicy | DynamoCreditPolicy]] = {
    policy.name: policy for policy in (DynamoCreditPolicy, CacheAwarePolicy, CacheAwareBalancePolicy)
}


class Part(enum.Enum):
    REACH = "reach"
    SWEEP = "sweep"
    MAIN = "main"
    TIGHT = "tight"
    ORDER = "order"
    AGGREGATED = "aggregated"


class Manner(enum.Enum):
    """Of Antiphon's line."""

    DEFAULT = "default"
    ARRIVAL = "arrival"
    """First come, first served."""
    NO_HOLD = "no_hold"
    """Everything is placed as it comes."""


@dataclass(frozen=True, slots=True)
class Series:
    """One policy, one workload, one seed: runs at rates that go up."""

    part: Part
    trace: str
    prefill: int
    decode: int
    pool_blocks: int
    policy: str
    setting: float | None
    manner: Manner
    seed: int
    shares: tuple[float, ...]
    """Of the reach."""

    @property
    def workers(self) -> int:
        return self.prefill + self.decode


def ends_below(policy: str, seed: int) -> float:
    """Share inside the promises below which a series ends. Where Antiphon and the bound no longer keep theirs they take
    long to run: with the first seed that is looked at, with further ones only where it begins."""
    return TARGET_SHARE if seed and policy in ("antiphon", *BOUNDS) else HOPELESS


def sweeps() -> Iterator[Series]:
    for trace in FILES:
        for policy, settings in SWEPT.items():
            for setting in settings:
                rates = CLOSED_LOOP_SWEEP_RATES if trace in CLOSED_LOOPS else SWEEP_RATES
                yield _series(Part.SWEEP, trace, 8, policy, 0, rates, setting=setting)


def studies(best: Best, seeds: int) -> Iterator[Series]:
    """Everything but `reach` and `sweep`, the most telling first, so that what a stopped study has is whole as far as
    it came: with the first seed the leaders on eight workers, the others there, the leaders on four and sixteen, and
    the small parts; then the leaders with all seeds; then the others."""
    others = tuple(policy for policy in _everybody() if policy not in LEADERS)
    for workers, policies in ((8, LEADERS), (8, others), (4, LEADERS), (16, LEADERS)):
        for trace in FILES:
            yield from _main(trace, workers, 0, best, policies)
    yield from _small(0)
    for policies in (LEADERS, others):
        for workers in (8, 4, 16):
            for seed in range(seeds):
                for trace in FILES:
                    yield from _main(trace, workers, seed, best, policies)
    yield from _small(1)
    for trace in FILES:
        for seed in range(seeds):
            yield from _main(trace, 8, seed, best, ("bound_chunked",))


def _everybody() -> tuple[str, ...]:
    return ("antiphon", "bound", *PLAIN, *FAMILIES)


def _main(trace: str, workers: int, seed: int, best: Best, policies: Sequence[str]) -> Iterator[Series]:
    """`policies`: or families, each at its default and at its best."""
    rates = (CLOSED_LOOP_RATES if trace in CLOSED_LOOPS else RATES)[workers]
    for policy in policies:
        if policy in FAMILIES:
            yield _series(Part.MAIN, trace, workers, FAMILIES[policy][0], seed, rates)
            if (trace, policy) in best:
                its, setting = best[trace, policy]
                yield _series(Part.MAIN, trace, workers, its, seed, rates, setting=setting)
        else:
            yield _series(Part.MAIN, trace, workers, policy, seed, _rates_of(policy, workers, rates))


def _rates_of(policy: str, workers: int, rates: tuple[float, ...]) -> tuple[float, ...]:
    """On eight workers the bounds keep the promises at low rates: those are left out."""
    kept = {"bound": 4, "bound_chunked": 3} if workers == 8 else {}
    return rates[-kept.get(policy, len(rates)) :]


def _small(seed: int) -> Iterator[Series]:
    everybody = ("antiphon", "bound", *PLAIN, *(policies[0] for policies in FAMILIES.values()))
    for manner in Manner:
        yield _series(Part.ORDER, "conversation", 8, "antiphon", seed, ORDER_RATES, manner=manner)
    for trace in ("conversation", "synthetic"):
        for policy in everybody:
            yield _series(Part.TIGHT, trace, 8, policy, seed, TIGHT_RATES, pool_blocks=TIGHT_BLOCKS)
    for trace in ("conversation", "synthetic"):
        for policy in ("antiphon", "bound", "lmetric", "dynamo_cost", "cache_aware"):
            yield Series(
                Part.AGGREGATED, trace, 8, 0, ROOMY_BLOCKS, policy, None, Manner.DEFAULT, seed, AGGREGATED_RATES
            )


def _series(
    part: Part,
    trace: str,
    workers: int,
    policy: str,
    seed: int,
    shares: tuple[float, ...],
    *,
    setting: float | None = None,
    manner: Manner = Manner.DEFAULT,
    pool_blocks: int = ROOMY_BLOCKS,
) -> Series:
    if policy not in registry.NAMES:
        raise registry.UnknownPolicyError(f"there is no policy {policy!r}: take one of {', '.join(registry.NAMES)}")
    prefill, decode = SHAPES[workers]
    if setting is not None and setting == default_of(policy):
        setting = None
    return Series(part, trace, prefill, decode, pool_blocks, policy, setting, manner, seed, shares)


def default_of(policy: str) -> float:
    """Of a policy that is swept."""
    return float(_SWEPT_POLICIES[policy].default)
