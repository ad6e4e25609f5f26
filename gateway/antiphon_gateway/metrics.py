"""The gateway's Prometheus metrics, in a registry of its own.

Label values come from a closed set (known models, our endpoints, statuses), never from what a client sent. What every
request and every token is counted by (`tallies`) is looked up once per model and endpoint.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from antiphon_kvtransfer.model_record import ModelRecord
from antiphon_policy.scaling.news import GatewayNews
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from antiphon_gateway.scaling_metrics import ScalingGauges
from antiphon_gateway.tallies import Count, Counts, Spread, Spreads, Watched
from antiphon_gateway.tokenization_cache import EncodingCache

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ERROR_RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class MoveReason(enum.Enum):
    """Why a choice goes on at another worker."""

    DRAINED = "drained"
    """Its worker gave it back: it ends, or changes its role."""
    LOST = "lost"
    """The stream to its worker broke."""
    FAILED = "failed"
    """Its worker failed on it."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """What one model's requests at one endpoint are measured by."""

    first_token_s: Spread
    inter_token_s: Spread
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of: dict[tuple[str, str], RequestMetrics] = {}
        self._answered: dict[tuple[str, str, int], Count] = {}
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        prefix = "antiphon_gateway"
        labels = ("model", "endpoint")
        self._requests = Counts(
            f"{prefix}_requests", "Requests answered, by status", (*labels, "status"), self.registry
        )
        self._cancelled = Counts(f"{prefix}_cancelled", "Requests whose client went away", labels, self.registry)
        self._first_token = Spreads(
            f"{prefix}_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            labels,
            _SECONDS,
            self.registry,
        )
        self._inter_token = Spreads(
            f"{prefix}_inter_token_seconds", "Between tokens of one choice", labels, _TOKEN_SECONDS, self.registry
        )
        self._queue_wait = Spreads(
            f"{prefix}_queue_wait_seconds",
            "From the request's arrival to a worker's answer",
            ("model",),
            _SECONDS,
            self.registry,
        )
        self._ttft_error = Spreads(
            f"{prefix}_ttft_prediction_error_ratio",
            "Error of the predicted time from submitting to the first token, over the measured one",
            ("model",),
            _ERROR_RATIOS,
            self.registry,
        )
        self._prompt_tokens = Counts(f"{prefix}_prompt_tokens", "Prompt tokens served", labels, self.registry)
        self._completion_tokens = Counts(f"{prefix}_completion_tokens", "Tokens generated", labels, self.registry)
        self._cached_tokens = Counts(
            f"{prefix}_cached_tokens", "Prompt tokens that were not computed", labels, self.registry
        )
        self._refused = Counter(
            f"{prefix}_refusals", "Submissions that workers refused", ("reason",), registry=self.registry
        )
        self._lost = Counter(f"{prefix}_workers_lost", "Streams to workers that broke", registry=self.registry)
        self._retries = Counter(f"{prefix}_retries", "Choices tried on another worker", registry=self.registry)
        self._moves = Counter(
            f"{prefix}_moves",
            "Choices that went on at another worker: drained (their worker gave them back), lost, failed",
            ("reason",),
            registry=self.registry,
        )
        for reason in MoveReason:
            self._moves.labels(reason.value)
        self._slow = Counter(
            f"{prefix}_slow_clients", "Requests ended as the client read too slowly", registry=self.registry
        )
        self._too_large = Counter(
            f"{prefix}_bodies_too_large", "Request bodies above the limit", registry=self.registry
        )
        self._in_flight = Gauge(f"{prefix}_requests_in_flight", "Requests being served", registry=self.registry)
        self._queue_depth = Gauge(f"{prefix}_queue_depth", "Choices that wait for a worker", registry=self.registry)
        self._workers = Gauge(f"{prefix}_workers", "Workers with a standing stream", registry=self.registry)
        self._found = Watched(
            f"{prefix}_encoding_cache_hit_characters",
            "Characters of chat prompts whose encoding was known",
            self.registry,
        )
        self._encoded = Watched(
            f"{prefix}_encoding_cache_miss_characters",
            "Characters of chat prompts that were encoded and may be kept",
            self.registry,
        )
        self._encoding_bytes = Gauge(
            f"{prefix}_encoding_cache_bytes", "Memory of the kept encodings, about", registry=self.registry
        )
        self._scaling = ScalingGauges(self.registry)

    def observe(
        self,
        *,
        in_flight: Callable[[], float],
        queue_depth: Callable[[], float],
        workers: Callable[[], float],
        encodings: EncodingCache | None,
    ) -> None:
        """What is read when the metrics are scraped."""
        if encodings is not None:
            self._found.read = lambda: encodings.found_characters
            self._encoded.read = lambda: encodings.encoded_characters
            self._encoding_bytes.set_function(lambda: encodings.bytes)
        self._in_flight.set_function(in_flight)
        self._queue_depth.set_function(queue_depth)
        self._workers.set_function(workers)

    def observe_scaling(
        self, news: Callable[[], Mapping[str, GatewayNews]], record: Callable[[str], ModelRecord | None]
    ) -> None:
        """The same: of all Models by key, and what is promised of one."""
        self._scaling.read, self._scaling.record = news, record

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
        self._queue_wait.labels(model).observe(seconds)

    def predicted(self, model: str, predicted_ttft_ms: float, measured_ttft_ms: float) -> None:
        """What routing had said of an attempt whose first token has now come. 0: it had said nothing."""
        if measured_ttft_ms <= 0.0 or predicted_ttft_ms <= 0.0:
            return
        self._ttft_error.labels(model).observe(abs(predicted_ttft_ms - measured_ttft_ms) / measured_ttft_ms)

    def refused(self, reason: str) -> None:
        self._refused.labels(reason.removeprefix("REFUSAL_").lower()).inc()

    def worker_lost(self) -> None:
        self._lost.inc()

    def retried(self) -> None:
        self._retries.inc()

    def moved(self, reason: MoveReason) -> None:
        self._moves.labels(reason.value).inc()

    def slow_client(self) -> None:
        self._slow.inc()

    def body_too_large(self) -> None:
        self._too_large.inc()

    def page(self) -> bytes:
        return generate_latest(self.registry)
