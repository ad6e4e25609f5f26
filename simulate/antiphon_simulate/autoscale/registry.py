"""Those who decide about sizes, by name: what `antiphon simulate autoscale --policy NAME` can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from antiphon_policy.scaling import ScalingDecision

from antiphon_simulate.autoscale.calls import Load
from antiphon_simulate.autoscale.capacity import mean_sizes, profile
from antiphon_simulate.autoscale.policies.dynamo_loops import DynamoLoops
from antiphon_simulate.autoscale.policies.hpa import Hpa
from antiphon_simulate.autoscale.policies.llm_d import LlmD
from antiphon_simulate.autoscale.policies.static import Static
from antiphon_simulate.autoscale.records import Scaler, Setting, Sizes


class UnknownScalerError(ValueError):
    """No scaling policy of that name; the message names what there is."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a policy may be made from."""

    load: Load
    setting: Setting
    peak: Sizes
    """The smallest pools that keep the goal without ever changing."""
    interval_ms: float
    """Of Antiphon's decisions."""
    keep: Callable[[ScalingDecision], None] | None = None


def _antiphon(known: Known) -> Scaler:
    # Alone of all it needs the law of the product.
    from antiphon_simulate.autoscale.policies.antiphon import Antiphon

    return Antiphon(known.setting, interval_ms=known.interval_ms, period_ms=known.load.day_ms, keep=known.keep)


def _static_mean(known: Known) -> Scaler:
    return Static("static_mean", mean_sizes(known.load.calls, known.load.span_ms, known.setting))


_MAKERS: Mapping[str, tuple[str, Callable[[Known], Scaler]]] = {
    "antiphon": ("Antiphon's own law: the smallest sizes that keep the promise, by replay", _antiphon),
    "static_peak": (
        "the smallest pools that keep the promise without ever changing",
        lambda known: Static("static_peak", known.peak),
    ),
    "static_mean": ("pools for the mean load", _static_mean),
    "hpa": (
        "Kubernetes' autoscaler on concurrency",
        lambda known: Hpa(profile(known.load.calls, known.setting)),
    ),
    "llm_d": ("llm-d: P90 over limit, up above 0.55, down below 0.40", lambda known: LlmD(known.setting)),
    "dynamo_loops": (
        "Dynamo-like: a floor by throughput, and one worker more or less by load",
        lambda known: DynamoLoops(known.setting, profile(known.load.calls, known.setting)),
    ),
}
NAMES = tuple(_MAKERS)


def describe(name: str) -> str:
    """In a line. Raises UnknownScalerError."""
    return _entry(name)[0]


def make(name: str, known: Known) -> Scaler:
    """A new one. Raises UnknownScalerError."""
    return _entry(name)[1](known)


def _entry(name: str) -> tuple[str, Callable[[Known], Scaler]]:
    if name not in _MAKERS:
        raise UnknownScalerError(f"there is no scaling policy {name!r}: use {', '.join(NAMES)} or all")
    return _MAKERS[name]
