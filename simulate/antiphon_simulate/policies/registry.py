"""The policies by name: what `antiphon simulate route --policy NAME` can run, each with its one setting and the sweep
of it that is compared. `docs/baselines.md` has the formulas, sources and differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from antiphon_simulate.bound import ChunkedUpperBound, UpperBound
from antiphon_simulate.policies.cache_aware import CacheAwareBalancePolicy, CacheAwarePolicy
from antiphon_simulate.policies.dynamo_cost import DynamoCostPolicy, DynamoCreditPolicy
from antiphon_simulate.policies.least_queued import LeastQueuedPolicy
from antiphon_simulate.policies.llm_d import LlmDPolicy
from antiphon_simulate.policies.lmetric import LMetricPolicy
from antiphon_simulate.policies.power_of_two import PowerOfTwoPolicy
from antiphon_simulate.policies.round_robin import RoundRobinPolicy
from antiphon_simulate.records import Policy, Schedule


class UnknownPolicyError(ValueError):
    """No policy of that name, or a setting for one that has none; the message names what there is."""


@dataclass(frozen=True, slots=True)
class _Entry:
    about: str
    plain: Callable[[], Policy | Schedule]
    setting: str = ""
    """What the setting is. Empty: there is none."""
    tuned: Callable[[float], Policy | Schedule] | None = None
    default: float = 0.0
    sweep: tuple[float, ...] = ()


def _antiphon() -> Policy:
    # Alone of all it needs the index and routing code of the product.
    from antiphon_simulate.policies.antiphon import AntiphonPolicy

    return AntiphonPolicy()


_Tuned = type[CacheAwarePolicy | CacheAwareBalancePolicy | DynamoCostPolicy | DynamoCreditPolicy | LlmDPolicy]


def _tuned(policy: _Tuned, setting: str, about: str) -> _Entry:
    return _Entry(about, policy, setting, policy, policy.default, policy.sweep)


_ENTRIES: Mapping[str, _Entry] = {
    "antiphon": _Entry("Antiphon's own routing: costs in milliseconds by the latency model", _antiphon),
    "round_robin": _Entry("each worker in turn", RoundRobinPolicy),
    "least_queued": _Entry("the worker with the fewest requests", LeastQueuedPolicy),
    "power_of_two": _Entry("of two workers at random the one with fewer tokens", PowerOfTwoPolicy),
    "cache_aware": _tuned(
        CacheAwarePolicy,
        "cache_threshold",
        "SGLang and smg: sticks to the prefix in the router's own tree while loads are even",
    ),
    "cache_aware_balance": _tuned(
        CacheAwareBalancePolicy, "balance_abs_threshold", "the same, tuned by when loads count as uneven"
    ),
    "dynamo_cost": _tuned(DynamoCostPolicy, "overlap_score_weight", "Dynamo: weight x prefill blocks + decode blocks"),
    "dynamo_credit": _tuned(
        DynamoCreditPolicy, "overlap_score_credit", "the same, tuned by how much a cached block counts"
    ),
    "lmetric": _Entry("LMetric: new prefill tokens x batch size", LMetricPolicy),
    "llm_d": _tuned(LlmDPolicy, "weight of the prefix score", "llm-d: weighted sum of prefix, queue and memory scores"),
    "bound_chunked": _Entry("a looser upper bound, in which also the engines obey, chunk by chunk", ChunkedUpperBound),
    "bound": _Entry("the upper bound: one central queue, one shared cache, free transfers", UpperBound),
}

NAMES: tuple[str, ...] = tuple(_ENTRIES)
"""Antiphon first, the bounds last."""


def make(name: str, setting: float | None = None) -> Policy | Schedule:
    """A new one, for one run, at its defaults or at this setting. Raises UnknownPolicyError."""
    entry = _entry(name)
    if setting is None:
        return entry.plain()
    if entry.tuned is None:
        raise UnknownPolicyError(f"policy {name} has no setting (asked for {setting:g}): leave it out")
    return entry.tuned(setting)


def sweep(name: str) -> Sequence[float]:
    """The settings to compare it at, its default among them; empty where it has none. Raises UnknownPolicyError."""
    return _entry(name).sweep


def describe(name: str) -> str:
    """One line. Raises UnknownPolicyError."""
    entry = _entry(name)
    if not entry.setting:
        return entry.about
    return f"{entry.about}; setting: {entry.setting}, {entry.default:g} by default"


def _entry(name: str) -> _Entry:
    entry = _ENTRIES.get(name)
    if entry is None:
        raise UnknownPolicyError(f"there is no policy {name!r}: take one of {', '.join(NAMES)}")
    return entry
