"""A timing of the simulator from what real workers had fitted: prints the JSON that `antiphon simulate --timing` takes.

    python -m benchmarks.simulator.timing benchmarks/simulator/results/NAME.json

Of the trials with the torch engine (each with one joint step model, `calibrate.joint`) it takes that whose predictions
are nearest to the medians of all (`antiphon_policy.equals.pooled`).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path

import msgspec
from antiphon_policy.equals import pooled

from benchmarks.simulator.calibrate import CHUNK_TOKENS, DEMO_TOKEN_BYTES, Results, joint

TRACE_BLOCK_TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    path = parser.parse_args().results
    results = msgspec.json.decode(path.read_bytes(), type=Results)
    trials = [trial for trial in results.trials if trial.kind.startswith("torch")]
    step = pooled((joint(trial.after), min(worker.samples for worker in trial.after)) for trial in trials)
    if step is None:
        parser.error(f"{path} has no trial with the torch engine that measured anything")
    speeds = [worker.link_gigabytes_per_s for trial in trials for worker in trial.after if worker.link_gigabytes_per_s]
    loads = [trial.load_average for trial in trials]
    timing = {
        "name": "demo",
        "source": f"SmolLM2-135M-Instruct in bf16, one compute thread a worker, as fitted by workers of "
        f"{len(trials)} runs of benchmarks/simulator ({path.name}), on {results.processors} shared cores "
        f"with a load average of {min(loads):.0f} to {max(loads):.0f}",
        "chunk_tokens": CHUNK_TOKENS,
        "mixed_chunk_tokens": CHUNK_TOKENS,
        "block_bytes": TRACE_BLOCK_TOKENS * DEMO_TOKEN_BYTES,
        "link_gigabytes_per_s": round(statistics.median(speeds), 2),
        "step": {name: float(f"{value:.4g}") for name, value in dataclasses.asdict(step).items()},
    }
    print(msgspec.json.format(msgspec.json.encode(timing), indent=2).decode())


if __name__ == "__main__":
    main()
