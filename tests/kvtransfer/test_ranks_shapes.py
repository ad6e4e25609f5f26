"""Pulls between workers of different shapes, over real transports: every rank gets its part of every block, no more."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from antiphon_engine.parallel import ParallelShape

from tests.support.block_keeper import hash_of
from tests.support.eventually import WAIT_S, eventually
from tests.support.rank_process import RankProcess
from tests.support.ranked_worker import NUM_BLOCKS, ranked_worker

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed")

ONE = ParallelShape()
TWO = ParallelShape(tensor=2)
FOUR = ParallelShape(tensor=4)
STAGES = ParallelShape(pipeline=2)
SQUARE = ParallelShape(tensor=2, pipeline=2)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RankProcess]]:
    """Two processes: the holder's ranks live in one, the reader's in the other."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = [RankProcess(folder, name=name) for name in ("holder", "reader")]
    try:
        for process in processes:
            process.until_ready()
        yield processes
    finally:
        for process in processes:
            process.close()


@pytest.mark.parametrize("transport", ["tcp", pytest.param("ucx", marks=needs_nixl)])
@pytest.mark.parametrize(
    ("holder_shape", "reader_shape", "kv_heads"),
    [
        (ONE, ONE, 4),
        (TWO, ONE, 4),
        (ONE, TWO, 4),
        (TWO, FOUR, 2),
        (FOUR, TWO, 2),
        (STAGES, ONE, 4),
        (ONE, STAGES, 4),
        (SQUARE, ONE, 4),
        (SQUARE, ParallelShape(pipeline=3), 4),
    ],
    ids=lambda value: f"{value} KV heads" if isinstance(value, int) else str(value),
)
async def test_every_rank_reads_its_part_from_the_ranks_that_have_it(
    hosts: list[RankProcess],
    tmp_path: Path,
    transport: str,
    holder_shape: ParallelShape,
    reader_shape: ParallelShape,
    kv_heads: int,
) -> None:
    holding, reading = hosts
    of_worker = functools.partial(ranked_worker, folder=tmp_path, kv_heads=kv_heads, transport=transport)
    async with (
        of_worker("holder", holder_shape, process_of=lambda _: holding) as holder,
        of_worker("reader", reader_shape, process_of=lambda _: reading) as reader,
    ):
        sources = [7, 8, 9, 3, 20, 21, 15]
        for content, block in enumerate(sources, start=1):
            holder.store(block, content)
        holder.store_partial("request", 0, 99)
        link = await reader.links.link(holder.peer, WAIT_S)
        assert all(reader.is_empty(block) for block in range(NUM_BLOCKS)), "measuring touched a block"

        targets = [0, 1, 5, 6, 7, 8, 2]
        hashes = [hash_of(content) for content in range(1, 8)]
        assert await link.pull(hashes, targets, deadline_s=WAIT_S) == 7
        assert await link.pull_partial("request", 23, deadline_s=WAIT_S)
        for content, block in zip([*range(1, 8), 99], [*targets, 23], strict=True):
            assert reader.holds(block, content)
        assert all(reader.is_empty(block) for block in range(NUM_BLOCKS) if block not in {*targets, 23})

        (status,) = reader.links.statuses()
        assert status.up
        assert status.gigabytes_per_s > 0
        assert (status.transport, status.detail) == (transport, "")
        await eventually(lambda: holder.keeper.kept_blocks() == 0 and reader.keeper.kept_blocks() == 0)
