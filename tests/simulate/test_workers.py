"""One prefill and one decode worker, or one that does both: times worked out by hand, or step by step."""

from __future__ import annotations

import pytest
from antiphon_policy.latency import StepModel, transfer_ms
from antiphon_simulate.decodes import DecodeBatch
from antiphon_simulate.job import Job
from antiphon_simulate.records import ClusterShape, Outcome, Placement, Timing
from antiphon_simulate.worker import HOP_MS
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.simulated_cluster import (
    BLOCK_TOKENS,
    STEP,
    TIMING,
    Placed,
    StepByStep,
    arrivals_of,
    moved_by,
    on_one,
    on_pair,
    outcomes,
    pair_shape,
    request,
)

ONE = ClusterShape(prefill=1, decode=0, pool_blocks=1000)


def prompt_ms(new_tokens: int, cached_tokens: int = 0) -> float:
    return STEP.prefill_ms(new_tokens=new_tokens, cached_tokens=cached_tokens, chunk_tokens=TIMING.chunk_tokens)


def test_a_request_alone_has_its_first_token_after_its_chunks() -> None:
    found = outcomes([request(0, 100.0, 300, 5)], on_pair())[0]
    assert found.ttft_ms == pytest.approx(prompt_ms(300) + HOP_MS)
    assert found.computed_tokens == 300
    assert found.moved_blocks == 19


def test_its_second_token_waits_for_the_last_chunks_blocks_and_one_step() -> None:
    found = outcomes([request(0, 0.0, 300, 2)], on_pair())[0]
    # Four chunks of 64, whose blocks move while the next one is computed; 44 tokens in 3 blocks are left.
    tail_ms = transfer_ms(3 * TIMING.block_bytes, gigabytes_per_s=1.0)
    step_ms = STEP.step_ms(new_tokens=1, token_context=301, sequences=1, kv_tokens=301)
    assert found.ended_ms - found.first_token_ms == pytest.approx(tail_ms + step_ms)


def test_where_the_link_is_slower_than_the_prefill_the_rest_is_waited_for() -> None:
    timing = Timing(
        step=STEP, chunk_tokens=64, mixed_chunk_tokens=64, block_bytes=100_000_000, link_gigabytes_per_s=1.0
    )
    found = outcomes([request(0, 0.0, 300, 2)], on_pair(), timing=timing)[0]
    first_chunk_ms = STEP.prefill_ms(new_tokens=64, chunk_tokens=64)
    moves_ms = 5 * 0.2 + 19 * 100.0
    step_ms = STEP.step_ms(new_tokens=1, token_context=301, sequences=1, kv_tokens=301)
    assert found.ended_ms - HOP_MS == pytest.approx(first_chunk_ms + moves_ms + step_ms)


def test_a_prompt_waits_for_the_one_before_it() -> None:
    found = outcomes([request(0, 0.0, 256, 1), request(1, 1.0, 128, 1)], on_pair())
    assert found[0].ttft_ms == pytest.approx(prompt_ms(256) + HOP_MS)
    assert found[1].first_token_ms == pytest.approx(prompt_ms(256) + prompt_ms(128) + HOP_MS)


def test_two_prompts_share_a_step_where_the_budget_leaves_room() -> None:
    found = outcomes([request(0, 0.0, 256, 1), request(1, 1.0, 20, 1), request(2, 2.0, 30, 1)], on_pair())
    both_ms = STEP.step_ms(new_tokens=50, token_context=20 * 20 + 30 * 30, sequences=2, kv_tokens=50)
    assert found[1].first_token_ms == pytest.approx(prompt_ms(256) + both_ms + HOP_MS)
    assert found[2].first_token_ms == found[1].first_token_ms


def test_the_second_request_computes_only_what_the_first_left_out() -> None:
    first = request(0, 0.0, 64, 1, range(4))
    second = request(1, 1000.0, 100, 3, range(7))
    found = outcomes([first, second], on_pair())
    assert found[1].computed_tokens == 36
    assert found[1].ttft_ms == pytest.approx(prompt_ms(36, 64) + HOP_MS)
    # The decode worker never had the first one's blocks: its only token came from the prefill worker.
    assert found[1].moved_blocks == 7


def test_a_decode_worker_is_not_sent_what_it_has() -> None:
    found = outcomes([request(0, 0.0, 64, 2, range(4)), request(1, 1000.0, 100, 3, range(7))], on_pair())
    assert (found[0].moved_blocks, found[1].moved_blocks) == (4, 3)


def test_of_a_prompt_that_is_all_there_the_last_token_is_computed() -> None:
    found = outcomes([request(0, 0.0, 64, 2, range(4)), request(1, 1000.0, 64, 2, range(4))], on_pair())
    assert found[1].computed_tokens == 1
    assert found[1].moved_blocks == 0


def test_a_partial_block_is_never_shared() -> None:
    found = outcomes([request(0, 0.0, 60, 2, range(4)), request(1, 1000.0, 60, 2, range(4))], on_pair())
    assert found[1].computed_tokens == 60 - 3 * BLOCK_TOKENS


def test_a_burst_of_siblings_computes_their_common_prefix_once() -> None:
    siblings = [request(n, 0.0, 128 + 16, 2, [*range(8), 100 + n]) for n in range(5)]
    found = outcomes(siblings, on_pair())
    assert sum(outcome.computed_tokens for outcome in found.values()) == 128 + 5 * 16


def test_a_prompt_that_finds_no_room_waits_until_there_is() -> None:
    # Each needs 17 of the decode worker's 20 blocks, so the second one's prompt is not even begun before.
    shape = pair_shape(pool_blocks=20)
    found = outcomes([request(0, 0.0, 256, 2), request(1, 0.0, 256, 2)], on_pair(), shape)
    assert found[1].first_token_ms > found[0].ended_ms - HOP_MS
    assert found[1].computed_tokens == 256


def test_leaves_are_evicted_first_and_roots_are_hit_again() -> None:
    # 20 blocks on the prefill worker: 12 of the first, then 12 others, so 4 leaves of the first are gone.
    trace = [request(0, 0.0, 192, 1, range(12)), request(1, 1000.0, 192, 1), request(2, 2000.0, 192, 1, range(12))]
    found = outcomes(trace, on_pair(), pair_shape(pool_blocks=20))
    assert found[2].computed_tokens == 4 * BLOCK_TOKENS


def test_an_answer_decodes_one_token_a_step_with_a_growing_context() -> None:
    found = outcomes([request(0, 0.0, 100, 50)], on_one(), ONE)[0]
    steps_ms = sum(STEP.step_ms(new_tokens=1, token_context=c, sequences=1, kv_tokens=c) for c in range(101, 150))
    assert found.ended_ms - found.first_token_ms == pytest.approx(steps_ms)
    assert found.tpot_ms == pytest.approx(steps_ms / 49)


def test_a_slow_worker_takes_so_many_times_longer() -> None:
    trace = [request(0, 0.0, 300, 20)]
    usual = outcomes(trace, on_one(), ONE)[0]
    slow = outcomes(trace, on_one(), ClusterShape(1, 0, 1000, slow={"worker-0": 3.0}))[0]
    assert slow.ended_ms - HOP_MS == pytest.approx(3 * (usual.ended_ms - HOP_MS))


def test_no_more_decode_at_once_than_allowed() -> None:
    trace = [request(n, 0.0, 16, 40) for n in range(3)]
    found = outcomes(trace, on_pair(), pair_shape(max_running=1))
    alone_ms = sum(STEP.step_ms(new_tokens=1, token_context=c, sequences=1, kv_tokens=c) for c in range(17, 56))
    assert found[1].ended_ms == pytest.approx(found[0].ended_ms + alone_ms)
    assert found[2].ended_ms == pytest.approx(found[1].ended_ms + alone_ms)


def test_a_prefix_is_pulled_from_a_peer_that_has_it() -> None:
    shape = ClusterShape(prefill=2, decode=1, pool_blocks=1000)
    placements = [
        Placement("decode-0", "prefill-0"),
        Placement("decode-0", "prefill-1", pull_from="prefill-0"),
        Placement("decode-0", "prefill-1", pull_from="prefill-0"),
    ]
    trace = [
        request(0, 0.0, 640, 1, range(40)),
        request(1, 10_000.0, 700, 1, range(44)),
        request(2, 20_000.0, 700, 1, range(500, 544)),
    ]
    found = outcomes(trace, Placed(lambda arrival, _: placements[arrival.request.index]), shape)
    assert (found[1].pulled_blocks, found[1].computed_tokens) == (40, 60)
    assert found[1].ttft_ms == pytest.approx(
        transfer_ms(40 * TIMING.block_bytes, gigabytes_per_s=1.0) + prompt_ms(60, 640) + HOP_MS
    )
    # Nobody has anything of the third: all of it is computed.
    assert (found[2].pulled_blocks, found[2].computed_tokens) == (0, 700)


def test_others_are_computed_while_a_prefix_is_on_its_way() -> None:
    shape = ClusterShape(prefill=2, decode=1, pool_blocks=1000)
    slow_link = Timing(
        step=STEP, chunk_tokens=64, mixed_chunk_tokens=64, block_bytes=100_000_000, link_gigabytes_per_s=1.0
    )
    placements = [
        Placement("decode-0", "prefill-0"),
        Placement("decode-0", "prefill-1", pull_from="prefill-0"),
        Placement("decode-0", "prefill-1"),
    ]
    trace = [
        request(0, 0.0, 640, 1, range(40)),
        request(1, 10_000.0, 700, 1, range(44)),
        request(2, 10_001.0, 64, 1),
    ]
    found = outcomes(trace, Placed(lambda arrival, _: placements[arrival.request.index]), shape, slow_link)
    assert found[2].ttft_ms == pytest.approx(prompt_ms(64) + HOP_MS)


def jobs_of(lengths: list[tuple[int, int]]) -> list[Job]:
    return [
        Job(
            Outcome(request(index, 0.0, prompt, output), 0.0),
            Placement("d"),
            block_tokens=BLOCK_TOKENS,
            prompt_on=None,  # type: ignore[arg-type]
            answer_on=None,  # type: ignore[arg-type]
            pull_from=None,
        )
        for index, (prompt, output) in enumerate(lengths)
    ]


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(2, 400)), min_size=1, max_size=12),
    st.floats(0.0, 1e5),
    st.sampled_from([STEP, StepModel(), StepModel(base_ms=0.3, per_kv_token_ms=0.0)]),
)
def test_the_steps_begun_are_the_least_that_take_so_long(
    lengths: list[tuple[int, int]], elapsed_ms: float, model: StepModel
) -> None:
    batch = DecodeBatch(model)
    for job in jobs_of(lengths):
        batch.join(job)
    steps = batch.steps_begun(elapsed_ms)
    assert batch.steps_ms(steps) >= elapsed_ms
    assert steps == 0 or batch.steps_ms(steps - 1) < elapsed_ms


WORKLOADS = st.lists(
    # (gap, prompt tokens, output tokens); of two that come at once, the first one's step begins without the second
    st.tuples(st.floats(0.01, 200.0), st.integers(1, 300), st.integers(1, 40)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60)
@given(workload=WORKLOADS, max_running=st.integers(1, 6))
def test_a_worker_of_both_roles_does_what_an_engine_does_step_by_step(
    workload: list[tuple[float, int, int]], max_running: int
) -> None:
    trace, now_ms = [], 0.0
    for index, (gap_ms, prompt_tokens, output_tokens) in enumerate(workload):
        now_ms += gap_ms
        trace.append(request(index, now_ms, prompt_tokens, output_tokens))
    found = outcomes(trace, on_one(), ClusterShape(1, 0, pool_blocks=10_000, max_running=max_running))
    engine = StepByStep(STEP, TIMING.chunk_tokens)
    engine.serve(arrivals_of(trace), prompts=True, max_running=max_running)
    for index, outcome in found.items():
        assert outcome.first_token_ms - HOP_MS == pytest.approx(engine.first_ms[index])
        assert outcome.ended_ms - HOP_MS == pytest.approx(engine.ended_ms[index])


@settings(max_examples=60)
@given(workload=WORKLOADS, max_running=st.integers(1, 6))
def test_a_pair_of_workers_does_what_two_engines_do_step_by_step(
    workload: list[tuple[float, int, int]], max_running: int
) -> None:
    trace, now_ms = [], 0.0
    for index, (gap_ms, prompt_tokens, output_tokens) in enumerate(workload):
        now_ms += gap_ms
        trace.append(request(index, now_ms, prompt_tokens, 1 + output_tokens))
    found = outcomes(trace, on_pair(), pair_shape(pool_blocks=10_000, max_running=max_running))
    prefiller, decoder = StepByStep(STEP, TIMING.chunk_tokens), StepByStep(STEP, TIMING.chunk_tokens)
    prefiller.serve([(at_ms, index, prompt, 1) for at_ms, index, prompt, _ in arrivals_of(trace)], prompts=True)
    joins = [
        (at_ms, index, trace[index].prompt_tokens, trace[index].output_tokens)
        for at_ms, index in moved_by(prefiller, trace, TIMING)
    ]
    decoder.serve(joins, prompts=False, max_running=max_running)
    for index, outcome in found.items():
        assert outcome.first_token_ms - HOP_MS == pytest.approx(prefiller.first_ms[index])
        assert outcome.ended_ms - HOP_MS == pytest.approx(decoder.ended_ms[index])
