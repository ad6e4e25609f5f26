"""How much the operator needs for many Models, beside a bare kopf operator that does the same writing.

In each round the operator and the bare one meet a fresh double of a cluster in turn, so that what else the machine does
meets both alike; the tables show medians over the rounds, and ratios are of one round. Smaller numbers of Models come
first, once each round, to see what grows with their number. Prints markdown; raw numbers go to `results/`.

    python -m benchmarks.operator.run --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from benchmarks.operator.phases import SPEC, Options, Phase, run_bare, run_operator

WATCHERS = {"operator": run_operator, "bare": run_bare}
Results = dict[int, dict[str, list[list[Phase]]]]
"""Models -> watcher -> phases of each round."""
_IMAGE = "change the image"


async def measure(models: Sequence[int], rounds: int, quiet_s: float, keep: Callable[[Results], None]) -> Results:
    """The largest number of Models is kept in silence too."""
    results: Results = {count: {name: [] for name in WATCHERS} for count in models}
    for number in range(rounds):
        for count in models:
            options = Options(count, quiet_s if count == max(models) else 0.0, rollout=True)
            for name, watch in WATCHERS.items():
                with tempfile.TemporaryDirectory(prefix="operator-benchmark-") as folder:
                    results[count][name].append(await watch(Path(folder), options))
                keep(results)
                told = f"round {number + 1} of {rounds}: {name}, {count} Models, load {os.getloadavg()[0]:.1f}"
                print(told, file=sys.stderr)
                await asyncio.sleep(0)
    return results


# -- tables


def table(results: Results) -> str:
    return "\n\n".join((_growth(results), _phases(results), _calls(results)))


def _growth(results: Results) -> str:
    """What creating costs, by the number of Models. The bare one is done when all pods are ready."""
    lines = [
        "| Models created at once | all Ready s | bare s | ratio | CPU s | bare | ratio | CPU ms a Model "
        "| calls a Model | bare | peak MiB | bare |",
        "|---" * 12 + "|",
    ]
    for count, found in results.items():
        own, bare = ([_named(phases, "create") for phases in found[name]] for name in WATCHERS)
        reached = (
            [phase.wall_s["all Models Ready"] for phase in own],
            [phase.wall_s["all pods ready"] for phase in bare],
        )
        cpu = ([phase.cpu_s for phase in each] for each in (own, bare))
        cells = [str(count), *_beside(*reached), *_beside(*cpu)]
        cells.append(f"{statistics.median(phase.cpu_s for phase in own) / count * 1000:.0f}")
        cells += [f"{statistics.median(_asked(phase) for phase in each) / count:.1f}" for each in (own, bare)]
        cells += [f"{statistics.median(phase.peak_rss_mib for phase in each):.0f}" for each in (own, bare)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _beside(own: Sequence[float], bare: Sequence[float]) -> tuple[str, str, str]:
    ratio = statistics.median(ours / limit for ours, limit in zip(own, bare, strict=True))
    return f"{statistics.median(own):.1f} ({min(own):.1f} to {max(own):.1f})", _number(bare), f"{ratio:.2f}"


def _phases(results: Results) -> str:
    """All phases of the largest number of Models."""
    count = max(results)
    lines = [
        f"| {count} Models | reached after s | writes a Model | reads a Model | status writes a Model | looks a Model "
        "| ms a plan | CPU s | bare CPU s | MiB | bare MiB | same pods |",
        "|---" * 12 + "|",
    ]
    names = [phase.name for phase in results[count]["operator"][0]]
    for name in names:
        own = [_named(phases, name) for phases in results[count]["operator"]]
        bare = [phase for phases in results[count]["bare"] for phase in phases if phase.name == name]
        reached = ", ".join(f"{what}: {_number([each.wall_s[what] for each in own])}" for what in own[0].wall_s)
        per_model: list[Callable[[Phase], float]] = [
            lambda phase: _asked(phase, writes=True),
            lambda phase: _asked(phase, writes=False),
            lambda phase: phase.status_writes,
            lambda phase: sum(phase.looks.values()),
        ]
        cells = [name, reached, *(f"{statistics.median(map(what, own)) / count:.2f}" for what in per_model)]
        plans = [phase.plan_ms["sum"] / phase.plan_ms["count"] for phase in own if phase.plan_ms.get("count")]
        cells += [_number(plans), _number([phase.cpu_s for phase in own]), _number([phase.cpu_s for phase in bare])]
        cells += [_number([phase.rss_mib for phase in own], 0), _number([phase.rss_mib for phase in bare], 0)]
        same = {phase.same_pods for phase in own if phase.same_pods is not None}
        cells.append(", ".join("yes" if each else "no" for each in sorted(same)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _calls(results: Results) -> str:
    """Of the largest number of Models, in all phases."""
    count = max(results)
    names = [phase.name for phase in results[count]["operator"][0]]
    lines = [f"| calls a Model, of {count} | {' | '.join(names)} | bare: create |", "|---" * (len(names) + 2) + "|"]
    medians = {
        name: _median_calls([_named(phases, name) for phases in results[count]["operator"]], count) for name in names
    }
    medians["bare: create"] = _median_calls([_named(phases, "create") for phases in results[count]["bare"]], count)
    for call in sorted({call for calls in medians.values() for call in calls}):
        cells = [f"{calls[call]:.2f}" if call in calls else "" for calls in medians.values()]
        if any(calls.get(call, 0.0) >= _SHOWN_CALLS for calls in medians.values()):
            lines.append(f"| {call} | {' | '.join(cells)} |")
    return "\n".join(lines)


_SHOWN_CALLS = 0.03
_WRITES = ("create", "update", "patch", "delete")


def _median_calls(phases: Sequence[Phase], count: int) -> dict[str, float]:
    calls = {call for phase in phases for call in phase.calls}
    return {call: statistics.median(phase.calls.get(call, 0) for phase in phases) / count for call in calls}


def _asked(phase: Phase, *, writes: bool | None = None) -> int:
    """Requests but those about the Lease."""
    return sum(
        n
        for call, n in phase.calls.items()
        if not call.endswith(" leases") and writes in (None, call.startswith(_WRITES))
    )


def _named(phases: Sequence[Phase], name: str) -> Phase:
    return next(phase for phase in phases if phase.name == name)


def _number(values: Sequence[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f}" if values else ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=int, nargs="+", default=[1, 30, 300])
    parser.add_argument("--quiet-s", type=float, default=60.0, help="of silence, with the most Models")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "operator.json")
    options = parser.parse_args(arguments)
    load_before = os.getloadavg()
    command = shlex.join(["python", "-m", "benchmarks.operator.run", *arguments])

    def keep(results: Results) -> None:
        """After each run, so that what was measured outlives a failure of the next."""
        raw = {
            "command": command,
            "rounds": options.rounds,
            "spec": SPEC,
            "cpus": os.cpu_count(),
            "load_average_before": load_before,
            "load_average_after": os.getloadavg(),
            "python": platform.python_version(),
            "kernel": platform.release(),
            "models": {
                count: {
                    name: [[dataclasses.asdict(phase) for phase in phases] for phases in rounds]
                    for name, rounds in found.items()
                }
                for count, found in results.items()
            },
        }
        options.output.parent.mkdir(exist_ok=True)
        options.output.write_text(json.dumps(raw, indent=1) + "\n")

    results = uvloop.run(measure(sorted(options.models), options.rounds, options.quiet_s, keep))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
