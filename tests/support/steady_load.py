"""Requests at a steady rate, whatever becomes of those before: when each had its first token, and how each ended.

An open loop, as many people are one: clients that wait for their answers would ask less just when it gets slow.

    async with SteadyLoad(url, "chat", per_s=3.0) as load:
        await load.until(lambda: len(load.answers) > 20)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import httpx

from tests.support.workers import prompt_of

ANSWER_DEADLINE_S = 90.0


@dataclass(frozen=True, slots=True)
class Answer:
    asked_at: float
    """Monotonic."""
    ttft_ms: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Failure:
    asked_at: float
    what: str


class SteadyLoad:
    """Each prompt is another one, so no cache makes it cheaper. Leaving the block asks nothing more, and waits for the
    answers that are under way."""

    def __init__(self, url: str, model: str, *, per_s: float, prompt_tokens: int, max_tokens: int) -> None:
        self._url, self._model, self._per_s = url, model, per_s
        self._prompt_tokens, self._max_tokens = prompt_tokens, max_tokens
        self.answers: list[Answer] = []
        """In the order in which they ended."""
        self.failures: list[Failure] = []
        self._asked: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Self:
        self._http = httpx.AsyncClient(
            timeout=ANSWER_DEADLINE_S, trust_env=False, limits=httpx.Limits(max_connections=1000)
        )
        self._asking = asyncio.create_task(self._ask_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)
        await asyncio.gather(*self._asked)
        await self._http.aclose()

    async def until(self, holds: Callable[[], bool], deadline_s: float = ANSWER_DEADLINE_S) -> None:
        async with asyncio.timeout(deadline_s), self._changed:
            await self._changed.wait_for(holds)

    def since(self, moment: float) -> list[Answer]:
        """Answers to requests that came later."""
        return [answer for answer in self.answers if answer.asked_at >= moment]

    async def _ask_on(self) -> None:
        number, due_at = 0, time.monotonic()
        while True:
            number += 1
            task = asyncio.create_task(self._ask(number))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
            due_at += 1.0 / self._per_s
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))  # the rate is what this is about

    async def _ask(self, number: int) -> None:
        asked_at = time.monotonic()
        try:
            answer = await self._answered(asked_at, number)
        except (httpx.HTTPError, AssertionError) as error:
            self.failures.append(Failure(asked_at, f"{type(error).__name__}: {error}"))
        else:
            self.answers.append(answer)
        async with self._changed:
            self._changed.notify_all()

    async def _answered(self, asked_at: float, number: int) -> Answer:
        body = {
            "model": self._model,
            "prompt": [201 + number % 50, number // 50 % 200, *prompt_of(self._prompt_tokens - 2, seed=number)],
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        ttft_ms, done, tokens = 0.0, False, 0
        async with self._http.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            assert response.status_code == 200, f"{response.status_code} {(await response.aread()).decode()}"
            async for line in response.aiter_lines():
                if not line:
                    continue
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                    continue
                event = json.loads(data)
                assert "error" not in event, data
                ttft_ms = ttft_ms or (time.monotonic() - asked_at) * 1000.0
                tokens += len(event["choices"])
        assert done, "the stream broke off"
        assert tokens, "the answer is empty"
        return Answer(asked_at, ttft_ms, tokens)
