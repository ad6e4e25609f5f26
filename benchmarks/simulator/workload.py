"""One open-loop workload, to be sent over HTTP and to be simulated: as token ids, and as a trace with the same blocks.

Prompts begin with one of a few prefixes, of very different popularity; some go on from an earlier prompt, as second
turns do. Answers are of fixed lengths.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_simulate.records import TraceRequest

BLOCK_TOKENS = 64
_PREFIXES = (512, 384, 256, 192, 128)
"""Tokens of each, the most popular first."""
_WITH_PREFIX = 0.8
_SECOND_TURNS = 0.25
_LONGEST_FIRST_TURN = 800


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    output_tokens: int
    gap: float
    """To the one before, in mean gaps."""


def make_requests(count: int, seed: int, ids: range) -> list[Request]:
    """Poisson arrivals; prompts of `ids`. Those of two seeds have no beginning in common."""
    dice = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(dice.choices(ids, k=length))

    prefixes = [tokens(length) for length in _PREFIXES]
    weights = [1.0 / rank for rank in range(1, len(prefixes) + 1)]
    made: list[Request] = []
    for _ in range(count):
        earlier = [request for request in made if len(request.prompt) < _LONGEST_FIRST_TURN]
        if len(earlier) > len(prefixes) and dice.random() < _SECOND_TURNS:
            prompt = dice.choice(earlier).prompt + tokens(dice.randint(40, 200))
        elif dice.random() < _WITH_PREFIX:
            prompt = dice.choices(prefixes, weights)[0] + tokens(dice.randint(16, 400))
        else:
            prompt = tokens(dice.randint(64, 700))
        made.append(Request(prompt, dice.randint(8, 48), dice.expovariate(1.0)))
    return made


def as_trace(requests: Sequence[Request], gap_ms: float) -> list[TraceRequest]:
    """The same with a number for each block and all before it. Partial blocks are nobody else's."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    arrivals = itertools.accumulate(request.gap * gap_ms for request in requests)
    made = []
    for index, (request, arrival_ms) in enumerate(zip(requests, arrivals, strict=True)):
        block, blocks = 0, []
        for begin in range(0, len(request.prompt), BLOCK_TOKENS):
            tokens = request.prompt[begin : begin + BLOCK_TOKENS]
            if len(tokens) < BLOCK_TOKENS:
                tokens = (-1, index)
            block = numbers.setdefault((block, tokens), len(numbers) + 1)
            blocks.append(block)
        made.append(TraceRequest(index, arrival_ms, len(request.prompt), request.output_tokens, tuple(blocks)))
    return made
