"""What the fleet holds and what is asked: the same for every contestant, made from names, so no process keeps it.

1,000 workers. *own*: two chains of 512 blocks a worker that nobody else holds (1,024,000 blocks). *ten*: 100 chains,
each held by ten workers. *all*: one chain that all hold. *steps*: one chain of which each worker holds a length
of its own. Stored in events of 256 blocks, worker after worker, as they come in when all are busy.
Standard library only: a peer runs it in an environment of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

WORKERS = 1_000
OWN_CHAINS = 2
TEN_CHAINS = 100
CHAIN_BLOCKS = 512
EVENT_BLOCKS = 256
HASH_BYTES = 16

PHASES = ("own", "ten", "all", "steps")
"""In this order they are stored."""

CASES = ("one", "half", "ten", "all", "steps", "moving", "none")
"""Who holds the chain asked for: one worker; one worker, half of it; ten; all; all, each another length; the same, but
just before each question one of them has stored one more block of it; nobody."""


@dataclass(frozen=True, slots=True)
class Event:
    """A worker has stored these blocks of a chain, packed, from block `first` on."""

    worker: int
    chain: str
    first: int
    packed: bytes


def chain(name: str, blocks: int = CHAIN_BLOCKS) -> bytes:
    """The first blocks of a chain, packed."""
    return random.Random(name).randbytes(blocks * HASH_BYTES)


def step_length(worker: int) -> int:
    """Blocks of the *steps* chain that the worker holds."""
    return 1 + worker * CHAIN_BLOCKS // WORKERS


def events(phase: str) -> Iterator[Event]:
    for first in range(0, CHAIN_BLOCKS, EVENT_BLOCKS):
        if phase == "own":
            for number in range(OWN_CHAINS):
                for worker in range(WORKERS):
                    yield _event(worker, f"own-{worker}-{number}", first, CHAIN_BLOCKS)
        elif phase == "ten":
            for number in range(TEN_CHAINS):
                for worker in holders_of_ten(number):
                    yield _event(worker, f"ten-{number}", first, CHAIN_BLOCKS)
        else:
            for worker in range(WORKERS):
                length = step_length(worker) if phase == "steps" else CHAIN_BLOCKS
                if first < length:
                    yield _event(worker, phase, first, length)


def removals() -> Iterator[Event]:
    """Each worker evicts the last blocks of its second own chain. To be removed from the last to the first."""
    for worker in range(WORKERS):
        yield _event(worker, f"own-{worker}-1", CHAIN_BLOCKS - EVENT_BLOCKS, CHAIN_BLOCKS)


def holders_of_ten(number: int) -> range:
    return range(number * 10, number * 10 + 10)


@dataclass(frozen=True, slots=True)
class Question:
    packed: bytes
    answer: dict[int, int]
    """Worker -> leading blocks."""
    after: Event | None = None
    """Stored just before it is asked, and removed after."""


def question(case: str, blocks: int, draw: random.Random) -> Question:
    if case == "none":
        return Question(draw.randbytes(blocks * HASH_BYTES), {})
    if case == "ten":
        number = draw.randrange(TEN_CHAINS)
        return Question(chain(f"ten-{number}", blocks), dict.fromkeys(holders_of_ten(number), blocks))
    if case == "all":
        return Question(chain("all", blocks), dict.fromkeys(range(WORKERS), blocks))
    if case == "steps":
        return Question(chain("steps", blocks), {worker: min(blocks, step_length(worker)) for worker in range(WORKERS)})
    if case == "moving":
        worker = draw.randrange(WORKERS * 9 // 10)
        lengths = {worker: step_length(worker) for worker in range(WORKERS)}
        lengths[worker] += 1
        event = _event(worker, "steps", lengths[worker] - 1, lengths[worker])
        return Question(chain("steps", blocks), {each: min(blocks, held) for each, held in lengths.items()}, event)
    worker = draw.randrange(WORKERS)
    name = f"own-{worker}-0"
    if case == "one":
        return Question(chain(name, blocks), {worker: blocks})
    rest = draw.randbytes(blocks // 2 * HASH_BYTES)
    return Question(chain(name, blocks // 2) + rest, {worker: blocks // 2})


def _event(worker: int, name: str, first: int, end: int) -> Event:
    end = min(end, first + EVENT_BLOCKS)
    return Event(worker, name, first, chain(name, end)[first * HASH_BYTES :])
