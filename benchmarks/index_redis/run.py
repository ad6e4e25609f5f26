"""The block index at the size of a large fleet, in one Valkey: what it costs the server and a gateway.

    python -m benchmarks.index_redis.run --workers 1000 --blocks 1000 --output benchmarks/index_redis/results/NAME.json

Real announcers (two processes), a real mirror in a process of its own, a real server. README.md beside this file has
the table and what stands behind each column.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from benchmarks.index_redis.child import Child
from tests.support.valkey import Valkey

MODEL = "benchmark"
LARGE_MODEL = "large"
FLEETS = 2
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Options:
    workers: int
    blocks: int
    large_blocks: int
    changes_per_s: tuple[int, ...]
    seconds: float
    package: Path | None


class Gauge:
    """What the server says of itself since `reset`."""

    def __init__(self, server: Valkey) -> None:
        self._server = server
        self._started = time.monotonic()

    def reset(self) -> None:
        with self._client() as client:
            client.config_set("slowlog-log-slower-than", 500)
            client.config_set("slowlog-max-len", 100_000)
            client.config_resetstat()
            client.slowlog_reset()
            self._cpu_s = self._cpu(client)
        self._started = time.monotonic()

    def read(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._started
        with self._client() as client:
            slow_ms = sorted(entry["duration"] / 1000 for entry in client.slowlog_get(100_000))
            scripts = client.info("commandstats").get("cmdstat_eval", {"calls": 0, "usec": 0})
            return {
                "seconds": seconds,
                "server_cpu_share": (self._cpu(client) - self._cpu_s) / seconds,
                "scripts": scripts["calls"],
                "script_us": scripts["usec"] / max(1, scripts["calls"]),
                "longest_ms": slow_ms[-1] if slow_ms else 0.5,
                "slower_than_2_ms": sum(ms > 2 for ms in slow_ms),
                "slower_than_5_ms": sum(ms > 5 for ms in slow_ms),
                "output_bytes": client.info("stats")["total_net_output_bytes"],
                "memory_bytes": client.info("memory")["used_memory"],
            }

    def _client(self) -> Any:
        return redis.Redis.from_url(self._server.url, protocol=2)

    def _cpu(self, client: Any) -> float:
        found = client.info("cpu")
        return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])


class Results(dict[str, Any]):
    """Says and writes what it is given, as a run takes minutes, and one that does not end says something too."""

    def __init__(self, about: dict[str, Any], output: Path | None) -> None:
        super().__init__(about=about)
        self._output = output

    def __setitem__(self, name: str, found: Any) -> None:
        super().__setitem__(name, found)
        self["about"]["load_after"] = os.getloadavg()
        print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
        if self._output:
            self._output.write_text(self.text() + "\n")

    def text(self) -> str:
        return json.dumps(self, indent=1)


class Stage:
    """Server, fleets, and a reader that comes and goes."""

    def __init__(self, options: Options, results: Results) -> None:
        self._options = options
        self.results = results
        self._stack = AsyncExitStack()
        self.server = Valkey()
        self.gauge = Gauge(self.server)
        self.fleets: list[Child] = []

    async def __aenter__(self) -> Stage:
        self._stack.enter_context(self.server)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _fleet(self, model: str, first: int, count: int, blocks: int) -> Child:
        arguments = ["--redis", self.server.url, "--model", model, "--first", str(first), "--count", str(count)]
        return Child("benchmarks.index_redis.fleet", [*arguments, "--blocks", str(blocks)], self._options.package)

    def reader(self, model: str) -> Child:
        arguments = ["--redis", self.server.url, "--model", model]
        return Child("benchmarks.index_redis.reader", arguments, self._options.package)

    async def announce(self) -> None:
        """All workers start at once and write their sets."""
        count, each = self._options.workers, self._options.workers // FLEETS
        self.gauge.reset()
        started = time.monotonic()
        for number in range(FLEETS):
            fleet = self._fleet(MODEL, number * each, each, self._options.blocks)
            self.fleets.append(await self._stack.enter_async_context(fleet))
        await self._until(lambda states: sum(state["healthy"] for state in states) == each * FLEETS)
        self.results["fleet starts"] = self.gauge.read() | {
            "took_s": time.monotonic() - started,
            "workers": count,
            "given_up": await self._given_up(),
        }

    async def _given_up(self) -> int:
        return sum([(await fleet.ask("state"))["given_up"] for fleet in self.fleets])

    async def start_gateways(self) -> None:
        rounds = []
        for _ in range(3):
            self.gauge.reset()
            async with self.reader(MODEL) as reader:
                await reader.ask("state")
                started = time.monotonic()
                state = await self._until_loaded(reader)
                rounds.append(self.gauge.read() | state | {"took_s": time.monotonic() - started})
        self.results["gateway starts"] = rounds

    async def follow(self) -> None:
        """Heartbeats only, then changes at several rates. At the end the mirror is compared with every worker."""
        async with self.reader(MODEL) as reader:
            await self._until_loaded(reader)
            for per_s in (0, *self._options.changes_per_s):
                await self._change(per_s)
                await asyncio.sleep(2)
                self.results[f"changes {per_s}/s"] = await self._watch(reader, self._options.seconds)
            await self._change(0)
            self.results["given up in all"] = await self._given_up()
            self.results["equal"] = await self._equal(reader)
            self.gauge.reset()
            await reader.ask("state", forget=True)
            before = [await fleet.ask("state") for fleet in self.fleets]
            self.server.restart_empty()
            self.gauge.reset()
            started = time.monotonic()
            wanted = [state["republished"] + self._options.workers // FLEETS for state in before]
            await self._until(
                lambda states: all(state["republished"] >= goal for state, goal in zip(states, wanted, strict=True))
            )
            written_s = time.monotonic() - started
            equal = await self._equal(reader)
            self.results["restarted empty"] = self.gauge.read() | {
                "all_written_after_s": written_s,
                "equal": equal,
                "reader": await reader.ask("state"),
            }

    async def one_large_set(self) -> None:
        rounds = []
        for number in range(3):
            self.gauge.reset()
            started = time.monotonic()
            async with self._fleet(LARGE_MODEL, number, 1, self._options.large_blocks) as fleet:
                while (await fleet.ask("state"))["healthy"] < 1:  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.01)
                written = self.gauge.read() | {"took_s": time.monotonic() - started}
                await fleet.ask("change", per_s=20)
                self.gauge.reset()
                async with self.reader(LARGE_MODEL) as reader:
                    await reader.ask("state", forget=True)
                    started = time.monotonic()
                    while (state := await reader.ask("state"))["pairs"] < self._options.large_blocks:
                        assert time.monotonic() - started < DEADLINE_S
                        await asyncio.sleep(0.02)
                    read = self.gauge.read() | {"took_s": time.monotonic() - started, "reader": state}
                    await fleet.ask("change", per_s=0)
                    await asyncio.sleep(1)
                    mine, known = await fleet.ask("digests"), await reader.ask("digests")
                    equal = all(known[worker] == found for worker, found in mine.items())
                with redis.Redis.from_url(self.server.url) as client:
                    client.flushall()
                rounds.append({"written": written, "read": read, "equal": equal})
        self.results["one large set"] = rounds

    async def _watch(self, reader: Child, seconds: float) -> dict[str, Any]:
        self.gauge.reset()
        before, fleets = await reader.ask("state", forget=True), [await fleet.ask("state") for fleet in self.fleets]
        started = time.monotonic()
        await asyncio.sleep(seconds)
        after, later = await reader.ask("state"), [await fleet.ask("state") for fleet in self.fleets]
        took_s = time.monotonic() - started
        ages = sorted(after["ages_ms"])
        return self.gauge.read() | {
            "reader_cpu_share": (after["cpu_s"] - before["cpu_s"]) / took_s,
            "fleet_cpu_share": sum(b["cpu_s"] - a["cpu_s"] for a, b in zip(fleets, later, strict=True)) / took_s,
            "changes_per_s": sum(b["changes"] - a["changes"] for a, b in zip(fleets, later, strict=True)) / took_s,
            "events_per_s": (after["counters"]["events"] - before["counters"]["events"]) / took_s,
            "gaps": after["counters"]["gaps"] - before["counters"]["gaps"],
            "reloads": after["counters"]["reloads"] - before["counters"]["reloads"],
            "age_ms_median": statistics.median(ages) if ages else None,
            "age_ms_most": ages[-1] if ages else None,
            "longest_pauses_ms": after["pauses_ms"],
            "reader_rss_bytes": after["rss_bytes"],
        }

    async def _change(self, per_s: int) -> None:
        for fleet in self.fleets:
            await fleet.ask("change", per_s=per_s / FLEETS)

    async def _equal(self, reader: Child) -> bool:
        """Whether the mirror becomes what every worker holds, block by block."""
        started = time.monotonic()
        true: dict[str, Any] = {}
        for fleet in self.fleets:
            true |= await fleet.ask("digests")
        while True:
            known = await reader.ask("digests")
            if all(known.get(worker) == found for worker, found in true.items()):
                return True
            if time.monotonic() - started > DEADLINE_S:
                return False

    async def _until_loaded(self, reader: Child) -> dict[str, Any]:
        wanted = self._options.workers // FLEETS * FLEETS * self._options.blocks
        ends_at = time.monotonic() + DEADLINE_S
        while (state := await reader.ask("state"))["pairs"] < wanted:
            assert time.monotonic() < ends_at, f"the mirror is not there: {state}"
            await asyncio.sleep(0.02)
        return {"reader": state}

    async def _until(self, condition: Callable[[Sequence[dict[str, Any]]], bool]) -> None:
        ends_at = time.monotonic() + DEADLINE_S
        while not condition(states := [await fleet.ask("state") for fleet in self.fleets]):
            assert time.monotonic() < ends_at, f"the fleet is not there: {states}"
            await asyncio.sleep(0.05)


async def measure(options: Options, results: Results) -> None:
    async with Stage(options, results) as stage:
        await stage.announce()
        await stage.start_gateways()
        await stage.follow()
    async with Stage(options, results) as stage:
        await stage.one_large_set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=1000, help="of each worker")
    parser.add_argument("--large-blocks", type=int, default=100_000, help="of the one large set")
    parser.add_argument(
        "--changes-per-s", type=int, nargs="*", default=[500, 2000, 5000], help="of all workers together"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="at each rate")
    parser.add_argument("--package", type=Path, help="folder that antiphon_kvtransfer is taken from")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    options = Options(
        arguments.workers,
        arguments.blocks,
        arguments.large_blocks,
        tuple(arguments.changes_per_s),
        arguments.seconds,
        arguments.package,
    )
    about = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
        "python": platform.python_version(),
        "package": "other" if options.package else "this",
        "workers": options.workers,
        "blocks": options.blocks,
    }
    results = Results(about, arguments.output)
    asyncio.run(measure(options, results))
    print(results.text())


if __name__ == "__main__":
    main()
