"""What is said of results: the table of their trials, and over all trials of a house how far off the simulator was.

    python -m benchmarks.simulator.report benchmarks/simulator/results/*.json

`each` is the median over requests of |simulated - measured| / measured; `calm` the same over those that the client sent
within 10 ms of their time: its own lateness tells when the machine was busy with something else.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.simulator.calibrate import HEADER, KINDS, Results, Trial, lines, median, p90
from benchmarks.simulator.replay import Answer

CALM_MS = 10.0


def errors(trials: Sequence[Trial], source: str) -> Iterator[str]:
    """Of the trials together: simulated over measured of each figure, in the median over trials, with the extremes."""
    for field in ("ttft_ms", "tpot_ms"):
        for figure in (median, p90):
            ratios = [_ratio(trial.measured, trial.simulated[source], field, figure) for trial in trials]
            yield f"{statistics.median(ratios) - 1:+.0%} ({min(ratios) - 1:+.0%} to {max(ratios) - 1:+.0%})"
        pairs = [
            (measured, getattr(measured, field), getattr(simulated, field))
            for trial in trials
            for measured, simulated in zip(trial.measured, trial.simulated[source], strict=True)
        ]
        yield f"{median([abs(simulated / real - 1.0) for _, real, simulated in pairs]):.0%}"
        calm = [simulated / real - 1.0 for one, real, simulated in pairs if one.late_ms < CALM_MS]
        yield f"{median([abs(off) for off in calm]):.0%} ({median(calm):+.0%})"


def _ratio(measured: Sequence[Answer], simulated: Sequence[Answer], field: str, figure: object) -> float:
    assert callable(figure)
    return figure([getattr(answer, field) for answer in simulated]) / figure([getattr(a, field) for a in measured])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    trials: list[Trial] = []
    for path in parser.parse_args().results:
        trials += msgspec.json.decode(path.read_bytes(), type=Results).trials
    print(HEADER)
    for trial in trials:
        print("\n".join(lines(trial)))
    print(
        "\n| house | timing | trials | TTFT p50 | TTFT p90 | each | calm | TPOT p50 | TPOT p90 | each | calm |"
        "\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for kind in KINDS:
        own = [trial for trial in trials if trial.kind == kind.name]
        for source in own[0].simulated if own else ():
            print(f"| {kind.name} | {source} | {len(own)} | {' | '.join(errors(own, source))} |")


if __name__ == "__main__":
    main()
