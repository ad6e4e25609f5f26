"""`antiphon serve --autoscale` while the load changes its kind: first long prompts with short answers, then short
prompts with long answers. What roles change, how soon, and what becomes of requests and caches.

The house is real: supervisor, Valkey, gateway, workers. Every answer has to be whole; some are asked for again in the
end, when nothing changes any more, and have to be the same. Of each change of a role it is told how many KV blocks the
worker held before and after it, and whether it was one process throughout. The decisions are then made again.

    python -m benchmarks.roles.run --output FILE.json
    python -m benchmarks.roles.run --engine torch --prompts-per-s 0.5 --answers-per-s 0.5 --output FILE.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from antiphon_simulate.autoscale.replay import replay

from tests.support.serve import ServeProcess, serve_process

TIMED = (
    *("--engine", "timed", "--timed-base-ms", "20", "--timed-per-new-token-ms", "0.8"),
    *("--timed-per-sequence-ms", "2", "--max-sequences", "64"),
)
PROMISES = {"timed": ("4000", "60"), "torch": ("3000", "150")}
"""TTFT and TPOT in ms."""
HOUSE = ("--prefill", "2", "--decode", "2", "--autoscale", "--sla-window-s", "20", "--kv-blocks", "4096")
LOOK_S = 0.5
ASKED_AGAIN = 12


class Phase(msgspec.Struct):
    name: str
    asked: int = 0
    failed: int = 0
    ttft_p95_ms: float = 0.0
    tpot_p95_ms: float = 0.0
    last_third_ttft_p95_ms: float = 0.0
    last_third_tpot_p95_ms: float = 0.0


class Change(msgspec.Struct):
    """Of one worker's role."""

    worker: str
    role: str
    phase: str
    after_s: float
    """Since the phase began."""
    blocks_before: int
    blocks_after: int
    same_incarnation: bool


class Result(msgspec.Struct):
    command: str
    at: str
    phases: list[Phase]
    changes: list[Change]
    asked_again: int
    altered: int
    decisions: int
    replayed_otherwise: int
    sentences: list[str]
    first_failures: list[str]


class Ask(msgspec.Struct):
    at: float
    body: dict[str, Any]
    text: str = ""
    failure: str = ""
    ttft_s: float = 0.0
    tpot_s: float = 0.0


class Watch:
    """What workers say of themselves, twice a second."""

    def __init__(self, house: ServeProcess, client: httpx.AsyncClient) -> None:
        self._house = house
        self._client = client
        self._seen: dict[str, dict[str, Any]] = {}
        self.phase = ("", 0.0)
        self.changes: list[Change] = []

    def _pages(self) -> list[str]:
        """Of all workers that are there now."""
        found = []
        for name, child in self._house.children().items():
            with contextlib.suppress(OSError, psutil.Error):
                if name not in ("valkey", "gateway"):
                    ready = json.loads(Path(child.environ()["ANTIPHON_READY_FILE"]).read_bytes())
                    found.append(ready["status_address"])
        return found

    async def run(self) -> None:
        while True:
            for page in await asyncio.to_thread(self._pages):
                try:
                    state = (await self._client.get(f"http://{page}/status")).json()
                except httpx.HTTPError:
                    continue
                before = self._seen.get(page, state)
                if before["role"] != state["role"]:
                    name, began = self.phase
                    self.changes.append(
                        Change(
                            worker=state["worker_id"],
                            role=state["role"],
                            phase=name,
                            after_s=round(time.monotonic() - began, 1),
                            blocks_before=before["indexed_blocks"],
                            blocks_after=state["indexed_blocks"],
                            same_incarnation=before["incarnation"] == state["incarnation"],
                        )
                    )
                self._seen[page] = state
            await asyncio.sleep(LOOK_S)


async def ask(client: httpx.AsyncClient, url: str, one: Ask) -> None:
    first = end = 0.0
    done = finish = None
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=one.body | {"stream": True}) as response:
            if response.status_code != 200:
                one.failure = (await response.aread()).decode()
                return
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    done = done or bool(data)
                    continue
                event = json.loads(data)
                one.failure = str(event.get("error", one.failure))
                for choice in event.get("choices", ()):
                    first, end = first or time.monotonic(), time.monotonic()
                    one.text += choice["text"]
                    finish = choice["finish_reason"] or finish
    except httpx.HTTPError as error:
        one.failure = repr(error)
    if not (done and finish):
        one.failure = one.failure or "the stream broke off"
    one.ttft_s, one.tpot_s = first - one.at, (end - first) / max(1, one.body["max_tokens"] - 1)


async def run_phase(
    client: httpx.AsyncClient, url: str, model: str, settings: argparse.Namespace, name: str, seed: int
) -> list[Ask]:
    prompts = name == "prompts"
    per_s = settings.prompts_per_s if prompts else settings.answers_per_s
    length, tokens = (2000, 16) if prompts else (60, 200)
    began = time.monotonic()
    asks: list[Ask] = []
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(settings.phase_s * per_s)):
            await asyncio.sleep(max(0.0, began + number / per_s - time.monotonic()))
            prompt = [(seed * 9973 + number * 7919 + 7 * at + at * at) % 200 for at in range(length)]
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "seed": 7, "ignore_eos": True}
            asks.append(Ask(time.monotonic(), body))
            tasks.create_task(ask(client, url, asks[-1]))
    return asks


def p95_ms(seconds: Sequence[float]) -> float:
    ordered = sorted(seconds)
    return round(1e3 * ordered[int(0.95 * (len(ordered) - 1))], 1) if ordered else 0.0


def summed(name: str, asks: Sequence[Ask]) -> Phase:
    last = asks[-len(asks) // 3 :]
    return Phase(
        name=name,
        asked=len(asks),
        failed=sum(1 for one in asks if one.failure),
        ttft_p95_ms=p95_ms([one.ttft_s for one in asks]),
        tpot_p95_ms=p95_ms([one.tpot_s for one in asks]),
        last_third_ttft_p95_ms=p95_ms([one.ttft_s for one in last]),
        last_third_tpot_p95_ms=p95_ms([one.tpot_s for one in last]),
    )


async def measured(settings: argparse.Namespace, house: ServeProcess, record: Path) -> Result:
    url = house.base_url
    limits = httpx.Limits(max_connections=1000)
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=limits) as client:
        model = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]
        watch = Watch(house, client)
        watching = asyncio.create_task(watch.run())
        phases, asked = [], []
        for seed, name in enumerate(("prompts", "answers")):
            watch.phase = (name, time.monotonic())
            asks = await run_phase(client, url, model, settings, name, seed)
            phases.append(summed(name, asks))
            asked += asks
        watching.cancel()
        again = [Ask(time.monotonic(), one.body) for one in asked[:: max(1, len(asked) // ASKED_AGAIN)]]
        for one in again:
            await ask(client, url, one)
    before = asked[:: max(1, len(asked) // ASKED_AGAIN)]
    altered = sum(1 for one, other in zip(again, before, strict=True) if one.text != other.text and not other.failure)
    found = await asyncio.to_thread(replay, record)
    return Result(
        command=" ".join(["python -m benchmarks.roles.run", *sys.argv[1:]]),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        phases=phases,
        changes=watch.changes,
        asked_again=len(again),
        altered=altered,
        decisions=found.decisions,
        replayed_otherwise=len(found.differences),
        sentences=[line.split("autoscale: ", 1)[1] for line in house.lines if "| autoscale: " in line],
        first_failures=[one.failure for one in asked if one.failure][:5],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("timed", "torch"), default="timed")
    parser.add_argument("--phase-s", type=float, default=40.0)
    parser.add_argument("--prompts-per-s", type=float, default=1.4)
    parser.add_argument("--answers-per-s", type=float, default=1.4)
    parser.add_argument("--output", type=Path, required=True)
    settings = parser.parse_args()
    ttft_ms, tpot_ms = PROMISES[settings.engine]
    promise = ("--sla-ttft-ms", ttft_ms, "--sla-tpot-ms", tpot_ms)
    engine = TIMED if settings.engine == "timed" else ()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "decisions.jsonl"
        words = ("--port", "0", "--threads", "1", "--record-decisions", str(record))
        with serve_process(*HOUSE, *promise, *engine, *words) as house:
            result = asyncio.run(measured(settings, house, record))
    settings.output.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    for phase in result.phases:
        print(phase)
    for change in result.changes:
        print(change)
    print(
        f"{result.altered} of {result.asked_again} altered; {result.decisions} decisions, "
        f"{result.replayed_otherwise} replay otherwise"
    )


if __name__ == "__main__":
    main()
