"""One gateway process, and two that share a port (`--reuse-port`): requests a second, and the CPU time of each.

Each process has streams of its own to the same four mock workers. The load generator is a process too, and so are the
workers: on two cores they compete with the gateways, so the figures say what two processes bring there, not on a
machine with cores to spare. Requests a second of CPU time is the figure that does not depend on that.

    python -m benchmarks.gateway.processes --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway.peers import Case, Client
from benchmarks.gateway.targets import Target, free_port, stage, start_gateway, start_mocks

CASE = Case("completions", False, 1, 64, 2000)


async def measure(rounds: int) -> dict[str, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="gateway-processes-") as folder:
        async with stage(Path(folder)) as own:
            mocks = await start_mocks(own, "mock_worker")
            alone = await start_gateway(own, "one", mocks)
            port = free_port()
            pair = [await start_gateway(own, name, mocks, "--reuse-port", port=port) for name in ("first", "second")]
            clients = [
                Client(await own.run(f"client-{number}", sys.executable, "-m", "benchmarks.gateway.load", talks=True))
                for number in range(2)
            ]
            results: dict[str, list[dict[str, Any]]] = {"one": [], "two": []}
            for number in range(-1, rounds):
                for name, targets in (("one", [alone]), ("two", pair)):
                    sample = await _both(clients, targets)
                    if number >= 0:
                        results[name].append(sample)
            return results


async def _both(clients: Sequence[Client], targets: Sequence[Target]) -> dict[str, Any]:
    """Two load generators at once, so that one alone is no bound."""
    before = [target.cpu_s() for target in targets]
    samples = await asyncio.gather(*(client.run(targets[0], CASE) for client in clients))
    cpu_s = [target.cpu_s() - begun for target, begun in zip(targets, before, strict=True)]
    return {
        "requests_per_s": sum(sample.requests_per_s for sample in samples),
        "cpu_s": cpu_s,
        "requests": CASE.requests * len(clients),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "processes.json")
    options = parser.parse_args(arguments)
    results = uvloop.run(measure(options.rounds))
    raw = {
        "command": "python -m benchmarks.gateway.processes " + " ".join(arguments),
        "cpus": os.cpu_count(),
        "load_average_after": os.getloadavg(),
        "results": results,
    }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(raw, indent=1) + "\n")
    for name, samples in results.items():
        rate = statistics.median(sample["requests_per_s"] for sample in samples)
        cpu_us = statistics.median(sum(sample["cpu_s"]) / sample["requests"] * 1e6 for sample in samples)
        share = statistics.median(max(sample["cpu_s"]) / sum(sample["cpu_s"]) for sample in samples)
        print(f"{name}: {rate:.0f} requests/s, {cpu_us:.0f} us CPU a request, busiest process {share:.0%} of it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
