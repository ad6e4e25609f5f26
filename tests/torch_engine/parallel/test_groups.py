"""Ranks find each other, and none of them waits for ever for one that is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from antiphon_engine.parallel import ParallelShape
from antiphon_engine.torch_engine.parallel.groups import GroupBroken, Groups, join_groups

from tests.support.rank_set import RankFailed, RankProcess, RankSet, rank_set
from tests.support.torch_engine import Running

TENSOR_2, PIPELINE_2 = ParallelShape(tensor=2), ParallelShape(pipeline=2)


def _sum(process: RankProcess) -> float:
    assert process.groups is not None
    return float(process.groups.all_reduce(torch.ones(3))[0])


def _send(process: RankProcess, times: int) -> None:
    assert process.groups is not None
    for _ in range(times):
        process.groups.send_on(torch.ones(2, 3))


def _receive(process: RankProcess) -> float:
    assert process.groups is not None
    return float(process.groups.receive(2, 3, torch.float32)[0, 0])


@pytest.fixture
def pair() -> Iterator[RankSet]:
    """Two processes that a test may kill."""
    with rank_set(2) as running:
        yield running


def test_a_rank_that_dies_breaks_its_stage_at_once(pair: RankSet, folders: dict[str, Path]) -> None:
    """Long before the deadline, which is later than this test would wait."""
    pair.load(folders["qwen2"], TENSOR_2, timeout_s=3600)
    for rank in (0, 1):
        pair.call(rank, _sum)
    assert [pair.answer(rank) for rank in (0, 1)] == [2.0, 2.0]
    pair.call(0, _sum)
    pair.processes[1].kill()
    with pytest.raises(RankFailed, match=r"GroupBroken: a sum over the stage's ranks failed .*start all ranks again"):
        pair.answer(0)


@pytest.mark.parametrize(("victim", "left", "function", "arguments"), [(1, 0, _send, (3,)), (0, 1, _receive, ())])
def test_a_stage_that_dies_breaks_its_neighbour_at_once(
    victim: int, left: int, function: object, arguments: tuple[int, ...], pair: RankSet, folders: dict[str, Path]
) -> None:
    pair.load(folders["qwen2"], PIPELINE_2, timeout_s=3600)
    pair.call(left, function, *arguments)
    pair.processes[victim].kill()
    with pytest.raises(RankFailed, match=r"GroupBroken: .*stage.*start all ranks again"):
        pair.answer(left)


def test_a_rank_that_hangs_is_given_up_at_the_deadline(pair: RankSet, folders: dict[str, Path]) -> None:
    """The other one is alive and connected, and never comes to the sum or the send."""
    pair.load(folders["qwen2"], TENSOR_2, timeout_s=3600, collective_timeout_s=0.5)
    pair.call(0, _sum)
    with pytest.raises(RankFailed, match="GroupBroken: a sum over the stage's ranks failed"):
        pair.answer(0)
    pair.load(folders["qwen2"], PIPELINE_2, timeout_s=3600, collective_timeout_s=0.5)
    pair.call(0, _send, 2)
    with pytest.raises(RankFailed, match="GroupBroken: the next stage did not take its activations"):
        pair.answer(0)
    pair.load(folders["qwen2"], PIPELINE_2, timeout_s=3600, collective_timeout_s=0.5)
    pair.call(1, _receive)
    with pytest.raises(RankFailed, match="GroupBroken: activations of the stage before did not come"):
        pair.answer(1)


def test_a_step_fails_where_a_rank_is_gone(pair: RankSet, folders: dict[str, Path]) -> None:
    executor = pair.load(folders["qwen2"], TENSOR_2, timeout_s=3600)
    step = [Running([5, 6, 7], [0, 1], 4).next_step("r")]
    assert executor.execute(step)[0] is not None
    pair.processes[1].kill()
    pair.processes[1].join(60)
    pair.call(0, RankProcess.step, executor.batch(step), [])
    with pytest.raises(RankFailed, match="GroupBroken"):
        pair.answer(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_never_comes_ends_joining(rank: int) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    with pytest.raises(GroupBroken, match=rf"rank {rank} could not join the 2 ranks that meet at 127.0.0.1:{port} "):
        join_groups(TENSOR_2, rank, "127.0.0.1", port, 0.5)


def test_a_taken_port_ends_joining() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        with pytest.raises(GroupBroken, match="rank 0 could not join"):
            join_groups(TENSOR_2, 0, "127.0.0.1", held.getsockname()[1], 0.5)


def test_ranks_may_name_the_addresses_where_peers_reach_them() -> None:
    """Two ranks in two threads, each listening at a loopback address of its own."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    sums: dict[int, float] = {}

    def rank(number: int) -> None:
        groups = join_groups(
            TENSOR_2,
            number,
            "127.0.0.1",
            port,
            30,
            own_address=f"127.0.0.{2 + number}",
            listening=listening if number == 0 else None,
        )
        sums[number] = float(groups.all_reduce(torch.tensor([number + 1.0]))[0])
        groups.close()
        groups.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == {0: 3.0, 1: 3.0}


def test_one_rank_needs_nobody() -> None:
    groups: Groups = join_groups(ParallelShape(), 0, "nowhere.invalid", 1, 1.0)
    assert groups.all_reduce(torch.tensor([3.0])).tolist() == [3.0]
    [only] = groups.gather_first(torch.tensor([4.0])) or []
    assert only.tolist() == [4.0]
    groups.close()
