"""A cluster of a few lines to close the law's loop with: prompts wait for the first free worker, answers take as many
steps as they have tokens, workers take their time to start. What the law is not told, it does not know."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from antiphon_policy.latency import StepModel
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import (
    ArrivalCounts,
    PoolView,
    Promise,
    RequestSample,
    ScalingDecision,
    ScalingInputs,
    ScalingMemory,
    TpotTarget,
    TtftTarget,
    decide,
)
from antiphon_policy.scaling.work import decode_ms

STEP = StepModel(8.0, 0.06, 6e-7, 0.02, 2.5e-5)
PROMISE = Promise(TtftTarget(1000.0, 150.0), TpotTarget(40.0))
BUCKET_MS = 10_000.0


def pool(role: WorkerRole, size: int = 2, **more: object) -> PoolView:
    """One whose workers are all ready."""
    given: dict[str, object] = {"ready": size, "step": STEP, "chunk_tokens": 2048, "max_sequences": 64, **more}
    return PoolView(role, size, **given)  # type: ignore[arg-type]


def pair(prefill: int = 2, decode: int = 2, **more: object) -> tuple[PoolView, PoolView]:
    return pool(WorkerRole.PREFILL, prefill, **more), pool(WorkerRole.DECODE, decode, **more)


def poisson(rate: Callable[[float], float], length_s: float, seed: int = 0) -> list[RequestSample]:
    """Requests with lengths like those of chats; `rate`: requests per second at a second."""
    draws = random.Random(seed)
    most = max(rate(float(second)) for second in range(int(length_s)))
    samples, at_s = [], 0.0
    while (at_s := at_s + draws.expovariate(most)) < length_s:
        if draws.random() * most <= rate(at_s):
            uncached = min(30_000, int(draws.lognormvariate(7.5, 1.0)) + 1)
            output = min(2_000, int(draws.lognormvariate(5.0, 0.8)) + 1)
            samples.append(RequestSample(1000.0 * at_s, uncached, 2 * uncached, output))
    return samples


@dataclass
class LoopPool:
    view: PoolView
    free_ms: list[float]
    """Of each ready worker, when it has done what it began."""
    starting_ms: list[float] = field(default_factory=list)
    """When each that starts is ready."""

    @property
    def size(self) -> int:
        return len(self.free_ms) + len(self.starting_ms)

    def advance(self, now_ms: float) -> None:
        for ready_ms in [ready_ms for ready_ms in self.starting_ms if ready_ms <= now_ms]:
            self.starting_ms.remove(ready_ms)
            heapq.heappush(self.free_ms, ready_ms)

    def resize(self, size: int, now_ms: float) -> None:
        while self.size < size:
            self.starting_ms.append(now_ms + self.view.start_ms)
        while self.size > size and self.starting_ms:
            self.starting_ms.remove(max(self.starting_ms))
        while self.size > size:
            heapq.heappop(self.free_ms)


@dataclass
class LoopResult:
    decisions: list[ScalingDecision]
    inside: int
    requests: int
    replica_hours: float

    def sizes(self, role: WorkerRole) -> list[int]:
        return [decision.size_of(role) for decision in self.decisions]

    def reversals(self, role: WorkerRole) -> list[float]:
        """When the direction of the changes changed."""
        times, last = [], 0
        for decision in self.decisions:
            change = next(pool.size - pool.before for pool in decision.sizes if pool.role is role)
            if change and last and (change > 0) != (last > 0):
                times.append(decision.at_ms)
            last = change or last
        return times


def run(
    requests: Sequence[RequestSample],
    pools: Sequence[PoolView],
    length_s: float,
    *,
    promise: Promise = PROMISE,
    every_s: float = 10.0,
) -> LoopResult:
    """The law decides every `every_s` seconds."""
    live = {view.role: LoopPool(view, [0.0] * view.size) for view in pools}
    prefill, decode = live[WorkerRole.PREFILL], live[WorkerRole.DECODE]
    answers: list[tuple[float, int]] = []
    waiting: list[RequestSample] = []
    served: dict[float, RequestSample] = {}
    decisions: list[ScalingDecision] = []
    memory = ScalingMemory()
    counts = [0.0] * int(length_s * 1000.0 / BUCKET_MS + 1)
    coming, inside, spent_ms = 0, 0, 0.0
    for tick in range(1, int(length_s / every_s) + 1):
        now_ms = tick * every_s * 1000.0
        while coming < len(requests) and requests[coming].at_ms <= now_ms:
            waiting.append(requests[coming])
            counts[int(requests[coming].at_ms // BUCKET_MS)] += 1
            coming += 1
        for one in live.values():
            one.advance(now_ms)
        while waiting and prefill.free_ms and prefill.free_ms[0] < now_ms:
            request = waiting.pop(_first(waiting, prefill.free_ms[0], promise))
            begins_ms = max(prefill.free_ms[0], request.at_ms)
            new = request.uncached_tokens
            first_ms = begins_ms + STEP.prefill_ms(new_tokens=new, cached_tokens=new, chunk_tokens=2048)
            heapq.heapreplace(prefill.free_ms, first_ms)
            while answers and answers[0][0] <= first_ms:
                heapq.heappop(answers)
            batch = (len(answers) + 1) / max(1, len(decode.free_ms))
            token_ms = decode_ms(STEP, batch, batch * request.prompt_tokens)
            heapq.heappush(answers, (first_ms + token_ms * request.output_tokens, request.prompt_tokens))
            assert promise.ttft is not None
            assert promise.tpot is not None
            in_time = first_ms - request.at_ms <= promise.ttft.limit_ms(new)
            inside += in_time and token_ms <= promise.tpot.limit_ms
            served[request.at_ms] = msgspec.structs.replace(request, ttft_ms=first_ms - request.at_ms, tpot_ms=token_ms)
        while answers and answers[0][0] <= now_ms:
            heapq.heappop(answers)
        views = tuple(
            _view(one, now_ms, waiting if role is WorkerRole.PREFILL else (), answers) for role, one in live.items()
        )
        begins_ms = now_ms - 1000.0 * promise.window_s
        decision = decide(
            ScalingInputs(
                now_ms,
                promise,
                views,
                tuple(
                    served.get(sample.at_ms, sample)
                    for sample in requests[max(0, coming - 2000) : coming]
                    if sample.at_ms >= begins_ms
                ),
                arrivals=ArrivalCounts(now_ms, BUCKET_MS, tuple(counts[: int(now_ms // BUCKET_MS)])),
                memory=memory,
            )
        )
        memory = decision.memory
        decisions.append(decision)
        for role, one in live.items():
            one.resize(decision.size_of(role), now_ms)
            spent_ms += one.size * every_s * 1000.0
    return LoopResult(decisions, inside, len(requests), spent_ms / 3.6e6)


def _first(waiting: Sequence[RequestSample], free_ms: float, promise: Promise) -> int:
    """As at the gateway: due first, too late last. (Those that came by then; else the next.)"""
    came = [at for at, request in enumerate(waiting) if request.at_ms <= free_ms]
    if len(came) < 2:
        return 0
    assert promise.ttft is not None
    dues = {at: waiting[at].at_ms + promise.ttft.limit_ms(waiting[at].uncached_tokens) for at in came}
    return min(
        came,
        key=lambda at: (free_ms + STEP.prefill_ms(new_tokens=waiting[at].uncached_tokens) > dues[at], dues[at]),
    )


def _view(
    one: LoopPool, now_ms: float, waiting: Sequence[RequestSample], answers: Sequence[tuple[float, int]]
) -> PoolView:
    decodes = one.view.role is WorkerRole.DECODE
    return msgspec.structs.replace(
        one.view,
        size=one.size,
        ready=len(one.free_ms),
        starting_ms=tuple(ready_ms - now_ms for ready_ms in one.starting_ms),
        queued_tokens=sum(sample.uncached_tokens for sample in waiting),
        running=len(answers) if decodes else 0,
        kv_tokens=sum(tokens for _, tokens in answers) if decodes else 0,
    )
