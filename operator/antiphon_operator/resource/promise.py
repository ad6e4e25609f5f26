"""What is promised and how it is kept: latency, scaling, and how changes roll out. None of it restarts a pod."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from antiphon_operator.resource.base import DURATION, Duration, Resource, Rule, about, about_undefaulted
from antiphon_operator.resource.durations import is_duration, parse_duration_ms


def _between(field: str, python: str, low: str, high: str, message: str) -> Rule:
    """The duration `field`, if there is one, lies in [low, high]. One rule for form and size: one sentence."""
    low_ms, high_ms = parse_duration_ms(low), parse_duration_ms(high)

    def holds(it: Resource) -> bool:
        text = getattr(it, python)
        return text is None or (is_duration(text) and low_ms <= parse_duration_ms(text) <= high_ms)

    return Rule(
        f"!has(self.{field}) || !self.{field}.matches('{DURATION}') || (duration(self.{field}) >= duration('{low}')"
        f" && duration(self.{field}) <= duration('{high}'))",
        message,
        holds,
    )


class Percentiles(Resource, frozen=True, kw_only=True):
    """A promise about one latency."""

    RULES: ClassVar = (_between("p95", "p95", "1ms", "1h", "p95 must be from 1ms to 1h, such as 500ms"),)

    p95: Annotated[
        Duration | None, about("95 of 100 requests are to be as fast, such as 500ms. Omitted: no promise.")
    ] = None


class FirstToken(Resource, frozen=True, kw_only=True):
    """A promise about the first token, which may grow with the prompt: no number of replicas makes one long prompt
    faster."""

    RULES: ClassVar = (
        *Percentiles.RULES,
        _between(
            "perThousandTokens",
            "per_thousand_tokens",
            "1ms",
            "1h",
            "perThousandTokens must be from 1ms to 1h, such as 60ms",
        ),
        Rule(
            "!has(self.perThousandTokens) || has(self.p95)",
            "perThousandTokens is added to p95: write ttft.p95 too",
            lambda it: it.per_thousand_tokens is None or it.p95 is not None,
        ),
    )

    p95: Annotated[
        Duration | None, about("95 of 100 requests are to be as fast, such as 500ms. Omitted: no promise.")
    ] = None
    per_thousand_tokens: Annotated[
        Duration | None,
        about(
            "Added to p95 for each thousand prompt tokens that have to be computed, such as 60ms; those that a cache "
            "has do not count. Omitted: nothing is added."
        ),
    ] = None


class Sla(Resource, frozen=True, kw_only=True):
    """The promise."""

    ttft: Annotated[FirstToken, about("Time to first token, from the request's arrival at the gateway.")] = FirstToken()
    tpot: Annotated[Percentiles, about("Time per output token after the first.")] = Percentiles()


class Bounds(Resource, frozen=True, kw_only=True):
    """Of one pool's scaling."""

    RULES: ClassVar = (
        Rule("self.min <= self.max", "min must not be above max: lower min or raise max", lambda it: it.min <= it.max),
    )

    min: Annotated[
        int, about("Fewest replicas. 0: the pool may sleep, and wakes at the next request.", ge=0, le=1000)
    ] = 1
    max: Annotated[int, about("Most replicas.", ge=1, le=1000)] = 8


class Autoscaling(Resource, frozen=True, kw_only=True):
    """Who decides how many replicas there are."""

    mode: Annotated[
        Literal["Disabled", "Advise", "Enforce", "External"],
        about(
            "Disabled: `replicas` of the pools. External: whoever writes the Pools' /scale, such as an HPA. Enforce: "
            "the operator's autoscaler, so that the promise in `sla` is kept; `replicas` is what a pool begins with. "
            "Advise: `replicas`, and the status and Events say what the autoscaler would do."
        ),
    ] = "Disabled"
    prefill: Annotated[Bounds, about_undefaulted("Bounds of the prefill pool. Default: min 1, max 8.")] = Bounds()
    decode: Annotated[Bounds, about("Bounds of the decode pool.")] = Bounds()
    gpu_budget: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        about("Most devices that both pools may have together. Omitted: no limit but the bounds."),
    ] = None


class Rollout(Resource, frozen=True, kw_only=True):
    """How a new revision takes over."""

    RULES: ClassVar = (
        Rule(
            "self.surge > 0 || self.maxUnavailable > 0",
            "surge and maxUnavailable must not both be 0: no rollout could go a step; set one of them to 1",
            lambda it: it.surge > 0 or it.max_unavailable > 0,
        ),
        _between(
            "progressDeadline",
            "progress_deadline",
            "10s",
            "24h",
            "progressDeadline must be from 10s to 24h, such as 15m",
        ),
        _between("drainTimeout", "drain_timeout", "0s", "24h", "drainTimeout must be from 0s to 24h, such as 10m"),
    )

    surge: Annotated[
        int,
        about(
            "Sets of new replicas that come up beside the old ones. A set is the fewest prefill and decode replicas "
            "that keep their ratio. Needs as many free devices.",
            ge=0,
            le=1000,
        ),
    ] = 1
    max_unavailable: Annotated[
        int,
        about(
            "With surge 0: sets of old replicas that go before new ones come, for clusters without free devices. The "
            "Model serves that much less meanwhile.",
            ge=0,
            le=1000,
        ),
    ] = 0
    progress_deadline: Annotated[
        Duration,
        about("A step of a rollout that is not ready by then is taken down; the old revision goes on serving."),
    ] = "15m"
    drain_timeout: Annotated[
        Duration,
        about("How long requests of a replica that is to go may take to end; then they move to another one."),
    ] = "10m"
    paused: Annotated[bool, about("No further step is taken; what runs goes on running.")] = False
