"""What a worker counts, for Prometheus: one set of instruments a process, on the default registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from antiphon_engine.executor import RankTimes
from antiphon_engine.interface import Load, StepResult
from antiphon_kvtransfer.links import LinkStatus
from antiphon_policy.latency import StepModelFit
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

_MS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


class WorkerMetrics:
    """The instruments. Values that can be asked for are asked for at scrape time."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.steps = Counter("antiphon_engine_steps", "Engine steps", registry=registry)
        self.step_ms = Histogram(
            "antiphon_engine_step_milliseconds", "Duration of an engine step", buckets=_MS_BUCKETS, registry=registry
        )
        self.tokens_computed = Counter(
            "antiphon_engine_tokens_computed", "Tokens whose KV was computed here", registry=registry
        )
        self.requests = Counter(
            "antiphon_worker_requests", "Requests by how they ended", ["role", "ending"], registry=registry
        )
        self.cached_tokens = Counter(
            "antiphon_worker_cached_tokens", "Prompt tokens that nobody computed for the request", registry=registry
        )
        self.prompt_tokens = Counter(
            "antiphon_worker_prompt_tokens", "Prompt tokens of requests that got a first token", registry=registry
        )
        self.pulls = Counter("antiphon_pulls", "Reads of KV blocks from peers", ["result"], registry=registry)
        self.pulled_blocks = Counter("antiphon_pulled_blocks", "KV blocks read from peers", registry=registry)
        self.pulled_bytes = Counter("antiphon_pulled_bytes", "Bytes of KV read from peers", registry=registry)
        self.pull_ms = Histogram(
            "antiphon_pull_milliseconds", "Duration of one pull", buckets=_MS_BUCKETS, registry=registry
        )
        self.remote_prefills = Counter(
            "antiphon_remote_prefills", "Prefill runs asked of peers, by how they ended", ["result"], registry=registry
        )
        self.fallbacks = Counter(
            "antiphon_prefill_fallbacks", "Prompts moved from a prefill worker that failed", ["to"], registry=registry
        )
        self.unpulled_at_done = Histogram(
            "antiphon_blocks_unpulled_at_done",
            "Blocks still to be read when the prefill worker had finished the prompt",
            buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
            registry=registry,
        )
        self._registry = registry

    def watch(
        self,
        load: Callable[[], Load],
        links: Callable[[], Sequence[LinkStatus]],
        preemptions: Callable[[], int] = int,
        rank_times: Callable[[], RankTimes | None] = lambda: None,
    ) -> None:
        """Register what asks the engine and the links."""
        self._registry.register(_PreemptionCollector(preemptions))
        self._registry.register(_RankTimesCollector(rank_times))
        fields: tuple[tuple[str, str, Callable[[Load], int]], ...] = (
            ("antiphon_engine_running_requests", "Requests being computed", lambda now: now.running),
            ("antiphon_engine_waiting_requests", "Requests accepted and not yet begun", lambda now: now.waiting),
            (
                "antiphon_engine_waiting_tokens",
                "Prompt tokens accepted and not yet computed",
                lambda now: now.waiting_tokens,
            ),
            ("antiphon_engine_kv_tokens", "Tokens whose KV is in use", lambda now: now.kv_tokens),
            ("antiphon_blocks_free", "KV blocks free or evictable", lambda now: now.free_blocks),
            ("antiphon_blocks_total", "KV blocks in the pool", lambda now: now.total_blocks),
            (
                "antiphon_blocks_retained",
                "KV blocks kept for peers or reads",
                lambda now: now.retained_blocks,
            ),
        )
        for name, help_text, field in fields:
            Gauge(name, help_text, registry=self._registry).set_function(_reading(load, field))
        self._registry.register(_LinkCollector(links))

    def watch_predictions(self, fit: StepModelFit) -> None:
        """Register what tells how well steps are predicted."""
        Gauge(
            "antiphon_worker_step_prediction_error_ratio",
            "Recent mean error of the predicted duration of a step, over the measured one",
            registry=self._registry,
        ).set_function(lambda: fit.relative_error)
        Gauge(
            "antiphon_worker_step_model_samples",
            "Engine steps that the step model was learnt from",
            registry=self._registry,
        ).set_function(lambda: float(fit.samples))

    def observe_step(self, result: StepResult) -> None:
        sample = result.sample
        if sample is not None:
            self.steps.inc()
            self.step_ms.observe(sample.duration_ms)
            self.tokens_computed.inc(sample.new_tokens)


def _reading(load: Callable[[], Load], field: Callable[[Load], int]) -> Callable[[], float]:
    return lambda: float(field(load()))


class _PreemptionCollector(Collector):
    """The engine counts them itself."""

    def __init__(self, preemptions: Callable[[], int]) -> None:
        self._preemptions = preemptions

    def collect(self) -> Iterator[CounterMetricFamily]:
        counter = CounterMetricFamily(
            "antiphon_engine_preemptions", "How often a running request had to give its blocks back"
        )
        counter.add_metric([], self._preemptions())
        yield counter


class _RankTimesCollector(Collector):
    """Nothing where no ranks of their own compute."""

    def __init__(self, rank_times: Callable[[], RankTimes | None]) -> None:
        self._rank_times = rank_times

    def collect(self) -> Iterator[CounterMetricFamily]:
        times = self._rank_times()
        if times is None:
            return
        yield CounterMetricFamily(
            "antiphon_engine_rank_busy_seconds",
            "Of a replica of several ranks: time of its steps in the model and in exchanges between ranks",
            value=times.busy_s,
        )
        yield CounterMetricFamily(
            "antiphon_engine_rank_exchange_seconds",
            "Of that: time in exchanges, waiting for other ranks included",
            value=times.exchange_s,
        )


class _LinkCollector(Collector):
    """The links there are at scrape time; those that are gone leave no stale series."""

    def __init__(self, links: Callable[[], Sequence[LinkStatus]]) -> None:
        self._links = links

    def collect(self) -> Iterator[GaugeMetricFamily]:
        speed = GaugeMetricFamily(
            "antiphon_link_gigabytes_per_second", "Measured speed of a link to a peer", labels=["peer", "transport"]
        )
        up = GaugeMetricFamily("antiphon_link_up", "Whether a link to a peer stands", labels=["peer", "transport"])
        for link in self._links():
            labels = [link.peer_worker_id, link.transport]
            speed.add_metric(labels, link.gigabytes_per_s)
            up.add_metric(labels, float(link.up))
        yield speed
        yield up
