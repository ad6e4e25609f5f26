"""What a worker tells of its engine's ranks."""

from __future__ import annotations

from antiphon_engine.executor import RankTimes
from antiphon_engine.interface import Load
from antiphon_worker.metrics import WorkerMetrics
from prometheus_client import CollectorRegistry, generate_latest


def page(times: RankTimes | None) -> str:
    registry = CollectorRegistry()
    load = Load(0, 0, 0, 0, 0, 0, 0)
    WorkerMetrics(registry).watch(lambda: load, list, rank_times=lambda: times)
    return generate_latest(registry).decode()


def test_ranks_tell_how_long_they_computed_and_how_long_of_that_they_exchanged() -> None:
    told = page(RankTimes(busy_s=7.5, exchange_s=2.25))
    assert "antiphon_engine_rank_busy_seconds_total 7.5" in told
    assert "antiphon_engine_rank_exchange_seconds_total 2.25" in told


def test_an_engine_without_ranks_tells_nothing_of_them() -> None:
    assert "antiphon_engine_rank" not in page(None)
