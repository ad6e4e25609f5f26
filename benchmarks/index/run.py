"""The block mirror beside the field's index: Dynamo's RadixTree through Python, in the same run.

In each round both start anew, in processes of their own, and do each step in turn (who is first changes every round),
so that what else the machine does meets both alike. Figures are medians over the rounds; a ratio is the median of the
rounds' ratios. Without `--dynamo-python` only ours is measured; with `--before` also ours of another checkout, whose
`kvtransfer/` is given. Prints markdown; raw numbers go to `results/`.

    python -m benchmarks.index.run --rounds 5 --dynamo-python PATH --before FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.index import workload

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (64, 512)
FORGOTTEN = 40
Round = dict[str, dict[str, Any]]
"""Contestant -> step -> figures."""


class Child:
    """A contestant's process, asked one thing at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def tell(self, *command: object) -> dict[str, Any]:
        into, out = self._process.stdin, self._process.stdout
        if into is None or out is None:
            raise RuntimeError("the child was started without pipes")
        into.write(json.dumps(command) + "\n")
        into.flush()
        line = out.readline()
        if not line:
            raise RuntimeError(f"the child ended at {command}: what it said of it is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True)
class Start:
    """How a contestant's process is started."""

    contestant: str
    python: str
    package: Path | None = None
    """The folder that `antiphon_kvtransfer` is taken from, if not the usual one."""


@contextmanager
def child(start: Start) -> Iterator[Child]:
    process = subprocess.Popen(
        [start.python, "-m", "benchmarks.index.child", start.contestant],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | ({"PYTHONPATH": str(start.package)} if start.package else {}),
    )
    try:
        yield Child(process)
    finally:
        process.kill()
        process.wait()


def measure(starts: dict[str, Start], asked: int, batches: int) -> Round:
    """One round."""
    figures: Round = {name: {} for name in starts}
    with ExitStack() as stack:
        children = {name: stack.enter_context(child(start)) for name, start in starts.items()}
        for phase in workload.PHASES:
            for name, each in children.items():
                figures[name][f"store {phase}"] = each.tell("store", phase)
        for case in workload.CASES:
            for blocks in LENGTHS:
                taken: dict[str, dict[str, list[float]]] = {name: {"dict": [], "brief": []} for name in children}
                for batch in range(batches):
                    for name, each in children.items():
                        for form, times in each.tell("ask", case, blocks, asked // batches, f"{batch}").items():
                            taken[name][form] += times
                for name, forms in taken.items():
                    figures[name][f"ask {case} {blocks}"] = {form: _spread(times) for form, times in forms.items()}
        for name, each in children.items():
            figures[name]["remove"] = each.tell("remove")
        for name, each in children.items():
            figures[name]["forget"] = _spread(each.tell("forget", list(range(FORGOTTEN)))["us"])
    return figures


def _spread(times_us: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times_us)
    return {
        "p50_us": ordered[len(ordered) // 2],
        "p99_us": ordered[len(ordered) * 99 // 100],
        "mean_us": statistics.fmean(ordered),
    }


# -- tables


def tables(rounds: Sequence[Round]) -> str:
    return "\n\n".join((_look_ups(rounds), _changes(rounds)))


def _look_ups(rounds: Sequence[Round]) -> str:
    names = list(rounds[0])
    heads = [cell for name in names for cell in (f"{name} p50 us", "p99")]
    others = names[1:]
    heads += [head for name in others for head in (f"ratio to {name}, p50", "p99")]
    heads += [f"{name}, brief, p50" for name in names]
    lines = [_row(["blocks", "held by", *heads]), _rule(2 + len(heads))]
    for blocks in LENGTHS:
        for case in workload.CASES:
            p50, p99 = (_asked(case, blocks, "dict", key) for key in ("p50_us", "p99_us"))
            cells = [f"{_median(rounds, name, figure):.1f}" for name in names for figure in (p50, p99)]
            cells += [f"{_ratio(rounds, name, figure):.2f}" for name in others for figure in (p50, p99)]
            brief = _asked(case, blocks, "brief", "p50_us")
            cells += [f"{_median(rounds, name, brief):.1f}" for name in names]
            lines.append(_row([str(blocks), case, *cells]))
    return "\n".join(lines)


def _changes(rounds: Sequence[Round]) -> str:
    names = list(rounds[0])
    others = names[1:]
    heads = [*names, *(f"ratio to {name}" for name in others)]
    lines = [_row(["", *heads]), _rule(1 + len(heads))]
    for title, figure, digits in _change_figures():
        cells = [f"{_median(rounds, name, figure):,.{digits}f}" for name in names]
        cells += [f"{_ratio(rounds, name, figure):.2f}" for name in others]
        lines.append(_row([title, *cells]))
    return "\n".join(lines)


Figure = Callable[[dict[str, Any]], float]
"""Of a contestant's steps in one round."""


def _asked(case: str, blocks: int, form: str, key: str) -> Figure:
    return lambda steps: steps[f"ask {case} {blocks}"][form][key]


def _change_figures() -> Iterator[tuple[str, Figure, int]]:
    """Title, figure, digits after the point."""
    pairs = {f"store {phase}": _blocks(workload.events(phase)) for phase in workload.PHASES}
    pairs["remove"] = _blocks(workload.removals())
    for step, name in (
        ("store own", "insert, own"),
        ("store ten", "insert, ten"),
        ("store all", "insert, all"),
        ("store steps", "insert, steps"),
        ("remove", "remove, own"),
    ):
        yield f"{name}: million blocks/s", _million_per_s(step, pairs[step]), 2
        yield f"{name}: CPU ns a block", _cpu_ns(step, pairs[step]), 0
    yield "longest event of 256 blocks, ms", lambda steps: max(each.get("longest_ms", 0) for each in steps.values()), 1
    yield "forget a worker, p50 us", lambda steps: steps["forget"]["p50_us"], 0
    yield "bytes a block that one worker holds", _bytes(("store own",), pairs), 0
    everything = tuple(f"store {phase}" for phase in workload.PHASES)
    count = sum(pairs[step] for step in everything)
    yield f"bytes a (worker, block) pair, all {count:,}", _bytes(everything, pairs), 0


def _million_per_s(step: str, blocks: int) -> Figure:
    return lambda steps: blocks / steps[step]["s"] / 1e6


def _cpu_ns(step: str, blocks: int) -> Figure:
    return lambda steps: steps[step]["cpu_s"] * 1e9 / blocks


def _bytes(names: Sequence[str], pairs: dict[str, int]) -> Figure:
    return lambda steps: sum(steps[name]["bytes"] for name in names) / sum(pairs[name] for name in names)


def _blocks(events: Iterable[workload.Event]) -> int:
    return sum(len(event.packed) for event in events) // workload.HASH_BYTES


def _median(rounds: Sequence[Round], name: str, figure: Figure) -> float:
    return statistics.median(figure(each[name]) for each in rounds)


def _ratio(rounds: Sequence[Round], other: str, figure: Figure) -> float:
    """Ours over the other's."""
    return statistics.median(figure(each["ours"]) / figure(each[other]) for each in rounds)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|---" * columns + "|"


# -- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--asked", type=int, default=1000, help="look-ups of each kind a round")
    parser.add_argument("--batches", type=int, default=5, help="in so many parts, in turn with the peer's")
    parser.add_argument("--dynamo-python", help="the interpreter of an environment with ai-dynamo-runtime")
    parser.add_argument("--before", type=Path, help="a `kvtransfer/` folder of another checkout")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "index.json")
    options = parser.parse_args()
    starts = {"ours": Start("ours", sys.executable)}
    if options.dynamo_python:
        starts["dynamo"] = Start("dynamo", options.dynamo_python)
    if options.before:
        starts["before"] = Start("ours", sys.executable, options.before)
    rounds: list[Round] = []
    loads: list[float] = []
    for number in range(options.rounds):
        order = sorted(starts, reverse=number % 2 == 0)
        found = measure({name: starts[name] for name in order}, options.asked, options.batches)
        rounds.append({name: found[name] for name in starts})
        loads.append(round(os.getloadavg()[0], 1))
        print(f"round {number + 1} of {options.rounds}, load {loads[-1]}", file=sys.stderr)
        options.results.parent.mkdir(exist_ok=True)
        options.results.write_text(
            json.dumps(
                {
                    "command": f"python -m benchmarks.index.run --rounds {options.rounds} --asked {options.asked}"
                    + (" --dynamo-python PATH" if options.dynamo_python else "")
                    + (" --before FOLDER" if options.before else ""),
                    "python": platform.python_version(),
                    "cores": os.cpu_count(),
                    "load_average_after_each_round": loads,
                    "rounds": rounds,
                },
                indent=1,
            )
            + "\n"
        )
    print(tables(rounds))


if __name__ == "__main__":
    main()
