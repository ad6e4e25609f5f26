"""A gang of ranks that compute nothing, placed by a real Ray: steps, their order, and what a lost rank does."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

import psutil
import pytest
from antiphon_engine import BlockEngine, ExecutorLost, SchedulerConfig, SequenceStep, TimedExecutor, TimedSettings
from antiphon_engine.gang import GangExecutor, GangStartError, GangStopped, GangUnschedulable, RayCluster
from antiphon_engine.interface import Sampling
from antiphon_engine.parallel import ParallelShape, kv_part
from antiphon_engine.torch_engine.step_batch import InvalidStep
from antiphon_kvtransfer.offer import TransportOffer

from tests.support.engine import Recorder
from tests.support.fake_rank import DIMS, EXCHANGE_S, FAIL, HANG, LAYER_BYTES, FakeSettings, fake_info, fake_token
from tests.support.gang import Told, descendants, gang, gang_settings, one_step, start_gang, until, until_gone

WAIT_S = 60.0


async def test_steps_come_back_in_order_and_as_the_sampling_rank_has_them(cluster: RayCluster) -> None:
    """One gang for all that a healthy one does: two stages."""
    told = Told()
    with gang(cluster, gang_settings(1, 2, fake=FakeSettings(blocks=(64, 40))), told) as executor:
        assert executor.depth == 2
        assert len(set(executor.pids)) == 2
        assert _listening(cluster) <= {"127.0.0.1", "::ffff:127.0.0.1"}
        # The pool is what the smallest rank has room for; the driver has none of it.
        assert (executor.kv.address, executor.kv.num_blocks) == (0, 40)
        assert executor.kv.block_bytes == fake_info().kv_block_bytes == executor.info.kv_block_bytes
        assert [line.split(" runs ")[0] for line in told.lines if " runs " in line] == [
            f"rank {rank} of pipeline 2" for rank in range(2)
        ]

        penalised = Sampling(seed=3, repetition_penalty=1.2, logprobs=2)
        prompt, output = [5, 6, 7], [8, 9]
        steps = [
            [one_step(11, request_id="plain"), one_step(9, start=4, sampling=penalised, prompt=prompt, output=output)],
            [one_step(13, request_id="later", block=39)],
        ]
        first, second = (executor.begin(step) for step in steps)
        spec = steps[0][1].sample
        assert spec is not None
        assert first.result(WAIT_S)[1] == fake_token(9, 4, 1, spec)
        later = steps[1][0].sample
        assert later is not None
        assert second.result(WAIT_S) == [fake_token(13, 0, 39, later)]
        # A chunk that samples nothing.
        assert executor.execute([SequenceStep("chunk", [1, 2, 3], 0, [1], None)]) == [None]
        assert executor.rank_times.exchange_s == 3 * EXCHANGE_S
        assert executor.rank_times.busy_s > 0

        with pytest.raises(InvalidStep, match="outside the pool of 40 blocks"):
            executor.begin([one_step(1, block=40)]).result(0)
        assert executor.begin([]).result(0) == []

        planes = executor.planes(TransportOffer("w/i", names=("tcp",)))
        for rank, plane in enumerate(planes):
            await plane.start()
            part = kv_part(ParallelShape(1, 2), DIMS, rank)
            assert (plane.rank, plane.part, plane.num_blocks) == (rank, part, 40)
            assert plane.block_bytes == part.layers * part.heads * LAYER_BYTES
            assert [name for name, _ in plane.endpoints] == ["tcp"]
        for plane in planes:
            await plane.close()
        ranks = [psutil.Process(pid) for pid in executor.pids]
    until_gone(ranks)


@pytest.mark.parametrize("how", ["killed", "fails in a step"])
def test_a_lost_rank_ends_all_steps_at_once_and_all_ranks(cluster: RayCluster, how: str) -> None:
    with gang(cluster, gang_settings(2)) as executor:
        ranks = [psutil.Process(pid) for pid in executor.pids]
        lost: list[ExecutorLost] = []
        executor.when_lost(lost.append)
        hanging = executor.begin([one_step(HANG if how == "killed" else FAIL)])
        if how == "killed":
            os.kill(executor.pids[0], signal.SIGKILL)
        with pytest.raises(ExecutorLost, match=r"the ranks are lost: rank [01] (is gone|failed in step 0)"):
            hanging.result(WAIT_S)
        with pytest.raises(ExecutorLost):
            executor.begin([one_step(1)]).result(0)
        until_gone(ranks)
        until(lambda: len(lost) == 1)


def test_an_engine_with_nothing_to_do_hears_of_a_lost_executor() -> None:
    class Watched(TimedExecutor):
        def when_lost(self, tell: Callable[[ExecutorLost], None]) -> None:
            self.tell = tell

    executor = Watched(TimedSettings(step_ms=lambda *_: 0.0, num_blocks=4))
    engine, recorder = BlockEngine(executor, SchedulerConfig()), Recorder()
    try:
        engine.start(recorder)
        executor.tell(ExecutorLost("rank 1 is gone"))
        recorder.wait(lambda: recorder.failure is not None)
        assert isinstance(recorder.failure, ExecutorLost)
    finally:
        engine.close()


def test_a_rank_that_cannot_load_ends_the_start_with_what_it_said(cluster: RayCluster) -> None:
    assert cluster.node_pid is not None
    with pytest.raises(GangStartError, match="rank 1: ValueError: the disk is gone"):
        start_gang(cluster, gang_settings(2, fake=FakeSettings(fail_to_load="the disk is gone")))
    _until_no_ranks(cluster)


def test_no_room_is_a_sentence_and_a_held_place_is_waited_for(cluster: RayCluster) -> None:
    """The cluster has room for two ranks: never for eight of one stage, and for two only when there is no other."""
    with pytest.raises(
        GangUnschedulable, match=r"stage 0 needs 8 CPU on one node; .* has 2 free of 2: no node is that"
    ):
        start_gang(cluster, gang_settings(8))
    with pytest.raises(
        GangUnschedulable, match=r"stage 1 needs a node of its own with 1 CPU .*the cluster has 1 nodes"
    ):
        start_gang(cluster, gang_settings(1, 2, spread=True))
    told = Told()
    started: list[GangExecutor] = []
    with gang(cluster, gang_settings(1)):
        second = threading.Thread(target=lambda: started.append(start_gang(cluster, gang_settings(2), told)))
        second.start()
        until(lambda: bool(told.problems))
        assert told.problems[0].startswith(
            "stage 0 needs 2 CPU on one node; the node with most (127.0.0.1, one of 1) has 1"
        )
    second.join(WAIT_S)
    assert told.problems[-1] == ""
    started[0].close()


def test_a_start_that_is_not_wanted_any_more_leaves_nothing(cluster: RayCluster) -> None:
    stop = threading.Event()
    told = Told()
    outcome: list[BaseException] = []

    def start() -> None:
        try:
            start_gang(cluster, gang_settings(2, fake=FakeSettings(load_s=60.0)), told, stop)
        except GangStopped as stopped:
            outcome.append(stopped)

    thread = threading.Thread(target=start)
    thread.start()
    until(lambda: any(" runs " in line for line in told.lines))
    stop.set()
    thread.join(WAIT_S)
    assert len(outcome) == 1
    _until_no_ranks(cluster)


def _listening(cluster: RayCluster) -> set[str]:
    """Addresses that Ray's processes and the ranks listen on."""
    assert cluster.node_pid is not None
    found = set()
    for process in descendants(cluster.node_pid):
        with contextlib.suppress(psutil.Error):
            sockets = process.net_connections("inet")
            found |= {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    assert found
    return found


def _until_no_ranks(cluster: RayCluster) -> None:
    assert cluster.node_pid is not None
    node = cluster.node_pid
    until(lambda: not any("RankProcess" in _name(process) for process in descendants(node)))


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
