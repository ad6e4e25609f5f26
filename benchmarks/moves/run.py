"""Streams while decode workers are scaled down (SIGTERM) and killed (kill -9), again and again.

A gateway, Valkey, prefill and decode workers, all real processes; streams on some lanes, one after the other on each.
A *scale-down* starts a replacement first and then ends the busiest decode worker with less time than its streams need,
so that they move. A *kill* takes the busiest one with -9, and a replacement is started for it. Every answer is compared
with what the same request got undisturbed: text, tokens of log-probabilities, finish and usage of each choice. Events
are so far apart that no stream loses more than two workers, or is given back more than six times: the gateway gives up
a request with the third and the ninth.

    python -m benchmarks.moves.run --engine timed --scale-downs 100 --kills 100 --output FILE.json
    python -m benchmarks.moves.run --engine torch --model tiny --scale-downs 100 --kills 100 --output FILE.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.moves.forked import ForkedWorkers
from tests.support.house import House
from tests.support.models import demo_model, write_tiny_model
from tests.support.moving import MovingLoad, Tally, asked, busiest, moves, references
from tests.support.workers import TIMED, WorkerProcess

_TIMED_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 2},
    {"n": 2},
    {"stop": "CUT", "logprobs": 1},
    {"stop": "CUT"},
    {"min_tokens": 30, "presence_penalty": 0.5},
)
_TORCH_KINDS: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"logprobs": 2, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"logprobs": 2, "stop": "CUT"},
    {"logprobs": 2, "repetition_penalty": 1.2},
)


_PATIENT = ("--lost-after-ms", "6000")
"""On a busy machine a process may not be heard for longer than the usual second and a half; a dead one is noticed by
its closed connection."""


class Settings(msgspec.Struct, frozen=True):
    command: str
    engine: str
    model: str
    scale_downs: int
    kills: int
    prefill: int
    decode: int
    lanes: int
    asks: int
    longest: int
    drain_timeout_s: float


class Phase(msgspec.Struct):
    """All events of one kind."""

    kind: str
    events: int
    took_s: float
    moves: dict[str, int]
    """Of choices, by reason."""
    exit_codes: dict[str, int]
    longest_end_s: float
    """From SIGTERM to the end of the process; 0 for kills."""
    pulled_blocks: int
    """By the decode workers that were left, in all their lives so far."""
    tally: Tally


class Results(msgspec.Struct):
    started: str
    machine: str
    cpu_count: int
    settings: Settings
    phases: list[Phase]


class Fleet:
    """The decode workers of a house, with the next one starting already."""

    def __init__(self, house: House, settings: Settings) -> None:
        self._house = house
        self._settings = settings
        self.decode: list[WorkerProcess] = []
        self._next: asyncio.Task[WorkerProcess] | None = None

    async def start(self) -> None:
        roles = [("--role", "prefill")] * self._settings.prefill + [("--role", "decode")] * self._settings.decode
        workers = await self._house.start_workers(*roles)
        self.decode = workers[self._settings.prefill :]
        await self._house.start_gateway(*_PATIENT)
        await self._house.until_ready(prefill=self._settings.prefill, decode=len(self.decode))

    async def add_one(self) -> None:
        """One more, once the gateway has it; and the next begins to start."""
        worker = await (self._next or self._starting())
        self._next = self._starting()
        self.decode.append(worker)
        await self._house.until_ready(decode=len(self.decode))

    def _starting(self) -> asyncio.Task[WorkerProcess]:
        return asyncio.create_task(self._house.workers.start("--role", "decode"))

    async def close(self) -> None:
        if self._next is not None:
            self.decode.append(await self._next)
            self._next = None

    async def take(self) -> WorkerProcess:
        """The busiest, which is no longer of the fleet."""
        worker = await busiest(self.decode)
        self.decode.remove(worker)
        return worker


async def phase(house: House, fleet: Fleet, settings: Settings, kind: str, events: int, load: MovingLoad) -> Phase:
    before = await moves(house)
    started = time.perf_counter()
    codes: dict[str, int] = {}
    longest_end_s = 0.0
    taken_at: list[float] = []
    ending: list[asyncio.Task[float]] = []

    async def ended(worker: WorkerProcess) -> float:
        told = time.perf_counter()
        async with asyncio.timeout(60):
            code = await worker.process.wait()
        codes[str(code)] = codes.get(str(code), 0) + 1
        return time.perf_counter() - told

    async with load.running():
        for number in range(1, events + 1):
            await fleet.add_one()
            # The gateway gives up a request that loses three workers, or moves nine times.
            moves_at_most = 2 if kind == "kill -9" else 6
            if len(taken_at) >= moves_at_most:
                await load.until_all_began_after(taken_at[-moves_at_most])
            worker = await fleet.take()
            worker.send_signal(signal.SIGTERM if kind == "scale-down" else signal.SIGKILL)
            taken_at.append(time.monotonic())
            ending.append(asyncio.create_task(ended(worker)))
            if number % 10 == 0:
                print(f"{kind} {number} of {events}, {time.perf_counter() - started:.0f} s: {load.tally}", flush=True)
        for took_s in await asyncio.gather(*ending):
            longest_end_s = max(longest_end_s, took_s if kind == "scale-down" else 0.0)
    await house.until_gateway_is_at_rest()
    for worker in fleet.decode:
        await worker.until_idle(20)
    after = await moves(house)
    pulled = sum([await worker.metric("antiphon_pulled_blocks_total") for worker in fleet.decode])
    return Phase(
        kind,
        events,
        round(time.perf_counter() - started, 1),
        {reason: after[reason] - before.get(reason, 0) for reason in after},
        codes,
        round(longest_end_s, 2),
        int(pulled),
        load.tally,
    )


async def measure(settings: Settings, folder: Path) -> AsyncIterator[Phase]:
    """Each phase, once it is over."""
    if settings.engine == "timed":
        engine: tuple[str, ...] = (*TIMED, "--timed-base-ms", "12", "--kv-blocks", "1024", "--max-batch-tokens", "256")
        kinds = _TIMED_KINDS
    else:
        model = demo_model() if settings.model == "demo" else write_tiny_model(folder / "model")
        engine = ("--engine", "torch", str(model), "--dtype", "float32", "--threads", "1")
        engine += ("--transport", "tcp", "--max-batch-tokens", "256", "--kv-blocks", "256", "--no-self-measure")
        kinds = _TORCH_KINDS
    drain = ("--drain-timeout-s", str(settings.drain_timeout_s), *_PATIENT)
    async with House(folder, *engine, *drain) as house:
        house.workers = ForkedWorkers(folder, *engine, *drain, "--redis-url", house.valkey.url)
        fleet = Fleet(house, settings)
        await fleet.start()
        asks = asked(settings.asks, longest=settings.longest, kinds=kinds)
        await references(house, asks)
        for kind, events in (("scale-down", settings.scale_downs), ("kill -9", settings.kills)):
            if events:
                load = MovingLoad(house, asks, settings.lanes)
                yield await phase(house, fleet, settings, kind, events, load)
        await fleet.close()


async def record(settings: Settings, output: Path) -> Results:
    """Written after each phase."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    results = Results(started, platform.machine(), os.cpu_count() or 0, settings, [])
    with tempfile.TemporaryDirectory() as folder:
        async for one in measure(settings, Path(folder)):
            print(msgspec.json.encode(one).decode(), flush=True)
            results.phases.append(one)
            write(results, output)
    return results


def write(results: Results, output: Path) -> None:
    output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", choices=("timed", "torch"), required=True)
    parser.add_argument("--model", choices=("tiny", "demo"), default="tiny", help="of the torch engine")
    parser.add_argument("--scale-downs", type=int, default=100)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=3)
    parser.add_argument("--lanes", type=int, default=12)
    parser.add_argument("--asks", type=int, default=48)
    parser.add_argument("--longest", type=int, default=160)
    parser.add_argument("--drain-timeout-s", type=float, default=0.1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    settings = Settings(
        "python -m benchmarks.moves.run " + " ".join(sys.argv[1:] if arguments is None else arguments),
        options.engine,
        options.model if options.engine == "torch" else "",
        options.scale_downs,
        options.kills,
        options.prefill,
        options.decode,
        options.lanes,
        options.asks,
        options.longest,
        options.drain_timeout_s,
    )
    # So that processes are ended, whoever ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    results = asyncio.run(record(settings, options.output))
    return int(any(one.tally.silent or one.tally.altered or one.tally.errors for one in results.phases))


if __name__ == "__main__":
    sys.exit(main())
