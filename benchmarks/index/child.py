"""One contestant in a process of its own, told by the parent what to do next: a line of JSON in, a line of JSON out.

python -m benchmarks.index.child ours | dynamo
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.index import workload
from benchmarks.index.contestants import CONTESTANTS, Contestant

PAGE_BYTES = 4096
AT_ONCE = 100
"""Events are prepared in lots of so many, so that few of them are in memory while it is measured."""


def serve(contestant: Contestant) -> None:
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "store": lambda phase: _apply(contestant, map(contestant.stored, workload.events(phase))),
        "remove": lambda: _apply(contestant, map(contestant.removed, workload.removals())),
        "ask": lambda case, blocks, count, seed: _ask(contestant, case, blocks, count, seed),
        "forget": lambda workers: _forget(contestant, workers),
    }
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(commands[name](*arguments)), flush=True)


def _apply(contestant: Contestant, prepared: Iterable[Any]) -> dict[str, Any]:
    """Time of all events (also of all threads of the process), the longest one, and what memory they left."""
    before_bytes, total_ns, cpu_ns, longest_ns = _resident_bytes(), 0, 0, 0
    lot: list[Any] = []
    probe = contestant.chain(workload.chain("own-0-0", 1))

    def take() -> None:
        nonlocal total_ns, cpu_ns, longest_ns
        started, cpu_started = time.perf_counter_ns(), time.process_time_ns()
        for event in lot:
            began = time.perf_counter_ns()
            contestant.apply(event)
            longest_ns = max(longest_ns, time.perf_counter_ns() - began)
        contestant.ask(probe)  # Whatever was only put into a queue is done now.
        total_ns += time.perf_counter_ns() - started
        cpu_ns += time.process_time_ns() - cpu_started
        lot.clear()

    for event in prepared:
        lot.append(event)
        if len(lot) == AT_ONCE:
            take()
    take()
    held_bytes = _resident_bytes() - before_bytes
    return {"s": total_ns / 1e9, "cpu_s": cpu_ns / 1e9, "longest_ms": longest_ns / 1e6, "bytes": held_bytes}


def _ask(contestant: Contestant, case: str, blocks: int, count: int, seed: str) -> dict[str, Any]:
    """Microseconds of `count` look-ups in either form, each of questions of its own; the answers are checked."""
    draw = random.Random(seed)
    taken_us: dict[str, list[float]] = {}
    for form, ask in (("dict", contestant.ask), ("brief", contestant.ask_briefly)):
        times = taken_us[form] = []
        for question in [workload.question(case, blocks, draw) for _ in range(count)]:
            chain = contestant.chain(question.packed)
            if question.after is not None:
                contestant.apply(contestant.stored(question.after))
                contestant.ask(chain[:1])  # Whatever was only put into a queue is done now.
            started = time.perf_counter_ns()
            found = ask(chain)
            times.append((time.perf_counter_ns() - started) / 1e3)
            if question.after is not None:
                contestant.apply(contestant.removed(question.after))
            if form == "dict" and contestant.answer(found) != question.answer:
                raise AssertionError(f"{case}, {blocks} blocks: a wrong answer: {found}")
    return taken_us


def _forget(contestant: Contestant, workers: list[int]) -> dict[str, Any]:
    taken_us = []
    probe = contestant.chain(workload.chain("own-0-0", 1))
    for worker in workers:
        started = time.perf_counter_ns()
        contestant.forget(worker)
        contestant.ask(probe)
        taken_us.append((time.perf_counter_ns() - started) / 1e3)
    return {"us": taken_us}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


if __name__ == "__main__":
    serve(CONTESTANTS[sys.argv[1]]())
