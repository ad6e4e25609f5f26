"""CPU time of the gateway per request and per streamed chunk, beside the field's routers in one interleaved run.

Every server has four workers that answer at once (`targets.py`), so that what is measured is the server. Three suites:

    ids     completions with token ids given, 2.1 KB: what a router does that need not tokenise. The Rust routers
            refuse token ids; they get a chat of as many bytes, which they do not tokenise either
    chunks  streams whose workers are paced: the cost of a chunk by itself
    text    chats with a real tokenizer and template, 16 tokens out, against Dynamo: about 320 tokens with a system
            prompt that all share, as many and all of them new, and conversations that grow to 1,100 (`load.Chats`)

In each round every case meets every server in turn, so that what else the machine does meets all alike; tables show
medians over the rounds. CPU time is the process's own, of all its threads, less what it needs when idle for as long.

    python -m benchmarks.gateway.peers --peers FOLDER --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from benchmarks.gateway.load import Chats, Job, Outcome
from benchmarks.gateway.targets import (
    ROUTERS,
    Stage,
    Target,
    stage,
    start_dynamo,
    start_gateway,
    start_mocks,
    start_router,
)

OURS = "antiphon"
IDLE_S = 2.0
SETTLE_S = 0.3
WAIT_S = 120.0
PACE_MS = 10.0


@dataclass(frozen=True, slots=True)
class Case:
    endpoint: str
    stream: bool
    tokens: int
    connections: int
    requests: int
    prompt_tokens: int = 512
    prompt_characters: int = 2060
    chats: Chats = Chats.SYSTEM

    @property
    def label(self) -> str:
        how = "stream" if self.stream else "whole"
        what = f"chat, {self.chats}" if self.endpoint == "chat" else self.endpoint
        return f"{what}, {how}, {self.tokens} tokens, {self.connections} at once"


SUITES: dict[str, list[Case]] = {
    "ids": [
        Case("completions", stream, tokens, connections, 300 if connections == 1 else 1500)
        for connections in (1, 32)
        for stream in (False, True)
        for tokens in (1, 16)
    ],
    "chunks": [
        Case("completions", True, tokens, connections, connections * (4 if tokens == 1 else 2))
        for connections in (32, 128)
        for tokens in (1, 33)
    ],
    "text": [
        Case("chat", stream, 16, connections, 200 if connections == 1 else 800, prompt_characters=1400, chats=chats)
        for chats in Chats
        for connections in (1, 32)
        for stream in (False, True)
    ],
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One case, once, on one server."""

    cpu_us_per_request: float
    requests_per_s: float
    busy: float
    """CPU seconds per second."""
    outcome: Outcome


class Client:
    """The load generator's process (`load.py`)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def _says(self) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the client ended; its log says why")
        return line

    def _hears(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")

    async def run(self, target: Target, case: Case) -> Sample:
        job = Job(
            port=target.port,
            model=target.model,
            endpoint=case.endpoint if target.takes_ids else "chat",
            stream=case.stream,
            tokens=case.tokens,
            connections=case.connections,
            requests=case.requests,
            prompt_tokens=case.prompt_tokens,
            prompt_characters=case.prompt_characters,
            chats=case.chats,
        )
        self._hears(msgspec.json.encode(job))
        await self._says()
        await asyncio.sleep(SETTLE_S)
        cpu_s, wall_s = target.cpu_s(), time.perf_counter()
        self._hears(b"go")
        outcome = msgspec.json.decode(await self._says(), type=Outcome)
        cpu_s, wall_s = target.cpu_s() - cpu_s, time.perf_counter() - wall_s
        own_s = cpu_s - target.idle_cpu_s_per_s * wall_s
        return Sample(own_s / case.requests * 1e6, case.requests / outcome.wall_s, cpu_s / wall_s, outcome)


@dataclass(frozen=True, slots=True)
class Setting:
    peers: Path
    model_dir: Path | None
    beside: Path | None
    python: Path | None
    names: frozenset[str]
    """Empty: all."""

    def wants(self, name: str) -> bool:
        return not self.names or name in self.names


async def start_targets(stage: Stage, suite: str, setting: Setting) -> list[Target]:
    """The servers of a suite, those that are installed."""
    step_ms = PACE_MS if suite == "chunks" else 0.0
    pace = ("--step-ms", str(step_ms))
    targets: list[Target | None] = []
    if suite == "text":
        if setting.model_dir is None:
            return []
        mocks = await start_mocks(stage, "mock_worker", *pace, "--model-dir", str(setting.model_dir))
        if setting.wants("dynamo"):
            targets.append(await start_dynamo(stage, setting.model_dir, setting.peers))
    else:
        mocks = await start_mocks(stage, "mock_worker", *pace)
        wanted = [name for name in ROUTERS if setting.wants(name)]
        if wanted:
            plain = await start_mocks(stage, "mock_http", *pace)
            targets += [await start_router(stage, name, plain, setting.peers) for name in wanted]
    ours = [await start_gateway(stage, OURS, mocks)]
    if setting.beside is not None:
        ours.append(await start_gateway(stage, "beside", mocks, tree=setting.beside))
    if setting.python is not None:
        tree = Path(__file__).parents[2]
        ours.append(await start_gateway(stage, "other python", mocks, tree=tree, python=str(setting.python)))
    return [*ours, *(target for target in targets if target is not None)]


Measured = dict[str, dict[str, list[Sample]]]
"""case label -> server -> one sample a round"""


async def measure(suite: str, rounds: int, setting: Setting, folder: Path) -> tuple[Measured, dict[str, list[float]]]:
    """Also the idle CPU time of each server, in seconds per second, once a round."""
    cases = SUITES[suite]
    async with stage(folder / suite) as own:
        targets = await start_targets(own, suite, setting)
        client = Client(await own.run("client", sys.executable, "-m", "benchmarks.gateway.load", talks=True))
        measured: Measured = {case.label: {target.name: [] for target in targets} for case in cases}
        idle: dict[str, list[float]] = {target.name: [] for target in targets}
        for number in range(-1, rounds):  # The first round only warms up.
            await _measure_idle(targets)
            for index, case in enumerate(cases):
                turn = (number + index) % max(1, len(targets))
                for target in (*targets[turn:], *targets[:turn]):
                    try:
                        sample = await client.run(target, case)
                    except RuntimeError as error:
                        raise RuntimeError(
                            f"{case.label} on {target.name}: {own.log_of('client')}{own.log_of(target.name)}"
                        ) from error
                    if number >= 0:
                        measured[case.label][target.name].append(sample)
            for target in targets:
                if number >= 0:
                    idle[target.name].append(target.idle_cpu_s_per_s)
            print(f"{suite}: round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return measured, idle


async def _measure_idle(targets: Sequence[Target]) -> None:
    await asyncio.sleep(SETTLE_S)
    before = [(target.cpu_s(), time.perf_counter()) for target in targets]
    await asyncio.sleep(IDLE_S)
    for target, (cpu_s, at) in zip(targets, before, strict=True):
        target.idle_cpu_s_per_s = (target.cpu_s() - cpu_s) / (time.perf_counter() - at)


def chunk_costs(measured: Measured) -> Measured:
    """Of the paced streams: CPU time of a chunk, as the difference of long and short ones, in place of a request's."""
    costs: Measured = {}
    for connections in (32, 128):
        short, long = (measured[Case("completions", True, tokens, connections, 0).label] for tokens in (1, 33))
        costs[f"chunk, {connections} streams at once"] = {
            name: [
                Sample(
                    (two.cpu_us_per_request - one.cpu_us_per_request) / 32, two.requests_per_s, two.busy, two.outcome
                )
                for one, two in zip(short[name], long[name], strict=True)
            ]
            for name in short
        }
    return costs


def table(measured: Measured) -> str:
    """Medians of CPU time, and in brackets ours as a share of the peer's, round by round."""
    names = list(next(iter(measured.values()), {}))
    lines = ["| CPU us | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for label, of in measured.items():
        cells = []
        for name in names:
            cell = f"{_median(of[name], lambda sample: sample.cpu_us_per_request):.0f}"
            if name != OURS and OURS in of:
                pairs = zip(of[OURS], of[name], strict=True)
                ratios = [ours.cpu_us_per_request / theirs.cpu_us_per_request for ours, theirs in pairs]
                cell += f" ({statistics.median(ratios):.2f})"
            cells.append(cell)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", "| requests/s; p50 ms | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for label, of in measured.items():
        cells = [
            f"{_median(of[name], lambda sample: sample.requests_per_s):.0f}; "
            f"{_median(of[name], lambda sample: sample.outcome.whole_p50_ms):.2f}"
            for name in names
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _median(samples: Sequence[Sample], figure: Callable[[Sample], float]) -> float:
    return statistics.median(map(figure, samples))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="folder of the peers' environments")
    parser.add_argument("--model-dir", type=Path, default=None, help="for the suite `text`: a Hugging Face folder")
    parser.add_argument("--beside", type=Path, default=None, help="another checkout whose gateway runs beside")
    parser.add_argument("--python", type=Path, default=None, help="this gateway also runs by this interpreter, beside")
    parser.add_argument("--suite", action="append", choices=list(SUITES), default=None)
    parser.add_argument("--at-once", type=int, default=0, help="only cases with so many connections")
    parser.add_argument("--only", action="append", default=[], help="peers to run; all that are installed")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "peers.json")
    options = parser.parse_args(arguments)
    if options.at_once:
        for suite, cases in SUITES.items():
            SUITES[suite] = [case for case in cases if case.connections == options.at_once]
    setting = Setting(options.peers, options.model_dir, options.beside, options.python, frozenset(options.only))
    raw: dict[str, object] = {
        "command": "python -m benchmarks.gateway.peers " + " ".join(arguments),
        "rounds": options.rounds,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_average_before": os.getloadavg(),
    }
    with tempfile.TemporaryDirectory(prefix="gateway-peers-") as folder:
        for suite in options.suite or list(SUITES):
            measured, idle = uvloop.run(measure(suite, options.rounds, setting, Path(folder)))
            raw[suite] = {"idle_cpu_s_per_s": idle, "samples": measured}
            raw["load_average_after"] = os.getloadavg()
            options.output.parent.mkdir(exist_ok=True)
            options.output.write_text(json.dumps(msgspec.to_builtins(raw), indent=1) + "\n")
            print(f"\n## {suite}\n\n{table(chunk_costs(measured) if suite == 'chunks' else measured)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
