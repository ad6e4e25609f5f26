"""Thousands of streams open at once through one gateway process: all whole, and what each takes.

Mock workers (`mock_worker.py`) give every request a token each `--step-ms`, so all streams of a wave are open together
for as long as their tokens take. Between and after the waves the gateway's memory is read: what a stream takes is
the growth at its peak by the number of streams, and what stays is what the last wave left above the first.

    python -m benchmarks.gateway.streams --streams 5000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway.peers import Case, Client
from benchmarks.gateway.targets import Target, stage, start_gateway, start_mocks

_SETTLE_S = 1.5


async def wave(client: Client, target: Target, case: Case) -> dict[str, Any]:
    """One wave; raises if an answer was not whole."""
    before = target.memory_bytes()
    running = asyncio.create_task(client.run(target, case))
    peak = files = 0
    while not running.done():
        peak = max(peak, target.memory_bytes())
        files = max(files, len(os.listdir(f"/proc/{target.pid}/fd")))
        await asyncio.wait({running}, timeout=0.1)
    sample = running.result()
    await asyncio.sleep(_SETTLE_S)
    return {
        "open_files": files,
        "memory_before_bytes": before,
        "memory_peak_bytes": peak,
        "memory_after_bytes": target.memory_bytes(),
        "bytes_per_stream": (peak - before) / case.connections,
        "wall_s": sample.outcome.wall_s,
        "first_byte_p50_ms": sample.outcome.first_byte_p50_ms,
        "cpu_us_per_token": sample.cpu_us_per_request / case.tokens,
        "busy": sample.busy,
    }


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    case = Case("completions", True, options.tokens, options.streams, options.streams, prompt_tokens=64)
    with tempfile.TemporaryDirectory(prefix="gateway-streams-") as folder:
        async with stage(Path(folder)) as own:
            mocks = await start_mocks(own, "mock_worker", "--step-ms", str(options.step_ms))
            target = await start_gateway(
                own, "antiphon", mocks, "--queue-size", str(options.streams), "--queue-timeout-s", "100"
            )
            client = Client(await own.run("client", sys.executable, "-m", "benchmarks.gateway.load", talks=True))
            waves = []
            for number in range(options.waves):
                try:
                    waves.append(await wave(client, target, case))
                except RuntimeError as error:
                    raise RuntimeError(f"{own.log_of('client')}\n{own.log_of('antiphon')}") from error
                print(f"wave {number + 1} of {options.waves}: {json.dumps(waves[-1])}", file=sys.stderr)
            return waves


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=1000.0)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "streams.json")
    options = parser.parse_args(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # For the client, which inherits it.
    waves = uvloop.run(measure(options))
    raw = {
        "command": "python -m benchmarks.gateway.streams " + " ".join(arguments),
        "streams": options.streams,
        "tokens": options.tokens,
        "step_ms": options.step_ms,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_after": os.getloadavg(),
        "waves": waves,
    }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(raw, indent=1) + "\n")
    for number, one in enumerate(waves):
        print(
            f"wave {number + 1}: {options.streams} streams whole, {one['bytes_per_stream'] / 1024:.1f} KiB a stream, "
            f"{one['cpu_us_per_token']:.0f} us CPU a token, {one['open_files']} open files, "
            f"afterwards {one['memory_after_bytes'] / 2**20:.1f} MiB"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
