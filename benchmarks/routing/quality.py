"""Routing's quality on recorded workloads: Antiphon, each baseline and the upper bound, on the simulator.

    python -m benchmarks.routing.quality --traces DIR [--seeds 5] [--processes 2] [--minutes 40]

What is run stands in `study.py`. Each run is appended to `results/runs.jsonl` as it ends; the command goes on with what
is not there yet, so it may be stopped (Ctrl-C, `--minutes`) and started again. Then, or alone with `--tables-only`, it
writes `results/summary.json` and `results/tables.md` (`tables.py`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from antiphon_simulate.goodput import GoodputSearch, Point, goodput

from benchmarks.routing.rows import Cell, Row, read_rows, run
from benchmarks.routing.study import (
    FAMILIES,
    FILES,
    REACH_FOUND,
    ROOMY_BLOCKS,
    SHAPES,
    Best,
    Manner,
    Part,
    Series,
    default_of,
    ends_below,
    studies,
    sweeps,
)
from benchmarks.routing.summary import summary_of
from benchmarks.routing.tables import tables_of

RESULTS = Path(__file__).parent / "results"
GUESS: Mapping[str, float] = {"conversation": 2.2, "synthetic": 2.2, "arxiv": 2.0, "agentic": 2.0}
Reach = Mapping[tuple[str, int], float]
"""(trace, workers) -> rate scale."""
"""Rate scales at which the search for the reach of eight workers begins."""


@dataclass
class Bench:
    """The processes, the file and the time that is left. Owned by `main`."""

    executor: ProcessPoolExecutor
    path: Path
    traces: Path
    commit: str
    until: float
    rows: dict[tuple[object, ...], Row] = field(default_factory=dict)
    processes: int = 2
    ran: int = 0
    begun: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until

    def submit(self, cell: Cell) -> Future[Row]:
        return self.executor.submit(run, cell, self.traces, self.commit)

    def keep(self, row: Row, left: int) -> None:
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        self.rows[row.key] = row
        self.ran += 1
        name = row.policy if row.setting is None else f"{row.policy}={row.setting:g}"
        say(
            f"{time.monotonic() - self.begun:5.0f} s  run {self.ran}, {left} series left: {row.part} {row.trace} "
            f"{row.prefill}+{row.decode} {name} {row.manner} seed {row.seed} x{row.share:g}: "
            f"{100 * row.inside:.2f} % inside, {row.cpu_s:.1f} s"
        )


def run_series(bench: Bench, series: Iterable[Series], reach: Reach) -> None:
    """All of them, as many at once as there are processes, each up to the rate that it fails at."""
    ahead = deque(series)
    running: dict[Future[Row], tuple[Series, int]] = {}
    while ahead or running:
        while ahead and len(running) < bench.processes and not bench.over:
            _next(bench, ahead.popleft(), 0, reach, running)
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            one, at = running.pop(future)
            row = future.result()
            bench.keep(row, len(ahead))
            if row.inside >= ends_below(row.policy, row.seed) and not bench.over:
                _next(bench, one, at + 1, reach, running)


def _next(bench: Bench, one: Series, at: int, reach: Reach, running: dict[Future[Row], tuple[Series, int]]) -> None:
    """Submit the first run of this series, from place `at` on, that the file does not have."""
    while at < len(one.shares):
        cell = Cell(one, one.shares[at], round(reach[one.trace, one.workers] * one.shares[at], 4))
        known = bench.rows.get(cell.key)
        if known is None:
            running[bench.submit(cell)] = one, at
            return
        if known.inside < ends_below(known.policy, known.seed):
            return
        at += 1


def find_reach(bench: Bench) -> Reach:
    """The rate scale up to which the looser bound keeps the promises (seed 0), within a tenth, for each trace and
    number of workers."""
    cases = [(trace, workers) for trace, found_on in REACH_FOUND.items() for workers in found_on]
    searches = {case: GoodputSearch(GUESS[case[0]], tolerance=0.1) for case in cases}
    for case, points in _reached(bench).items():
        for point in points:
            searches[case].learn(point.rate, point.inside_sla_share)
    running: dict[Future[Row], tuple[str, int]] = {}

    def go_on(case: tuple[str, int]) -> None:
        scale = searches[case].next_scale()
        if scale is not None:
            trace, (prefill, decode) = case[0], SHAPES[case[1]]
            one = Series(
                Part.REACH, trace, prefill, decode, ROOMY_BLOCKS, "bound_chunked", None, Manner.DEFAULT, 0, (scale,)
            )
            running[bench.submit(Cell(one, scale, scale))] = case

    for case in cases:
        go_on(case)
    while running:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            case, row = running.pop(future), future.result()
            bench.keep(row, len(running))
            searches[case].learn(row.rate_scale, row.figures.inside_sla_share)
            go_on(case)
    found = {}
    for case, points in _reached(bench).items():
        rate = goodput(points).rps
        if rate is None:
            raise SystemExit(f"{case}: the bound keeps the promises at no rate: choose another timing or SLA")
        found[case] = round(rate, 3)
    for trace in FILES:
        for workers in SHAPES:
            found.setdefault((trace, workers), found[trace, 8] * workers / 8)
    return found


def _reached(bench: Bench) -> dict[tuple[str, int], list[Point]]:
    points: dict[tuple[str, int], list[Point]] = {}
    for row in bench.rows.values():
        if row.part == Part.REACH.value:
            points.setdefault((row.trace, row.workers), []).append(Point(row.rate_scale, row.figures.inside_sla_share))
    return points


def best_of(rows: Iterable[Row]) -> Best:
    """(trace, family) -> the setting with the most requests inside their promises, over the rates of the sweep; a rate
    that was not run, since the one below was hopeless, counts as none."""
    scores: dict[tuple[str, str], dict[tuple[str, float], float]] = {}
    for row in rows:
        if row.part != Part.SWEEP.value:
            continue
        family = next(name for name, policies in FAMILIES.items() if row.policy in policies)
        setting = row.setting if row.setting is not None else default_of(row.policy)
        its = scores.setdefault((row.trace, family), {})
        its[row.policy, setting] = its.get((row.policy, setting), 0.0) + row.inside
    return {key: max(its, key=lambda one: its[one]) for key, its in scores.items()}


def without_twins(series: Iterable[Series]) -> list[Series]:
    """A best setting that is the default is one series, not two."""
    return list(dict.fromkeys(series))


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def _run(given: argparse.Namespace) -> None:
    path = given.results / "runs.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    executor = ProcessPoolExecutor(given.processes, mp_context=multiprocessing.get_context("spawn"))
    bench = Bench(
        executor,
        path,
        given.traces,
        given.commit or _commit(),
        time.monotonic() + 60.0 * given.minutes,
        {row.key: row for row in read_rows(path)},
        given.processes,
    )
    with executor:
        reach = find_reach(bench)
        say(f"reach: {reach}")
        run_series(bench, sweeps(), reach)
        best = best_of(bench.rows.values())
        say(f"best: {best}")
        run_series(bench, without_twins(studies(best, given.seeds)), reach)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", type=Path, required=True, metavar="DIR", help="the folder with the trace files")
    add("--results", type=Path, default=RESULTS, metavar="DIR")
    add("--seeds", type=int, default=5)
    add("--processes", type=int, default=2)
    add("--minutes", type=float, default=600.0, help="begin no run after so long")
    add("--commit", default="", help="what the rows say that they were run at (default: that of the checkout)")
    add("--tables-only", action="store_true")
    given = parser.parse_args()
    if not given.tables_only:
        try:
            _run(given)
        except KeyboardInterrupt:
            say("stopped; the same command goes on")
            raise SystemExit(130) from None
    rows = read_rows(given.results / "runs.jsonl")
    summary = summary_of(rows, best_of(rows))
    (given.results / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
    (given.results / "tables.md").write_text(tables_of(summary))
    say(f"written: {given.results}/summary.json, tables.md")


if __name__ == "__main__":
    main()
