"""Which parallel sizes and Ray options a worker takes, before anything starts; how long it waits to live again."""

from __future__ import annotations

from pathlib import Path

import pytest
from antiphon_engine.parallel import ParallelShape
from antiphon_telemetry.exit import ExitCode
from antiphon_worker.errors import WorkerStartError
from antiphon_worker.last_words import leave_last_words
from antiphon_worker.options import WorkerOptions
from antiphon_worker.parallel import checked_shape
from antiphon_worker.ranks import LONGEST_PAUSE_S, pause_s


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (WorkerOptions(tensor_parallel=0), "tensor parallel size 0: it has to be 1 or more"),
        (WorkerOptions(engine="timed", pipeline_parallel=2), "the timed engine computes nothing that pipeline 2 could"),
        (WorkerOptions(tensor_parallel=4, expert_parallel=2), "--expert-parallel 2 with --tensor-parallel 4: experts"),
        (WorkerOptions(ray_head=True), "--ray-head: a replica of one rank needs no Ray"),
        (WorkerOptions(tensor_parallel=2, ray_head=True, ray_join="a:1"), "--ray-head and --ray-join: choose one"),
        (WorkerOptions(tensor_parallel=2, ray_join="head"), "--ray-join head: it has to be HOST:PORT"),
        (WorkerOptions(tensor_parallel=2, ray_address="ray://h:1"), "--ray-address ray://h:1: it has to be HOST:PORT"),
        (WorkerOptions(tensor_parallel=2, ray_token_file="/none"), "--ray-token-file /none: there is no such file"),
        (WorkerOptions(tensor_parallel=2, ray_wait_s=0.0), "--ray-wait-s has to be positive"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(options: WorkerOptions, sentence: str) -> None:
    with pytest.raises(WorkerStartError) as refused:
        checked_shape(options)
    assert sentence in str(refused.value)
    assert refused.value.exit_code is ExitCode.BAD_INPUT


def test_shapes_that_can_be() -> None:
    assert checked_shape(WorkerOptions()) == ParallelShape()
    joining = WorkerOptions(tensor_parallel=2, pipeline_parallel=2, expert_parallel=2, ray_join="[fd00::1]:6380")
    assert checked_shape(joining) == ParallelShape(2, 2, 2)


def test_lives_that_end_soon_are_further_and_further_apart() -> None:
    assert [pause_s(failures, 0.0) for failures in (1, 2, 3, 7, 50)] == [
        1.0,
        2.0,
        4.0,
        LONGEST_PAUSE_S,
        LONGEST_PAUSE_S,
    ]
    assert pause_s(3, 1.0) == 3.0


def test_last_words_are_left_only_where_somebody_looks(tmp_path: Path) -> None:
    leave_last_words("nobody", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "termination-log").touch()
    leave_last_words("GangUnschedulable: no room", tmp_path / "termination-log")
    assert (tmp_path / "termination-log").read_text() == "GangUnschedulable: no room"
