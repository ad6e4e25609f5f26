"""The table narrows by arrays what `pricing` prices one by one: both must mean the same."""

from __future__ import annotations

import random

import msgspec
import pytest
from antiphon_policy.latency import StepModel
from antiphon_policy.pricing import Prices
from antiphon_policy.routing import NoWorker, RouteOption, RouteRequest, WorkerRole, WorkerView, Workload
from antiphon_policy.worker_table import NEAR_TIE, NEAR_TIE_MS, WorkerTable


def any_view(worker_id: str, rng: random.Random) -> WorkerView:
    return WorkerView(
        worker_id=worker_id,
        role=rng.choice(list(WorkerRole)),
        leading_blocks=rng.choice([0, rng.randint(0, 40)]),
        queued_tokens=rng.choice([0, rng.randint(0, 20_000)]),
        running=rng.choice([0, rng.randint(0, 50)]),
        kv_tokens=rng.randint(0, 100_000),
        free_blocks=rng.choice([0, rng.randint(0, 500)]),
        total_blocks=rng.choice([0, 1000]),
        step=StepModel(
            base_ms=rng.uniform(0.1, 20),
            per_new_token_ms=rng.uniform(0.001, 1),
            per_token_context_ms=rng.choice([0.0, rng.uniform(0, 1e-5)]),
            per_sequence_ms=rng.uniform(0, 0.5),
            per_kv_token_ms=rng.uniform(0, 1e-3),
        ),
        draining=rng.random() < 0.2,
        may_decode=rng.random() < 0.8,
        empty_blocks=rng.randint(0, 50),
        chunk_tokens=rng.choice([256, 512]),
    )


def any_request(rng: random.Random) -> RouteRequest:
    return RouteRequest(
        prompt_tokens=rng.randint(1, 5000),
        block_tokens=64,
        block_bytes=rng.choice([1_000, 100_000]),
        max_tokens=rng.randint(1, 1000),
        ttft_limit_ms=rng.choice([None, rng.uniform(10, 10_000)]),
        tpot_limit_ms=rng.choice([None, rng.uniform(1, 100)]),
    )


def table_of(views: list[WorkerView], workload: Workload) -> WorkerTable:
    table = WorkerTable({}, workload)
    for view in views:
        table.put(view)
    return table


def rank(option: RouteOption) -> tuple[bool, float]:
    return not option.keeps_sla, option.cost.total_ms


@pytest.mark.parametrize("seed", range(4))
def test_nothing_cheaper_is_overlooked(seed: int) -> None:
    """Against all pairs, priced one by one."""
    rng = random.Random(seed)
    for _ in range(300):
        views = [any_view(f"w{at}", rng) for at in range(rng.randint(1, 7))]
        workload = Workload(rng.uniform(1, 5000), rng.uniform(1, 1000), rng.random())
        request = any_request(rng)
        leading = {view.worker_id: view.leading_blocks for view in views if view.leading_blocks}
        live = [view for view in views if not view.draining]
        decoders = [view for view in live if view.role is not WorkerRole.PREFILL and view.may_decode]
        prefillers = [view for view in live if view.role is WorkerRole.PREFILL]
        table = table_of(views, workload)
        if not decoders:
            with pytest.raises(NoWorker):
                table.choose(request, leading, rng.random())
            continue
        decision = table.choose(request, leading, rng.random())
        holders = [(view, view.leading_blocks) for view in live if view.leading_blocks]
        followers, on_decoders = (
            min((view.queued_tokens for view in side), default=0) / workload.uncached_tokens
            for side in (prefillers, decoders)
        )
        prices = Prices(request, workload, {}, sorted(holders, key=lambda one: -one[1]), followers, on_decoders)
        every = [prices.local(view, view.leading_blocks) for view in decoders]
        every += [
            prices.remote(decoder, decoder.leading_blocks, prefiller, prefiller.leading_blocks)
            for decoder in decoders
            for prefiller in prefillers
        ]
        best = min(every, key=rank)
        assert decision.cost is not None
        assert decision.keeps_sla == best.keeps_sla
        near_ms = max(NEAR_TIE_MS, NEAR_TIE * best.cost.ttft_ms)
        assert decision.cost.total_ms <= best.cost.total_ms + near_ms + 1e-6, decision.explanation


@pytest.mark.parametrize("seed", range(3))
def test_a_table_that_was_changed_equals_one_that_was_made(seed: int) -> None:
    rng = random.Random(seed)
    table = WorkerTable()
    current: dict[str, WorkerView] = {}
    for _ in range(100):
        name = f"w{rng.randint(0, 40)}"
        if rng.random() < 0.6:
            current[name] = any_view(name, rng)
            table.put(current[name])
        else:
            table.remove(name)
            current.pop(name, None)
        assert {view.worker_id: view for view in table.views()} == current
        request = any_request(rng)
        leading = {name: view.leading_blocks for name, view in current.items() if view.leading_blocks}
        fresh = table_of(list(table.views()), Workload())
        try:
            expected = fresh.choose(request, leading, 0.4)
        except NoWorker:
            with pytest.raises(NoWorker):
                table.choose(request, leading, 0.4)
        else:
            assert table.choose(request, leading, 0.4) == expected


def test_many_workers_are_narrowed_down_to_the_right_ones() -> None:
    """A thousand, of which one has the prefix, and one decode worker is idle."""
    views = [
        WorkerView(f"p{at}", WorkerRole.PREFILL, 0, 3 * at, 0, 0, 1000, 1000, StepModel()) for at in range(500)
    ] + [WorkerView(f"d{at}", WorkerRole.DECODE, 0, 0, 5 + at % 7, 9000, 1000, 1000, StepModel()) for at in range(500)]
    table = table_of(views, Workload())
    table.put(msgspec.structs.replace(table.view("d123"), running=1, kv_tokens=0))
    request = RouteRequest(prompt_tokens=2000, block_tokens=64, block_bytes=100_000, max_tokens=50)
    for draw in (0.0, 0.4, 0.99):
        decision = table.choose(request, {"p321": 30}, draw)
        assert (decision.decode, decision.prefill) == ("d123", "p0"), decision.explanation
        assert decision.prefix_peers == (("p321", 30),), "pulled, as nobody waits behind that worker"
    assert table.choose(request, {"p321": 30}, 0.5, excluded={"p0"}).prefill == "p1"


def test_equal_workers_are_not_all_given_to_the_first() -> None:
    """llm-d/llm-d-router#298: gateways that see the same figures must not herd."""
    views = [WorkerView(f"b{at}", WorkerRole.BOTH, 0, 0, 0, 0, 1000, 1000, StepModel()) for at in range(10)]
    table = table_of(views, Workload())
    request = RouteRequest(prompt_tokens=500, block_tokens=64, block_bytes=1000, max_tokens=50)
    chosen = {table.choose(request, {}, draw / 997).decode for draw in range(997)}
    assert len(chosen) == 10


def test_the_cheapest_pair_that_keeps_the_sla_wins() -> None:
    """The one that holds the prefix is the cheapest, but too far behind for the promise."""
    views = [
        WorkerView("p0", WorkerRole.PREFILL, 0, 2200, 0, 0, 1000, 1000, StepModel()),
        WorkerView("p1", WorkerRole.PREFILL, 0, 0, 0, 0, 1000, 1000, StepModel()),
        WorkerView("d0", WorkerRole.DECODE, 0, 0, 60, 0, 1000, 1000, StepModel()),
    ]
    table = WorkerTable({("p1", "p0"): 0.001}, Workload(evicted_reuse=1.0))
    for view in views:
        table.put(view)
    request = RouteRequest(prompt_tokens=2000, block_tokens=64, block_bytes=100_000, max_tokens=50)
    assert table.choose(request, {"p0": 30}, 0.0).prefill == "p0"
    limited = msgspec.structs.replace(request, ttft_limit_ms=1_100.0)
    decision = table.choose(limited, {"p0": 30}, 0.0)
    assert (decision.prefill, decision.keeps_sla) == ("p1", True)
    hopeless = table.choose(msgspec.structs.replace(request, ttft_limit_ms=5.0), {"p0": 30}, 0.0)
    assert (hopeless.prefill, hopeless.keeps_sla) == ("p0", False), "nobody keeps it: the cheapest"


def test_a_prompt_on_a_decode_worker_must_not_break_what_runs_there() -> None:
    views = [
        WorkerView("p0", WorkerRole.PREFILL, 0, 3000, 0, 0, 1000, 1000, StepModel()),
        WorkerView("d0", WorkerRole.DECODE, 0, 0, 1, 500, 1000, 1000, StepModel()),
    ]
    table = table_of(views, Workload(output_tokens=50))
    request = RouteRequest(prompt_tokens=1000, block_tokens=64, block_bytes=100_000, max_tokens=50)
    assert table.choose(request, {}, 0.0).prefill is None
    limited = msgspec.structs.replace(request, tpot_limit_ms=8.0)
    assert table.choose(limited, {}, 0.0).prefill == "p0", "500 ms over 50 tokens is 10 ms for each"


def test_the_sessions_last_pair_wins_near_ties_only() -> None:
    views = [WorkerView(f"b{at}", WorkerRole.BOTH, 0, 0, 0, 0, 1000, 1000, StepModel()) for at in range(5)]
    table = table_of(views, Workload())
    request = RouteRequest(prompt_tokens=500, block_tokens=64, block_bytes=1000, max_tokens=50, hint=("b3", ""))
    assert {table.choose(request, {}, draw / 20).decode for draw in range(20)} <= {"b3", *(f"b{at}" for at in range(5))}
    assert table.choose(request, {}, 0.6).decode == "b3"
    table.put(msgspec.structs.replace(table.view("b3"), queued_tokens=2000))
    assert table.choose(request, {}, 0.6).decode != "b3"


def test_the_sessions_last_pair_is_looked_at_however_many_are_as_good() -> None:
    views = [WorkerView(f"p{at}", WorkerRole.PREFILL, 0, 0, 0, 0, 1000, 1000, StepModel()) for at in range(30)]
    views += [WorkerView(f"d{at}", WorkerRole.DECODE, 0, 0, 0, 0, 1000, 1000, StepModel()) for at in range(30)]
    table = table_of(views, Workload())
    hint = ("d17", "p23")
    request = RouteRequest(prompt_tokens=500, block_tokens=64, block_bytes=1000, max_tokens=50, hint=hint)
    for draw in range(20):
        decision = table.choose(request, {}, draw / 20)
        assert (decision.decode, decision.prefill) == hint
    table.remove("p23")
    assert table.choose(request, {}, 0.1).prefill != "p23"


def test_a_cold_worker_gets_its_share_where_blocks_are_short() -> None:
    """Its empty blocks push nothing out."""
    views = [
        WorkerView("b0", WorkerRole.BOTH, 0, 0, 2, 100, 1000, 1000, StepModel()),
        WorkerView("b1", WorkerRole.BOTH, 0, 0, 2, 100, 1000, 1000, StepModel(), empty_blocks=900),
    ]
    request = RouteRequest(prompt_tokens=2000, block_tokens=64, block_bytes=1000, max_tokens=50)
    table = table_of(views, Workload(evicted_reuse=0.5))
    assert {table.choose(request, {}, draw / 10).decode for draw in range(10)} == {"b1"}
