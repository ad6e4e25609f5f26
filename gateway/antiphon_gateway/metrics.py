"""The gateway's Prometheus metrics, in a registry of its own.

Label values come from a closed set (known models, our endpoints, statuses), never from what a client sent. The
children that the hot path needs are looked up once per model and endpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ERROR_RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """What one model's requests at one endpoint are measured by."""

    first_token_s: Histogram
    inter_token_s: Histogram
    prompt_tokens: Counter
    completion_tokens: Counter
    cached_tokens: Counter


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of: dict[tuple[str, str], RequestMetrics] = {}
        self._answered: dict[tuple[str, str, int], Counter] = {}
        self._queued: dict[str, Histogram] = {}
        self._predicted: dict[str, Histogram] = {}
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        prefix = "antiphon_gateway"
        labels = ("model", "endpoint")
        self._requests = Counter(
            f"{prefix}_requests", "Requests answered, by status", (*labels, "status"), registry=self.registry
        )
        self._cancelled = Counter(
            f"{prefix}_cancelled", "Requests whose client went away", labels, registry=self.registry
        )
        self._first_token = Histogram(
            f"{prefix}_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            labels,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._inter_token = Histogram(
            f"{prefix}_inter_token_seconds",
            "Between steps of one choice",
            labels,
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._queue_wait = Histogram(
            f"{prefix}_queue_wait_seconds",
            "From the request's arrival to a worker's answer",
            ("model",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._ttft_error = Histogram(
            f"{prefix}_ttft_prediction_error_ratio",
            "Error of the predicted time from submitting to the first token, over the measured one",
            ("model",),
            buckets=_ERROR_RATIOS,
            registry=self.registry,
        )
        self._prompt_tokens = Counter(f"{prefix}_prompt_tokens", "Prompt tokens served", labels, registry=self.registry)
        self._completion_tokens = Counter(
            f"{prefix}_completion_tokens", "Tokens generated", labels, registry=self.registry
        )
        self._cached_tokens = Counter(
            f"{prefix}_cached_tokens", "Prompt tokens that were not computed", labels, registry=self.registry
        )
        self._refused = Counter(
            f"{prefix}_refusals", "Submissions that workers refused", ("reason",), registry=self.registry
        )
        self._lost = Counter(f"{prefix}_workers_lost", "Streams to workers that broke", registry=self.registry)
        self._retries = Counter(f"{prefix}_retries", "Choices tried on another worker", registry=self.registry)
        self._slow = Counter(
            f"{prefix}_slow_clients", "Requests ended as the client read too slowly", registry=self.registry
        )
        self._too_large = Counter(
            f"{prefix}_bodies_too_large", "Request bodies above the limit", registry=self.registry
        )
        self._in_flight = Gauge(f"{prefix}_requests_in_flight", "Requests being served", registry=self.registry)
        self._queue_depth = Gauge(f"{prefix}_queue_depth", "Choices that wait for a worker", registry=self.registry)
        self._workers = Gauge(f"{prefix}_workers", "Workers with a standing stream", registry=self.registry)

    def observe(
        self, *, in_flight: Callable[[], float], queue_depth: Callable[[], float], workers: Callable[[], float]
    ) -> None:
        """What is read when the metrics are scraped."""
        self._in_flight.set_function(in_flight)
        self._queue_depth.set_function(queue_depth)
        self._workers.set_function(workers)

    def of(self, model: str, endpoint: str) -> RequestMetrics:
        known = self._of.get((model, endpoint))
        if known is not None:
            return known
        known = self._of[model, endpoint] = RequestMetrics(
            first_token_s=self._first_token.labels(model, endpoint),
            inter_token_s=self._inter_token.labels(model, endpoint),
            prompt_tokens=self._prompt_tokens.labels(model, endpoint),
            completion_tokens=self._completion_tokens.labels(model, endpoint),
            cached_tokens=self._cached_tokens.labels(model, endpoint),
        )
        return known

    def answered(self, model: str, endpoint: str, status: int) -> None:
        counter = self._answered.get((model, endpoint, status))
        if counter is None:
            counter = self._answered[model, endpoint, status] = self._requests.labels(model, endpoint, str(status))
        counter.inc()

    def cancelled(self, model: str, endpoint: str) -> None:
        self._cancelled.labels(model, endpoint).inc()

    def queued(self, model: str, seconds: float) -> None:
        histogram = self._queued.get(model)
        if histogram is None:
            histogram = self._queued[model] = self._queue_wait.labels(model)
        histogram.observe(seconds)

    def predicted(self, model: str, predicted_ttft_ms: float, measured_ttft_ms: float) -> None:
        """What routing had said of an attempt whose first token has now come. 0: it had said nothing."""
        if measured_ttft_ms <= 0.0 or predicted_ttft_ms <= 0.0:
            return
        histogram = self._predicted.get(model)
        if histogram is None:
            histogram = self._predicted[model] = self._ttft_error.labels(model)
        histogram.observe(abs(predicted_ttft_ms - measured_ttft_ms) / measured_ttft_ms)

    def refused(self, reason: str) -> None:
        self._refused.labels(reason.removeprefix("REFUSAL_").lower()).inc()

    def worker_lost(self) -> None:
        self._lost.inc()

    def retried(self) -> None:
        self._retries.inc()

    def slow_client(self) -> None:
        self._slow.inc()

    def body_too_large(self) -> None:
        self._too_large.inc()

    def page(self) -> bytes:
        return generate_latest(self.registry)
