"""A local Ray cluster and gangs of fake ranks in it, for tests; and what must not be left of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil
from antiphon_engine.executor import SampleSpec, SequenceStep
from antiphon_engine.gang import GangExecutor, GangSettings, RayCluster
from antiphon_engine.interface import Sampling
from antiphon_engine.parallel import ParallelShape

from tests.support.fake_rank import MAKER, FakeSettings


class Told:
    """What a start has said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.problems: list[str] = []


def gang_settings(
    tensor: int = 2, pipeline: int = 1, *, fake: FakeSettings | None = None, place_s: float = 30.0, spread: bool = False
) -> GangSettings:
    return GangSettings(
        shape=ParallelShape(tensor, pipeline),
        maker=MAKER,
        maker_settings=(fake or FakeSettings()).packed(),
        spread_stages=spread,
        place_s=place_s,
    )


@contextmanager
def gang(cluster: RayCluster, settings: GangSettings, told: Told | None = None) -> Iterator[GangExecutor]:
    executor = start_gang(cluster, settings, told)
    try:
        yield executor
    finally:
        executor.close()


def start_gang(
    cluster: RayCluster, settings: GangSettings, told: Told | None = None, stop: threading.Event | None = None
) -> GangExecutor:
    told = told or Told()
    return GangExecutor.start(
        settings, cluster, told.lines.append, stop or threading.Event(), problem=told.problems.append
    )


def one_step(
    *tokens: int,
    request_id: str = "r",
    start: int = 0,
    block: int = 1,
    sampling: Sampling | None = None,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> SequenceStep:
    """A sequence whose last token samples."""
    spec = SampleSpec(sampling or Sampling(temperature=0.0), len(output), prompt, output, frozenset())
    return SequenceStep(request_id, tokens, start, [block] * 8, spec)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def until_gone(processes: Sequence[psutil.Process], within_s: float = 60.0) -> None:
    _, alive = psutil.wait_procs(list(processes), timeout=within_s)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], alive


def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.02)
