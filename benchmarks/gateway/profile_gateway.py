"""Where the gateway's CPU time goes: py-spy on the gateway process under one of the loads of `run.py`.

    python -m benchmarks.gateway.profile_gateway --case "chat, whole, 32 at once" --seconds 20

Prints the share of each function's own time, and of the time with what it calls. Needs py-spy, and the right to trace.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import uvloop
from antiphon_telemetry.exit import leave

from benchmarks.gateway.run import CASES, Case, Process, gateway_target, run_case, running_house

SAMPLES_PER_S = 500


async def record(case: Case, seconds: int, output: Path, *, gil: bool) -> None:
    """Load the gateway for longer than py-spy watches it."""
    async with running_house() as house:
        target = gateway_target(house)
        client = await Process.start("benchmarks.gateway.load")
        await run_case(client, target, case)  # Warms up.
        spy = await asyncio.create_subprocess_exec(
            *("py-spy", "record", "--pid", str(target.pid), "--duration", str(seconds), "--rate", str(SAMPLES_PER_S)),
            *("--format", "raw", "--output", str(output), "--nonblocking", *(("--gil",) if gil else ())),
            stdout=asyncio.subprocess.DEVNULL,
            env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        )
        while spy.returncode is None:
            await run_case(client, target, case)
        await client.close()
    if spy.returncode:
        raise RuntimeError(f"py-spy ended with {spy.returncode}")


def shares(raw: str) -> tuple[Counter[str], Counter[str], int]:
    """(samples in the function itself, samples in it or what it calls, all samples)."""
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    total = 0
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [_function(frame) for frame in stack.split(";")]
        total += int(count)
        own[frames[-1]] += int(count)
        for name in set(frames):
            within[name] += int(count)
    return own, within, total


def _function(frame: str) -> str:
    """Without the line number."""
    name, _, where = frame.partition(" (")
    return f"{name} ({where.partition(':')[0].rstrip(')')})"


def main(arguments: Sequence[str]) -> int:
    cases = {case.label: case for case in CASES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(cases), default="chat, stream of 33, 32 at once")
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--gil", action="store_true", help="only what holds the interpreter lock")
    parser.add_argument("--top", type=int, default=25)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gateway-profile-") as folder:
        output = Path(folder) / "stacks.txt"
        uvloop.run(record(cases[options.case], options.seconds, output, gil=options.gil))
        own, within, total = shares(output.read_text())
    for title, counter in (("itself", own), ("with what it calls", within)):
        print(f"| {title} | share of {total} samples |\n|---|---|")
        for name, count in counter.most_common(options.top):
            print(f"| {name} | {100 * count / total:.1f} % |")
        print()
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
