"""The block pool: reference counts, index, leaf-first eviction, events, integrity."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from antiphon_engine import IntegrityError
from antiphon_engine.pool import NO_BLOCK, BlockPool
from antiphon_kvtransfer.identity import BlockHash, chain_hashes, chain_root

ROOT = chain_root(model="m", revision="r", adapter="", kv_format="f", salt=b"")


def chain(*tokens: int) -> list[BlockHash]:
    """One block a token."""
    return chain_hashes(ROOT, tokens, 1)


def store(pool: BlockPool, hashes: list[BlockHash]) -> list[int]:
    """Refer to a chain: its indexed beginning, and new blocks for the rest."""
    blocks = pool.leading(hashes)
    for block in blocks:
        pool.acquire(block)
    new = pool.allocate(len(hashes) - len(blocks))
    assert new is not None
    blocks += new
    for number in range(len(hashes)):
        blocks[number] = pool.index(blocks[number], hashes[number], blocks[number - 1] if number else NO_BLOCK)
    return blocks


def test_unindexed_blocks_are_free_at_once_and_indexed_ones_stay_cached() -> None:
    pool = BlockPool(4)
    blocks = store(pool, chain(1, 2))
    loose = pool.allocate(1)
    assert loose is not None
    pool.drop([*blocks, *loose])
    assert pool.check({}) == (2, 2, 0)
    assert pool.available_blocks == 4
    assert pool.leading(chain(1, 2, 3)) == blocks


def test_allocate_takes_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) is not None
    assert pool.allocate(2) is None
    assert pool.available_blocks == 1


def test_eviction_is_leaf_first_and_least_recently_used() -> None:
    pool = BlockPool(4)
    old, new = chain(1, 2), chain(8, 9)
    pool.drop(store(pool, old))
    pool.drop(store(pool, new))
    evicted = []
    for _ in range(4):
        assert pool.allocate(1) is not None
        gone = [h for h in (*old, *new) if pool.find(h) is None and h not in evicted]
        evicted += gone
    assert evicted == [old[1], old[0], new[1], new[0]]


def test_use_makes_a_chain_recent() -> None:
    pool = BlockPool(4)
    first, second = chain(1, 2), chain(8, 9)
    pool.drop(store(pool, first))
    pool.drop(store(pool, second))
    pool.drop(store(pool, first))
    pool.allocate(2)
    assert len(pool.leading(first)) == 2
    assert pool.leading(second) == []


def test_a_parent_outlives_its_children_even_if_it_is_older() -> None:
    pool = BlockPool(3)
    trunk = chain(1)
    pool.drop(store(pool, trunk))
    leaf = store(pool, chain(1, 2))
    pool.drop(leaf)
    pool.allocate(2)
    assert len(pool.leading(chain(1, 2))) == 1


def test_the_same_content_is_kept_once() -> None:
    pool = BlockPool(3)
    hashes = chain(1)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert second is not None
    assert pool.index(first[0], hashes[0], NO_BLOCK) == first[0]
    assert pool.index(second[0], hashes[0], NO_BLOCK) == first[0]
    assert pool.check({first[0]: 2}) == (2, 0, 1)


def test_a_retained_block_outlives_its_request() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks
    pool.retain(blocks)
    pool.drop(blocks)
    assert pool.available_blocks == 1
    assert pool.retained_blocks == 1
    pool.release(blocks)
    assert pool.check({}) == (2, 0, 0)
    with pytest.raises(ValueError, match="more often"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="request is gone"):
        pool.retain(blocks)


def test_what_leads_to_a_retained_block_is_not_available() -> None:
    """Its ancestors cannot be evicted before it, so they are not counted as room."""
    pool = BlockPool(3)
    blocks = store(pool, chain(1, 2, 3))
    pool.retain(blocks[1:2])
    pool.drop(blocks)
    assert pool.available_blocks == 1
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [blocks[2]]
    pool.release(blocks[1:2])
    assert pool.available_blocks == 2


def test_events_tell_the_net_change_with_consecutive_sequence() -> None:
    pool = BlockPool(2)
    assert pool.take_change() is None
    pool.drop(store(pool, chain(1, 2)))
    change = pool.take_change()
    assert change is not None
    assert (change.sequence, change.stored, change.removed) == (1, tuple(chain(1, 2)), ())
    pool.drop(store(pool, chain(5)))
    change = pool.take_change()
    assert change is not None
    assert (change.sequence, change.stored, change.removed) == (2, tuple(chain(5)), (chain(1, 2)[1],))
    assert pool.indexed() == (2, frozenset([chain(1)[0], chain(5)[0]]))


def test_evicted_and_stored_again_between_two_events_is_no_change() -> None:
    pool = BlockPool(1)
    pool.drop(store(pool, chain(1)))
    pool.take_change()
    other = pool.allocate(1)
    assert other
    pool.drop(other)
    pool.drop(store(pool, chain(1)))
    assert pool.take_change() is None


def test_integrity_check_finds_a_lost_reference() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks
    with pytest.raises(IntegrityError, match=f"block {blocks[0]} counts 1 references, requests hold 0"):
        pool.check({})


def test_a_copy_of_the_books_is_checked_while_the_pool_goes_on() -> None:
    pool = BlockPool(8)
    blocks = store(pool, chain(1, 2, 3))
    copy = pool.copy()
    pool.drop(blocks)
    store(pool, chain(*range(10, 18)))
    assert copy.check(Counter(blocks)) == (5, 0, 3)
    assert pool.check(Counter(range(8))) == (0, 0, 8)


@pytest.mark.parametrize("seed", range(5))
def test_books_balance_under_random_use(seed: int) -> None:
    """Chains of a small tree come and go in a pool that is too small for all; events mirror the index."""
    rng = random.Random(seed)
    pool = BlockPool(12)
    owned: list[list[int]] = []
    retained: list[int] = []
    mirror: set[BlockHash] = set()
    for _ in range(600):
        action = rng.random()
        if action < 0.4:
            hashes = chain(*(rng.randrange(2) for _ in range(rng.randrange(1, 5))))
            if len(hashes) <= pool.available_blocks - sum(not pool.is_used(b) for b in pool.leading(hashes)):
                owned.append(store(pool, hashes))
        elif action < 0.7 and owned:
            pool.drop(owned.pop(rng.randrange(len(owned))))
        elif action < 0.85 and owned:
            block = rng.choice(rng.choice(owned))
            pool.retain([block])
            retained.append(block)
        elif retained:
            pool.release([retained.pop(rng.randrange(len(retained)))])
        change = pool.take_change()
        if change is not None:
            mirror |= set(change.stored)
            mirror -= set(change.removed)
        assert pool.indexed()[1] == mirror
        free, cached, used = pool.check(Counter(block for blocks in owned for block in blocks))
        assert free + cached + used == 12
    for blocks in owned:
        pool.drop(blocks)
    pool.release(retained)
    assert pool.available_blocks == 12
    assert pool.check({})[2] == 0


def test_empty_blocks_are_those_that_nothing_must_leave() -> None:
    pool = BlockPool(4)
    blocks = store(pool, chain(1, 2))
    pool.drop(blocks)
    assert (pool.available_blocks, pool.empty_blocks) == (4, 2)
    assert pool.allocate(3) is not None
    assert (pool.available_blocks, pool.empty_blocks) == (1, 0)
