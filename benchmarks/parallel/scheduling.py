"""What of a step is the engine's own work, with no executor: planning, packing, taking in the results.

One thread, a scheduler and a pool with running sequences, and results that cost nothing. Prints the medians.

    python -m benchmarks.parallel.scheduling
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from antiphon_engine import (
    EngineRequest,
    ModelInfo,
    SampledToken,
    Sampling,
    SchedulerConfig,
    TimedExecutor,
    TimedSettings,
)
from antiphon_engine._request import Request
from antiphon_engine.pool import BlockPool
from antiphon_engine.scheduler import Scheduler
from antiphon_engine.torch_engine.step_batch import build_batch

BLOCK_TOKENS = 64
MAX_CONTEXT_TOKENS = 8192
STEPS = 150
CONTEXTS = (500, 4000)
SEQUENCES = (1, 16, 64)
_ANSWER = SampledToken(65, None)


@dataclass(frozen=True, slots=True)
class Row:
    context_tokens: int
    sequences: int
    schedule_ms: float
    pack_ms: float
    commit_ms: float
    """And the load that every step's result says."""
    p99_ms: float
    """Of the sum."""

    @property
    def sum_ms(self) -> float:
        return self.schedule_ms + self.pack_ms + self.commit_ms


def measure(context_tokens: int, sequences: int, rounds: int) -> Row:
    """Decode steps of `sequences` that all run."""
    blocks = sequences * (context_tokens // BLOCK_TOKENS + 8) + 64
    settings = TimedSettings(
        step_ms=lambda **_: 0.0, num_blocks=blocks, block_tokens=BLOCK_TOKENS, max_context_tokens=MAX_CONTEXT_TOKENS
    )
    info = TimedExecutor(settings).info
    config = SchedulerConfig(max_batch_tokens=4096, max_sequences=sequences, max_waiting_tokens=10**7)
    taken: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        scheduler = Scheduler(config, info, BlockPool(blocks), 1)
        for number in range(sequences):
            scheduler.submit(_request(number, context_tokens, info))
        while scheduler.load().waiting_tokens:
            plan = scheduler.schedule()
            scheduler.commit(plan, [_ANSWER if part.step.sample else None for part in plan.parts])
        for _ in range(STEPS):
            begun = time.perf_counter()
            plan = scheduler.schedule()
            scheduled = time.perf_counter()
            build_batch(
                [part.step for part in plan.parts],
                block_tokens=BLOCK_TOKENS,
                num_blocks=blocks,
                vocab_size=info.vocab_size,
                max_context_tokens=MAX_CONTEXT_TOKENS,
            )
            packed = time.perf_counter()
            scheduler.commit(plan, [_ANSWER] * len(plan.parts))
            scheduler.load()
            taken.append((scheduled - begun, packed - scheduled, time.perf_counter() - packed))
            if len(plan.parts) != sequences:
                raise RuntimeError(f"a step of {len(plan.parts)} sequences where {sequences} run")
    schedule, pack, commit = (statistics.median(times) * 1e3 for times in zip(*taken, strict=True))
    p99 = sorted(map(sum, taken))[int(len(taken) * 0.99)] * 1e3
    return Row(context_tokens, sequences, schedule, pack, commit, p99)


def _request(number: int, context_tokens: int, info: ModelInfo) -> Request:
    prompt = [(number * 31 + position) % 250 for position in range(context_tokens)]
    sampling = Sampling(temperature=0.0, max_tokens=2 * STEPS, ignore_eos=True)
    request = Request.of(EngineRequest(f"r{number}", prompt, sampling), info)
    request.hash_blocks()
    return request


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scheduling.json")
    options = parser.parse_args(arguments)
    rows = [measure(context, sequences, options.rounds) for context in CONTEXTS for sequences in SEQUENCES]
    print("| context | sequences | schedule ms | pack ms | commit ms | sum ms (p99) |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.context_tokens} | {row.sequences} | {row.schedule_ms:.3f} | {row.pack_ms:.3f} | "
            f"{row.commit_ms:.3f} | {row.sum_ms:.3f} ({row.p99_ms:.2f}) |"
        )
    told = {
        "command": "python -m benchmarks.parallel.scheduling " + " ".join(arguments),
        "load_average": os.getloadavg(),
        "rows": [asdict(row) for row in rows],
    }
    options.output.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
