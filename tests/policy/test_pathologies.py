"""States of a fleet in which routers of this kind are known to stop or to herd, put to the table of workers itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from antiphon_policy.latency import StepModel
from antiphon_policy.routing import NoWorker, RouteRequest, WorkerRole, WorkerView
from antiphon_policy.worker_table import WorkerTable
from msgspec.structs import replace

BLOCK_TOKENS = 64
STEP = StepModel(base_ms=4.0, per_new_token_ms=0.1, per_token_context_ms=1e-6, per_sequence_ms=0.1, per_kv_token_ms=0.0)
ASKED = RouteRequest(prompt_tokens=24 * BLOCK_TOKENS, block_tokens=BLOCK_TOKENS, block_bytes=20_000_000, max_tokens=100)
"""To pull its blocks takes longer than to compute them."""


def worker(worker_id: str, **more: object) -> WorkerView:
    view = WorkerView(
        worker_id=worker_id,
        role=WorkerRole.BOTH,
        leading_blocks=0,
        queued_tokens=0,
        running=0,
        kv_tokens=0,
        free_blocks=1000,
        total_blocks=1000,
        step=STEP,
    )
    return replace(view, **more)  # type: ignore[arg-type]


def table_of(*views: WorkerView) -> WorkerTable:
    table = WorkerTable({})
    for view in views:
        table.put(view)
    return table


def prefiller(table: WorkerTable, leading: Mapping[str, int]) -> str:
    """Who computes the prompt."""
    decision = table.choose(ASKED, leading, 0.5)
    return decision.prefill or decision.decode


def route_many(table: WorkerTable, leading: Mapping[str, int], count: int) -> Counter[str]:
    """Each is counted at once and nothing is done meanwhile, as in a burst."""
    chosen: Counter[str] = Counter()
    for at in range(count):
        decision = table.choose(ASKED, leading, at / count)
        by = decision.prefill or decision.decode
        uncached = ASKED.prompt_tokens - decision.prefill_blocks * BLOCK_TOKENS
        table.put(replace(table.view(by), queued_tokens=table.view(by).queued_tokens + uncached))
        view = table.view(decision.decode)
        table.put(replace(view, running=view.running + 1))
        chosen[by] += 1
    return chosen


def test_misses_go_by_load_not_to_the_emptiest_cache() -> None:
    """sgl-project/sglang#14305: a miss went to the worker with the smallest tree, however busy it was."""
    table = table_of(
        worker("new", free_blocks=1000, queued_tokens=20_000, running=5),
        worker("old", free_blocks=200, running=5),
    )
    assert prefiller(table, {}) == "old"


def test_a_match_is_kept_within_what_it_saves_and_not_beyond() -> None:
    """sgl-project/sglang#32195: with any imbalance affinity was dropped wholly."""
    for queued_tokens, expected in ((500, "warm"), (20_000, "cold")):
        table = table_of(worker("warm", queued_tokens=queued_tokens), worker("cold"))
        assert prefiller(table, {"warm": 20}) == expected


def test_a_burst_of_equal_requests_spreads() -> None:
    """llm-d/llm-d-router#298: each pick sees the earlier ones."""
    chosen = route_many(table_of(*(worker(f"w{at}") for at in range(8))), {}, 64)
    assert max(chosen.values()) <= 10
    assert len(chosen) == 8


def test_a_cold_worker_gets_its_share_once_the_warm_ones_queue() -> None:
    table = table_of(*(worker(f"warm{at}") for at in range(3)), worker("cold"))
    leading = {f"warm{at}": 20 for at in range(3)}
    assert route_many(table, leading, 3)["cold"] == 0
    assert route_many(table, leading, 97)["cold"] >= 4


def test_the_longest_queue_counts_in_tokens() -> None:
    """smg-project/smg#1621: one long context fills an engine that has the fewest requests."""
    table = table_of(worker("few", queued_tokens=30_000, running=1), worker("many", queued_tokens=600, running=6))
    assert prefiller(table, {}) == "many"


def test_who_is_missing_or_silent_stops_nobody() -> None:
    """llm-d/llm-d-router#2547, vllm-project/aibrix#617: unknown figures of some, or of all, block nothing."""
    silent = [worker(f"w{at}", free_blocks=0, total_blocks=0) for at in range(3)]
    assert prefiller(table_of(*silent), {}) in {"w0", "w1", "w2"}
    # The index still speaks of one that is gone.
    assert prefiller(table_of(*silent), {"gone": 24}) in {"w0", "w1", "w2"}
    with pytest.raises(NoWorker):
        table_of().choose(ASKED, {}, 0.5)
