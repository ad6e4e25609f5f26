"""The pool of a simulated worker: what it holds, what it evicts, and that its books add up."""

from __future__ import annotations

import pytest
from antiphon_simulate.pool import BlockPool, Holding, PoolError
from hypothesis import given
from hypothesis import strategies as st


def filled(pool: BlockPool, *chain: int) -> None:
    """A job that brings this chain, and ends."""
    holding = pool.hold(chain, len(chain))
    assert holding is not None
    holding.fill(len(chain))
    holding.close()


def held(pool: BlockPool, *blocks: int) -> list[int]:
    return [block for block in blocks if block in pool]


def test_a_chain_that_was_brought_is_found_from_its_root_on() -> None:
    pool = BlockPool(10)
    filled(pool, 1, 2, 3)
    assert pool.leading_blocks((1, 2, 3, 4)) == 3
    assert pool.leading_blocks((1, 2, 7)) == 2
    assert pool.leading_blocks((7, 8, 9)) == 0
    assert pool.available_blocks == 10


def test_the_leaf_of_the_least_recently_used_chain_goes_first() -> None:
    pool = BlockPool(6)
    filled(pool, 1, 2, 3)
    filled(pool, 1, 5, 6)
    # The root is shared and was used last by the second chain.
    other = pool.hold((), 2)
    assert held(pool, 1, 2, 3, 5, 6) == [1, 2, 5, 6]
    third = pool.hold((), 2)
    assert held(pool, 1, 2, 5, 6) == [1, 5]
    assert other is not None
    assert third is not None


def test_using_a_chain_again_keeps_it() -> None:
    pool = BlockPool(4)
    filled(pool, 1, 2)
    filled(pool, 3, 4)
    filled(pool, 1, 2)
    assert pool.hold((), 2) is not None
    assert held(pool, 1, 2, 3, 4) == [1, 2]


def test_what_a_job_uses_is_not_evicted_and_who_finds_no_room_takes_nothing() -> None:
    pool = BlockPool(4)
    filled(pool, 1, 2)
    running = pool.hold((1, 2, 3), 3)
    assert running is not None
    assert running.named == 2
    assert pool.available_blocks == 1
    assert pool.hold((8, 9), 2) is None
    assert pool.available_blocks == 1
    running.close()
    assert pool.hold((8, 9), 2) is not None
    assert held(pool, 1, 2) == [1, 2]
    assert pool.hold((), 1) is None or held(pool, 1, 2) == [1]


def test_blocks_that_two_jobs_filled_are_kept_once() -> None:
    pool = BlockPool(10)
    one, two = pool.hold((1, 2), 3), pool.hold((1, 2), 3)
    assert one is not None
    assert two is not None
    one.fill(2)
    assert pool.available_blocks == 4
    two.fill(2)
    assert pool.available_blocks == 6
    one.close()
    pool.check_integrity([(1, 2)])
    assert pool.available_blocks == 7
    two.close()
    pool.check_idle([(1, 2)])


def test_a_job_uses_what_another_has_brought_since_it_began() -> None:
    pool = BlockPool(10)
    late = pool.hold((1, 2, 3), 3)
    assert late is not None
    assert not late.extend()
    filled(pool, 1, 2)
    assert late.extend()
    assert (late.named, late.reserved) == (2, 1)


def test_a_pinned_prefix_stays_until_it_is_given_back() -> None:
    pool = BlockPool(3)
    filled(pool, 1, 2, 3)
    pin = pool.pin((1, 2, 3), 2)
    assert pool.hold((), 2) is None
    pin.close()
    assert pool.hold((), 2) is not None


def test_the_index_hears_of_what_came_and_went_and_not_of_what_did_both() -> None:
    pool = BlockPool(2)
    filled(pool, 1, 2)
    assert pool.take_changes() == ([1, 2], [])
    assert not pool.is_changed
    filled(pool, 3)
    assert pool.take_changes() == ([3], [2])
    filled(pool, 4, 5)
    filled(pool, 1)
    stored, removed = pool.take_changes()
    assert (sorted(stored), sorted(removed)) == ([4], [3])


def test_a_mistake_in_the_books_is_found() -> None:
    pool = BlockPool(2)
    holding = pool.hold((1,), 1)
    assert holding is not None
    with pytest.raises(PoolError, match="nothing runs"):
        pool.check_idle()
    holding.fill(1)
    with pytest.raises(PoolError, match="prefix"):
        pool.check_integrity([(2, 1)])
    pool.reserved_blocks = 2
    with pytest.raises(PoolError, match="2 blocks reserved"):
        pool.check_integrity()


CHAINS = [(1, 2, 3, 4), (1, 2, 5, 6), (1, 7), (8, 9, 10), (8, 11, 12, 13, 14)]


@given(
    capacity=st.integers(3, 14),
    acts=st.lists(st.tuples(st.sampled_from(["begin", "fill", "end"]), st.integers(0, 99), st.integers(0, 4))),
)
def test_in_any_order_of_jobs_what_is_held_is_a_prefix_and_nothing_leaks(
    capacity: int, acts: list[tuple[str, int, int]]
) -> None:
    pool = BlockPool(capacity)
    running: list[Holding] = []
    known: set[int] = set()
    for act, which, more in acts:
        if act == "begin":
            chain = CHAINS[which % len(CHAINS)]
            room = pool.hold(chain, len(chain) + more)
            if room is not None:
                running.append(room)
        elif running:
            job = running[which % len(running)]
            if act == "fill":
                job.extend()
                job.fill(min(len(job.chain), job.named + more))
            else:
                running.remove(job)
                job.close()
        pool.check_integrity(CHAINS)
        stored, removed = pool.take_changes()
        assert not known & set(stored)
        assert known >= set(removed)
        known = (known - set(removed)) | set(stored)
        assert known == {block for chain in CHAINS for block in chain if block in pool}
        for job in running:
            assert all(block in pool for block in job.chain[: job.named])
    for job in running:
        job.close()
    pool.check_idle(CHAINS)
