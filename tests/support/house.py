"""The whole house as real processes: a Valkey, workers, a gateway. For tests that kill parts of it.

async with House(tmp_path) as house:
    await house.start_workers(("--role", "prefill"), ("--role", "decode"))
    await house.start_gateway()
    answer = await house.complete(prompt_of(400), max_tokens=20)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support.valkey import Valkey
from tests.support.workers import TIMED, WorkerProcess, Workers

START_DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 120.0


@dataclass
class Streamed:
    """One streamed completion, as far as it came."""

    text: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    status: int = 0
    finish: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    """[DONE] was seen."""
    first_text: asyncio.Event = field(default_factory=asyncio.Event)
    retry_after: str | None = None

    @property
    def complete(self) -> bool:
        return self.done and self.finish is not None and self.error is None

    @property
    def refused_before_the_first_token(self) -> bool:
        """An error status that a client may retry."""
        return self.status in (429, 500, 502, 503) and not self.text


class House:
    def __init__(self, folder: Path, *worker_options: str) -> None:
        """`worker_options`: of every worker; by default a timed engine over tcp."""
        self._folder = folder
        self.valkey = Valkey(unix=True)
        self.workers = Workers(folder, *(worker_options or TIMED), "--redis-url", self.valkey.url)
        self.gateway: asyncio.subprocess.Process | None = None
        self.url = ""
        self.model = ""
        self.client = httpx.AsyncClient(
            timeout=ANSWER_DEADLINE_S, trust_env=False, limits=httpx.Limits(max_connections=500)
        )

    async def __aenter__(self) -> Self:
        self.valkey.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        if self.gateway is not None and self.gateway.returncode is None:
            self.gateway.kill()
            await self.gateway.wait()
        await self.workers.__aexit__()
        self.valkey.__exit__(None, None, None)

    async def start_workers(self, *options: Sequence[str]) -> list[WorkerProcess]:
        return await self.workers.start_all(*options)

    async def start_gateway(self, *options: str) -> None:
        """Start it and wait until it can serve."""
        ready = self._folder / "gateway.json"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANTIPHON_", "OTEL_"))}
        with (self._folder / "gateway.log").open("wb") as log:
            self.gateway = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "antiphon", "gateway", "--port", "0", "--redis-url", self.valkey.url),
                *("--ready-file", str(ready), *options),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        async with asyncio.timeout(START_DEADLINE_S):
            while not ready.exists():
                assert self.gateway.returncode is None, self.gateway_log
                await asyncio.sleep(0.02)
            self.url = f"http://{json.loads(ready.read_bytes())['address']}"
            await self.until_ready()
            self.model = (await self.client.get(f"{self.url}/v1/models")).json()["data"][0]["id"]

    @property
    def gateway_log(self) -> str:
        return (self._folder / "gateway.log").read_text(errors="replace")

    async def until_ready(self, *, prefill: int = 0, decode: int = 0) -> None:
        """The gateway says that it can serve, with at least so many workers of each role."""
        async with asyncio.timeout(START_DEADLINE_S):
            while True:
                page = await self.client.get(f"{self.url}/ready")
                models = page.json()["models"].values()
                if page.status_code == 200 and any(m["prefill"] >= prefill and m["decode"] >= decode for m in models):
                    return
                await asyncio.sleep(0.05)

    async def complete(self, prompt: Sequence[int], **options: Any) -> httpx.Response:
        """POST /v1/completions, unstreamed."""
        return await self.client.post(f"{self.url}/v1/completions", json=self._body(prompt, options))

    async def stream(self, prompt: Sequence[int], into: Streamed | None = None, **options: Any) -> Streamed:
        """POST /v1/completions, streamed and read to its end, whatever that is."""
        answer = into or Streamed()
        body = self._body(prompt, options) | {"stream": True, "stream_options": {"include_usage": True}}
        async with self.client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            answer.status = response.status_code
            answer.retry_after = response.headers.get("retry-after")
            if response.status_code != 200:
                answer.error = json.loads(await response.aread())["error"]
                return answer
            async for line in response.aiter_lines():
                if not line:
                    continue
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    answer.done = True
                    continue
                event = json.loads(data)
                answer.events.append(event)
                answer.error = event.get("error", answer.error)
                for choice in event.get("choices", ()):
                    answer.text += choice["text"]
                    answer.finish = choice["finish_reason"] or answer.finish
                    if choice["text"]:
                        answer.first_text.set()
        return answer

    async def gateway_metric(self, name: str) -> float:
        """The sum of a metric's samples; 0 if there is none."""
        page = (await self.client.get(f"{self.url}/metrics")).text
        lines = [line for line in page.splitlines() if not line.startswith("#")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)

    async def until_gateway_is_at_rest(self, deadline_s: float = 60.0) -> None:
        ends_at = time.monotonic() + deadline_s
        names = ("antiphon_gateway_requests_in_flight", "antiphon_gateway_queue_depth")
        while any([await self.gateway_metric(name) for name in names]):
            assert time.monotonic() < ends_at, "requests are left in the gateway"
            await asyncio.sleep(0.05)

    def _body(self, prompt: Sequence[int], options: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "prompt": list(prompt), "temperature": 0, "ignore_eos": True, "seed": 7} | options
