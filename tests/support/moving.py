"""Streams under a load while decode workers are taken away: what came of each, beside what it is undisturbed.

async with House(folder, *TIMED) as house:
    ...
    asks = await references(house, asked(24))
    load = MovingLoad(house, asks, lanes=12)
    async with load.running():
        await scale_down(house, decoders)   # or kill
    assert load.tally.silent == load.tally.altered == 0

An answer is a function of its request (sampling noise is the request's own), so each has one right text. The torch
engine may round differently in another batch: where the reference's best two scores are nearer than `NEAR_TIE` a
different token is counted as a near tie, and nothing after it is compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from tests.support.house import House, Streamed
from tests.support.workers import WorkerProcess, prompt_of

NEAR_TIE = 1e-3


class Choice(msgspec.Struct):
    """One choice of an answer, put together from its events."""

    text: str = ""
    finish: str | None = None
    tokens: list[str] = []
    logprobs: list[float] = []
    gaps: list[float] = []
    """Between the best two log-probabilities at each token, where the engine says them."""


class Answered(msgspec.Struct):
    choices: dict[int, Choice]
    usage: tuple[int, int] | None
    """Tokens of prompt and answer."""


class Ask(msgspec.Struct):
    """A request, and what its answer is when nothing disturbs it."""

    prompt: list[int]
    options: dict[str, Any]
    right: Answered | None = None


class Tally(msgspec.Struct):
    """What came of the streams."""

    streams: int = 0
    complete: int = 0
    altered: int = 0
    """Another text, other tokens, finish or usage than undisturbed."""
    silent: int = 0
    """Neither [DONE] nor an error event."""
    errors: int = 0
    """Ended with an error that the client saw."""
    near_ties: int = 0
    tokens: int = 0
    """Of answers."""
    notes: list[str] = []
    """Of what is not as it should be, the first ones."""


def asked(count: int, *, longest: int, seed: int = 1, kinds: Sequence[dict[str, Any]] = ({},)) -> list[Ask]:
    """Requests with prompts of 20 to 420 tokens and answers of up to `longest`, each kind in turn."""
    chance = random.Random(seed)
    return [
        Ask(
            prompt_of(chance.randrange(20, 420), seed=seed * 1000 + number),
            {"max_tokens": chance.randrange(longest // 2, longest + 1), "seed": number}
            | dict(kinds[number % len(kinds)]),
        )
        for number in range(count)
    ]


async def references(house: House, asks: Sequence[Ask], *, at_once: int = 4) -> None:
    """Ask each undisturbed. A request that wants the stop string CUT gets one that its own text has."""
    gate = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> None:
        async with gate:
            if ask.options.get("stop") == "CUT":
                del ask.options["stop"]
                text = (await _ask(house, ask)).choices[0].text
                middle = len(text) * 2 // 3
                # Beside one that ends the answer, some that begin at every other character: text is held back often.
                ask.options["stop"] = [text[middle : middle + 4], *(text[at] + text[at + 1] + "¤" for at in (5, 9))]
            ask.right = await _ask(house, ask)

    await asyncio.gather(*(one(ask) for ask in asks))


async def _ask(house: House, ask: Ask) -> Answered:
    streamed = await house.stream(ask.prompt, **ask.options)
    assert streamed.complete, (streamed.status, streamed.error)
    return answered(streamed)


def answered(streamed: Streamed) -> Answered:
    choices: dict[int, Choice] = {}
    usage = None
    for event in streamed.events:
        if event.get("usage"):
            usage = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
        for part in event.get("choices", ()):
            choice = choices.setdefault(part["index"], Choice())
            choice.text += part["text"]
            choice.finish = part["finish_reason"] or choice.finish
            told = part.get("logprobs")
            if told:
                choice.tokens += told["tokens"]
                choice.logprobs += told["token_logprobs"]
                choice.gaps += [_gap(top) for top in told["top_logprobs"]]
    return Answered(choices, usage)


def _gap(top: dict[str, float] | None) -> float:
    best = sorted(top.values(), reverse=True) if top else []
    return best[0] - best[1] if len(best) > 1 else float("inf")


def difference(right: Answered, got: Answered) -> tuple[str, bool]:
    """In words, empty for none; and whether it begins at a near tie."""
    for index, wanted in right.choices.items():
        found = got.choices.get(index, Choice())
        for at, (one, other) in enumerate(zip(wanted.tokens, found.tokens, strict=False)):
            if one != other:
                return f"choice {index}, token {at}: {other!r}, not {one!r}", wanted.gaps[at] < NEAR_TIE
        if (found.text, found.finish) != (wanted.text, wanted.finish):
            return f"choice {index}: {found.finish} {found.text!r}, not {wanted.finish} {wanted.text!r}", False
        if found.tokens != wanted.tokens:
            return f"choice {index}: {len(found.tokens)} log-probabilities, not {len(wanted.tokens)}", False
        if any(abs(a - b) > 1e-3 for a, b in zip(found.logprobs, wanted.logprobs, strict=True)):
            return f"choice {index}: other log-probabilities", False
    if got.usage != right.usage:
        return f"usage {got.usage}, not {right.usage}", False
    return "", False


@dataclass
class MovingLoad:
    """Streams on `lanes` lanes, each asking one after the other, until it is told to stop."""

    house: House
    asks: Sequence[Ask]
    lanes: int
    tally: Tally = field(default_factory=Tally)
    _began: dict[int, float] = field(default_factory=dict)
    """Of streams that run, by lane, when they began."""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Return once all lanes have had something, and leave once what runs has ended."""
        running = [asyncio.create_task(self._lane(lane)) for lane in range(self.lanes)]
        try:
            yield
        finally:
            self._stop.set()
            await asyncio.gather(*running)

    async def until_all_began_after(self, moment: float, deadline_s: float = 60.0) -> None:
        """No stream runs any more that began before (monotonic)."""
        async with asyncio.timeout(deadline_s):
            while any(began <= moment for began in self._began.values()):  # noqa: ASYNC110  # nobody announces it
                await asyncio.sleep(0.02)

    async def _lane(self, lane: int) -> None:
        number = lane
        while not self._stop.is_set():
            self._began[lane] = time.monotonic()
            await self._one(self.asks[number % len(self.asks)])
            del self._began[lane]
            number += self.lanes + 1

    async def _one(self, ask: Ask) -> None:
        tally = self.tally
        streamed = Streamed()
        tally.streams += 1
        broken = ""
        try:
            await self.house.stream(ask.prompt, streamed, **ask.options)
        except httpx.HTTPError as error:
            broken = repr(error)
        right, got = ask.right, answered(streamed)
        assert right is not None
        tally.tokens += got.usage[1] if got.usage else 0
        if streamed.error is not None:
            tally.errors += 1
            self._note(f"error: {streamed.status} {streamed.error}")
            if any(not right.choices[index].text.startswith(choice.text) for index, choice in got.choices.items()):
                tally.altered += 1
        elif not streamed.complete:
            tally.silent += 1
            self._note(f"silent end after {sum(len(c.text) for c in got.choices.values())} characters {broken}")
        else:
            tally.complete += 1
            what, is_near_tie = difference(right, got)
            tally.near_ties += is_near_tie
            if what and not is_near_tie:
                tally.altered += 1
                self._note(f"altered: {what}")

    def _note(self, words: str) -> None:
        if len(self.tally.notes) < 20:
            self.tally.notes.append(words[:500])


async def busiest(workers: Sequence[WorkerProcess], deadline_s: float = 60.0) -> WorkerProcess:
    """The one that runs most answers, as soon as one of them runs any."""
    async with asyncio.timeout(deadline_s):
        while True:
            loads = [((await worker.status())["active_requests"], worker) for worker in workers]
            load, worker = max(loads, key=lambda pair: pair[0])
            if load:
                return worker
            await asyncio.sleep(0.02)


async def moves(house: House) -> dict[str, int]:
    """Choices that went on at another worker so far, by reason, as the gateway counts them."""
    page = (await house.client.get(f"{house.url}/metrics")).text
    found = {}
    for line in page.splitlines():
        if line.startswith("antiphon_gateway_moves_total{"):
            found[line.partition('"')[2].partition('"')[0]] = int(float(line.rpartition(" ")[2]))
    return found
