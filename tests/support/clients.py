"""Clients that ask one question after the other, streamed, and write down everything that was not as it should be."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Self

import httpx

_QUESTIONS = ("Why is the sky blue?", "Name three rivers.", "What is a prime number?", "Tell me about the sea.")


@dataclass(frozen=True, slots=True)
class Failure:
    at: float
    """Monotonic."""
    what: str


@dataclass
class Clients:
    """`count` clients of one model. `async with` starts them; leaving lets each finish its answer."""

    url: str
    model: str
    count: int
    max_tokens: int = 24
    answered: int = 0
    failures: list[Failure] = field(default_factory=list)
    _stopping: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def __aenter__(self) -> Self:
        self._http = httpx.AsyncClient(timeout=60, trust_env=False)
        self._tasks = [asyncio.create_task(self._ask_on(number)) for number in range(self.count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.finish()
        await self._http.aclose()

    async def finish(self) -> None:
        """No new questions; returns when the answers that are under way have ended."""
        self._stopping = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), 90)

    def stop_asking(self) -> None:
        """No new questions from now on; answers under way go on."""
        self._stopping = True

    async def until_answered(self, more: int) -> None:
        """So many further answers."""
        wanted = self.answered + more
        async with asyncio.timeout(120), self._changed:
            await self._changed.wait_for(lambda: self.answered >= wanted)

    async def _ask_on(self, number: int) -> None:
        turn = number
        while not self._stopping:
            turn += 1
            try:
                await self._ask(_QUESTIONS[turn % len(_QUESTIONS)], seed=turn)
                async with self._changed:
                    self.answered += 1
                    self._changed.notify_all()
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(Failure(time.monotonic(), f"{type(error).__name__}: {error}"))
                await asyncio.sleep(0.2)

    async def _ask(self, question: str, seed: int) -> None:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self.max_tokens,
            "seed": seed,
            "stream": True,
        }
        done, finish, text = False, None, ""
        async with self._http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
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
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
        assert done, "the stream broke off"
        assert finish in ("stop", "length"), finish
        assert text, "the answer is empty"
