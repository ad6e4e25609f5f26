"""The upper bounds: one queue by deadline, one cache in which nothing is computed twice, steps as workers take them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from antiphon_policy.latency import StepModel
from antiphon_simulate.bound import UpperBound
from antiphon_simulate.bound_queue import CentralQueue, Part
from antiphon_simulate.cluster import simulate
from antiphon_simulate.policies import registry
from antiphon_simulate.records import ClusterShape, Ending, Outcome, RunResult, Sla, Timing, TraceRequest
from antiphon_simulate.worker import HOP_MS

BLOCK_TOKENS = 100
STEP = StepModel(
    base_ms=4.0, per_new_token_ms=0.1, per_token_context_ms=1e-5, per_sequence_ms=0.1, per_kv_token_ms=1e-4
)
TIMING = Timing(STEP, chunk_tokens=400, mixed_chunk_tokens=200, block_bytes=1, link_gigabytes_per_s=1000.0)
SLA = Sla(ttft_ms=200.0, ttft_ms_per_1k_prompt_tokens=200.0, tpot_ms=20.0)
PAIRS = ClusterShape(prefill=2, decode=2, pool_blocks=400)

BOUNDS = ("bound", "bound_chunked")


def request(index: int, arrival_ms: float, blocks: Sequence[int], output_tokens: int = 20) -> TraceRequest:
    return TraceRequest(index, arrival_ms, BLOCK_TOKENS * len(blocks), output_tokens, tuple(blocks))


def conversations(seed: int, *, turns: int = 300, mean_gap_ms: float = 60.0) -> list[TraceRequest]:
    """Open-loop turns of some conversations that grow by two blocks each time, between prompts of nobody else's."""
    draws = random.Random(seed)
    talks: list[list[int]] = [[7, 8, 9] for _ in range(12)]
    fresh = iter(range(1_000, 1_000_000))
    requests, now_ms = [], 0.0
    for index in range(turns):
        now_ms += draws.expovariate(1.0 / mean_gap_ms)
        if draws.random() < 0.7:
            talk = draws.choice(talks)
            talk += [next(fresh), next(fresh)]
            blocks = list(talk)
            if len(talk) > 16:
                del talk[3:]
        else:
            blocks = [next(fresh) for _ in range(draws.randint(1, 20))]
        requests.append(request(index, now_ms, blocks, draws.randint(1, 60)))
    return requests


def run(name: str, requests: Sequence[TraceRequest], shape: ClusterShape = PAIRS, timing: Timing = TIMING) -> RunResult:
    return simulate(requests, shape, timing, registry.make(name), SLA, seed=1, block_tokens=BLOCK_TOKENS)


def inside_sla(result: RunResult) -> int:
    return sum(
        outcome.ending is Ending.COMPLETE
        and outcome.ttft_ms <= SLA.ttft_limit_ms(outcome.request.prompt_tokens)
        and outcome.tpot_ms <= SLA.tpot_ms
        for outcome in result.outcomes
    )


def computed(result: RunResult) -> int:
    return sum(outcome.computed_tokens for outcome in result.outcomes)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", [PAIRS, ClusterShape(prefill=4, decode=0, pool_blocks=400)], ids=["pairs", "both"])
def test_it_keeps_the_promise_for_far_more_requests_than_round_robin(seed: int, shape: ClusterShape) -> None:
    requests = conversations(seed, turns=200, mean_gap_ms=25.0)
    bound, other = run("bound", requests, shape), run("round_robin", requests, shape)
    assert inside_sla(bound) > inside_sla(other) + 20
    assert computed(bound) < computed(other)


@pytest.mark.parametrize("shape", [PAIRS, ClusterShape(prefill=4, decode=0, pool_blocks=400)], ids=["pairs", "both"])
def test_no_policy_does_better_and_the_looser_bound_is_above(shape: ClusterShape) -> None:
    requests = conversations(11, turns=80, mean_gap_ms=25.0)
    bound = run("bound", requests, shape)
    for name in registry.NAMES:
        if not name.startswith("bound"):
            other = run(name, requests, shape)
            assert (inside_sla(other), -computed(other)) <= (inside_sla(bound), -computed(bound)), name
    assert inside_sla(run("bound_chunked", requests, shape)) >= inside_sla(bound)


@pytest.mark.parametrize(("name", "who_is_first"), [("bound", 0), ("bound_chunked", 1)])
def test_a_prompt_that_has_begun_gives_way_to_a_more_urgent_one_only_in_the_looser_bound(
    name: str, who_is_first: int
) -> None:
    long, short = request(0, 0.0, range(30), 1), request(1, 1.0, [900], 1)
    result = run(name, [long, short], ClusterShape(prefill=1, decode=0, pool_blocks=400))
    first_ms = [outcome.first_token_ms for outcome in result.outcomes]
    assert first_ms.index(min(first_ms)) == who_is_first


def test_of_those_that_cannot_all_be_in_time_the_dearest_is_given_up() -> None:
    """Its deadline is met if it goes first, as it has the earliest, and then half of the others are late."""
    runs_already = request(0, 0.0, range(20), 1)
    dear = request(1, 1.0, range(100, 110), 1)
    others = [request(2 + at, 200.0, [200 + at], 1) for at in range(8)]
    result = run("bound", [runs_already, dear, *others], ClusterShape(prefill=1, decode=0, pool_blocks=400))
    late = [
        outcome.request.index
        for outcome in result.outcomes
        if outcome.ttft_ms > SLA.ttft_limit_ms(outcome.request.prompt_tokens)
    ]
    assert late == [1]


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("mean_gap_ms", [8.0, 60.0])
def test_each_block_is_computed_once_for_all(name: str, mean_gap_ms: float) -> None:
    requests = conversations(0, turns=100, mean_gap_ms=mean_gap_ms)
    # Once more each: cached whole by then, so that only the last token is computed.
    again = [replace(one, index=100 + one.index, arrival_ms=one.arrival_ms + 1e6) for one in requests]
    result = run(name, [*requests, *again])
    blocks = {block for one in requests for block in one.blocks}
    assert [outcome.computed_tokens for outcome in result.outcomes[100:]] == [1] * 100
    # A prompt of the first 100 too may find itself cached whole by others when its turn comes.
    assert 0 <= computed(result) - 100 - BLOCK_TOKENS * len(blocks) <= 100
    assert all(outcome.ending is Ending.COMPLETE for outcome in result.outcomes)


def test_two_that_need_the_same_block_at_once_do_not_both_compute_it() -> None:
    result = run("bound", [request(0, 0.0, range(8)), request(1, 0.0, [*range(8), 99])])
    assert sorted(outcome.computed_tokens for outcome in result.outcomes)[0] < 800
    assert computed(result) == 900


def test_a_lone_request_takes_as_long_as_on_an_idle_cluster_with_free_transfers() -> None:
    alone = [request(0, 50.0, range(11), output_tokens=30)]
    shape = ClusterShape(prefill=1, decode=0, pool_blocks=400)
    (bound,), (real,) = run("bound", alone, shape).outcomes, run("round_robin", alone, shape).outcomes
    assert bound.ttft_ms == pytest.approx(HOP_MS + STEP.prefill_ms(new_tokens=1100, chunk_tokens=200))
    assert (bound.ttft_ms, bound.tpot_ms) == pytest.approx((real.ttft_ms, real.tpot_ms))


def test_workers_and_windows_are_those_of_the_simulator() -> None:
    requests = conversations(2)
    bound, real = run("bound", requests), run("round_robin", requests)
    assert set(bound.busy_ms) == set(real.busy_ms)
    assert [outcome.request.index for outcome in bound.outcomes] == list(range(300))
    assert bound.window_ms == real.window_ms
    for windows in bound.busy_ms.values():
        assert all(0.0 <= busy <= bound.window_ms + 1e-6 for busy in windows)
    assert bound.span_ms == pytest.approx(real.span_ms)


@pytest.mark.parametrize("name", BOUNDS)
def test_a_slow_worker_gets_less(name: str) -> None:
    shape = replace(PAIRS, slow={"prefill-0": 4.0})
    result = run(name, conversations(3, mean_gap_ms=120.0), shape)
    assert sum(result.busy_ms["prefill-0"]) < sum(result.busy_ms["prefill-1"])
    assert inside_sla(result) > 290


def test_who_waits_for_an_answer_comes_after_it_and_a_pause() -> None:
    first = request(0, 0.0, range(4), output_tokens=10)
    second = replace(request(1, 0.0, range(6)), after=0, think_ms=500.0)
    one, two = run("bound", [first, second]).outcomes
    assert two.arrived_ms == pytest.approx(one.ended_ms + 500.0)
    assert two.computed_tokens == 200


def test_a_run_that_is_cut_leaves_the_rest_unfinished_and_those_who_had_not_come_out() -> None:
    requests = conversations(4, turns=150, mean_gap_ms=10.0)
    result = UpperBound().run(requests, PAIRS, TIMING, SLA, until_ms=1000.0, block_tokens=BLOCK_TOKENS)
    assert all(outcome.arrived_ms <= 1000.0 for outcome in result.outcomes)
    assert 0 < sum(outcome.ending is Ending.UNFINISHED for outcome in result.outcomes) < len(result.outcomes)
    assert max(sum(windows) for windows in result.busy_ms.values()) <= 1000.0


@pytest.mark.parametrize("name", BOUNDS)
def test_even_workers_that_cannot_keep_any_promise_serve_everybody_in_the_end(name: str) -> None:
    slow = replace(TIMING, step=replace(STEP, per_new_token_ms=2.0, base_ms=60.0))
    for shape in (PAIRS, ClusterShape(prefill=2, decode=0, pool_blocks=400)):
        result = run(name, conversations(5, turns=60), shape, slow)
        assert all(outcome.ending is Ending.COMPLETE for outcome in result.outcomes)


# -- the queue


def new_queue() -> CentralQueue:
    return CentralQueue([(STEP, 400)], block_tokens=BLOCK_TOKENS)


def wait(queue: CentralQueue, index: int, blocks: Sequence[int], deadline_ms: float) -> None:
    one = request(index, 0.0, blocks)
    queue.new_prompt(one, Outcome(one, 0.0), deadline_ms)


def end_part(queue: CentralQueue, part: Part) -> None:
    """The step has ended, and anybody may take what is left of the prompt."""
    queue.done(part)
    if not part.is_last:
        queue.wait(part.prompt)


def test_the_queue_gives_the_earliest_deadline_that_can_be_met_and_late_ones_last() -> None:
    queue = new_queue()
    wait(queue, 0, range(4), 500.0)
    wait(queue, 1, range(10, 14), 300.0)
    wait(queue, 2, range(20, 40), 100.0)  # 2000 tokens take more than 200 ms
    taken = [queue.take(0.0, 400) for _ in range(4)]
    assert [part.prompt.request.index for part in taken if part] == [1, 0, 2]
    assert taken[3] is None


def test_who_needs_a_block_that_is_being_computed_waits_and_then_goes_on_behind_it() -> None:
    queue = new_queue()
    wait(queue, 0, range(6), 1000.0)
    wait(queue, 1, [*range(5), 77], 2000.0)
    first = queue.take(0.0, 400)
    assert first is not None
    assert queue.take(0.0, 400) is None
    assert queue.is_waiting
    end_part(queue, first)
    # Blocks 0 to 3 are there for both; request 0 takes 4 and 5, so the other one waits again, for block 4.
    second = queue.take(1.0, 400)
    assert second is not None
    assert (second.prompt.request.index, second.tokens, second.is_last) == (0, 200, True)
    assert queue.take(1.0, 400) is None
    end_part(queue, second)
    last = queue.take(2.0, 400)
    assert last is not None
    assert (last.prompt.request.index, last.tokens, last.end_tokens, last.is_last) == (1, 100, 600, True)


@pytest.mark.parametrize("seed", range(5))
def test_no_token_of_a_block_is_taken_twice_however_parts_overlap(seed: int) -> None:
    draws = random.Random(seed)
    queue = new_queue()
    prompts = conversations(seed, turns=80)
    for one in prompts:
        queue.new_prompt(one, Outcome(one, 0.0), draws.uniform(0.0, 5000.0))
    computed_tokens: dict[int, int] = {}
    running: list[Part] = []
    last = 0
    while queue.is_waiting or running:
        part = queue.take(0.0, draws.randint(1, 400))
        if part is not None and draws.random() < 0.2:
            queue.put_back(part)
        elif part is not None:
            running.append(part)
        if running and (part is None or len(running) > 6):
            done = running.pop(draws.randrange(len(running)))
            before = sum(computed_tokens.get(block, 0) for block, _ in done.blocks)
            assert all(tokens > computed_tokens.get(block, 0) for block, tokens in done.blocks)
            computed_tokens.update(done.blocks)
            grown = sum(tokens for _, tokens in done.blocks) - before
            assert grown == done.tokens or (not done.blocks and done.tokens == 1)
            last += done.is_last
            end_part(queue, done)
    assert last == len(prompts)
    assert computed_tokens == dict.fromkeys({block for one in prompts for block in one.blocks}, BLOCK_TOKENS)


def test_a_part_that_was_put_back_is_as_if_it_had_not_been_taken() -> None:
    queue = new_queue()
    wait(queue, 0, range(6), 1000.0)
    part = queue.take(0.0, 250)
    assert part is not None
    queue.put_back(part)
    again = queue.take(0.0, 150)
    assert again is not None
    assert (again.tokens, again.end_tokens) == (150, 150)
    end_part(queue, again)
    rest = queue.take(0.0, 1000)
    assert rest is not None
    assert (rest.tokens, rest.end_tokens, rest.is_last) == (450, 600, True)


def test_tokens_that_no_block_stands_for_are_computed_by_each_for_itself() -> None:
    result = simulate(
        [TraceRequest(index, 1000.0 * index, 350, 1, (1, 2, 3)) for index in range(3)],
        PAIRS,
        TIMING,
        UpperBound(),
        SLA,
        seed=0,
        block_tokens=BLOCK_TOKENS,
    )
    assert [outcome.computed_tokens for outcome in result.outcomes] == [350, 50, 50]
