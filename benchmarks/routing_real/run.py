"""Routing by cost and round robin side by side on the real engine: 2 prefill and 2 decode workers, chats of some turns.

Each round runs each load once with either routing, on the same workers, and swaps their order from round to round. A
nonce in the system prompts is other for every run, so none finds what another left. Counted are the prompt tokens that
had to be computed, as the workers say in `usage`; beside them stands what one unlimited cache shared by all would have
had to compute. Times to first token are a sanity check only: all workers share the machine's cores.

    python -m benchmarks.routing_real.run --mtbench FILE --taskmaster FILE --rounds 3 --output FILE.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tests.support.chat_load import ChatLoad, Totals
from tests.support.chats import Chat, read_mtbench, read_taskmaster, with_system_prompts
from tests.support.index_house import GatewayProcess
from tests.support.routing_house import RoutingHouse

PREFILL = DECODE = 2
ROUTINGS = ("round-robin", "cost")
READING_S = 0.05


class Settings(msgspec.Struct, frozen=True):
    command: str
    rounds: int
    at_once: int
    groups: int
    system_words: int
    output_tokens: int
    kv_blocks: int


class Run(msgspec.Struct, frozen=True):
    """One load with one routing in one round."""

    round: int
    load: str
    routing: str
    took_s: float
    totals: Totals


class Results(msgspec.Struct, frozen=True):
    started: str
    cpu_count: int
    machine: str
    settings: Settings
    runs: list[Run]


async def measure(settings: Settings, loads: dict[str, list[Chat]]) -> list[Run]:
    options = ("--threads", "1", "--kv-blocks", str(settings.kv_blocks))
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        async with RoutingHouse(Path(folder), *options) as house:
            await house.start(prefill=PREFILL, decode=DECODE, by_cost=1, in_turn=1)
            await warm_up(house, settings)
            for number in range(settings.rounds):
                for name, texts in loads.items():
                    for routing in ROUTINGS if number % 2 == 0 else reversed(ROUTINGS):
                        nonce = f"{number:02}{name[0]}{routing[0]}"
                        run = await one_run(house, settings, number, name, routing, texts, nonce)
                        print(f"round {number} {name} {routing}: {run.totals}; {run.took_s:.0f} s", flush=True)
                        runs.append(run)
    return runs


async def one_run(
    house: RoutingHouse,
    settings: Settings,
    number: int,
    name: str,
    routing: str,
    texts: Sequence[Chat],
    nonce: str,
) -> Run:
    chats = with_system_prompts(texts, groups=settings.groups, words=settings.system_words, nonce=nonce)
    load = load_on(house, settings, [house.gateways[f"{routing}-0"]])
    started = time.perf_counter()
    turns = await load.run(chats)
    assert len(turns) == sum(len(chat.users) for chat in chats)
    return Run(number, name, routing, round(time.perf_counter() - started, 1), Totals.of(turns))


async def warm_up(house: RoutingHouse, settings: Settings) -> None:
    """Every worker computes and every link is used once; gateways learn what a step takes."""
    for name, gateway in house.gateways.items():
        texts = [Chat(f"warm-{number}", ("Hello.", "And now?")) for number in range(8)]
        chats = with_system_prompts(texts, groups=4, words=settings.system_words, nonce=f"warm {name}")
        await load_on(house, settings, [gateway]).run(chats)


def load_on(house: RoutingHouse, settings: Settings, gateways: Sequence[GatewayProcess]) -> ChatLoad:
    return ChatLoad(
        house.client,
        house.model,
        gateways,
        at_once=settings.at_once,
        max_tokens=settings.output_tokens,
        reading_s=READING_S,
    )


def table(runs: Sequence[Run]) -> str:
    """Medians over the rounds, with the least and the most."""
    lines = [
        "| load | routing | prompt tokens | computed | avoidable | hit rate | ideal hit rate | TTFT median, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(run.load for run in runs):
        for routing in ROUTINGS:
            of = [run.totals for run in runs if (run.load, run.routing) == (name, routing)]
            cells = (
                spread([one.prompt_tokens for one in of], "d"),
                spread([one.computed_tokens for one in of], "d"),
                spread([one.computed_tokens - one.ideal_computed_tokens for one in of], "d"),
                spread([one.hit_rate for one in of], ".3f"),
                spread([one.ideal_hit_rate for one in of], ".3f"),
                spread([one.ttft_median_ms for one in of], ".0f"),
            )
            lines.append(f"| {name} | {routing} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float], form: str) -> str:
    middle = statistics.median_low(values)
    if min(values) == max(values):
        return f"{middle:{form}}"
    return f"{middle:{form}} ({min(values):{form}}-{max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mtbench", type=Path, required=True, help="chat_mtbench_2turn.jsonl")
    parser.add_argument("--taskmaster", type=Path, required=True, help="chat_taskmaster4_coffee.jsonl")
    parser.add_argument("--chats", type=int, default=80, help="the first so many of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=4, help="chats at a time")
    parser.add_argument("--groups", type=int, default=8, help="different system prompts")
    parser.add_argument("--system-words", type=int, default=550)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--kv-blocks", type=int, default=700, help="of each worker")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    settings = Settings(
        command=" ".join(["python -m benchmarks.routing_real.run", *_without_folders(sys.argv[1:])]),
        rounds=given.rounds,
        at_once=given.at_once,
        groups=given.groups,
        system_words=given.system_words,
        output_tokens=given.output_tokens,
        kv_blocks=given.kv_blocks,
    )
    loads = {
        "mtbench": read_mtbench(given.mtbench)[: given.chats],
        "taskmaster": read_taskmaster(given.taskmaster)[: given.chats],
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    runs = asyncio.run(measure(settings, loads))
    results = Results(started, os.cpu_count() or 1, platform.machine(), settings, runs)
    given.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    print(table(runs))


def _without_folders(arguments: Sequence[str]) -> list[str]:
    return [Path(argument).name if "/" in argument else argument for argument in arguments]


if __name__ == "__main__":
    main()
