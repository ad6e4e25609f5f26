"""Clients that chat with a cluster, and what became of the tokens that they sent.

So many chats at a time, each turn after the answer to the one before and a moment's reading, each through another
gateway than the turn before. A client whose gateway breaks off asks the next one that serves, as a load balancer would.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx
from antiphon_gateway.models import Model

from tests.support.chats import Chat, IdealCache, Message
from tests.support.index_house import GatewayProcess


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered turn of a chat."""

    chat: str
    number: int
    gateway: str
    computed_by: str
    """The worker that was to compute the prompt."""
    prompt_tokens: int
    cached_tokens: int
    ideal_tokens: int
    """That an unlimited cache shared by all would have had (`IdealCache`)."""
    completion_tokens: int
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over turns. Rates are shares of the prompt tokens."""

    turns: int
    prompt_tokens: int
    computed_tokens: int
    ideal_computed_tokens: int
    hit_rate: float
    ideal_hit_rate: float
    ttft_median_ms: float
    computed_by: dict[str, int]
    """Worker -> prompt tokens that it computed."""

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Totals:
        prompt = sum(turn.prompt_tokens for turn in turns)
        cached = sum(turn.cached_tokens for turn in turns)
        ideal = sum(turn.ideal_tokens for turn in turns)
        by: Counter[str] = Counter()
        for turn in turns:
            by[turn.computed_by] += turn.prompt_tokens - turn.cached_tokens
        return cls(
            turns=len(turns),
            prompt_tokens=prompt,
            computed_tokens=prompt - cached,
            ideal_computed_tokens=prompt - ideal,
            hit_rate=round(cached / prompt, 4),
            ideal_hit_rate=round(ideal / prompt, 4),
            ttft_median_ms=round(statistics.median(turn.ttft_ms for turn in turns), 1),
            computed_by=dict(sorted(by.items())),
        )

    def __str__(self) -> str:
        return (
            f"{self.turns} turns, {self.prompt_tokens} prompt tokens, {self.computed_tokens} computed"
            f" (ideal {self.ideal_computed_tokens}), hit rate {self.hit_rate:.3f} (ideal {self.ideal_hit_rate:.3f}),"
            f" TTFT median {self.ttft_median_ms:.0f} ms"
        )


class BrokenOff(Exception):
    """The gateway went away in the middle."""


@dataclass
class ChatLoad:
    """`await ChatLoad(...).run(chats)`; `turns` and `broken_off` may be read meanwhile."""

    client: httpx.AsyncClient
    model: Model
    gateways: Sequence[GatewayProcess]
    at_once: int
    max_tokens: int = 12
    reading_s: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    broken_off: list[str] = field(default_factory=list)
    """Names of the gateways that broke off, once for each request that did not end there."""

    def __post_init__(self) -> None:
        self._ideal = IdealCache(self.model)

    async def run(self, chats: Iterable[Chat]) -> list[Turn]:
        waiting = iter(list(enumerate(chats)))
        async with asyncio.TaskGroup() as group:
            for _ in range(self.at_once):
                group.create_task(self._client(waiting))
        return self.turns

    async def until_turns(self, count: int, deadline_s: float = 60.0) -> None:
        async with asyncio.timeout(deadline_s):
            while len(self.turns) < count:  # noqa: ASYNC110 - whoever answers is in another process
                await asyncio.sleep(0.01)

    async def _client(self, waiting: Iterator[tuple[int, Chat]]) -> None:
        for number, chat in waiting:
            answers: list[str] = []
            for turn in range(len(chat.users)):
                messages = chat.messages(answers)
                said = await self._turn(chat, turn, number + turn, messages)
                answers.append(chat.assistants[turn] if chat.assistants else said)
                self._ideal.answered(messages, said)
                await asyncio.sleep(self.reading_s)

    async def _turn(self, chat: Chat, turn: int, first: int, messages: Sequence[Message]) -> str:
        ideal_tokens = self._ideal.hit_tokens(messages)
        for attempt in range(len(self.gateways)):
            serving = [gateway for gateway in self.gateways if gateway.serving]
            gateway = serving[(first + attempt) % len(serving)]
            try:
                return await self._ask(gateway, chat, turn, messages, ideal_tokens)
            except (httpx.HTTPError, BrokenOff):
                self.broken_off.append(gateway.name)
        raise AssertionError(f"no gateway answered turn {turn} of {chat.name}: {self.broken_off}")

    async def _ask(
        self, gateway: GatewayProcess, chat: Chat, turn: int, messages: Sequence[Message], ideal_tokens: int
    ) -> str:
        body = {
            "model": self.model.name,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked_at = time.perf_counter()
        first_at, text, usage = 0.0, "", None
        async with self.client.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, f"{gateway.name}: {(await response.aread()).decode()}"
            route = dict(part.split("=", 1) for part in response.headers["x-antiphon-route"].split(";"))
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, f"{gateway.name}: {event}"
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                if text and not first_at:
                    first_at = time.perf_counter()
        if usage is None:
            raise BrokenOff
        first_at = first_at or time.perf_counter()
        self.turns.append(
            Turn(
                chat=chat.name,
                number=turn,
                gateway=gateway.name,
                computed_by=route.get("prefill", route["decode"]),
                prompt_tokens=usage["prompt_tokens"],
                cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                ideal_tokens=ideal_tokens,
                completion_tokens=usage["completion_tokens"],
                ttft_ms=round((first_at - asked_at) * 1e3, 1),
            )
        )
        return text
