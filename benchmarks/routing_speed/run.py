"""What one routing decision costs, over 4 to 1,000 workers: CPU time of `WorkerTable.choose`, and of keeping it true.

    python -m benchmarks.routing_speed.run

Half of the workers prefill, half decode, all with load; prompts of 2,000 tokens in blocks of 64, with limits. The cases
of each round are interleaved, so a busy minute of the machine meets them all; the least of the rounds is nearest to the
code's own cost, the median says what the machine made of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from antiphon_policy.latency import StepModel
from antiphon_policy.routing import RouteRequest, RoutingSnapshot, WorkerRole, WorkerView, Workload, route
from antiphon_policy.worker_table import WorkerTable

WORKERS = (4, 16, 64, 256, 1000)
HOLDERS = ("none", "four", "all")
REQUEST = RouteRequest(2000, 64, 100_000, 512, ttft_limit_ms=3000.0, tpot_limit_ms=50.0)
BUSY = Workload(800, 200, 40, 500, 2000.0, 0.2)


def fleet(count: int, rng: random.Random) -> list[WorkerView]:
    return [
        WorkerView(
            worker_id=f"worker-{at}",
            role=WorkerRole.PREFILL if at % 2 else WorkerRole.DECODE,
            leading_blocks=0,
            queued_tokens=rng.randrange(4000) if at % 2 else 0,
            running=0 if at % 2 else rng.randrange(30),
            kv_tokens=0 if at % 2 else rng.randrange(60_000),
            free_blocks=900,
            total_blocks=1000,
            step=StepModel(),
        )
        for at in range(count)
    ]


def per_call_us(call: Callable[[int], object], calls: int) -> float:
    began = time.process_time()
    for at in range(calls):
        call(at)
    return (time.process_time() - began) / calls * 1e6


def cases(rng: random.Random) -> dict[str, tuple[Callable[[int], object], int]]:
    found: dict[str, tuple[Callable[[int], object], int]] = {}
    for count in WORKERS:
        views = fleet(count, rng)
        table = WorkerTable({}, BUSY)
        for view in views:
            table.put(view)
        for held in HOLDERS:
            some = {"none": [], "four": views[:4], "all": views}[held]
            leading = {view.worker_id: rng.randrange(1, 31) for view in some}
            found[f"choose, {count} workers, {held} hold a prefix"] = (
                lambda at, table=table, leading=leading: table.choose(REQUEST, leading, at % 100 / 100),
                200,
            )
        changed = [replace(view, queued_tokens=view.queued_tokens + 100) for view in views]
        found[f"put, {count} workers"] = (
            lambda at, table=table, changed=changed: table.put(changed[at % len(changed)]),
            2000,
        )
        if count <= 64:
            snapshot = RoutingSnapshot(tuple(views), {}, BUSY)
            found[f"route of a snapshot, {count} workers"] = (
                lambda at, snapshot=snapshot: route(snapshot, REQUEST, at % 100 / 100),
                50,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "decision.json")
    arguments = parser.parse_args()
    measured: dict[str, list[float]] = {}
    load = [os.getloadavg()[0]]
    for _ in range(arguments.rounds):
        for name, (call, calls) in cases(random.Random(4)).items():
            measured.setdefault(name, []).append(per_call_us(call, calls))
    load.append(os.getloadavg()[0])
    table = {
        name: {"least_us": round(min(values), 1), "median_us": round(statistics.median(values), 1), "all_us": values}
        for name, values in measured.items()
    }
    arguments.out.write_text(
        json.dumps(
            {
                "command": f"python -m benchmarks.routing_speed.run --rounds {arguments.rounds}",
                "python": platform.python_version(),
                "processors": os.cpu_count(),
                "load_before_and_after": load,
                "cpu_us": table,
            },
            indent=1,
        )
        + "\n"
    )
    print(f"{'case':55s} {'least us':>9s} {'median us':>10s}   load {load[0]:.1f} -> {load[1]:.1f}")
    for name, figures in table.items():
        print(f"{name:55s} {figures['least_us']:9.1f} {figures['median_us']:10.1f}")


if __name__ == "__main__":
    main()
