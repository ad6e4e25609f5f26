"""A workload on a real house, over HTTP, and in the simulator. Both give the same record of each request."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from antiphon_policy.routing import WorkerRole
from antiphon_simulate.cluster import simulate
from antiphon_simulate.policies import registry
from antiphon_simulate.policies.immediate import ImmediatePolicy
from antiphon_simulate.records import Arrival, ClusterShape, Placement, Sla, Timing

from benchmarks.simulator.house import House
from benchmarks.simulator.workload import BLOCK_TOKENS, Request, as_trace

_DEADLINE_S = 600.0
_NO_PROMISE = Sla(ttft_ms=math.inf, ttft_ms_per_1k_prompt_tokens=0.0, tpot_ms=math.inf)


@dataclass(frozen=True)
class Answer:
    """What came of one request."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    remote: bool
    """A prefill worker computed the prompt."""
    ttft_ms: float
    tpot_ms: float
    late_ms: float = 0.0
    """So long after its time it was sent: the client's own slowness."""


async def ask_all(house: House, requests: Sequence[Request], gap_ms: float) -> list[Answer]:
    """Open loop: each is sent at its time, whatever became of those before."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    async with (
        asyncio.timeout(_DEADLINE_S),
        httpx.AsyncClient(trust_env=False, timeout=_DEADLINE_S, limits=limits) as client,
    ):
        await client.get(f"{house.url}/v1/models")
        began = time.perf_counter()
        due_s, asking = 0.0, []
        for request in requests:
            due_s += request.gap * gap_ms / 1e3
            asking.append(_ask(client, house, request, began + due_s))
        return list(await asyncio.gather(*asking))


async def _ask(client: httpx.AsyncClient, house: House, request: Request, due: float) -> Answer:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    sent = time.perf_counter()
    body = {
        "model": house.model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = last = 0.0
    usage = None
    async with client.stream("POST", f"{house.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        remote = "prefill=" in response.headers.get("x-antiphon-route", "")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if event.get("error"):
                raise RuntimeError(f"the answer broke off: {event['error']}")
            usage = event.get("usage") or usage
            if event["choices"]:
                first, last = first or now, now
    if usage is None or usage["completion_tokens"] != request.output_tokens:
        raise RuntimeError(f"{request.output_tokens} tokens were asked for, usage says {usage}")
    return Answer(
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=request.output_tokens,
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        remote=remote,
        ttft_ms=(first - sent) * 1e3,
        tpot_ms=(last - first) * 1e3 / (request.output_tokens - 1),
        late_ms=(sent - due) * 1e3,
    )


@dataclass(frozen=True)
class Simulated:
    answers: list[Answer]
    steps_ms: float
    """That all engines were in steps, together."""


class _AsMeasured(ImmediatePolicy):
    """Computes prompts where the real house did."""

    name = "as measured"

    def __init__(self, remote: Sequence[bool]) -> None:
        super().__init__()
        self._remote = remote

    def place(self, arrival: Arrival, now_ms: float) -> Placement:
        workers = {worker.role: worker.worker_id for worker in self.cluster.workers}
        remote = self._remote[arrival.request.index]
        decode = workers.get(WorkerRole.DECODE) or workers[WorkerRole.BOTH]
        return Placement(decode, workers[WorkerRole.PREFILL] if remote else None)


def simulate_all(
    requests: Sequence[Request],
    gap_ms: float,
    shape: ClusterShape,
    timing: Timing,
    *,
    remote: Sequence[bool] | None = None,
) -> Simulated:
    """The same by Antiphon's own policy, without promises, as the house has none; or, where it is given which prompts
    were computed remotely, placed like that."""
    trace = as_trace(requests, gap_ms)
    policy = registry.make("antiphon") if remote is None else _AsMeasured(remote)
    result = simulate(trace, shape, timing, policy, _NO_PROMISE, seed=0, block_tokens=BLOCK_TOKENS)
    answers = []
    for outcome in sorted(result.outcomes, key=lambda outcome: outcome.request.index):
        assert outcome.placement is not None
        answers.append(
            Answer(
                prompt_tokens=outcome.request.prompt_tokens,
                output_tokens=outcome.request.output_tokens,
                cached_tokens=outcome.request.prompt_tokens - outcome.computed_tokens,
                remote=outcome.placement.prefill is not None,
                ttft_ms=outcome.ttft_ms,
                tpot_ms=outcome.tpot_ms,
            )
        )
    return Simulated(answers, sum(sum(windows) for windows in result.busy_ms.values()))
