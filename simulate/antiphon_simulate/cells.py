"""Runs many simulations: cells of (policy, setting, rate, seed), on processes of their own.

A `Series` is what one policy does with one seed: the rates that were asked for, then, where goodput is searched for,
the rates that the search wants to see. Series run at the same time, a series' cells one after the other. Only figures
come back from a process, not what became of a hundred thousand requests.

The processes belong to `run_all`: they are gone when it returns or raises (also on Ctrl-C), and end by themselves if
the process that started them does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass

from antiphon_simulate.cluster import simulate
from antiphon_simulate.figures import RunFigures, figures
from antiphon_simulate.goodput import GoodputSearch
from antiphon_simulate.policies import registry
from antiphon_simulate.records import ClusterShape, Sla, Timing, TraceRequest
from antiphon_simulate.traces import Trace, TraceFormat
from antiphon_simulate.workload import make_workload, offered_rps

_LOOK_S = 0.2
"""So often it is looked whether somebody wants to stop."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What all cells have in common."""

    trace: Trace
    shape: ClusterShape
    timing: Timing
    sla: Sla
    gateways: int = 1


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy, at its default or at a setting of its own."""

    policy: str
    setting: float | None = None

    @property
    def label(self) -> str:
        return self.policy if self.setting is None else f"{self.policy}={self.setting:g}"


@dataclass(frozen=True, slots=True)
class Cell:
    variant: Variant
    rate_scale: float
    seed: int
    to_the_end: bool = True
    """False: cut when whoever is not served yet is late anyway. Enough to know the share inside the SLA."""


@dataclass(frozen=True, slots=True)
class CellResult:
    cell: Cell
    offered_rps: float
    figures: RunFigures
    took_s: float


def run_cell(plan: Plan, cell: Cell) -> CellResult:
    """Simulate one cell, in this process."""
    began = time.monotonic()
    workload = make_workload(plan.trace, rate_scale=cell.rate_scale, seed=cell.seed)
    result = simulate(
        workload,
        plan.shape,
        plan.timing,
        registry.make(cell.variant.policy, cell.variant.setting),
        plan.sla,
        seed=cell.seed,
        gateways=plan.gateways,
        until_ms=None if cell.to_the_end else _all_late_ms(plan, workload),
    )
    return CellResult(
        cell=cell,
        offered_rps=offered_rps(plan.trace, rate_scale=cell.rate_scale),
        figures=figures(result, plan.timing),
        took_s=time.monotonic() - began,
    )


def _all_late_ms(plan: Plan, workload: Sequence[TraceRequest]) -> float | None:
    """From then on nothing changes the share inside the SLA. None where nobody knows before: in closed loops."""
    if plan.trace.format is TraceFormat.SESSIONS:
        return None
    return 1.0 + max(
        request.arrival_ms
        + plan.sla.ttft_limit_ms(request.prompt_tokens)
        + plan.sla.tpot_ms * (request.output_tokens - 1)
        for request in workload
    )


class Series:
    """The cells of one variant and seed, in order."""

    def __init__(self, variant: Variant, seed: int, rate_scales: Sequence[float], *, search: bool) -> None:
        self._variant, self._seed = variant, seed
        self._ahead = list(rate_scales)
        self._search = GoodputSearch(rate_scales[0]) if search else None

    def next_cell(self) -> Cell | None:
        if self._ahead:
            return Cell(self._variant, self._ahead.pop(0), self._seed)
        scale = self._search.next_scale() if self._search else None
        return None if scale is None else Cell(self._variant, scale, self._seed, to_the_end=False)

    def learn(self, result: CellResult) -> None:
        if self._search is not None:
            self._search.learn(result.cell.rate_scale, result.figures.inside_sla_share)


def run_all(
    plan: Plan, series: Sequence[Series], *, processes: int, progress: Callable[[CellResult], None]
) -> list[CellResult]:
    """All cells of all series, in the order in which they finished; each is told to `progress`."""
    results = []
    run = _one_by_one(plan, series) if processes == 1 else _side_by_side(plan, series, processes)
    with contextlib.closing(run):
        for result in run:
            results.append(result)
            progress(result)
    return results


def _one_by_one(plan: Plan, series: Sequence[Series]) -> Generator[CellResult]:
    for one in series:
        while (cell := one.next_cell()) is not None:
            result = run_cell(plan, cell)
            one.learn(result)
            yield result


def _side_by_side(plan: Plan, series: Sequence[Series], processes: int) -> Generator[CellResult]:
    ours = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        min(processes, len(series)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_process,
        initargs=(plan,),
    )
    try:
        running: dict[Future[CellResult], Series] = {}
        with _interrupts_noted() as interrupted:
            for one in series:
                _submit_next(executor, one, running)
            while running:
                done, _ = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                if interrupted.is_set():
                    raise KeyboardInterrupt
                for future in done:
                    one = running.pop(future)
                    result = future.result()
                    one.learn(result)
                    _submit_next(executor, one, running)
                    yield result
    except BaseException:
        # A cell takes minutes: nobody waits for those that nobody wants any more.
        for process in set(multiprocessing.active_children()) - ours:
            process.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _submit_next(executor: ProcessPoolExecutor, series: Series, running: dict[Future[CellResult], Series]) -> None:
    cell = series.next_cell()
    if cell is not None:
        with _interrupts_held():
            running[executor.submit(_run_here, cell)] = series


@contextlib.contextmanager
def _interrupts_noted() -> Iterator[threading.Event]:
    """Set by Ctrl-C. The exception that Python would raise may come up inside a finalizer, where it is lost."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # no signal comes there
        yield noted
        return
    before = signal.signal(signal.SIGINT, lambda *_: noted.set())
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """A process that is started meanwhile never sees Ctrl-C: that is for this one to handle."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_plan: Plan | None = None
"""In a process of the pool: sent once, as it holds the whole trace."""


def _begin_process(plan: Plan) -> None:
    global _plan
    _plan = plan
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _run_here(cell: Cell) -> CellResult:
    if _plan is None:
        raise RuntimeError("a process of the pool begins with `_begin_process`")
    return run_cell(_plan, cell)
