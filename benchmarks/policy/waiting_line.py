"""What a pass over the waiting line costs, by how much waits: the line alone, without routing.

    python benchmarks/policy/waiting_line.py

Prints microseconds (median of 200, processor time): a pass that holds 32, and a pass that starts one.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from antiphon_policy.admission import Entry, Verdict, WaitingLine

HELD = 32
REPEATS = 200


def line_of(entries: int, tenants: int) -> WaitingLine[int]:
    """A line of requests of all kinds: at risk, too late, with and without prefixes."""
    draw = random.Random(1)
    line: WaitingLine[int] = WaitingLine()
    for key in range(entries):
        line.add(
            Entry(
                key=key,
                arrived_ms=0.0,
                uncached_tokens=draw.randint(1, 20_000),
                tenant=str(key % tenants),
                matched_tokens=draw.randint(0, 5_000),
                due_ms=draw.uniform(0, 20_000),
                service_ms=100.0,
            )
        )
    return line


def median_us(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.process_time_ns()
        work()
        times.append((time.process_time_ns() - begun) / 1e3)
    return statistics.median(times)


def hold(line: WaitingLine[int]) -> None:
    for _ in line.pass_over(1000.0, lambda _: Verdict.HOLD, tokens_per_ms=100.0, max_held=HELD):
        pass


def start_one(line: WaitingLine[int]) -> None:
    entry = next(line.pass_over(1000.0, lambda _: Verdict.START, tokens_per_ms=100.0))
    line.add(entry)


def main() -> None:
    print(f"{'waiting':>8} {'tenants':>8} {f'holds {HELD} (us)':>16} {'starts 1 (us)':>16}")
    for entries in (10, 100, 1000):
        for tenants in (1, 50):
            line = line_of(entries, tenants)
            print(
                f"{entries:>8} {tenants:>8} {median_us(lambda line=line: hold(line)):>16.0f}"
                f" {median_us(lambda line=line: start_one(line)):>16.0f}"
            )


if __name__ == "__main__":
    main()
