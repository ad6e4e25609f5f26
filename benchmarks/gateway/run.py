"""What a request and a streamed chunk cost the gateway in CPU time, against a bare server on uvloop and httptools.

Real processes: a Valkey, a timed worker whose steps take a few milliseconds, the gateway, the bare server, a client.
In one interleaved run each case meets the gateway and the bare server in turn, once a round, so that what else the
machine does meets both alike; the tables show medians over the rounds. CPU time is the process's own, of all its
threads, less what the same process needs when idle for as long. Prints markdown; raw numbers go to `results/`.

    python -m benchmarks.gateway.run --rounds 7
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import uvloop
from antiphon_telemetry.exit import leave

from benchmarks.gateway.load import Job, Outcome
from tests.support.house import House

STEP_MS = 5.0
IDLE_S = 2.0
SETTLE_S = 0.3
"""For what the end of a job leaves to do (the last load report, closed connections), before the next is measured."""
WAIT_S = 120.0
WORKER = (
    *("--engine", "timed", "--transport", "tcp", "--timed-block-bytes", "512", "--role", "both"),
    *("--timed-base-ms", str(STEP_MS), "--timed-per-new-token-ms", "0", "--timed-per-sequence-ms", "0"),
    *("--max-sequences", "256", "--max-batch-tokens", "65536", "--max-waiting-tokens", "1000000"),
    *("--kv-blocks", "16384"),
)


@dataclass(frozen=True, slots=True)
class Case:
    endpoint: str
    stream: bool
    tokens: int
    connections: int
    requests: int

    @property
    def label(self) -> str:
        how = f"stream of {self.tokens}" if self.stream else "whole"
        return f"{self.endpoint}, {how}, {self.connections} at once"

    def job(self, target: Target) -> Job:
        return Job(
            port=target.port,
            model=target.model,
            endpoint=self.endpoint,
            stream=self.stream,
            tokens=self.tokens,
            connections=self.connections,
            requests=self.requests,
        )


ENDPOINTS = ("chat", "completions")
CONNECTIONS = (32, 128)
STREAM_TOKENS = (1, 17, 33)
CASES = [
    *(Case(endpoint, False, 1, 32, 512) for endpoint in ENDPOINTS),
    *(
        Case(endpoint, True, tokens, connections, max(256, connections * 2) * (2 if tokens == 1 else 1))
        for endpoint in ENDPOINTS
        for connections in CONNECTIONS
        for tokens in STREAM_TOKENS
    ),
]


@dataclass(slots=True)
class Target:
    """A server process under test."""

    name: str
    pid: int
    port: int
    model: str
    idle_cpu_s_per_s: float = 0.0

    def cpu_s(self) -> float:
        """CPU time of all threads, user and system, in nanosecond steps (the kernel's clock of another process)."""
        return time.clock_gettime((~self.pid << 3) | 2)


@dataclass(frozen=True, slots=True)
class Sample:
    """One case, once, on one target."""

    cpu_us_per_request: float
    requests_per_s: float
    busy: float
    """CPU seconds per second."""
    outcome: Outcome


class Process:
    """A Python process that is talked to line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, *options: str) -> Self:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def says(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process {self.pid} ended; what it wrote to the standard error says why")
        return line.decode().strip()

    async def hears(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        await self._process.stdin.drain()

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(WAIT_S):
            await self._process.wait()


async def run_case(client: Process, target: Target, case: Case) -> Sample:
    await client.hears(msgspec.json.encode(case.job(target)).decode())
    await client.says()
    await asyncio.sleep(SETTLE_S)
    cpu_s, wall_s = target.cpu_s(), time.perf_counter()
    await client.hears("go")
    outcome = msgspec.json.decode(await client.says(), type=Outcome)
    cpu_s, wall_s = target.cpu_s() - cpu_s, time.perf_counter() - wall_s
    own_s = cpu_s - target.idle_cpu_s_per_s * wall_s
    return Sample(own_s / case.requests * 1e6, case.requests / outcome.wall_s, cpu_s / wall_s, outcome)


async def measure_idle(targets: Sequence[Target]) -> None:
    await asyncio.sleep(SETTLE_S)
    before = [(target.cpu_s(), time.perf_counter()) for target in targets]
    await asyncio.sleep(IDLE_S)
    for target, (cpu_s, at) in zip(targets, before, strict=True):
        target.idle_cpu_s_per_s = (target.cpu_s() - cpu_s) / (time.perf_counter() - at)


Measured = dict[str, dict[str, list[Sample]]]
"""case label -> target name -> one sample a round"""


@contextlib.asynccontextmanager
async def running_house() -> AsyncIterator[House]:
    """A worker and a gateway. If what is done with them fails, their logs are shown."""
    with tempfile.TemporaryDirectory(prefix="gateway-benchmark-") as folder:
        async with House(Path(folder), *WORKER) as house:
            (worker,) = await house.start_workers(())
            await house.start_gateway()
            try:
                yield house
            except Exception:
                print(f"gateway:\n{house.gateway_log[-4000:]}\nworker:\n{worker.log[-4000:]}", file=sys.stderr)
                raise


def gateway_target(house: House) -> Target:
    assert house.gateway is not None
    return Target("gateway", house.gateway.pid, int(house.url.rpartition(":")[2]), house.model)


async def measure(rounds: int) -> tuple[Measured, dict[str, list[float]]]:
    """Also the idle CPU time of each target, in seconds per second, once a round."""
    async with running_house() as house:
        bare = await Process.start("benchmarks.gateway.bare_server", "--step-ms", str(STEP_MS))
        client = await Process.start("benchmarks.gateway.load")
        targets = [gateway_target(house), Target("bare", bare.pid, int(await bare.says()), house.model)]
        measured: Measured = {case.label: {target.name: [] for target in targets} for case in CASES}
        idle: dict[str, list[float]] = {target.name: [] for target in targets}
        for number in range(-1, rounds):  # The first round only warms up.
            await measure_idle(targets)
            for case in CASES:
                for target in targets:
                    sample = await run_case(client, target, case)
                    if number >= 0:
                        measured[case.label][target.name].append(sample)
            for target in targets:
                if number >= 0:
                    idle[target.name].append(target.idle_cpu_s_per_s)
            print(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        await client.close()
        await bare.close()
    return measured, idle


def fit(chunks: Sequence[int], cpu_us: Sequence[float]) -> tuple[float, float]:
    """Least squares: (us of a request, us of a chunk)."""
    mean_chunks, mean_us = statistics.fmean(chunks), statistics.fmean(cpu_us)
    slope = sum((x - mean_chunks) * (y - mean_us) for x, y in zip(chunks, cpu_us, strict=True)) / sum(
        (x - mean_chunks) ** 2 for x in chunks
    )
    return mean_us - slope * mean_chunks, slope


def _stream(endpoint: str, tokens: int, connections: int) -> str:
    return Case(endpoint, True, tokens, connections, 0).label


def costs(measured: Measured) -> list[tuple[str, dict[str, list[float]]]]:
    """(what, target -> us in each round) of every row of the first table."""
    rows = []
    for endpoint in ENDPOINTS:
        of = measured[Case(endpoint, False, 1, 32, 0).label]
        per_target = {name: [sample.cpu_us_per_request for sample in samples] for name, samples in of.items()}
        rows.append((f"{endpoint}: request answered whole with 1 token, 32 at once", per_target))
    for endpoint in ENDPOINTS:
        for connections in CONNECTIONS:
            labels = [_stream(endpoint, tokens, connections) for tokens in STREAM_TOKENS]
            fits: dict[str, list[tuple[float, float]]] = {
                name: [
                    fit(STREAM_TOKENS, [measured[label][name][number].cpu_us_per_request for label in labels])
                    for number in range(len(measured[labels[0]][name]))
                ]
                for name in measured[labels[0]]
            }
            for which, what in enumerate(("request, streamed", "chunk")):
                per_target = {name: [one[which] for one in values] for name, values in fits.items()}
                rows.append((f"{endpoint}: {what}, {connections} at once", per_target))
    return rows


def table(measured: Measured) -> str:
    lines = ["| CPU time of the server | gateway us | bare us | ratio |", "|---|---|---|---|"]
    for what, of in costs(measured):
        ratio = statistics.median(ours / bare for ours, bare in zip(of["gateway"], of["bare"], strict=True))
        ours, bare = (statistics.median(of[name]) for name in ("gateway", "bare"))
        lines.append(f"| {what} | {ours:.0f} | {bare:.1f} | {ratio:.1f} |")
    lines += [
        "",
        "| load | requests/s | bare | CPU s/s | first byte p50 ms | bare | whole p50 ms | bare |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, samples in measured.items():
        cells = [label, *_medians(samples, lambda sample: sample.requests_per_s, "{:.0f}")]
        cells.append(_medians(samples, lambda sample: sample.busy, "{:.2f}")[0])
        cells += _medians(samples, lambda sample: sample.outcome.first_byte_p50_ms, "{:.1f}")
        cells += _medians(samples, lambda sample: sample.outcome.whole_p50_ms, "{:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _medians(samples: dict[str, list[Sample]], figure: Callable[[Sample], float], form: str) -> list[str]:
    """Of the gateway, and of the bare server."""
    return [form.format(statistics.median(map(figure, samples[name]))) for name in ("gateway", "bare")]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gateway.json")
    options = parser.parse_args(arguments)
    load_before = os.getloadavg()
    measured, idle = uvloop.run(measure(options.rounds))
    raw = {
        "rounds": options.rounds,
        "step_ms": STEP_MS,
        "cpus": os.cpu_count(),
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "idle_cpu_s_per_s": idle,
        "costs_us": dict(costs(measured)),
        "samples": measured,
    }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(msgspec.to_builtins(raw), indent=1) + "\n")
    print(table(measured))
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
