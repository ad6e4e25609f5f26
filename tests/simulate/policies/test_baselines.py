"""Each baseline chooses as its published formula says, worked by hand on workers in known states."""

from __future__ import annotations

from antiphon_policy.routing import WorkerRole
from antiphon_simulate.policies.draws import draws
from antiphon_simulate.policies.dynamo_cost import DynamoCostPolicy, DynamoCreditPolicy
from antiphon_simulate.policies.least_queued import LeastQueuedPolicy
from antiphon_simulate.policies.llm_d import LlmDPolicy
from antiphon_simulate.policies.lmetric import LMetricPolicy
from antiphon_simulate.policies.power_of_two import PowerOfTwoPolicy

from tests.support.known_cluster import KnownCluster, decoder, placed, prompt, worker

BOTH = WorkerRole.BOTH
TEN_BLOCKS = prompt(range(10))


def test_least_queued_takes_the_fewest_requests_on_either_side_and_not_the_fewest_tokens() -> None:
    policy = LeastQueuedPolicy()
    policy.begin(
        KnownCluster(
            worker("p0", queued_requests=3, queued_tokens=10),
            worker("p1", queued_requests=2, queued_tokens=9_000),
            decoder("d0", running=4),
            decoder("d1", running=5),
        )
    )
    placement = placed(policy, TEN_BLOCKS)
    assert (placement.prefill, placement.decode) == ("p1", "d0")


def test_least_queued_counts_what_waits_and_what_runs_on_workers_that_do_both() -> None:
    policy = LeastQueuedPolicy()
    policy.begin(
        KnownCluster(
            worker("w0", BOTH, queued_requests=0, running=6),
            worker("w1", BOTH, queued_requests=4, running=1),
            worker("w2", BOTH, queued_requests=3, running=3),
        )
    )
    placement = placed(policy, TEN_BLOCKS)
    assert (placement.prefill, placement.decode) == (None, "w1")


def test_equal_workers_are_chosen_by_the_draw_and_all_get_their_share() -> None:
    policy = LeastQueuedPolicy()
    policy.begin(KnownCluster(worker("p0"), worker("p1"), worker("p2"), decoder("d0")))
    chosen = [placed(policy, TEN_BLOCKS, draw=at / 300).prefill for at in range(300)]
    assert all(chosen.count(name) > 60 for name in ("p0", "p1", "p2"))


def test_power_of_two_takes_the_less_loaded_of_the_two_workers_drawn() -> None:
    loads = {"p0": 5_000, "p1": 100, "p2": 900, "p3": 40_000}
    policy = PowerOfTwoPolicy()
    policy.begin(KnownCluster(*(worker(name, queued_tokens=tokens) for name, tokens in loads.items()), decoder("d0")))
    names = list(loads)
    for at in range(50):
        draw = at / 50
        numbers = draws(draw)
        first = int(next(numbers) * 4)
        second = (first + 1 + int(next(numbers) * 3)) % 4
        assert first != second
        less = min(names[first], names[second], key=lambda name: loads[name])
        assert placed(policy, TEN_BLOCKS, draw=draw).prefill == less


def test_power_of_two_never_takes_the_most_loaded_of_all_and_does_not_always_take_the_least() -> None:
    policy = PowerOfTwoPolicy()
    policy.begin(
        KnownCluster(
            worker("p0"), decoder("d0", kv_tokens=900), decoder("d1", kv_tokens=10), decoder("d2", kv_tokens=50)
        )
    )
    chosen = {placed(policy, TEN_BLOCKS, draw=at / 100).decode for at in range(100)}
    assert chosen == {"d1", "d2"}


def test_the_same_draw_gives_the_same_choice() -> None:
    def choices() -> list[str]:
        policy = PowerOfTwoPolicy()
        policy.begin(KnownCluster(worker("p0"), *(decoder(f"d{at}") for at in range(8))))
        return [placed(policy, TEN_BLOCKS, draw=at / 40).decode for at in range(40)]

    assert choices() == choices()
    assert len(set(choices())) > 4


def test_lmetric_multiplies_new_prefill_tokens_by_the_batch() -> None:
    # p0: (0 + 1000) x (1 + 1) = 2000; p1, which holds 9 of 10 blocks: (400 + 100) x (2 + 1) = 1500.
    policy = LMetricPolicy()
    cluster = KnownCluster(
        worker("p0", queued_requests=1),
        worker("p1", queued_requests=2, queued_tokens=400),
        decoder("d0", running=7),
        decoder("d1", running=6, kv_tokens=90_000),
        held={"p1": 9},
    )
    policy.begin(cluster)
    placement = placed(policy, TEN_BLOCKS)
    assert (placement.prefill, placement.decode) == ("p1", "d1")
    # One request more there, and (400 + 100) x (3 + 1) = 2000 is no less; two more, and it is more.
    cluster.workers[1].queued_requests = 4
    assert placed(policy, TEN_BLOCKS).prefill == "p0"


def test_lmetric_counts_at_least_the_last_token_of_a_prompt_that_is_held_whole() -> None:
    # Else the product would be 0 however long the batch: w0 1 x 31 = 31, w1 1000 x 1.
    policy = LMetricPolicy()
    cluster = KnownCluster(worker("w0", BOTH, running=30), worker("w1", BOTH), held={"w0": 10})
    policy.begin(cluster)
    assert placed(policy, TEN_BLOCKS).decode == "w0"
    cluster.workers[0].running = 1_000
    assert placed(policy, TEN_BLOCKS).decode == "w1"


def test_dynamo_adds_prefill_and_decode_blocks_where_workers_do_both() -> None:
    # w0 holds 8 of 10 blocks: (300 + 1000) / 100 - 8 = 5 prefill blocks; w1: 10. Decode blocks: 10 new ones on either.
    policy = DynamoCostPolicy()
    cluster = KnownCluster(worker("w0", BOTH, queued_tokens=300), worker("w1", BOTH), held={"w0": 8})
    policy.begin(cluster)
    assert placed(policy, TEN_BLOCKS).decode == "w0"
    # Now its 10 blocks run on w0, and another prompt of 10 blocks costs 5 + 20 there, 10 + 10 on w1.
    other = prompt(range(100, 110), index=1)
    assert placed(policy, other).decode == "w1"


def test_dynamo_counts_blocks_that_running_requests_share_once_and_forgets_those_that_ended() -> None:
    policy = DynamoCostPolicy(0.0)
    policy.begin(KnownCluster(worker("p0"), decoder("d0"), decoder("d1")))
    first = placed(policy, TEN_BLOCKS)
    other_decoder = "d1" if first.decode == "d0" else "d0"
    # The same prompt adds nothing where it runs: 10 blocks there as here, so the draw decides among both; one that
    # shares 9 of its 10 blocks makes 11 there and 10 on the other.
    assert placed(policy, prompt([*range(9), 50], index=1)).decode == other_decoder
    policy.ended(TEN_BLOCKS, first, 1.0)
    # The first worker is empty again: 10 against 20.
    assert placed(policy, prompt(range(200, 210), index=2)).decode == first.decode


def test_dynamos_prefill_side_ignores_decode_blocks_and_its_decode_side_ignores_caches() -> None:
    policy = DynamoCostPolicy()
    policy.begin(
        KnownCluster(
            worker("p0", queued_tokens=500),
            worker("p1", queued_tokens=1_000),
            decoder("d0"),
            decoder("d1"),
            held={"p1": 6, "d0": 10},
        )
    )
    first = placed(policy, TEN_BLOCKS, draw=0.1)
    # p0: 5 + 10 = 15; p1: 10 + 10 - 6 = 14.
    assert first.prefill == "p1"
    # d0 holds the prompt, but if it decodes there already another one goes to the empty worker.
    other_decoder = "d1" if first.decode == "d0" else "d0"
    assert placed(policy, prompt(range(100, 110), index=1)).decode == other_decoder


def test_dynamos_credit_says_how_much_a_cached_block_counts() -> None:
    # p0 idle: 10; p1, behind 12 blocks with 6 of 10 held: 22 - 6 x credit.
    cluster = KnownCluster(worker("p0"), worker("p1", queued_tokens=1_200), decoder("d0"), held={"p1": 6})
    chosen = {}
    for credit in (1.0, 1.9, 2.1):
        policy = DynamoCreditPolicy(credit)
        policy.begin(cluster)
        chosen[credit] = placed(policy, TEN_BLOCKS).prefill
    assert chosen == {1.0: "p0", 1.9: "p0", 2.1: "p1"}


def test_llm_d_weighs_prefix_queue_and_memory_scores() -> None:
    # p0: 3 x 0.5 + 2 x 0.5 + 2 x 0.5 = 3.5; p1: 3 x 0 + 2 x 1 + 2 x 0.9 = 3.8; p2: 3 x 0.9 + 2 x 0 + 2 x 0.2 = 3.1.
    cluster = KnownCluster(
        worker("p0", queued_requests=2, free_blocks=500),
        worker("p1", queued_requests=0, free_blocks=900),
        worker("p2", queued_requests=4, free_blocks=200),
        decoder("d0"),
        held={"p0": 5, "p2": 9},
    )
    policy = LlmDPolicy()
    policy.begin(cluster)
    assert placed(policy, TEN_BLOCKS).prefill == "p1"
    # With 5 for the prefix: 4.5, 3.8, 4.9.
    policy = LlmDPolicy(5.0)
    policy.begin(cluster)
    assert placed(policy, TEN_BLOCKS).prefill == "p2"
