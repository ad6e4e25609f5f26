"""Whether the gateway's memory stays flat: mixed load for half an hour, its memory sampled, the slope told.

Chat and completions, whole and streamed, short and long, at 1 to 64 at once, turn by turn; between turns all
connections are closed and opened anew. The slope is a least-squares fit over the second half of the run, after what
is kept on purpose (the last requests' explanations, caches) has filled. With `--share` the load rests between turns, so
that it takes only that part of the time: memory is what is looked at, and the machine may have other work.

    python -m benchmarks.gateway.soak --minutes 30 --share 0.25
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway.peers import Case, Client
from benchmarks.gateway.run import fit
from benchmarks.gateway.targets import Target, stage, start_gateway, start_mocks

SAMPLE_S = 2.0
CASES = [
    Case("completions", False, 1, 32, 600),
    Case("chat", True, 16, 32, 300),
    Case("completions", True, 64, 64, 200),
    Case("chat", False, 16, 8, 300),
    Case("completions", False, 4, 1, 100, prompt_tokens=4096),
    Case("completions", True, 16, 64, 600, prompt_tokens=64),
]


class Sampled:
    """Seconds since the start, and the memory in bytes then."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.memory_bytes: list[float] = []

    async def follow(self, target: Target) -> None:
        began = time.monotonic()
        while True:
            self.at_s.append(time.monotonic() - began)
            self.memory_bytes.append(float(target.memory_bytes()))
            await asyncio.sleep(SAMPLE_S)


async def soak(minutes: float, share: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gateway-soak-") as folder:
        async with stage(Path(folder)) as own:
            mocks = await start_mocks(own, "mock_worker")
            target = await start_gateway(own, "antiphon", mocks)
            client = Client(await own.run("client", sys.executable, "-m", "benchmarks.gateway.load", talks=True))
            sampled = Sampled()
            following = asyncio.create_task(sampled.follow(target))
            ends_at = time.monotonic() + minutes * 60
            requests = 0
            try:
                for case in itertools.cycle(CASES):
                    if time.monotonic() > ends_at:
                        break
                    began = time.monotonic()
                    await client.run(target, case)
                    requests += case.requests
                    await asyncio.sleep((time.monotonic() - began) * (1 / share - 1))
            except RuntimeError as error:
                raise RuntimeError(f"{own.log_of('client')}\n{own.log_of('antiphon')}") from error
            finally:
                following.cancel()
            cpu_s = target.cpu_s()
            warnings = own.log_of("antiphon").count(" warning ") + own.log_of("antiphon").count(" error ")
    half = len(sampled.at_s) // 2
    _, slope = fit(sampled.at_s[half:], sampled.memory_bytes[half:])
    return {
        "minutes": sampled.at_s[-1] / 60,
        "requests": requests,
        "slope_bytes_per_hour": slope * 3600,
        "bytes_per_request": slope * (sampled.at_s[-1] / requests),
        "gateway_cpu_s": cpu_s,
        "warnings_in_the_end_of_the_log": warnings,
        "at_s": sampled.at_s,
        "memory_bytes": sampled.memory_bytes,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--share", type=float, default=1.0, help="part of the time under load (default: all)")
    parser.add_argument("--commit", default="", help="what is measured, to stand in the result")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    options = parser.parse_args(arguments)
    result = uvloop.run(soak(options.minutes, options.share))
    raw = {
        "command": "python -m benchmarks.gateway.soak " + " ".join(arguments),
        "commit": options.commit,
        "load_average_after": os.getloadavg(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **result,
    }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(raw, indent=1) + "\n")
    memory = [value / 2**20 for value in result["memory_bytes"]]
    print(
        f"{result['minutes']:.1f} minutes, {result['requests']} requests: {memory[0]:.1f} MiB at the start, "
        f"{memory[len(memory) // 2]:.1f} half way, {memory[-1]:.1f} at the end; slope of the second half "
        f"{result['slope_bytes_per_hour'] / 2**20:.2f} MiB an hour, {result['bytes_per_request']:.1f} bytes a request"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
