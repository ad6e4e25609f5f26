"""The mirror answers as naive sets would, whatever order news comes in."""

from __future__ import annotations

import random

import pytest
from antiphon_kvtransfer.identity import BlockHash
from antiphon_kvtransfer.mirror import Applied, BlockMirror, Position
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.membership import block

MODEL = "demo"


def naive_leading(chain: list[BlockHash], held: set[BlockHash] | frozenset[BlockHash]) -> int:
    count = 0
    for block_id in chain:
        if block_id not in held:
            break
        count += 1
    return count


def load(mirror: BlockMirror, worker: str, hashes: list[BlockHash], sequence: int = 0, incarnation: str = "i1") -> None:
    mirror.load(MODEL, worker, Position(incarnation, sequence), hashes)


def apply(
    mirror: BlockMirror,
    worker: str,
    previous: int,
    sequence: int,
    stored: list[BlockHash],
    removed: list[BlockHash] | None = None,
    incarnation: str = "i1",
) -> Applied:
    return mirror.apply(
        MODEL,
        worker,
        incarnation=incarnation,
        previous=previous,
        sequence=sequence,
        stored=stored,
        removed=removed or [],
    )


@given(st.lists(st.integers(min_value=0, max_value=40), max_size=70), st.integers(min_value=0, max_value=40))
def test_leading_blocks_as_naive(lengths: list[int], chain_length: int) -> None:
    chain = [block(index) for index in range(chain_length)]
    mirror = BlockMirror()
    for worker, length in enumerate(lengths):
        load(mirror, f"w{worker}", [*(block(index) for index in range(length)), block("other")])
    expected = {f"w{worker}": min(length, chain_length) for worker, length in enumerate(lengths)}
    assert mirror.leading_blocks(MODEL, chain) == {worker: count for worker, count in expected.items() if count}
    assert_groups_say_the_same(mirror, chain)


def assert_groups_say_the_same(mirror: BlockMirror, chain: list[BlockHash]) -> None:
    groups = mirror.leading_groups(MODEL, chain)
    flat = [(worker, length) for length, workers in groups for worker in workers]
    assert len({length for length, _ in groups}) == len(groups)
    assert dict(flat) == mirror.leading_blocks(MODEL, chain)
    assert len(dict(flat)) == len(flat)


class Tree(RuleBasedStateMachine):
    """Workers store and evict (leaf first) blocks of a tree of chains, are reloaded, restart and leave.

    The model is one plain set a worker; the mirror follows, whatever was said twice.
    """

    WORKERS = 5

    def __init__(self) -> None:
        super().__init__()
        self.mirror = BlockMirror()
        self.held: dict[str, set[tuple[int, ...]]] = {}
        self.at: dict[str, tuple[str, int]] = {}
        self.gone: list[BlockHash] = []
        self.mirror.on_last_removed = lambda _, hashes: self.gone.extend(hashes)

    @staticmethod
    def _hash(path: tuple[int, ...]) -> BlockHash:
        return block("".join(map(str, path)))

    def _anywhere(self) -> set[tuple[int, ...]]:
        return set().union(*self.held.values())

    @rule(
        worker=st.integers(0, WORKERS - 1),
        path=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        drop=st.integers(0, 3),
        twice=st.booleans(),
    )
    def change(self, worker: int, path: list[int], drop: int, twice: bool) -> None:
        name = f"w{worker}"
        if name not in self.held:
            return
        held, (incarnation, sequence) = self.held[name], self.at[name]
        before = self._anywhere()
        removed = []
        for _ in range(drop):
            leaves = [p for p in held if not any(o[:-1] == p for o in held)]
            if leaves:
                removed.append(max(leaves))
                held.discard(max(leaves))
        chain = [tuple(path[: end + 1]) for end in range(len(path))]
        # Said twice: blocks that it holds already are stored, and others that it never held are removed, two times.
        stored = [*chain, *chain] if twice else [p for p in chain if p not in held]
        removed = [p for p in removed if p not in chain]
        missing = [(9, worker), *removed] if twice else []
        gone = before - self._anywhere() - set(chain)
        held.update(chain)
        hashes = [self._hash(p) for p in stored], [self._hash(p) for p in [*removed, *missing]]
        self.gone.clear()
        assert apply(self.mirror, name, sequence, sequence + 1, *hashes, incarnation) is Applied.APPLIED
        assert sorted(self.gone) == sorted(map(self._hash, gone))
        assert apply(self.mirror, name, sequence, sequence + 1, *hashes, incarnation) is Applied.STALE
        self.at[name] = (incarnation, sequence + 1)

    @rule(
        worker=st.integers(0, WORKERS - 1),
        incarnation=st.integers(0, 1000),
        paths=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=4),
    )
    def restart(self, worker: int, incarnation: int, paths: list[list[int]]) -> None:
        name = f"w{worker}"
        held = {tuple(path[: end + 1]) for path in paths for end in range(len(path))}
        self.held[name], self.at[name] = held, (str(incarnation), 0)
        load(self.mirror, name, [self._hash(path) for path in held], 0, str(incarnation))

    @rule(worker=st.integers(0, WORKERS - 1))
    def leave(self, worker: int) -> None:
        self.held.pop(f"w{worker}", None)
        self.mirror.forget(MODEL, f"w{worker}")

    @invariant()
    def equal(self) -> None:
        for worker in range(self.WORKERS):
            name = f"w{worker}"
            held = {self._hash(path) for path in self.held.get(name, set())}
            assert self.mirror.contents(MODEL, name) == held
        assert self.mirror.blocks == sum(len(held) for held in self.held.values())
        for path in ((0, 0, 0, 0, 0, 0), (0, 1, 0, 1, 0, 1), (1, 1, 1, 1, 1, 1)):
            chain = [self._hash(path[: end + 1]) for end in range(6)]
            expected = {name: naive_leading(chain, {self._hash(p) for p in held}) for name, held in self.held.items()}
            assert self.mirror.leading_blocks(MODEL, chain) == {name: n for name, n in expected.items() if n}
            assert_groups_say_the_same(self.mirror, chain)


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_gap_stale_and_other_incarnations() -> None:
    """llm-d/llm-d-router#1737 (gaps lost for good) and #2853 (restart in place, sequence from 0)."""
    mirror = BlockMirror()
    assert apply(mirror, "w", 0, 1, [block(1)]) is Applied.GAP
    load(mirror, "w", [block(1)], sequence=5)
    assert apply(mirror, "w", 4, 5, [block(2)]) is Applied.STALE
    assert apply(mirror, "w", 6, 7, [block(2)]) is Applied.GAP
    assert apply(mirror, "w", 5, 6, [block(2)], incarnation="i2") is Applied.GAP
    assert mirror.contents(MODEL, "w") == {block(1)}
    load(mirror, "w", [block(9)], sequence=0, incarnation="i2")
    assert apply(mirror, "w", 5, 6, [block(2)], incarnation="i1") is Applied.GAP
    assert mirror.contents(MODEL, "w") == {block(9)}
    assert mirror.position(MODEL, "w") == Position("i2", 0)


def test_models_do_not_mix() -> None:
    mirror = BlockMirror()
    mirror.load("a", "w", Position("i", 0), [block(1)])
    assert mirror.leading_blocks("b", [block(1)]) == {}
    mirror.forget_model("a")
    assert mirror.leading_blocks("a", [block(1)]) == {}
    assert mirror.blocks == 0


def test_memory_is_bounded_and_what_stays_is_prefix_closed() -> None:
    """vllm-project/production-stack#687: an index that only grows ends the router."""
    mirror = BlockMirror(max_blocks=10)
    load(mirror, "a", [block(index) for index in range(6)])
    load(mirror, "b", [])
    assert apply(mirror, "b", 0, 1, [block(index) for index in range(4)]) is Applied.APPLIED
    assert apply(mirror, "b", 1, 2, [block(4)]) is Applied.APPLIED
    assert mirror.blocks == 10
    assert mirror.contents(MODEL, "b") == {block(index) for index in range(4)}
    # The parent did not fit, so its child does not come in later either.
    assert apply(mirror, "a", 0, 1, [], [block(5), block(4), block(3)]) is Applied.APPLIED
    assert apply(mirror, "b", 2, 3, [block(5)], [block(3)]) is Applied.APPLIED
    assert mirror.contents(MODEL, "b") == {block(index) for index in range(3)}
    assert mirror.incomplete(MODEL) == ("b",)
    load(mirror, "b", [block(index) for index in range(6)], sequence=3)
    assert mirror.incomplete(MODEL) == ()
    assert mirror.leading_blocks(MODEL, [block(index) for index in range(6)]) == {"a": 3, "b": 6}
    load(mirror, "c", [block(index) for index in range(6)])
    assert mirror.contents(MODEL, "c") == frozenset()
    assert mirror.blocks <= 10


def test_slots_are_reused() -> None:
    mirror = BlockMirror()
    for round_number in range(50):
        load(mirror, f"w{round_number}", [block(1)])
        assert mirror.leading_blocks(MODEL, [block(1)]) == {f"w{round_number}": 1}
        mirror.forget(MODEL, f"w{round_number}")
    assert len(mirror._models[MODEL].slots) == 1


class CountingDict(dict[BlockHash, int]):
    looked_up = 0

    def get(self, key: BlockHash, default: int = 0) -> int:  # type: ignore[override]
        self.looked_up += 1
        return super().get(key, default)


@pytest.mark.parametrize("shared", [0, 1, 5, 1000, 2000])
def test_few_look_ups_for_a_thousand_workers(shared: int) -> None:
    """A thousand workers, a chain of 2000 blocks, one shared stretch: counted, not timed."""
    mirror = BlockMirror()
    chain = [block(index) for index in range(2000)]
    rng = random.Random(7)
    for worker in range(1000):
        load(mirror, f"w{worker}", [*chain[: shared if worker < 50 else 0], block(rng.random())])
    model = mirror._models[MODEL]
    model.holders = counting = CountingDict(model.holders)
    found = mirror.leading_blocks(MODEL, chain)
    assert found == ({f"w{worker}": shared for worker in range(50)} if shared else {})
    assert counting.looked_up <= 25


def test_what_a_prefix_costs_to_ask_for_does_not_grow_with_its_holders() -> None:
    """One group for a thousand workers, made once: until one of them leaves."""
    mirror = BlockMirror()
    chain = [block(index) for index in range(64)]
    for worker in range(1000):
        load(mirror, f"w{worker}", chain[: 64 if worker % 2 else 32])
    first, again = (sorted(mirror.leading_groups(MODEL, chain)) for _ in range(2))
    assert [(length, len(workers)) for length, workers in first] == [(32, 500), (64, 500)]
    assert all(one[1] is other[1] for one, other in zip(first, again, strict=True))
    mirror.forget(MODEL, "w1")
    load(mirror, "new", chain[:3])  # In the slot that is free now.
    assert dict(mirror.leading_groups(MODEL, chain))[3] == ("new",)
    assert "w1" not in dict(mirror.leading_groups(MODEL, chain))[64]


@pytest.mark.parametrize("from_length", [0, 300])
def test_a_chain_of_which_everyone_holds_another_length(from_length: int) -> None:
    """Told apart block by block, and rightly so again after some of them went on, evicted, left and came."""
    mirror = BlockMirror()
    chain = [block(index) for index in range(600)]
    lengths = {f"w{worker}": from_length + 1 + worker for worker in range(250)}
    for worker, length in lengths.items():
        load(mirror, worker, chain[:length])
    assert dict(mirror.leading_blocks(MODEL, chain)) == lengths
    draw = random.Random(3)
    for step in range(40):
        worker = draw.choice(list(lengths))
        position = mirror.position(MODEL, worker)
        assert position is not None
        held, now = lengths[worker], draw.randrange(1, 600)
        stored, removed = chain[held:now], chain[now:held]
        assert apply(mirror, worker, position.sequence, position.sequence + 1, stored, removed) is Applied.APPLIED
        lengths[worker] = now
        if step % 10 == 0:
            gone = draw.choice(list(lengths))
            mirror.forget(MODEL, gone)
            lengths[f"new-{step}"] = lengths.pop(gone)  # As many, in the slot that is free now.
            load(mirror, f"new-{step}", chain[: lengths[f"new-{step}"]])
        asked = draw.choice([600, 600, 64, 333])
        assert mirror.leading_blocks(MODEL, chain[:asked]) == {
            worker: min(length, asked) for worker, length in lengths.items()
        }
        assert_groups_say_the_same(mirror, chain[:asked])


def test_a_hole_in_a_set_costs_nobody_else_its_place() -> None:
    """While a set is loaded it may lack a parent for a moment: all others are told rightly, and each worker once."""
    mirror = BlockMirror()
    chain = [block(index) for index in range(200)]
    lengths = {f"w{worker}": 1 + worker for worker in range(200)}
    for worker, length in lengths.items():
        load(mirror, worker, chain[:length])
    for hole in range(1, 200, 7):
        load(mirror, "holed", [*chain[:hole], *chain[hole + 1 :]])
        found = mirror.leading_blocks(MODEL, chain)
        assert {worker: length for worker, length in found.items() if worker != "holed"} == lengths
        assert 1 <= found["holed"] <= 200
        assert_groups_say_the_same(mirror, chain)


def test_blocks_with_the_same_holders_share_one_mask() -> None:
    """A mask over a thousand workers has 160 bytes: one for each block would be most of the index."""
    mirror = BlockMirror()
    blocks = [block(index) for index in range(60)]
    orders = random.Random(5)
    for worker in range(100):
        load(mirror, f"w{worker}", [])
    for worker in orders.sample(range(100), 100):
        for step, start in enumerate(range(0, 60, 20)):
            apply(mirror, f"w{worker}", step, step + 1, blocks[start : start + 20])
    masks = mirror._models[MODEL].holders.values()
    assert len({id(mask) for mask in masks}) == 1


def test_what_is_remembered_of_questions_is_bounded() -> None:
    """Ever new sets of workers are asked for: neither their masks nor their expansions pile up."""
    mirror = BlockMirror()
    draw = random.Random(11)
    for worker in range(300):
        load(mirror, f"w{worker}", [])
    for step in range(200):
        for worker in draw.sample(range(300), 100):
            position = mirror.position(MODEL, f"w{worker}")
            assert position is not None
            apply(mirror, f"w{worker}", position.sequence, position.sequence + 1, [block(step)])
            mirror.leading_groups(MODEL, [block(step)])
    model = mirror._models[MODEL]
    assert len(model._expanded) * 300 < 5_000_000
    assert [len(workers) for _, workers in mirror.leading_groups(MODEL, [block(7)])] == [100]


def test_what_is_remembered_of_walks_is_bounded() -> None:
    """A chain of which everyone holds another length, asked for up to each of its blocks."""
    mirror = BlockMirror()
    chain = [block(index) for index in range(1500)]
    for worker in range(500):
        load(mirror, f"w{worker}", chain[: worker * 3 + 3])
    for asked in range(1, 1501):
        assert len(mirror.leading_groups(MODEL, chain[:asked])) == (asked + 2) // 3
    model = mirror._models[MODEL]
    assert sum(len(masks) for masks, _ in model._walked.values()) * 300 < 5_000_000


def test_a_long_life_costs_no_memory() -> None:
    """The log by which a worker's blocks are found again stays near what it holds, whatever came and went."""
    mirror = BlockMirror()
    load(mirror, "w", [])
    for step in range(500):
        stored = [block(index) for index in range(step * 100, step * 100 + 100)]
        removed = [block(index) for index in range(step * 100 - 100, step * 100)]
        assert apply(mirror, "w", step, step + 1, stored, removed) is Applied.APPLIED
    held = {block(index) for index in range(499 * 100, 500 * 100)}
    assert mirror.contents(MODEL, "w") == held
    assert len(mirror._models[MODEL].workers["w"].holding.log) <= 16 * (2 * len(held) + 1024)
    mirror.forget(MODEL, "w")
    assert mirror.blocks == 0
    assert not mirror._models[MODEL].holders
