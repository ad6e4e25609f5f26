"""Which bytes a rank reads from which: for any two shapes of a model, against a pool that is one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from antiphon_engine.parallel import ModelDims, ParallelShape, kv_part
from antiphon_kvtransfer.plane import KvPart, PeerRank
from antiphon_kvtransfer.ranges import ranges_between, sources_of
from antiphon_kvtransfer.transport import ReadRange
from hypothesis import given
from hypothesis import strategies as st

CELL_BYTES = 3
"""Of one layer of one head."""
BLOCKS = 9


@st.composite
def _models(draw: st.DrawFn) -> tuple[ModelDims, ParallelShape, ParallelShape]:
    dims = ModelDims(layers=draw(st.integers(1, 6)), query_heads=24, kv_heads=draw(st.sampled_from([1, 2, 3, 4, 6])))
    tensor = st.sampled_from([size for size in range(1, 5) if dims.kv_heads % size == 0 or size % dims.kv_heads == 0])
    pipeline = st.integers(1, min(3, dims.layers))
    return dims, *(ParallelShape(draw(tensor), draw(pipeline)) for _ in range(2))


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Remote blocks in runs and out of order; local blocks are never the same twice."""
    count = draw(st.integers(1, BLOCKS))
    remote = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=count, max_size=count))
    if draw(st.booleans()):
        remote = sorted(remote)
    local = draw(st.permutations(range(BLOCKS)))[:count]
    return remote, sorted(local) if draw(st.booleans()) else list(local)


def _ranks(shape: ParallelShape, dims: ModelDims) -> list[PeerRank]:
    parts = [kv_part(shape, dims, rank) for rank in range(shape.ranks)]
    return [PeerRank(rank, part, BLOCKS, part.layers * part.heads * CELL_BYTES, ()) for rank, part in enumerate(parts)]


def _cut(model: np.ndarray, part: KvPart) -> np.ndarray:
    """A rank's pool, [block][byte], of the whole model's [block][head][layer][byte]."""
    own = model[:, part.head_begin : part.head_end, part.layer_begin : part.layer_end]
    return np.ascontiguousarray(own).reshape(BLOCKS, -1)


def _read(pool: np.ndarray, remote: np.ndarray, ranges: Sequence[ReadRange]) -> int:
    flat = pool.reshape(-1)
    for one in ranges:
        flat[one.local_offset_bytes :][: one.length_bytes] = remote.reshape(-1)[one.remote_offset_bytes :][
            : one.length_bytes
        ]
    return sum(one.length_bytes for one in ranges)


@given(_models(), _pairs(), st.integers(0, 2**32 - 1))
def test_every_rank_gets_exactly_its_part_of_every_block(
    model: tuple[ModelDims, ParallelShape, ParallelShape], blocks: tuple[list[int], list[int]], seed: int
) -> None:
    dims, holder_shape, reader_shape = model
    remote_blocks, local_blocks = blocks
    held = np.random.default_rng(seed).integers(1, 255, (BLOCKS, dims.kv_heads, dims.layers, CELL_BYTES), np.uint8)
    expected = np.zeros_like(held)
    expected[local_blocks] = held[remote_blocks]
    for rank in _ranks(reader_shape, dims):
        pool = np.zeros((BLOCKS, rank.block_bytes), np.uint8)
        read_bytes = 0
        for source in sources_of(rank.part, rank.rank, _ranks(holder_shape, dims)):
            ranges = ranges_between(rank.part, source.peer.part, remote_blocks, local_blocks, CELL_BYTES)
            read_bytes += _read(pool, _cut(held, source.peer.part), ranges)
        assert np.array_equal(pool, _cut(expected, rank.part))
        assert read_bytes == len(local_blocks) * rank.block_bytes, "each byte once"


@given(_pairs())
def test_between_equal_parts_a_run_of_neighbouring_blocks_is_one_range(blocks: tuple[list[int], list[int]]) -> None:
    remote, local = blocks
    part = KvPart(2, 5, 1, 3)
    ranges = ranges_between(part, part, remote, local, CELL_BYTES)
    steps = zip(zip(remote, local, strict=True), zip(remote[1:], local[1:], strict=True), strict=False)
    breaks = sum((r + 1, n + 1) != after for (r, n), after in steps)
    assert len(ranges) == breaks + 1


@pytest.mark.parametrize(
    ("local", "remote", "ranges_a_block"),
    [
        (KvPart(0, 4, 0, 2), KvPart(0, 4, 0, 4), 1),
        (KvPart(0, 4, 0, 4), KvPart(0, 4, 2, 4), 1),
        (KvPart(0, 4, 0, 4), KvPart(0, 2, 0, 4), 4),
        (KvPart(0, 2, 0, 4), KvPart(0, 4, 0, 4), 4),
        (KvPart(0, 2, 0, 4), KvPart(0, 4, 0, 1), 1),
        (KvPart(0, 2, 0, 2), KvPart(0, 2, 2, 4), 0),
        (KvPart(0, 2, 0, 2), KvPart(2, 4, 0, 2), 0),
    ],
    ids=[
        "some heads of a wider rank",
        "all heads of a narrower rank",
        "from a stage",
        "into a stage",
        "one head into a stage",
        "other heads",
        "other layers",
    ],
)
def test_within_a_block_heads_join_where_the_layers_are_the_same(
    local: KvPart, remote: KvPart, ranges_a_block: int
) -> None:
    assert len(ranges_between(local, remote, [0, 3], [4, 1], 64)) == 2 * ranges_a_block


def test_readers_spread_over_the_copies_of_a_head() -> None:
    dims = ModelDims(layers=2, query_heads=8, kv_heads=2)
    holder = _ranks(ParallelShape(tensor=8), dims)
    read_from = [
        [source.peer.rank for source in sources_of(rank.part, rank.rank, holder)]
        for rank in _ranks(ParallelShape(tensor=4), dims)
    ]
    assert read_from == [[0], [1], [6], [7]]
