"""Ranks that stand still or die in the middle of a pull: no block is certain that is not in on all ranks, and no target
block is free while a rank may still write into it.

UCX is kept to its TCP here: its copies between processes of one host go through while the holder stands still.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from antiphon_engine.parallel import ParallelShape
from antiphon_kvtransfer.links import LinkError

from tests.support.block_keeper import REUSED, hash_of
from tests.support.eventually import WAIT_S, eventually
from tests.support.rank_process import RankProcess
from tests.support.ranked_worker import NUM_BLOCKS, RankedWorker, ranked_worker

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed")
both_transports = pytest.mark.parametrize("transport", ["tcp", pytest.param("ucx", marks=needs_nixl)])

CONTENTS = [1, 2, 3, 4, 5]
HASHES = [hash_of(content) for content in CONTENTS]
TARGETS = [10, 11, 12, 4, 2]
TWO = ParallelShape(tensor=2)
STAGES = ParallelShape(pipeline=2)


class Processes:
    """Two ranks of the holder and two of the reader, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = itertools.count()
        self.holder = [self._start(), self._start()]
        self.reader = [self._start(), self._start()]
        for process in (*self.holder, *self.reader):
            process.until_ready()

    def replace_the_dead(self) -> None:
        for ranks in (self.holder, self.reader):
            for number, process in enumerate(ranks):
                if not process.alive:
                    process.close()
                    ranks[number] = self._start()
                    ranks[number].until_ready()

    def close(self) -> None:
        for process in (*self.holder, *self.reader):
            process.close()

    def _start(self) -> RankProcess:
        return RankProcess(self._folder, name=str(next(self._started)), UCX_TLS="tcp")


@pytest.fixture(scope="module")
def all_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with closing(Processes(tmp_path_factory.mktemp("ranks"))) as processes:
        yield processes


@pytest.fixture
def processes(all_processes: Processes) -> Processes:
    all_processes.replace_the_dead()
    return all_processes


@asynccontextmanager
async def _linked(
    processes: Processes, transport: str, folder: Path
) -> AsyncIterator[tuple[RankedWorker, RankedWorker]]:
    """(reader, holder), wired up; each rank of the reader (heads) reads from both of the holder (layers)."""
    async with (
        ranked_worker("holder", STAGES, folder, lambda rank: processes.holder[rank], transport=transport) as holder,
        ranked_worker("reader", TWO, folder, lambda rank: processes.reader[rank], transport=transport) as reader,
    ):
        _store(holder)
        await reader.links.link(holder.peer, WAIT_S)
        yield reader, holder


def _store(holder: RankedWorker) -> None:
    for block, content in enumerate(CONTENTS):
        holder.store(block, content)


async def _pulled(reader: RankedWorker, holder: RankedWorker) -> int:
    link = await reader.links.link(holder.peer, WAIT_S)
    return await link.pull(HASHES, TARGETS, deadline_s=WAIT_S)


def _reuse(worker: RankedWorker) -> list[int]:
    """The engine overwrites every block that nobody keeps."""
    free = worker.keeper.reuse()
    for pool in worker.pools:
        pool[free] = REUSED
    return free


@both_transports
async def test_targets_are_not_free_before_the_read_has_ended_on_all_ranks(
    processes: Processes, tmp_path: Path, transport: str
) -> None:
    """One of the holder's ranks stands still: the pull is given up, and what that rank still sends may land later."""
    async with _linked(processes, transport, tmp_path) as (reader, holder):
        with processes.holder[1].stopped():
            pull = asyncio.create_task(_pulled(reader, holder))
            await eventually(lambda: reader.keeper.kept_blocks() == len(TARGETS))
            pull.cancel()
            await asyncio.wait({pull})
            if transport == "ucx":
                # No word of an end from UCX: the blocks wait for it, and are not given to anybody else.
                assert reader.keeper.kept_blocks() == len(TARGETS)
                assert not set(_reuse(reader)) & set(TARGETS)
            else:
                await eventually(lambda: reader.keeper.kept_blocks() == 0)
        await eventually(lambda: reader.keeper.kept_blocks() == 0 and holder.keeper.kept_blocks() == 0)
        assert set(TARGETS) <= set(_reuse(reader))
        assert await _pulled(reader, holder) == len(CONTENTS)
        assert all(reader.holds(block, content) for block, content in zip(TARGETS, CONTENTS, strict=True))
        elsewhere = set(range(NUM_BLOCKS)) - set(TARGETS)
        assert all((pool[block] == REUSED).all() for pool in reader.pools for block in elsewhere)


@both_transports
async def test_a_rank_of_the_reader_that_dies_fails_the_pull_and_is_named(
    processes: Processes, tmp_path: Path, transport: str
) -> None:
    async with _linked(processes, transport, tmp_path) as (reader, holder):
        with processes.holder[0].stopped():
            pull = asyncio.create_task(_pulled(reader, holder))
            await eventually(lambda: reader.keeper.kept_blocks() == len(TARGETS))
            processes.reader[1].kill()
            with pytest.raises(LinkError, match="rank 1 of this worker is gone"):
                await pull
            (status,) = reader.links.statuses()
            assert not status.up
            assert "rank 1 of this worker is gone" in status.detail
            if transport == "ucx":
                assert reader.keeper.kept_blocks() == len(TARGETS), "rank 0 lives, and its read has not ended"
            with pytest.raises(LinkError, match="rank 1 of this worker is gone"):
                await _pulled(reader, holder)
        await eventually(lambda: reader.keeper.kept_blocks() == 0 and holder.keeper.kept_blocks() == 0)


@both_transports
async def test_a_rank_of_the_holder_that_dies_fails_the_pull(
    processes: Processes, tmp_path: Path, transport: str
) -> None:
    async with _linked(processes, transport, tmp_path) as (reader, holder):
        with processes.holder[1].stopped():
            pull = asyncio.create_task(_pulled(reader, holder))
            await eventually(lambda: reader.keeper.kept_blocks() == len(TARGETS))
            processes.holder[1].kill()
            with pytest.raises(LinkError, match=r"rank [01]: .*holder/i1/1"):
                await pull
        await eventually(lambda: reader.keeper.kept_blocks() == 0 and holder.keeper.kept_blocks() == 0)
