"""`BlockEngine`: the engine of every executor of ours. One thread, one lock, one scheduler.

The thread plans a step under the lock, computes it without the lock, and takes in the results under the lock; then it
tells the listener. When there is nothing to compute it sleeps until a call changes something. So calls from other
threads wait for planning at most, never for a step.

Callbacks are made without the lock, so a listener may call the engine. Block events keep their order because one thread
at a time delivers them: whoever finds another one delivering leaves its events to it, and waits for nothing.

Failures. A step that raises ends its requests with an error and the engine goes on; after `MAX_FAILED_STEPS` in a row,
or if the thread dies of anything else, `on_failure` is called once and nothing is accepted any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from antiphon_kvtransfer.identity import BlockHash

from antiphon_engine._priority import compute_after_others
from antiphon_engine._request import Request
from antiphon_engine._step import StepPlan, step_sample
from antiphon_engine.executor import Executor, SampledToken
from antiphon_engine.interface import (
    BlocksChanged,
    Engine,
    EngineListener,
    EngineRequest,
    IntegrityReport,
    KvMemory,
    Load,
    ModelInfo,
    RefusalReason,
    RequestRefused,
    Reservation,
    StepResult,
    StepSample,
)
from antiphon_engine.pool import BlockPool
from antiphon_engine.scheduler import Scheduler, SchedulerConfig
from antiphon_engine.self_measure import Limits, probe_steps

logger = logging.getLogger("antiphon.engine")

MAX_FAILED_STEPS = 3


class BlockEngine(Engine):
    def __init__(self, executor: Executor, config: SchedulerConfig) -> None:
        self._executor = executor
        self._pool = BlockPool(executor.kv.num_blocks)
        self._scheduler = Scheduler(config, executor.info, self._pool)
        self._config = config
        self._measurement: tuple[float, Future[tuple[StepSample, ...]]] | None = None
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._block_events: deque[BlocksChanged] = deque()
        self._delivering = threading.Lock()
        self._changed = False
        self._closing = False
        self._failed = False
        self._listener: EngineListener | None = None
        self._thread: threading.Thread | None = None

    @property
    def info(self) -> ModelInfo:
        return self._executor.info

    @property
    def kv(self) -> KvMemory:
        return self._executor.kv

    @property
    def preemptions(self) -> int:
        """How often a running request had to give its blocks back."""
        with self._lock:
            return self._scheduler.preemptions

    def measure_first(self, budget_ms: float) -> Future[tuple[StepSample, ...]]:
        """Before `start`: have the engine's thread time some steps of its own first, for about so long at most.

        What it measured (`self_measure`); fewer steps, or none, where time or blocks are short or a step fails.
        """
        measured: Future[tuple[StepSample, ...]] = Future()
        with self._lock:
            if self._thread is not None:
                raise RuntimeError("an engine measures itself before it is started")
            self._measurement = (budget_ms, measured)
        return measured

    def start(self, listener: EngineListener) -> None:
        with self._lock:
            if self._thread is not None or self._closing:
                raise RuntimeError("an engine is started once")
            self._listener = listener
            self._thread = threading.Thread(target=self._run, args=(listener,), name="antiphon-engine", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float = 10.0) -> None:
        with self._wake:
            first = not self._closing
            self._closing = True
            self._wake.notify_all()
        if self._thread is None:
            if first:
                self._executor.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                logger.warning("the engine's step did not end within %.1f s; its thread is left behind", deadline_s)

    # -- requests

    def submit(self, request: EngineRequest) -> None:
        prepared = Request.of(request, self.info)
        self._scheduler.validate(prepared)
        prepared.hash_blocks()  # takes a while for a long prompt: not under the lock
        with self._changing():
            if self._closing or self._failed:
                raise RequestRefused(RefusalReason.DRAINING, "the engine is closed: go elsewhere")
            self._scheduler.submit(prepared)

    def cancel(self, request_id: str) -> None:
        with self._changing():
            self._scheduler.cancel(request_id)

    def grant(self, request_id: str, credit_blocks: int) -> None:
        with self._changing():
            self._scheduler.grant(request_id, credit_blocks)

    def reserve(self, request_id: str, num_tokens: int) -> Reservation | None:
        with self._changing():
            return self._scheduler.reserve(request_id, num_tokens)

    def publish(self, request_id: str, num_tokens: int) -> None:
        with self._changing():
            self._scheduler.publish(request_id, num_tokens)

    def resume(self, request_id: str, output: Sequence[int] = ()) -> None:
        with self._changing():
            self._scheduler.resume(request_id, output)

    # -- blocks kept for others

    def pin(self, hashes: Sequence[BlockHash]) -> list[int]:
        with self._changing():
            blocks = self._pool.leading(hashes)
            self._pool.retain(blocks)
            return blocks

    def pin_partial(self, request_id: str) -> list[int]:
        with self._changing():
            blocks = self._scheduler.partial_block(request_id)
            self._pool.retain(blocks)
            return blocks

    def retain(self, blocks: Sequence[int]) -> None:
        with self._changing():
            self._pool.retain(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        with self._changing():
            self._pool.release(blocks)

    def lookup(self, hashes: Sequence[BlockHash]) -> int:
        with self._lock:
            return len(self._pool.leading(hashes))

    # -- observation

    def indexed_blocks(self) -> tuple[int, frozenset[BlockHash]]:
        with self._lock:
            return self._pool.indexed()

    def load(self) -> Load:
        with self._lock:
            return self._scheduler.load()

    def check_integrity(self) -> IntegrityReport:
        with self._lock:
            check = self._scheduler.integrity_check()
        return check()

    # -- inside

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock for a change, then say what came of it: block events, room, and that there may be work."""
        has_more_room = False
        try:
            with self._wake:
                available = self._pool.available_blocks
                try:
                    yield
                finally:
                    self._changed = True
                    self._wake.notify_all()
                    has_more_room = self._settle(available)
        finally:
            self._tell(has_more_room)

    def _settle(self, available_before: int) -> bool:
        """Under the lock, after a change: line up what changed in the index; True if there is more room."""
        change = self._pool.take_change()
        if change is not None and self._listener is not None:
            self._block_events.append(change)
        return self._pool.available_blocks > available_before

    def _tell(self, has_more_room: bool) -> None:
        """Without the lock, after a change: the callbacks."""
        if self._listener is None:
            return
        while self._block_events and self._delivering.acquire(blocking=False):
            try:
                while self._block_events:
                    self._listener.on_blocks(self._block_events.popleft())
            finally:
                self._delivering.release()
        if has_more_room:
            self._listener.on_capacity()

    def _run(self, listener: EngineListener) -> None:
        try:
            compute_after_others()
            if self._measurement is not None:
                self._measure(*self._measurement)
            self._step_until_closed(listener)
        except BaseException as error:
            logger.error("the engine's thread died", exc_info=error)
            with self._lock:
                self._failed = True
            listener.on_failure(error)
        finally:
            self._executor.close()

    def _measure(self, budget_ms: float, measured: Future[tuple[StepSample, ...]]) -> None:
        if not measured.set_running_or_notify_cancel():
            return
        samples: list[StepSample] = []
        limits = Limits.of(self._config, self.info, self._pool.available_blocks)
        with self._changing():
            # Retained, as no request refers to them. They are never indexed, so nobody finds what is in them.
            blocks = self._pool.allocate(limits.blocks) or []
            self._pool.retain(blocks)
            self._pool.drop(blocks)
        try:
            for sample in probe_steps(self._executor.execute, limits, blocks, budget_ms):
                samples.append(sample)
                if self._closing:
                    break
        except Exception as error:
            logger.warning("a step of the self-measurement failed after %d of them", len(samples), exc_info=error)
        finally:
            with self._changing():
                self._pool.release(blocks)
            measured.set_result(tuple(samples))

    def _step_until_closed(self, listener: EngineListener) -> None:
        failed_steps = 0
        while (plan := self._next_plan()) is not None:
            error: Exception | None = None
            results: Sequence[SampledToken | None] = ()
            started = time.perf_counter()
            if plan.parts:
                try:
                    results = self._compute(plan)
                    failed_steps = 0
                except Exception as caught:
                    logger.error("a step of %d requests failed", len(plan.parts), exc_info=caught)
                    error = caught
                    failed_steps += 1
            duration_ms = (time.perf_counter() - started) * 1e3
            with self._changing():
                if error is None:
                    news = self._scheduler.commit(plan, results)
                    sample = step_sample([part.step for part in plan.parts], duration_ms) if plan.parts else None
                else:
                    news = self._scheduler.fail(plan, f"the step failed: {type(error).__name__}: {error}")
                    sample = None
                load = self._scheduler.load()
            listener.on_step(StepResult(news.outputs, news.prefills, load, sample))
            if error is not None and failed_steps >= MAX_FAILED_STEPS:
                raise error

    def _next_plan(self) -> StepPlan | None:
        """Wait for something to do. None: close."""
        while True:
            with self._wake:
                while not self._changed and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return None
                available = self._pool.available_blocks
                plan = self._scheduler.schedule()
                # Blocks given back by a preemption may let in what was tried before: then try once more.
                self._changed = plan.preempted
                has_more_room = self._settle(available)
            self._tell(has_more_room)
            if plan.parts or plan.has_news:
                return plan

    def _compute(self, plan: StepPlan) -> Sequence[SampledToken | None]:
        steps = [part.step for part in plan.parts]
        results = self._executor.execute(steps)
        if [result is None for result in results] != [step.sample is None for step in steps]:
            raise RuntimeError(f"{type(self._executor).__name__} did not sample exactly where it was asked to")
        return results
