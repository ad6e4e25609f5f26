"""A step never takes the processor from what keeps a worker heard: heartbeats, cancels, pulls."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

import pytest
from antiphon_engine import SampledToken, SchedulerConfig, SequenceStep, TimedExecutor, TimedSettings

from tests.support.engine import generate, no_time, started


class PriorityExecutor(TimedExecutor):
    """Notes the priority of the thread that computes, and of a thread that it starts, as OpenMP does."""

    niceness: list[int]

    def execute(self, step: Sequence[SequenceStep]) -> list[SampledToken | None]:
        self.niceness = [niceness_of_this_thread()]
        helper = threading.Thread(target=lambda: self.niceness.append(niceness_of_this_thread()))
        helper.start()
        helper.join()
        return super().execute(step)


def niceness_of_this_thread() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own only on Linux")
def test_compute_threads_come_after_the_rest_of_the_process() -> None:
    before = niceness_of_this_thread()
    executor = PriorityExecutor(TimedSettings(step_ms=no_time, num_blocks=8))
    engine, recorder = started(executor, SchedulerConfig())
    engine.submit(generate("a", [1, 2, 3], max_tokens=1))
    recorder.wait_finished("a")
    engine.close()
    assert niceness_of_this_thread() == before
    own, inherited = executor.niceness
    assert own > before
    assert inherited == own
