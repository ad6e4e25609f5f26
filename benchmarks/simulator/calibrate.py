"""How far the simulator is from the real system: the same requests on both, timing taken from the real workers.

    python -m benchmarks.simulator.calibrate --rounds 3 --out benchmarks/simulator/results/NAME.json

Each round does the same with each of three houses, started anew:

    torch-split   one prefill and one decode worker, the demo model on the torch engine
    torch-both    one worker that does both
    timed-split   as the first, but its engine waits as a known step model says: what is off here is the model of the
                  system (queues, chunks, transfers, hops), for there is nothing to be learnt about the engine

A load to learn from runs first. The step models that the workers have fitted then are the timing (`before`), and the
workload is sent and simulated with it. With the timed engine the known model is the timing (`known`). To tell what of
the error comes from where, the same is simulated with what the workers have fitted by the end (`after`: the machine may
not be as fast as before), with that scaled until simulated engines are in steps for as long as the real ones were
(`scaled`: fits follow typical steps, and on a disturbed machine the mean is longer), and with that and the prompts
computed where the real house computed them (`placed`: without what the two gateways chose differently).

`timing.py` makes a timing of the simulator of the results.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from antiphon_policy.equals import TypicalStep
from antiphon_policy.latency import StepModel, StepModelFit
from antiphon_simulate.records import ClusterShape, Timing
from antiphon_simulate.setup import slower

from benchmarks.simulator.house import House, WorkerSays, started
from benchmarks.simulator.replay import Answer, ask_all, simulate_all
from benchmarks.simulator.workload import BLOCK_TOKENS, Request, as_trace, make_requests

CHUNK_TOKENS = 512
KV_BLOCKS = 400
DEMO_TOKEN_BYTES = 23_040
TIMED_BLOCK_BYTES = 4096
KNOWN = StepModel(
    base_ms=40.0, per_new_token_ms=1.5, per_token_context_ms=5e-4, per_sequence_ms=4.0, per_kv_token_ms=4e-3
)
LINK_GIGABYTES_PER_S = 3.0
"""Where no link was measured."""
LEARNING = 16
"""Requests of the load to learn from."""
AT_ONCE = (1, 4)
"""So many of them at a time."""
SCALINGS = 4
"""Longer steps are fewer, with more in each, so it takes a few."""
UTILISATION = 0.5
"""Of the busiest worker, by the timing: queues form, and nothing runs full."""


@dataclass(frozen=True)
class Kind:
    name: str
    prefill: int
    decode: int
    timed: bool
    ids: range
    """Token ids of prompts."""

    @property
    def arguments(self) -> list[str]:
        arguments = ["--prefill", str(self.prefill), "--decode", str(self.decode), "--kv-blocks", str(KV_BLOCKS)]
        if self.timed:
            for name in ("base_ms", "per_new_token_ms", "per_token_context_ms", "per_sequence_ms", "per_kv_token_ms"):
                arguments += [f"--timed-{name.replace('_', '-')}", str(getattr(KNOWN, name))]
            arguments += ["--engine", "timed", "--timed-block-bytes", str(TIMED_BLOCK_BYTES)]
        return arguments

    @property
    def shape(self) -> ClusterShape:
        if self.prefill:
            return ClusterShape(self.prefill, self.decode, KV_BLOCKS, max_running=64)
        return ClusterShape(self.decode, 0, KV_BLOCKS, max_running=64)


KINDS = (
    Kind("timed-split", 1, 1, True, range(1, 250)),
    Kind("torch-split", 1, 1, False, range(1000, 40_000)),
    Kind("torch-both", 0, 1, False, range(1000, 40_000)),
)


@dataclass(frozen=True)
class Trial:
    """One house in one round."""

    kind: str
    round: int
    load_average: float
    """Of the machine's last minute, after the workload."""
    gap_ms: float
    """Between two requests in the mean."""
    before: list[WorkerSays]
    after: list[WorkerSays]
    measured: list[Answer]
    scaled: StepModel
    simulated: dict[str, list[Answer]]
    """By where the timing is from."""


@dataclass(frozen=True)
class Results:
    made_at: str
    python: str
    processors: int
    trials: list[Trial]


def _steps() -> Iterator[tuple[str, TypicalStep]]:
    """Steps of the workload's size, each for the role that has them."""
    for tokens in (32, 128, 256, CHUNK_TOKENS):
        for cached in (0, 256, 512):
            yield "prefill", TypicalStep(tokens, tokens * (cached + tokens), 1, cached + tokens)
    for sequences in (1, 2, 4, 8):
        for context in (256, 1024):
            yield "decode", TypicalStep(sequences, sequences * context, sequences, sequences * context)


def joint(workers: Sequence[WorkerSays]) -> StepModel:
    """One step model for all: it says for prompts what those say that compute prompts, and for answers the others.
    (A prefill worker has never seen a step of many sequences, a decode worker hardly one with a long prompt.)"""
    fit = StepModelFit()
    for _ in range(8):
        for role, step in _steps():
            for worker in workers:
                if worker.role in (role, "both"):
                    fit.observe(
                        step.ms(worker.step),
                        new_tokens=step.new_tokens,
                        token_context=step.token_context,
                        sequences=step.sequences,
                        kv_tokens=step.kv_tokens,
                    )
    return fit.model()


def timing_of(step: StepModel, workers: Sequence[WorkerSays], *, timed: bool) -> Timing:
    speeds = [worker.link_gigabytes_per_s for worker in workers if worker.link_gigabytes_per_s > 0.0]
    return Timing(
        step=step,
        chunk_tokens=CHUNK_TOKENS,
        mixed_chunk_tokens=CHUNK_TOKENS,
        block_bytes=TIMED_BLOCK_BYTES if timed else BLOCK_TOKENS * DEMO_TOKEN_BYTES,
        link_gigabytes_per_s=statistics.median(speeds) if speeds else LINK_GIGABYTES_PER_S,
    )


def gap_ms(requests: Sequence[Request], step: StepModel, *, split: bool) -> float:
    """At which the busiest worker is busy for `UTILISATION` of the time."""
    seen: set[int] = set()
    prompts_ms = answers_ms = 0.0
    for request in as_trace(requests, 1.0):
        known = sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
        cached = min(known * BLOCK_TOKENS, request.prompt_tokens - 1)
        prompts_ms += step.prefill_ms(new_tokens=request.prompt_tokens - cached, cached_tokens=cached)
        context = request.prompt_tokens + request.output_tokens // 2
        # Two at once in the mean.
        one_ms = step.step_ms(new_tokens=2, token_context=2 * context, sequences=2, kv_tokens=2 * context) / 2
        answers_ms += request.output_tokens * one_ms
    busiest_ms = max(prompts_ms, answers_ms) if split else prompts_ms + answers_ms
    return busiest_ms / len(requests) / UTILISATION


async def try_one(kind: Kind, number: int, count: int, folder: Path) -> Trial:
    async with started(kind.arguments, folder / f"{kind.name}-{number}.log") as house:
        await _learn(house, kind, number)
        before = await house.workers()
        step = KNOWN if kind.timed else joint(before)
        requests = make_requests(count, seed=1000 * number, ids=kind.ids)
        gap = gap_ms(requests, step, split=kind.prefill > 0)
        measured = await ask_all(house, requests, gap)
        load_average = os.getloadavg()[0]
        after = await house.workers()
    timings = {"known": KNOWN} if kind.timed else {"before": step, "after": joint(after)}
    remote = [answer.remote for answer in measured]
    really_ms = sum(worker.steps_ms for worker in after) - sum(worker.steps_ms for worker in before)
    scaled = timings["known" if kind.timed else "after"]
    for _ in range(SCALINGS):
        timing = timing_of(scaled, before, timed=kind.timed)
        scaled = slower(scaled, really_ms / simulate_all(requests, gap, kind.shape, timing, remote=remote).steps_ms)
    timings["scaled"] = scaled
    simulated = {
        name: simulate_all(requests, gap, kind.shape, timing_of(model, before, timed=kind.timed)).answers
        for name, model in timings.items()
    }
    timing = timing_of(scaled, before, timed=kind.timed)
    simulated["placed"] = simulate_all(requests, gap, kind.shape, timing, remote=remote).answers
    return Trial(kind.name, number, load_average, gap, before, after, measured, scaled, simulated)


async def _learn(house: House, kind: Kind, number: int) -> None:
    """Prompts of all sizes, alone and at once."""
    load = make_requests(LEARNING, seed=1000 * number + 1, ids=kind.ids)
    half = LEARNING // 2
    for part, at_once in zip((load[:half], load[half:]), AT_ONCE, strict=True):
        for begin in range(0, half, at_once):
            await ask_all(house, part[begin : begin + at_once], 0.0)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def p90(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[-1]


def hit_rate(answers: Sequence[Answer]) -> float:
    return sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)


def lines(trial: Trial) -> Iterator[str]:
    """The table's rows: measured, simulated, and how far off."""
    for source, answers in trial.simulated.items():
        cells = [trial.kind, str(trial.round), source, f"{trial.load_average:.0f}"]
        for field in ("ttft_ms", "tpot_ms"):
            real = [getattr(answer, field) for answer in trial.measured]
            simulated = [getattr(answer, field) for answer in answers]
            for figure in (median, p90):
                cells.append(
                    f"{figure(real):.1f} / {figure(simulated):.1f} ({figure(simulated) / figure(real) - 1:+.0%})"
                )
        cells.append(f"{hit_rate(trial.measured):.3f} / {hit_rate(answers):.3f}")
        remote = [sum(answer.remote for answer in side) / len(side) for side in (trial.measured, answers)]
        cells.append(f"{remote[0]:.2f} / {remote[1]:.2f}")
        yield f"| {' | '.join(cells)} |"


HEADER = (
    "| house | round | timing | load average | TTFT p50, ms | TTFT p90, ms | TPOT p50, ms | TPOT p90, ms | hit rate "
    "| prefilled remotely |\n|---|---|---|---|---|---|---|---|---|---|"
)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS], default=[k.name for k in KINDS])
    parser.add_argument("--first-round", type=int, default=1, help="number of the first round: another, other requests")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the raw results")
    options = parser.parse_args()
    trials: list[Trial] = []
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.first_round, options.first_round + options.rounds):
            for kind in KINDS:
                if kind.name in options.kinds:
                    trials.append(await try_one(kind, number, options.requests, Path(folder)))
                    print("\n".join(lines(trials[-1])), flush=True)
                    now = datetime.now(UTC).isoformat(timespec="seconds")
                    results = Results(now, platform.python_version(), os.cpu_count() or 1, trials)
                    options.out.write_bytes(msgspec.json.encode(results) + b"\n")


if __name__ == "__main__":
    asyncio.run(main())
