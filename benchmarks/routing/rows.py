"""One run, and the file that keeps it: a JSON object a line, appended when the run has ended.

A study that was stopped reads the file and goes on with what is not in it. `late` tells the late requests of Antiphon
and of the bounds apart, so that a figure can be explained without running it again.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from antiphon_policy.admission import Order
from antiphon_simulate.cluster import simulate
from antiphon_simulate.figures import RunFigures, figures
from antiphon_simulate.ideal import infeasible
from antiphon_simulate.policies import registry
from antiphon_simulate.policies.antiphon import AntiphonPolicy, Variant
from antiphon_simulate.records import ClusterShape, Ending, Outcome, Policy, Schedule, Sla, Timing
from antiphon_simulate.timings import DEFAULT, read_timing
from antiphon_simulate.traces import Trace, read_trace
from antiphon_simulate.workload import make_workload, offered_rps

from benchmarks.routing.study import FILES, LIMIT, Manner, Series

_MOST_LATE = 40
"""Late requests that a row describes."""


class Late(msgspec.Struct, frozen=True):
    """A feasible request that broke its promise."""

    index: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    ttft_limit_ms: float
    tpot_ms: float
    waited_ms: float
    """In the gateway, until it was placed."""
    computed_tokens: int
    pulled_blocks: int
    moved_blocks: int
    local: bool
    """Its prompt was computed by the worker that answered it."""


@dataclass(frozen=True, slots=True)
class Cell:
    series: Series
    share: float
    rate_scale: float

    @property
    def key(self) -> tuple[object, ...]:
        its = self.series
        return (
            its.part.value, its.trace, its.prefill, its.decode, its.pool_blocks, its.policy, its.setting,
            its.manner.value, its.seed, self.share,
        )  # fmt: skip


class Row(msgspec.Struct, frozen=True):
    """What stands in the file."""

    part: str
    trace: str
    prefill: int
    decode: int
    pool_blocks: int
    policy: str
    setting: float | None
    manner: str
    seed: int
    share: float
    """Of the reach."""
    rate_scale: float
    offered_rps: float
    commit: str
    cpu_s: float
    local: int
    """Prompts computed by the worker that answered."""
    waited_p99_ms: float
    late: tuple[Late, ...]
    figures: RunFigures

    @property
    def key(self) -> tuple[object, ...]:
        return (
            self.part, self.trace, self.prefill, self.decode, self.pool_blocks, self.policy, self.setting,
            self.manner, self.seed, self.share,
        )  # fmt: skip

    @property
    def workers(self) -> int:
        return self.prefill + self.decode

    @property
    def inside(self) -> float:
        return self.figures.inside_sla_share or 0.0


def read_rows(path: Path) -> list[Row]:
    """One of each cell; none where there is no file yet. A line that was cut off with its process is left out."""
    if not path.exists():
        return []
    rows: dict[tuple[object, ...], Row] = {}
    for line in path.read_bytes().splitlines():
        try:
            row = msgspec.json.decode(line, type=Row)
        except msgspec.DecodeError:
            continue
        rows[row.key] = row
    return list(rows.values())


@functools.lru_cache(maxsize=len(FILES))
def head_of(traces: Path, name: str) -> Trace:
    return read_trace(traces / FILES[name]).head(LIMIT)


def run(cell: Cell, traces: Path, commit: str) -> Row:
    """Simulate one cell, in this process."""
    gc.collect()
    gc.disable()  # a run makes few cycles and ends soon
    begun = time.process_time()
    series, sla, timing = cell.series, Sla(), read_timing(DEFAULT)
    trace = head_of(traces, series.trace)
    workload = make_workload(trace, rate_scale=cell.rate_scale, seed=series.seed)
    result = simulate(
        workload,
        ClusterShape(series.prefill, series.decode, series.pool_blocks),
        timing,
        _policy(series),
        sla,
        seed=series.seed,
    )
    row = Row(
        part=series.part.value,
        trace=series.trace,
        prefill=series.prefill,
        decode=series.decode,
        pool_blocks=series.pool_blocks,
        policy=series.policy,
        setting=series.setting,
        manner=series.manner.value,
        seed=series.seed,
        share=cell.share,
        rate_scale=cell.rate_scale,
        offered_rps=offered_rps(trace, rate_scale=cell.rate_scale),
        commit=commit,
        cpu_s=time.process_time() - begun,
        local=sum(_is_local(outcome) for outcome in result.outcomes),
        waited_p99_ms=_p99([_waited_ms(outcome) for outcome in result.outcomes]),
        late=_late(result.outcomes, timing, sla) if series.policy in ("antiphon", "bound") else (),
        figures=figures(result, timing),
    )
    gc.enable()
    return row


def _policy(series: Series) -> Policy | Schedule:
    if series.policy != "antiphon" or series.manner is Manner.DEFAULT:
        return registry.make(series.policy, series.setting)
    if series.manner is Manner.ARRIVAL:
        return AntiphonPolicy(Variant(order=Order.ARRIVAL))
    return AntiphonPolicy(Variant(hold=False))


def _late(outcomes: Sequence[Outcome], timing: Timing, sla: Sla) -> tuple[Late, ...]:
    ordered = sorted(outcomes, key=lambda outcome: outcome.request.index)
    hopeless = infeasible([outcome.request for outcome in ordered], timing, sla)
    found = []
    for outcome in ordered:
        request = outcome.request
        limit_ms = sla.ttft_limit_ms(request.prompt_tokens)
        kept = outcome.ttft_ms <= limit_ms and outcome.tpot_ms <= sla.tpot_ms and outcome.ending is Ending.COMPLETE
        if not kept and request.index not in hopeless:
            found.append(
                Late(
                    index=request.index,
                    prompt_tokens=request.prompt_tokens,
                    output_tokens=request.output_tokens,
                    ttft_ms=round(outcome.ttft_ms, 1),
                    ttft_limit_ms=round(limit_ms, 1),
                    tpot_ms=round(outcome.tpot_ms, 2),
                    waited_ms=round(_waited_ms(outcome), 1),
                    computed_tokens=outcome.computed_tokens,
                    pulled_blocks=outcome.pulled_blocks,
                    moved_blocks=outcome.moved_blocks,
                    local=_is_local(outcome),
                )
            )
    return tuple(found[:_MOST_LATE])


def _waited_ms(outcome: Outcome) -> float:
    return max(0.0, outcome.placed_ms - outcome.arrived_ms)


def _is_local(outcome: Outcome) -> bool:
    return outcome.placement is not None and outcome.placement.prefill is None


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0
