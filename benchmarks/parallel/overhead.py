"""What a step costs beside the model and the exchanges between ranks, where ranks are processes of their own.

A whole engine (`BlockEngine`: planning, packing, taking in results) over a real gang that Ray placed, with tensor and
pipeline ranks and with one rank; beside it the same rank in the engine's own process. All have one thread a rank, so
that the compute of a rank is the same. Decodes of 1, 8 and 16 sequences, and a long prompt in chunks.

Of each step, at the driver, with what the sampling rank says of itself:

    engine     from the end of the step before to `begin`: waking the engine's thread, results taken in, the next plan
    send       `begin`: packing, and writing to the ranks' sockets
    way        the rest: to the rank and its thread, back to the driver and its thread
    exchange   sums and activations between ranks, waiting for a slower rank included
    model      the rest of what the rank was busy for

engine + send + way is the overhead. With two steps in flight (pipeline) parts of it are hidden behind the other step:
there overhead is what the last rank was not busy of the time from one step's end to the next one's, and what the first
rank lacked shows as exchange. Every case meets every executor in turn in each round.

    python -m benchmarks.parallel.overhead --rounds 5
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
from antiphon_engine import BlockEngine, EngineRequest, Executor, Sampling, SchedulerConfig, StepResult
from antiphon_engine.gang import ClusterSettings, RayCluster
from antiphon_engine.parallel import ParallelShape

from benchmarks.parallel.parts import MODELS, InProcess, Noting, Timed, start_gang, write_model
from tests.support.engine import Recorder

SHAPES = {
    "gang of 1": ParallelShape(),
    "tensor 2": ParallelShape(tensor=2),
    "pipeline 2": ParallelShape(pipeline=2),
}
IN_PROCESS = "in process"
PROMPT_TOKENS = 40
CHUNK_TOKENS = 64
LONG_PROMPT_TOKENS = 512
WAIT_S = 120.0
_AT_ONCE_S = 50e-6


@dataclass(frozen=True, slots=True)
class Case:
    sequences: int
    prompt_tokens: int
    steps: int

    @property
    def label(self) -> str:
        return f"{self.sequences} decodes" if self.steps > 1 else f"chunks of {CHUNK_TOKENS}"


CASES = (
    Case(1, PROMPT_TOKENS, 40),
    Case(8, PROMPT_TOKENS, 40),
    Case(16, PROMPT_TOKENS, 40),
    Case(1, LONG_PROMPT_TOKENS, 1),
)


class Parts(msgspec.Struct, frozen=True):
    """Of one step, in milliseconds."""

    whole: float
    engine: float
    send: float
    way: float
    exchange: float
    model: float

    @property
    def overhead(self) -> float:
        return self.whole - self.exchange - self.model


class Ended(Recorder):
    """Says when so many requests have ended as were to come."""

    def __init__(self) -> None:
        super().__init__()
        self._left = 0
        self.all_ended = threading.Event()

    def expect(self, requests: int) -> None:
        self._left = requests
        self.all_ended.clear()

    def on_step(self, result: StepResult) -> None:
        super().on_step(result)
        self._left -= sum(output.finish is not None for output in result.outputs)
        if self._left <= 0:
            self.all_ended.set()


def parts_of(steps: Sequence[Timed], case: Case, depth: int) -> Iterator[Parts]:
    """Steps of the case alone: all of them decode, or are a whole chunk, and so was the one before."""
    decodes = case.steps > 1
    # With several stages the sequences are spread over as many steps in flight, if there are enough.
    wanted = -(-case.sequences // depth) if decodes else CHUNK_TOKENS
    for before, step in itertools.pairwise(steps):
        if {before.tokens, step.tokens} != {wanted} or (decodes and step.sequences != wanted):
            continue
        whole = step.ended_s - before.ended_s
        engine, send = step.begin_s - before.ended_s, step.begun_s - step.begin_s
        if engine < 0:
            engine = send = 0.0  # While the step before was under way: hidden.
        elif step.ended_s < step.begun_s + _AT_ONCE_S and send > step.busy_s:
            send -= step.busy_s  # Computed within `begin`.
        way = whole - step.busy_s - engine - send
        model = step.busy_s - step.exchange_s
        yield Parts(*(round(value * 1e3, 4) for value in (whole, engine, send, way, step.exchange_s, model)))


class Bench:
    """One executor with its engine, for all rounds."""

    def __init__(self, name: str, executor: Executor) -> None:
        self.name = name
        self._executor = Noting(executor)
        self._dice = random.Random(7)
        self._recorder = Ended()
        config = SchedulerConfig(max_batch_tokens=CHUNK_TOKENS, max_sequences=max(case.sequences for case in CASES))
        self._engine = BlockEngine(self._executor, config)
        self._engine.start(self._recorder)

    def run(self, case: Case, number: str) -> list[Parts]:
        self._executor.steps.clear()
        self._recorder.expect(case.sequences)
        for sequence in range(case.sequences):
            # Of no earlier request's beginning: nothing is found in the cache.
            prompt = [self._dice.randrange(10, 1000) for _ in range(case.prompt_tokens)]
            sampling = Sampling(temperature=0.0, max_tokens=case.steps, ignore_eos=True)
            self._engine.submit(EngineRequest(f"{number}-{sequence}", prompt, sampling))
        if not self._recorder.all_ended.wait(WAIT_S):
            raise RuntimeError(f"{self.name}: {case.label} did not end within {WAIT_S:.0f} s")
        return list(parts_of(self._executor.steps, case, self._executor.depth))

    def close(self) -> None:
        self._engine.close()


Measured = dict[str, dict[str, list[list[Parts]]]]
"""case -> executor -> rounds -> steps"""


def measure(benches: Sequence[Bench], rounds: int) -> Measured:
    measured: Measured = {case.label: {bench.name: [] for bench in benches} for case in CASES}
    for number in range(-1, rounds):  # The first round only warms up.
        for index, case in enumerate(CASES):
            turn = (number + index) % len(benches)
            for bench in (*benches[turn:], *benches[:turn]):
                parts = bench.run(case, f"{number}-{index}")
                if number >= 0:
                    measured[case.label][bench.name].append(parts)
        print(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return measured


def table(measured: Measured) -> str:
    """Medians over all steps of all rounds."""
    columns = ("whole", "overhead", "engine", "send", "way", "exchange", "model")
    lines = [f"| ms a step | {' | '.join(columns)} | overhead % | exchange % |", "|---" * (len(columns) + 3) + "|"]
    for label, of in measured.items():
        for name, rounds in of.items():
            steps = list(itertools.chain.from_iterable(rounds))
            if not steps:
                continue
            cells = [f"{statistics.median(getattr(step, column) for step in steps):.3f}" for column in columns]
            for part in ("overhead", "exchange"):
                cells.append(f"{statistics.median(getattr(step, part) / step.whole for step in steps) * 100:.1f}")
            lines.append(f"| {label}, {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", action="append", choices=list(MODELS), default=None)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "overhead.json")
    options = parser.parse_args(arguments)
    raw: dict[str, object] = {
        "command": "python -m benchmarks.parallel.overhead " + " ".join(arguments),
        "rounds": options.rounds,
        "cpus": os.cpu_count(),
        "columns": list(Parts.__struct_fields__),
    }
    for model in options.model or list(MODELS):
        with ExitStack() as ends, tempfile.TemporaryDirectory(prefix="parallel-overhead-") as folder:
            weights = write_model(Path(folder), model)
            cluster = RayCluster(ClusterSettings(node_ranks=sum(shape.ranks for shape in SHAPES.values())))
            ends.callback(cluster.close)
            benches = [Bench(IN_PROCESS, InProcess(weights))]
            ends.callback(benches[0].close)
            for name, shape in SHAPES.items():
                benches.append(Bench(name, start_gang(weights, shape, cluster)))
                ends.callback(benches[-1].close)
            load_before = os.getloadavg()
            measured = measure(benches, options.rounds)
        raw[model] = {
            "load_average": (load_before, os.getloadavg()),
            "steps": {
                label: {
                    name: [[msgspec.structs.astuple(step) for step in one] for one in of] for name, of in row.items()
                }
                for label, row in measured.items()
            },
        }
        options.output.write_text(json.dumps(raw) + "\n")
        print(f"\n## {model}\n\n{table(measured)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
