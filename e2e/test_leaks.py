"""200 requests (60 without --exhaustive), half of them cancelled at random points, through `antiphon serve` with the
real model: nothing is left.

Not a block on any worker, not a task, not a descriptor, and after Ctrl-C not a process.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.support.serve import ServeProcess, serve_process
from tests.support.workers import is_idle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_REQUESTS, _FEWER_REQUESTS = 200, 60
_AT_ONCE = 24
_IDLE_DEADLINE_S = 60.0


def _status_urls(process: ServeProcess) -> dict[str, str]:
    found = re.findall(r"worker ready worker_id=(\S+) .*status=(\S+)", process.text)
    return {worker_id: f"http://{address}/status" for worker_id, address in found}


def _descriptors(process: ServeProcess) -> dict[str, int]:
    return {name: child.num_fds() for name, child in process.children().items()}


def _threads(process: ServeProcess) -> dict[str, int]:
    return {name: child.num_threads() for name, child in process.children().items()}


async def _idle_statuses(client: httpx.AsyncClient, urls: dict[str, str]) -> dict[str, Any]:
    """The status of each worker once it is idle."""
    statuses = {}
    for worker_id, url in urls.items():
        ends_at = time.monotonic() + _IDLE_DEADLINE_S
        while not is_idle(status := (await client.get(url)).json()):
            assert time.monotonic() < ends_at, f"{worker_id} is not idle: {status}"
            await asyncio.sleep(0.1)
        statuses[worker_id] = status
    return statuses


async def _request(client: httpx.AsyncClient, url: str, number: int, dice: random.Random) -> str:
    """One request; every second one is given up after a random while. Returns how it ended."""
    body = {
        "model": "demo",
        "prompt": [dice.randrange(1000, 40_000) for _ in range(dice.choice((5, 20, 60, 130, 200, 300, 500, 900)))],
        "max_tokens": dice.randrange(1, 40),
        "temperature": dice.choice((0, 1)),
        "ignore_eos": True,
        "stream": dice.random() < 0.5,
    }
    if number % 2:
        # From a request that has hardly left to one that is about to be complete.
        patience_s = dice.choice((0.01, 0.1, 0.5, 1.5, 4.0)) * dice.random()
        try:
            async with asyncio.timeout(patience_s):
                await client.post(f"{url}/v1/completions", json=body)
        except TimeoutError:
            return "cancelled"
        return "complete"
    answer = await client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if body["stream"]:
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]
    else:
        assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
    return "complete"


_POOLED_THREADS = 4


async def _load(url: str, count: int, seed: int) -> list[str]:
    dice = random.Random(seed)
    gate = asyncio.Semaphore(_AT_ONCE)
    # A client of its own for each load: its connections end with it.
    limits = httpx.Limits(max_connections=_AT_ONCE)
    async with httpx.AsyncClient(timeout=300, trust_env=False, limits=limits) as client:

        async def one(number: int) -> str:
            async with gate:
                return await _request(client, url, number, random.Random(dice.random()))

        return list(await asyncio.gather(*(one(number) for number in range(count))))


async def test_many_requests_leave_nothing(pytestconfig: pytest.Config) -> None:
    """See ai-dynamo/dynamo#13855, #7489, #13691 and vllm-project/vllm#50425: cancels that left blocks held."""
    requests = _REQUESTS if pytestconfig.getoption("exhaustive") else _FEWER_REQUESTS
    with serve_process("--port", "0", "--kv-blocks", "400", "--log-level", "info") as process:
        url = process.base_url
        urls = _status_urls(process)
        assert len(urls) == 2
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            await _load(url, 16, seed=1)
            before = await _idle_statuses(client, urls)
            await client.get(f"{url}/metrics")  # so that this client's own connection is there before and after
            descriptors, threads = _descriptors(process), _threads(process)

            endings = await _load(url, requests, seed=2)
            cancelled = endings.count("cancelled")
            assert cancelled > requests // 4, endings

            after = await _idle_statuses(client, urls)
            for worker_id, status in after.items():
                assert status["total_blocks"] == before[worker_id]["total_blocks"] == status["free_blocks"]
                assert status["integrity"] == "ok"
                assert status["pins"] == 0
            page = (await client.get(f"{url}/metrics")).text
            assert re.search(r"^antiphon_gateway_requests_in_flight 0\.0$", page, re.MULTILINE)
            assert re.search(r"^antiphon_gateway_queue_depth 0\.0$", page, re.MULTILINE)
            counted = re.findall(r"^antiphon_gateway_cancelled_total\{.*\} (\S+)$", page, re.MULTILINE)
            print(f"{requests} requests, {cancelled} given up, {sum(map(float, counted)):.0f} seen as cancelled in all")
            await _settles(lambda: _descriptors(process), descriptors)
            # A pool makes a thread when it has none to spare; one left behind by each request would be sixty.
            await _settles(
                lambda: _threads(process), {name: count + _POOLED_THREADS for name, count in threads.items()}
            )
        everything = psutil.Process(process.pid).children(recursive=True)
        process.interrupt()
        assert process.wait() == 0
        assert [child for child in everything if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
        assert "Traceback" not in process.text, process.text


async def _settles(now: Any, limit: dict[str, int]) -> None:
    """No process has more than before (closing a socket takes a moment)."""
    ends_at = time.monotonic() + 20
    while any(count > limit[name] for name, count in now().items()):
        assert time.monotonic() < ends_at, json.dumps({"before": limit, "after": now()})
        await asyncio.sleep(0.1)
