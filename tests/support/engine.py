"""Engines for tests: a listener that records, timed executors that do not wait, and KV content to pull."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from antiphon_engine import (
    BlockEngine,
    BlocksChanged,
    EngineListener,
    EngineRequest,
    Executor,
    FinishReason,
    KvMemory,
    PrefillProgress,
    RequestKind,
    RequestOutput,
    SampledToken,
    Sampling,
    SchedulerConfig,
    SequenceStep,
    StepResult,
    TimedExecutor,
    TimedSettings,
)
from antiphon_engine._request import Request
from antiphon_engine._step import StepNews, StepPlan
from antiphon_engine.pool import BlockPool
from antiphon_engine.scheduler import Scheduler
from antiphon_kvtransfer.identity import BlockHash, chain_hashes, chain_root

BLOCK_TOKENS = 4


def no_time(*, new_tokens: int, token_context: int, sequences: int, kv_tokens: int) -> float:
    return 0.0


def timed_executor(num_blocks: int, *, max_context_tokens: int = 512) -> TimedExecutor:
    return TimedExecutor(
        TimedSettings(
            step_ms=no_time, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, max_context_tokens=max_context_tokens
        )
    )


def generate(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    output: Sequence[int] = (),
    held: bool = False,
    stop: frozenset[int] = frozenset(),
    min_tokens: int = 0,
) -> EngineRequest:
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop, min_tokens=min_tokens)
    return EngineRequest(request_id, prompt, sampling, output=output, held=held)


def prefill(
    request_id: str, prompt: Sequence[int], *, credit_blocks: int | None = None, held: bool = False
) -> EngineRequest:
    return EngineRequest(
        request_id, prompt, Sampling(temperature=0.0), RequestKind.PREFILL, held=held, credit_blocks=credit_blocks
    )


def hashes_of(executor: Executor, tokens: Sequence[int]) -> list[BlockHash]:
    info = executor.info
    root = chain_root(
        model=info.model, revision=info.revision, adapter=info.adapter, kv_format=info.kv_format, salt=b""
    )
    return chain_hashes(root, tokens, info.block_tokens)


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the timed engine generates after `prompt`, whatever happens to the request."""
    driver = Driver(timed_executor(-(-(len(prompt) + count + 1) // BLOCK_TOKENS)))
    driver.submit(generate("alone", prompt, max_tokens=count))
    driver.run()
    return driver.tokens["alone"]


def kv_content(tokens: Sequence[int]) -> list[bytes]:
    """Content of the blocks that hold `tokens`, as an executor elsewhere computes it."""
    count = -(-len(tokens) // BLOCK_TOKENS)
    if not count:
        return []
    executor = timed_executor(count)
    executor.execute([SequenceStep("peer", tokens, 0, range(count), None, sequence=tokens)])
    return [read_block(executor.kv, number) for number in range(count)]


def read_block(kv: KvMemory, block: int) -> bytes:
    return ctypes.string_at(kv.address + block * kv.block_bytes, kv.block_bytes)


def write_block(kv: KvMemory, block: int, content: bytes) -> None:
    assert len(content) == kv.block_bytes
    ctypes.memmove(kv.address + block * kv.block_bytes, content, kv.block_bytes)


class Driver:
    """Scheduler and executor without a thread: each step happens when the test says so."""

    def __init__(self, executor: TimedExecutor, config: SchedulerConfig | None = None) -> None:
        self.executor = executor
        self.pool = BlockPool(executor.kv.num_blocks)
        self.scheduler = Scheduler(config or SchedulerConfig(), executor.info, self.pool)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, RequestOutput] = {}
        self.prefills: dict[str, list[PrefillProgress]] = defaultdict(list)

    def submit(self, request: EngineRequest) -> Request:
        prepared = Request.of(request, self.executor.info)
        self.scheduler.validate(prepared)
        self.scheduler.submit(prepared)
        return prepared

    def step(self, during: Callable[[], None] | None = None, error: str = "") -> StepPlan:
        """One step. `during` is called while it computes; with `error` it fails."""
        plan = self.scheduler.schedule()
        results = self.executor.execute([part.step for part in plan.parts]) if plan.parts else []
        if during is not None:
            during()
        self._take(self.scheduler.fail(plan, error) if error else self.scheduler.commit(plan, results))
        return plan

    def run(self, max_steps: int = 1000) -> None:
        """Step until nothing can be done."""
        for _ in range(max_steps):
            plan = self.step()
            if not plan.parts and not plan.preempted:
                return
        raise AssertionError(f"still at work after {max_steps} steps")

    def fill(self, request_id: str, tokens: Sequence[int]) -> None:
        """Reserve, "pull" and publish the KV of the leading `tokens` of a held request."""
        reservation = self.scheduler.reserve(request_id, len(tokens))
        assert reservation is not None
        for number, content in list(enumerate(kv_content(tokens)))[reservation.filled_blocks :]:
            write_block(self.executor.kv, reservation.blocks[number], content)
        self.scheduler.publish(request_id, len(tokens))

    def _take(self, news: StepNews) -> None:
        for output in news.outputs:
            assert output.request_id not in self.finished
            self.tokens[output.request_id].extend(output.token_ids)
            if output.finish is not None:
                self.finished[output.request_id] = output
        for progress in news.prefills:
            self.prefills[progress.request_id].append(progress)


class Recorder(EngineListener):
    """Records all callbacks; `wait` until a condition over them holds."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.steps: list[StepResult] = []
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, RequestOutput] = {}
        self.prefills: dict[str, list[PrefillProgress]] = defaultdict(list)
        self.blocks: set[BlockHash] = set()
        self.sequence = 0
        self.capacity_calls = 0
        self.failure: BaseException | None = None

    def wait(self, condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, deadline_s), "it did not happen in time"

    def wait_finished(self, *request_ids: str) -> list[FinishReason | None]:
        self.wait(lambda: all(request_id in self.finished for request_id in request_ids))
        return [self.finished[request_id].finish for request_id in request_ids]

    def on_step(self, result: StepResult) -> None:
        with self.changed:
            self.steps.append(result)
            for output in result.outputs:
                self.tokens[output.request_id].extend(output.token_ids)
                if output.finish is not None:
                    self.finished[output.request_id] = output
            for progress in result.prefills:
                self.prefills[progress.request_id].append(progress)
            self.changed.notify_all()

    def on_blocks(self, change: BlocksChanged) -> None:
        with self.changed:
            assert change.sequence == self.sequence + 1
            assert not self.blocks & set(change.stored)
            assert set(change.removed) <= self.blocks
            self.sequence = change.sequence
            self.blocks |= set(change.stored)
            self.blocks -= set(change.removed)
            self.changed.notify_all()

    def on_capacity(self) -> None:
        with self.changed:
            self.capacity_calls += 1
            self.changed.notify_all()

    def on_failure(self, error: BaseException) -> None:
        with self.changed:
            self.failure = error
            self.changed.notify_all()


class GatedExecutor(Executor):
    """A timed executor whose steps wait for the test, and fail when it says so."""

    def __init__(self, inner: TimedExecutor, *, gated: bool = True) -> None:
        self._inner = inner
        self._gated = gated
        self.entered = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)
        self.failing: BaseException | None = None
        self.thread_name = ""
        self.closed = False

    @property
    def info(self):  # type: ignore[no-untyped-def]
        return self._inner.info

    @property
    def kv(self) -> KvMemory:
        return self._inner.kv

    def execute(self, step: Sequence[SequenceStep]) -> list[SampledToken | None]:
        self.thread_name = threading.current_thread().name
        self.entered.release()
        if self._gated:
            assert self.permits.acquire(timeout=20.0)
        if self.failing is not None:
            raise self.failing
        return self._inner.execute(step)

    def close(self) -> None:
        self.closed = True
        self._inner.close()


def started(executor: Executor, config: SchedulerConfig | None = None) -> tuple[BlockEngine, Recorder]:
    engine = BlockEngine(executor, config or SchedulerConfig())
    recorder = Recorder()
    engine.start(recorder)
    return engine, recorder
