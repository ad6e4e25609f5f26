"""The figures of scaling as gauges, for those who scale by Prometheus: KEDA, a HorizontalPodAutoscaler, a person.

They are what the gateway's news say (`scaling_news`), put together when Prometheus asks. Each gateway tells of its own
requests: sum what counts requests and tokens, and take the worst of percentiles and shares (docs/autoscaling.md has
queries). What workers say of themselves is the same from each gateway: take the largest.

A figure that there is not (no promise, no request in the window) has no series. The only label values are the keys of
Models that the gateway knows, and roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from antiphon_kvtransfer.model_record import ModelRecord
from antiphon_policy.scaling.news import GatewayNews
from antiphon_policy.scaling.records import RequestSample
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PREFIX = "antiphon_gateway_model"
_RATE_BUCKETS = 6
"""Arrivals per second are of the last minute."""


class ScalingGauges(Collector):
    """See the module."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.read: Callable[[], Mapping[str, GatewayNews]] = dict
        """The news of all Models, by key."""
        self.record: Callable[[str], ModelRecord | None] = lambda model: None
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        def gauge(name: str, told: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"{_PREFIX}_{name}", told, labels=("model", *labels))

        ttft_p95 = gauge("ttft_p95_seconds", "Time to first token of the last 5 minutes' requests, 95th percentile")
        tpot_p95 = gauge("tpot_p95_seconds", "Mean time of an answer's tokens after the first, 95th percentile")
        ttft_share = gauge("ttft_attainment_ratio", "Of the last 5 minutes' requests, those inside the TTFT promise")
        tpot_share = gauge("tpot_attainment_ratio", "Of the last 5 minutes' answers, those inside the TPOT promise")
        ttft_used = gauge("ttft_p95_promise_ratio", "Time to first token over what was promised, 95th percentile")
        tpot_used = gauge("tpot_p95_promise_ratio", "The same of an answer's tokens after the first")
        queued_requests = gauge("queued_requests", "Choices that wait for a worker in this gateway")
        queued_tokens = gauge("queued_tokens", "Their prompt tokens, as far as is known uncached ones")
        held_requests = gauge("held_requests", "Requests that wait for the first worker of a Model that sleeps")
        arrivals = gauge("arrivals_per_second", "Choices that came in the last minute, per second")
        streams = gauge("running_answers", "Answers of this gateway that have begun and not ended")
        waiting = gauge("worker_waiting_tokens", "Prompt tokens that workers have accepted and not computed", "role")
        running = gauge("worker_running_requests", "Requests that workers compute, of all gateways", "role")
        for model, news in sorted(self.read().items()):
            record, labels = self.record(model), (model,)
            ttfts = [(one.ttft_ms, one.weight) for one in news.samples if one.ttft_ms is not None]
            tpots = [(one.tpot_ms, one.weight) for one in news.samples if one.tpot_ms is not None]
            if ttfts:
                ttft_p95.add_metric(labels, percentile(ttfts) / 1e3)
            if tpots:
                tpot_p95.add_metric(labels, percentile(tpots) / 1e3)
            for used, share, shares in (
                (_ttft_used(news.samples, record), ttft_share, ttft_used),
                (_tpot_used(news.samples, record), tpot_share, tpot_used),
            ):
                if used:
                    share.add_metric(labels, attainment(used))
                    shares.add_metric(labels, percentile(used))
            queued_requests.add_metric(labels, sum(pool.queued_requests for pool in news.pools))
            queued_tokens.add_metric(labels, sum(pool.queued_tokens for pool in news.pools))
            held_requests.add_metric(labels, news.held_requests)
            arrivals.add_metric(labels, _per_second(news))
            streams.add_metric(labels, news.streams)
            for role in sorted({worker.role for worker in news.workers}, key=lambda role: role.value):
                own = [worker for worker in news.workers if worker.role is role]
                waiting.add_metric((model, role.value), sum(worker.waiting_tokens for worker in own))
                running.add_metric((model, role.value), sum(worker.running for worker in own))
        yield from (ttft_p95, tpot_p95, ttft_share, tpot_share, ttft_used, tpot_used)
        yield from (queued_requests, queued_tokens, held_requests, arrivals, streams, waiting, running)


def percentile(values: Iterable[tuple[float, float]], share: float = 0.95) -> float:
    """The smallest value that so much of the weight is at or below, of (value, weight); at least one.

    Of 1 to 20, each of weight 1, the 95th percentile is 19.
    """
    ordered = sorted(values)
    left = share * sum([weight for _, weight in ordered])
    for value, weight in ordered:
        left -= weight
        if left <= 1e-9:
            return value
    return ordered[-1][0]


def attainment(used: Sequence[tuple[float, float]]) -> float:
    """Of (what was needed of the promise, weight), the share of those inside it."""
    return sum([weight for value, weight in used if value <= 1.0]) / sum([weight for _, weight in used])


def _ttft_used(samples: Sequence[RequestSample], record: ModelRecord | None) -> list[tuple[float, float]]:
    """(time over limit, weight) of each request that was promised something and measured."""
    found: list[tuple[float, float]] = []
    for sample in samples if record is not None else ():
        limit_ms = record.ttft_limit_ms(sample.uncached_tokens) if record is not None else None
        if limit_ms is not None and limit_ms > 0.0 and sample.ttft_ms is not None:
            found.append((sample.ttft_ms / limit_ms, sample.weight))
    return found


def _tpot_used(samples: Sequence[RequestSample], record: ModelRecord | None) -> list[tuple[float, float]]:
    limit_ms = record.tpot_p95_ms if record is not None else None
    if limit_ms is None or limit_ms <= 0.0:
        return []
    return [(one.tpot_ms / limit_ms, one.weight) for one in samples if one.tpot_ms is not None]


def _per_second(news: GatewayNews) -> float:
    counts = news.arrivals.counts[-_RATE_BUCKETS:]
    return sum(counts) / (len(counts) * news.arrivals.bucket_ms / 1e3) if counts else 0.0
