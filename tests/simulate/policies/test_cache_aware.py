"""The cache-aware policy: its three branches, and the tree that it keeps of what it routed."""

from __future__ import annotations

import random

import pytest
from antiphon_simulate.policies.cache_aware import SHRINK_EVERY_MS, CacheAwareBalancePolicy, CacheAwarePolicy
from antiphon_simulate.policies.prefix_tree import PrefixTree

from tests.support.known_cluster import BLOCK_TOKENS, KnownCluster, decoder, placed, prompt, worker


def two_prefillers() -> KnownCluster:
    return KnownCluster(worker("p0"), worker("p1"), decoder("d0", kv_tokens=10), decoder("d1", kv_tokens=900))


def test_a_prompt_sticks_to_the_worker_that_had_more_than_the_threshold_of_it() -> None:
    cluster = two_prefillers()
    policy = CacheAwarePolicy()
    policy.begin(cluster)
    home = placed(policy, prompt(range(10))).prefill
    busy = next(state for state in cluster.workers if state.worker_id == home)
    busy.queued_requests = 50
    # 4 of 10 blocks were sent there: above 0.3. 3 of 10 are not above it: the least loaded worker.
    assert placed(policy, prompt([*range(4), *range(100, 106)], index=1)).prefill == home
    assert placed(policy, prompt([*range(3), *range(200, 207)], index=2)).prefill != home


def test_what_workers_really_hold_does_not_matter_to_it() -> None:
    cluster = two_prefillers()
    cluster.held = {"p0": 10}
    policy = CacheAwarePolicy()
    policy.begin(cluster)
    cluster.workers[0].queued_requests = 1
    assert placed(policy, prompt(range(10))).prefill == "p1"


def test_when_loads_are_uneven_it_takes_the_least_loaded_and_remembers_that() -> None:
    cluster = two_prefillers()
    policy = CacheAwarePolicy()
    policy.begin(cluster)
    home = placed(policy, prompt(range(10))).prefill
    busy, idle = sorted(cluster.workers[:2], key=lambda state: state.worker_id != home)
    # More than 64 apart, and more than 1.5 times as much.
    busy.queued_requests = 65
    assert placed(policy, prompt(range(10), index=1)).prefill == idle.worker_id
    busy.queued_requests = 0
    # The prefix is where it was sent last.
    assert placed(policy, prompt(range(10), index=2)).prefill == idle.worker_id


def test_both_thresholds_must_be_passed_to_count_as_uneven() -> None:
    cluster = two_prefillers()
    policy = CacheAwareBalancePolicy(4)
    policy.begin(cluster)
    home = placed(policy, prompt(range(10))).prefill
    busy, idle = sorted(cluster.workers[:2], key=lambda state: state.worker_id != home)
    busy.queued_requests, idle.queued_requests = 20, 15  # 5 apart, but 1.33 times as much
    assert placed(policy, prompt(range(10), index=1)).prefill == home
    busy.queued_requests, idle.queued_requests = 4, 0  # many times as much, but 4 apart
    assert placed(policy, prompt(range(10), index=2)).prefill == home
    busy.queued_requests = 5
    assert placed(policy, prompt(range(10), index=3)).prefill == idle.worker_id


def test_the_decode_side_is_power_of_two() -> None:
    policy = CacheAwarePolicy()
    policy.begin(two_prefillers())
    assert {placed(policy, prompt(range(10)), draw=at / 20).decode for at in range(20)} == {"d0"}


def test_its_tree_stays_bounded() -> None:
    policy = CacheAwarePolicy(tree_tokens=50 * BLOCK_TOKENS)
    policy.begin(two_prefillers())
    for at in range(400):
        blocks = range(10 * at, 10 * at + 10)
        placed(policy, prompt(blocks, index=at), draw=at / 400, now_ms=at * SHRINK_EVERY_MS / 2)
        # At most what two prompts since the last shrinking brought.
        assert policy.tree.blocks_of("p0") + policy.tree.blocks_of("p1") <= 2 * 50 + 20


def test_the_tree_matches_the_longest_prefix_that_was_sent_anywhere() -> None:
    tree = PrefixTree()
    tree.insert([1, 2, 3, 4], "a")
    tree.insert([1, 2, 7], "b")
    assert tree.match([1, 2, 3, 9]) == (3, "a")
    assert tree.match([1, 2, 8]) == (2, "b")
    assert tree.match([5]) == (0, "")


def test_shrinking_takes_the_leaves_used_longest_ago_and_leaves_other_workers_alone() -> None:
    tree = PrefixTree()
    tree.insert([1, 2, 3], "a")
    tree.insert([1, 2, 4, 5], "a")
    tree.insert([1, 2, 3], "b")
    tree.insert([1, 6], "a")
    tree.shrink(4)
    assert (tree.blocks_of("a"), tree.blocks_of("b")) == (4, 3)
    # Of a's six blocks 3 was used longest ago, then 5 (a leaf, and 4 then is one).
    assert tree.match([1, 2, 4, 5]) == (3, "a")
    assert tree.match([1, 6]) == (2, "a")
    assert tree.match([1, 2, 3]) == (3, "b")


@pytest.mark.parametrize("seed", range(5))
def test_what_the_tree_keeps_for_a_worker_is_always_closed_towards_the_root(seed: int) -> None:
    draws = random.Random(seed)
    tree = PrefixTree()
    paths: list[list[int]] = [[0]]
    for fresh in range(1, 200):
        parent = draws.choice(paths)
        paths.append([*parent[: draws.randint(1, len(parent))], fresh])
        tree.insert(paths[-1], draws.choice("ab"))
        if draws.random() < 0.2:
            tree.shrink(draws.randint(5, 30))
            assert max(tree.blocks_of("a"), tree.blocks_of("b")) <= 30
    tree.shrink(0)
    assert [tree.match(path) for path in paths] == [(0, "")] * len(paths)
