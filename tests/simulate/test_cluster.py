"""A simulated cluster: nothing is lost, what the gateway knows is what it could know, and runs repeat."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from antiphon_policy.routing import WorkerRole
from antiphon_simulate.cluster import Cluster, PlacementError, StalledError, WorkloadError, simulate
from antiphon_simulate.gateway import Gateway
from antiphon_simulate.policies.round_robin import RoundRobinPolicy
from antiphon_simulate.records import Arrival, ClusterShape, Ending, Placement, Sla, TraceRequest
from antiphon_simulate.worker import HOP_MS
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.simulated_cluster import (
    BLOCK_TOKENS,
    STEP,
    TIMING,
    Placed,
    on_pair,
    outcomes,
    pair_shape,
    request,
    run,
)

INDEX_DELAY_MS = 20.0
REPORT_DELAY_MS = 2.0


def conversations(count: int, turns: int, gap_ms: float) -> list[TraceRequest]:
    """Each turn's prompt is the last one's and two blocks more; all begin with the same three blocks."""
    return [
        request(
            turn * count + chat,
            (turn * count + chat) * gap_ms,
            (3 + 2 * (turn + 1)) * BLOCK_TOKENS + 5,
            7 + chat,
            [0, 1, 2, *range(1000 * (chat + 1), 1000 * (chat + 1) + 2 * (turn + 1)), 900_000 + turn * count + chat],
        )
        for turn in range(turns)
        for chat in range(count)
    ]


def test_every_request_ends_and_no_more_is_computed_than_was_asked_for() -> None:
    trace = conversations(20, 6, 7.0)
    result = run(trace, RoundRobinPolicy(), ClusterShape(3, 2, pool_blocks=60))
    assert [outcome.request.index for outcome in result.outcomes] == list(range(120))
    for outcome in result.outcomes:
        assert outcome.ending is Ending.COMPLETE
        assert outcome.arrived_ms <= outcome.placed_ms < outcome.first_token_ms < outcome.ended_ms
        assert 1 <= outcome.computed_tokens <= outcome.request.prompt_tokens
    assert result.span_ms == 119 * 7.0


def test_with_room_for_all_and_time_between_them_each_block_is_computed_once_per_worker() -> None:
    trace = conversations(4, 5, 5000.0)
    found = outcomes(trace, on_pair())
    computed = sum(outcome.computed_tokens for outcome in found.values())
    full_blocks = {block for r in trace for block in r.blocks[: r.prompt_tokens // BLOCK_TOKENS]}
    assert computed == len(full_blocks) * BLOCK_TOKENS + len(trace) * 5


def test_round_robin_takes_each_worker_in_turn() -> None:
    result = run([request(n, n * 1.0, 20, 2) for n in range(6)], RoundRobinPolicy(), ClusterShape(2, 3, 100))
    placed = [outcome.placement for outcome in result.outcomes if outcome.placement]
    assert [placement.prefill for placement in placed] == ["prefill-0", "prefill-1"] * 3
    assert [placement.decode for placement in placed] == ["decode-0", "decode-1", "decode-2"] * 2


def test_without_a_decode_pool_all_workers_do_both() -> None:
    cluster = Cluster([], ClusterShape(2, 0, 100), TIMING, RoundRobinPolicy(), Sla())
    assert [state.role for state in cluster.gateways[0].workers] == [WorkerRole.BOTH] * 2
    found = outcomes([request(n, n * 1.0, 40, 6) for n in range(8)], RoundRobinPolicy(), ClusterShape(2, 0, 100))
    assert all(outcome.ending is Ending.COMPLETE and not outcome.moved_blocks for outcome in found.values())


def test_the_same_arguments_give_the_same_run_and_another_seed_other_draws() -> None:
    trace = conversations(10, 4, 11.0)

    def by_draw(arrival: Arrival, policy: Placed) -> Placement:
        return Placement(f"decode-{int(arrival.draw * 2)}", f"prefill-{int(arrival.draw * 2)}")

    def times(seed: int) -> list[tuple[float, float]]:
        result = run(trace, Placed(by_draw), ClusterShape(2, 2, 80), seed=seed)
        return [(outcome.first_token_ms, outcome.ended_ms) for outcome in result.outcomes]

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_a_client_that_waits_for_its_answer_thinks_and_then_asks_again() -> None:
    trace = [
        request(0, 5.0, 100, 10),
        request(1, 0.0, 50, 3, after=0, think_ms=250.0),
        request(2, 90_000.0, 50, 3, after=1, think_ms=250.0),
    ]
    found = outcomes(trace, on_pair())
    assert found[1].arrived_ms == found[0].ended_ms + 250.0
    assert found[2].arrived_ms == 90_000.0


def test_busy_time_falls_into_the_windows_in_which_it_was_spent() -> None:
    result = simulate(
        [request(0, 90.0, 300, 1)],
        pair_shape(),
        TIMING,
        on_pair(),
        Sla(),
        seed=0,
        window_ms=100.0,
        block_tokens=BLOCK_TOKENS,
    )
    (found,) = result.outcomes
    assert result.busy_ms["prefill-0"][0] == pytest.approx(10.0)
    assert sum(result.busy_ms["prefill-0"]) == pytest.approx(found.ttft_ms - HOP_MS)
    assert not any(result.busy_ms["decode-0"])


def test_a_run_that_is_cut_says_what_was_unfinished() -> None:
    trace = [request(0, 0.0, 64, 2), request(1, 1.0, 64, 4000), request(2, 2000.0, 64, 2)]
    result = run(trace, on_pair(), until_ms=1500.0)
    assert [(o.request.index, o.ending) for o in result.outcomes] == [(0, Ending.COMPLETE), (1, Ending.UNFINISHED)]
    assert sum(result.busy_ms["decode-0"]) == pytest.approx(1500.0 - result.outcomes[0].first_token_ms, rel=0.05)


class Watching(Placed):
    """Notes what it knows of the workers each time it places, and of a request's blocks."""

    def __init__(self) -> None:
        super().__init__(lambda arrival, policy: self._look(arrival))
        self.seen: list[dict[str, tuple[int, int, int, int, int]]] = []
        self.leading: list[dict[str, int]] = []

    def _look(self, arrival: Arrival) -> Placement:
        self.seen.append(
            {
                s.worker_id: (s.queued_tokens, s.queued_requests, s.running, s.kv_tokens, s.free_blocks)
                for s in self.cluster.workers
            }
        )
        self.leading.append(dict(self.cluster.leading_blocks(arrival.request)))
        return Placement("decode-0", "prefill-0")


def test_what_was_routed_counts_at_once_and_is_reported_away_as_it_is_done() -> None:
    done_ms = STEP.prefill_ms(new_tokens=256, chunk_tokens=64) + STEP.prefill_ms(new_tokens=64, chunk_tokens=64)
    trace = [
        request(0, 0.0, 256, 1000),
        request(1, 0.0, 64, 1000),
        request(2, 0.0, 64, 1),
        # After the first chunk has been reported, and after all.
        request(3, STEP.prefill_ms(new_tokens=64, chunk_tokens=64) + REPORT_DELAY_MS + 0.1, 64, 1),
        request(4, done_ms * 3, 64, 1),
        request(5, 100_000.0, 64, 1),
    ]
    policy = Watching()
    outcomes(trace, policy)
    prefill = [seen["prefill-0"] for seen in policy.seen]
    decode = [seen["decode-0"] for seen in policy.seen]
    assert prefill[:3] == [(0, 0, 0, 0, 1000), (256, 1, 0, 0, 984), (320, 2, 0, 0, 980)]
    assert decode[:3] == [(0, 0, 0, 0, 1000), (0, 0, 1, 256, 921), (0, 0, 2, 320, 854)]
    assert prefill[3][:2] == (384 - 64, 3)
    assert prefill[4] == (0, 0, 0, 0, 1000)
    assert decode[4][2] == 2
    assert decode[5] == (0, 0, 0, 0, 1000)


def test_the_index_hears_of_blocks_a_while_after_they_were_computed() -> None:
    chunk_ms = STEP.prefill_ms(new_tokens=64, chunk_tokens=64)
    trace = [
        request(0, 0.0, 64, 2, range(4)),
        request(1, chunk_ms + INDEX_DELAY_MS - 0.1, 64, 2, range(4)),
        request(2, chunk_ms + INDEX_DELAY_MS + 0.1, 64, 2, range(4)),
        request(3, 10_000.0, 80, 2, [0, 1, 2, 3, 90]),
    ]
    policy = Watching()
    outcomes(trace, policy)
    assert policy.leading == [{}, {}, {"prefill-0": 4}, {"prefill-0": 4, "decode-0": 4}]


def test_a_block_counts_as_evicted_when_its_last_holder_dropped_it() -> None:
    evicted: list[list[int]] = []

    def choose(arrival: Arrival, policy: Placed) -> Placement:
        evicted.append(list(policy.cluster.evicted()))
        return Placement("decode-0", "prefill-0")

    trace = [
        request(0, 0.0, 64, 20, range(4)),
        # Takes 7 of 10 blocks of the prefill worker, so 3 goes there, and 8 of the decode worker: 3 and 2 go.
        request(1, 5_000.0, 112, 1, range(10, 17)),
        # 2, 1, 0 and the last four of those go on the prefill worker; 1 goes on the decode worker, 0 stays there.
        request(2, 10_000.0, 112, 20, range(20, 27)),
        request(3, 15_000.0, 16, 1, [40]),
    ]
    outcomes(trace, Placed(choose), pair_shape(pool_blocks=10))
    assert evicted[:3] == [[], [], [3]]
    assert sorted(evicted[3]) == [1, 2, 13, 14, 15, 16]


def test_the_end_is_told_to_the_policy_once() -> None:
    policy = on_pair()
    found = outcomes([request(n, n * 3.0, 40, 1 + n) for n in range(5)], policy)
    assert sorted(index for index, _ in policy.ends) == [0, 1, 2, 3, 4]
    for index, told_ms in policy.ends:
        assert told_ms == pytest.approx(found[index].ended_ms - HOP_MS + REPORT_DELAY_MS)


class OneAtATime:
    """Keeps everything back but one request per prefill worker."""

    name = "one_at_a_time"

    def __init__(self) -> None:
        self.waiting: list[TraceRequest] = []
        self.asked = 0

    def begin(self, cluster: object) -> None:
        self.cluster = cluster

    def arrived(self, arrival: Arrival) -> None:
        self.waiting.append(arrival.request)

    def dispatch(self, now_ms: float) -> Iterator[tuple[TraceRequest, Placement]]:
        self.asked += 1
        assert isinstance(self.cluster, Gateway)
        for state in self.cluster.workers:
            if state.role is WorkerRole.PREFILL and not state.queued_requests and self.waiting:
                yield self.waiting.pop(0), Placement("decode-0", state.worker_id)

    def ended(self, request: TraceRequest, placement: Placement, now_ms: float) -> None:
        pass


def test_a_policy_that_keeps_requests_back_is_asked_again_when_a_worker_has_progressed() -> None:
    policy = OneAtATime()
    result = run([request(n, 0.0, 100, 5) for n in range(10)], policy, ClusterShape(2, 1, 500))
    placed = [outcome.placed_ms for outcome in result.outcomes]
    assert placed[:2] == [0.0, 0.0]
    assert len(set(placed[2:])) > 2
    # Only while something waits.
    assert policy.asked < 100


class Nothing(OneAtATime):
    name = "nothing"

    def dispatch(self, now_ms: float) -> Iterator[tuple[TraceRequest, Placement]]:
        return iter(())


def test_a_policy_that_never_places_is_told_so() -> None:
    with pytest.raises(StalledError, match="nothing keeps 2 requests back"):
        run([request(0, 0.0, 10, 1), request(1, 0.0, 10, 1)], Nothing())


@pytest.mark.parametrize(
    "placement", [Placement("prefill-0"), Placement("decode-0", "decode-1"), Placement("decode-0", "prefill-9")]
)
def test_a_placement_on_a_worker_that_cannot_do_it_is_an_error(placement: Placement) -> None:
    with pytest.raises(PlacementError):
        run([request(0, 0.0, 10, 1)], Placed(lambda arrival, policy: placement), ClusterShape(1, 2, 10))


@pytest.mark.parametrize(
    ("trace", "shape", "says"),
    [
        ([request(0, 0.0, 400, 17)], pair_shape(pool_blocks=26), "needs 27 blocks"),
        ([request(0, 0.0, 40, 1), request(0, 0.0, 40, 1)], pair_shape(), "same index"),
        ([request(0, 0.0, 40, 1, after=7)], pair_shape(), "comes after 7"),
        ([request(0, 0.0, 40, 1, [1])], pair_shape(), "1 block ids"),
        ([], pair_shape(slow={"decode-7": 2.0}), "decode-7"),
        ([], ClusterShape(0, 1, 10), "at least"),
    ],
)
def test_a_workload_that_does_not_fit_is_refused(trace: list[TraceRequest], shape: ClusterShape, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        run(trace, on_pair(), shape)


CHATS = st.lists(
    # (gap, which conversation, turns of it, output tokens, draws: prefill, decode, pull from)
    st.tuples(
        st.floats(0.0, 60.0),
        st.integers(0, 5),
        st.integers(0, 6),
        st.integers(1, 40),
        st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 5)),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60)
@given(chats=CHATS, pool_blocks=st.integers(16, 60), aggregated=st.booleans())
def test_whatever_a_policy_chooses_all_requests_end_and_pools_and_mirror_agree(
    chats: list[tuple[float, int, int, int, tuple[int, int, int]]], pool_blocks: int, aggregated: bool
) -> None:
    trace: list[TraceRequest] = []
    now_ms = 0.0
    for index, (gap_ms, chat, turns, output_tokens, _) in enumerate(chats):
        now_ms += gap_ms
        blocks = [0, *range(100 * (chat + 1), 100 * (chat + 1) + 2 * turns)]
        trace.append(request(index, now_ms, len(blocks) * BLOCK_TOKENS - (index % 3), output_tokens, blocks))
    decoders = ["worker-0", "worker-1"] if aggregated else ["decode-0", "decode-1"]
    prefillers = [None] * 3 if aggregated else ["prefill-0", "prefill-1", None]
    names = ["", "", *decoders, *(prefillers[:2] if not aggregated else decoders)]

    def choose(arrival: Arrival, policy: Placed) -> Placement:
        prefill, decode, pull = chats[arrival.request.index][4]
        return Placement(decoders[decode], prefillers[prefill], pull_from=names[pull])

    shape = ClusterShape(2, 0 if aggregated else 2, pool_blocks=pool_blocks, max_running=3)
    # `run` checks pools and mirror.
    result = run(trace, Placed(choose), dataclasses.replace(shape, slow={decoders[1]: 2.5}))
    assert len(result.outcomes) == len(trace)
    for outcome in result.outcomes:
        assert outcome.ending is Ending.COMPLETE
        assert 1 <= outcome.computed_tokens <= outcome.request.prompt_tokens
        assert outcome.first_token_ms <= outcome.ended_ms
