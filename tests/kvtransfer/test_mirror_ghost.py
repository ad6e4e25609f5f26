"""What evicting a block costs is learnt from what is wanted again."""

from __future__ import annotations

import itertools
import random
import sys

import pytest
from antiphon_kvtransfer.ghost import PRIOR_REUSE, EvictionGhost
from antiphon_kvtransfer.identity import BlockHash
from antiphon_kvtransfer.mirror import BlockMirror, Position

from tests.support.membership import block


def blocks(first: int, count: int) -> list[BlockHash]:
    return [block(index) for index in range(first, first + count)]


def test_prior_until_something_is_known() -> None:
    assert EvictionGhost().reuse == PRIOR_REUSE
    assert EvictionGhost(prior=0.25).reuse == 0.25
    with pytest.raises(ValueError, match="prior"):
        EvictionGhost(prior=1.5)
    with pytest.raises(ValueError, match="max_blocks"):
        EvictionGhost(1)


@pytest.mark.parametrize("true_share", [0.0, 0.1, 0.5, 1.0])
def test_learns_the_share_of_evicted_blocks_that_are_asked_for_again(true_share: float) -> None:
    ghost, rng = EvictionGhost(10_000), random.Random(3)
    for index in range(20_000):
        ghost.evicted([block(index)])
        if rng.random() < true_share:
            assert ghost.asked([block(index)], 0) == 1
    assert ghost.reuse == pytest.approx(true_share, abs=0.02)


def test_follows_a_change_of_traffic() -> None:
    ghost = EvictionGhost(2_000)
    numbers = itertools.count()
    for share in (1.0, 0.0, 1.0):
        for _ in range(10_000):
            gone = [block(next(numbers))]
            ghost.evicted(gone)
            if share:
                ghost.asked(gone, 0)
        assert ghost.reuse == pytest.approx(share, abs=0.04)


def test_counts_evicted_blocks_right_after_the_matched_prefix() -> None:
    ghost = EvictionGhost()
    chain = blocks(0, 10)
    ghost.evicted([chain[6], chain[5], chain[4], chain[9]])
    assert ghost.asked(chain, 3) == 0  # Block 3 was never evicted: computing it anew is nobody's fault.
    assert ghost.asked(chain, 4) == 3  # 7 and 8 were not, so 9 would be computed for them in any case.
    assert ghost.asked(chain, 4) == 0  # Once per eviction.
    ghost.evicted(chain[4:5])
    assert ghost.asked(chain, 4) == 1
    assert ghost.asked(chain, 10) == 0


def test_what_another_gateway_asked_for_counts_when_it_is_stored_and_only_once() -> None:
    ghost = EvictionGhost()
    chain = blocks(0, 8)
    ghost.evicted(chain)
    assert ghost.asked(chain[:5], 0) == 5
    assert ghost.stored(chain) == 3
    assert ghost.stored(chain) == 0
    assert ghost.blocks == 0


def test_wanted_later_than_it_remembers_does_not_count() -> None:
    ghost = EvictionGhost(100)
    ghost.evicted(blocks(0, 1))
    for index in range(1, 200):
        ghost.evicted(blocks(index, 1))
    assert ghost.asked(blocks(0, 1), 0) == 0
    assert ghost.asked(blocks(199, 1), 0) == 1


@pytest.mark.parametrize("at_once", [1, 7, 99, 1_000, 5_000])
def test_memory_is_bounded_however_many_come_at_once(at_once: int) -> None:
    ghost = EvictionGhost(1_000)
    for start in range(0, 10_000, at_once):
        ghost.evicted(blocks(start, at_once))
        assert ghost.blocks <= 1_000
    assert ghost.blocks >= min(500, at_once)
    assert 0 <= ghost.reuse <= 1


def test_bytes_as_stated() -> None:
    """`max_blocks` says what a remembered hash costs: the hash itself and its share of the set."""
    ghost = EvictionGhost(200_000)
    ghost.evicted(blocks(0, 200_000))
    held = sum(sys.getsizeof(generation) for generation in (ghost._younger, ghost._older))
    assert held / ghost.blocks + 64 < 120


def test_share_stays_in_range_when_all_returns_at_once() -> None:
    ghost = EvictionGhost(1_000)
    for start in range(0, 5_000, 500):
        ghost.evicted(blocks(start, 500))
    for _ in range(3):
        ghost.evicted(blocks(0, 500))
        ghost.stored(blocks(0, 500))
    assert 0 <= ghost.reuse <= 1


def test_the_mirror_tells_of_evictions_but_not_of_lost_workers() -> None:
    mirror, gone, stored = BlockMirror(), list[BlockHash](), list[BlockHash]()
    mirror.on_last_removed = lambda model, hashes: gone.extend(hashes)
    mirror.on_stored = lambda model, hashes: stored.extend(hashes)
    chain = blocks(0, 4)
    mirror.load("m", "a", Position("i", 0), chain)
    mirror.load("m", "b", Position("i", 0), chain[:2])
    assert (gone, stored) == ([], [])

    def evict(worker: str, previous: int, removed: list[BlockHash], added: list[BlockHash]) -> None:
        mirror.apply(
            "m",
            worker,
            incarnation="i",
            previous=previous,
            sequence=previous + 1,
            stored=added,
            removed=removed,
        )

    evict("a", 0, [chain[3], chain[2], chain[1]], [])
    assert gone == [chain[3], chain[2]]  # b still holds block 1.
    evict("b", 0, [chain[1], block("never held")], [block("new")])
    assert gone == [chain[3], chain[2], chain[1]]
    assert stored == [block("new")]
    mirror.load("m", "a", Position("i2", 0), [])
    mirror.forget("m", "b")
    mirror.forget_model("m")
    assert len(gone) == 3
