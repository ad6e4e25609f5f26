"""`BlockEngine`: the engine of every executor of ours. One thread, one lock, one scheduler.

The thread plans a step under the lock, has it computed without the lock, and takes in the results under the lock; then
it tells the listener. When there is nothing to do it sleeps until a call changes something or a step ends. So calls
from other threads wait for planning at most, never for a step.

An executor with several stages has up to `depth` steps in flight (`_flights`): the thread plans and begins steps until
there are so many or nothing is left to plan, and takes in results in the order in which the steps began. `close` plans
no more, and takes in what is in flight.

Callbacks are made without the lock, so a listener may call the engine. Block events keep their order (`_block_news`).

Failures. A step that raises ends its requests with an error and the engine goes on; after `MAX_FAILED_STEPS` in a row,
at once if the executor is lost (`ExecutorLost`), or if the thread dies of anything else, `on_failure` is called once
and nothing is accepted any more. What was in flight then ends without a word, for its owners to take elsewhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from antiphon_kvtransfer.identity import BlockHash
from antiphon_kvtransfer.offer import TransportOffer
from antiphon_kvtransfer.plane import RankPlane

from antiphon_engine._block_news import BlockNews
from antiphon_engine._flights import EndedStep, Flights
from antiphon_engine._grammars import Grammars, RequestGrammar
from antiphon_engine._priority import compute_after_others
from antiphon_engine._request import Request
from antiphon_engine._step import StepPlan, step_sample
from antiphon_engine.executor import Executor, ExecutorLost, RankTimes
from antiphon_engine.interface import (
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
from antiphon_engine.self_measure import Limits, measure

logger = logging.getLogger("antiphon.engine")

MAX_FAILED_STEPS = 3


class BlockEngine(Engine):
    def __init__(self, executor: Executor, config: SchedulerConfig) -> None:
        self._executor = executor
        self._pool = BlockPool(executor.kv.num_blocks)
        self._scheduler = Scheduler(config, executor.info, self._pool, executor.depth)
        self._config = config
        self._grammars = Grammars(executor.info)
        self._measurement: tuple[float, Future[tuple[StepSample, ...]]] | None = None
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._block_news = BlockNews()
        self._changed = False
        self._closing = False
        self._lost: ExecutorLost | None = None
        self._failed = False
        self._listener: EngineListener | None = None
        self._thread: threading.Thread | None = None

    @property
    def info(self) -> ModelInfo:
        return self._executor.info

    @property
    def kv(self) -> KvMemory:
        return self._executor.kv

    def planes(self, offer: TransportOffer) -> Sequence[RankPlane]:
        """The data plane of each rank of the executor, not started. Called once."""
        return self._executor.planes(offer)

    @property
    def preemptions(self) -> int:
        """How often a running request had to give its blocks back."""
        with self._lock:
            return self._scheduler.preemptions

    @property
    def rank_times(self) -> RankTimes | None:
        """What ranks of their own have computed for; None: there are none."""
        return self._executor.rank_times

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
        self._executor.when_lost(self._on_lost)
        self._thread.start()

    def close(self, deadline_s: float = 10.0) -> None:
        with self._wake:
            first = not self._closing
            self._closing = True
            self._wake.notify_all()
        if self._thread is None:
            if first:
                self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                logger.warning("the engine's step did not end within %.1f s; its thread is left behind", deadline_s)

    # -- requests

    def submit(self, request: EngineRequest) -> None:
        prepared = Request.of(request, self.info)
        self._scheduler.validate(prepared)
        prepared.hash_blocks()  # takes a while for a long prompt: not under the lock
        grammar = request.sampling.grammar
        if grammar is not None:
            prepared.grammar = RequestGrammar(self._grammars, grammar, request.output, self._on_grammar_ready)
        with self._changing():
            if self._closing or self._failed:
                raise RequestRefused(RefusalReason.DRAINING, "the engine is closed: go elsewhere")
            self._scheduler.submit(prepared)
            if prepared.grammar is not None:
                prepared.grammar.start()

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

    def resume(self, request_id: str, output: Sequence[int] = (), scored_tokens: int = 0) -> None:
        with self._changing():
            self._scheduler.resume(request_id, output, scored_tokens)

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
            self._block_news.add(change)
        return self._pool.available_blocks > available_before

    def _tell(self, has_more_room: bool) -> None:
        """Without the lock, after a change: the callbacks."""
        if self._listener is None:
            return
        self._block_news.deliver(self._listener)
        if has_more_room:
            self._listener.on_capacity()

    def _run(self, listener: EngineListener) -> None:
        try:
            if self._executor.rank_times is None:  # else nothing is computed here, and ranks wait for what is done here
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
            self._end()

    def _end(self) -> None:
        self._grammars.close()
        self._executor.close()

    def _measure(self, budget_ms: float, measured: Future[tuple[StepSample, ...]]) -> None:
        if not measured.set_running_or_notify_cancel():
            return
        limits = Limits.of(self._config, self.info, self._pool.available_blocks)
        with self._changing():
            # Retained, as no request refers to them. They are never indexed, so nobody finds what is in them.
            blocks = self._pool.allocate(limits.blocks) or []
            self._pool.retain(blocks)
            self._pool.drop(blocks)
        samples: tuple[StepSample, ...] = ()
        try:
            samples = measure(self._executor, limits, blocks, budget_ms, stop=lambda: self._closing)
        finally:
            with self._changing():
                self._pool.release(blocks)
            measured.set_result(samples)

    def _step_until_closed(self, listener: EngineListener) -> None:
        """Results come first, then plans: a step that is committed lets its sequences into the next one."""
        flights = Flights(self._executor, self._on_step_end)
        failed_steps = 0
        while True:
            plan = self._next_plan(flights)
            if plan is not None:
                if plan.parts:
                    flights.begin(plan)
                elif plan.has_news:
                    self._commit(EndedStep(plan, (), None, 0.0), listener)
            elif flights.oldest_has_ended:
                step = flights.take()
                failed_steps = 0 if step.error is None else failed_steps + 1
                self._commit(step, listener)
                if step.error is not None and failed_steps >= MAX_FAILED_STEPS:
                    raise step.error
            else:
                return

    def _on_lost(self, error: ExecutorLost) -> None:
        """On any thread."""
        with self._wake:
            self._lost = error
            self._wake.notify_all()

    def _on_step_end(self) -> None:
        """On whatever thread ended the step."""
        with self._wake:
            self._wake.notify_all()

    def _on_grammar_ready(self) -> None:
        """On whatever thread compiled it."""
        with self._wake:
            self._changed = True
            self._wake.notify_all()

    def _next_plan(self, flights: Flights) -> StepPlan | None:
        """Wait for a change while one more step may be begun, and plan it. None: a step has ended, or close."""

        def may_go_on() -> bool:
            if flights.oldest_has_ended or self._lost is not None:
                return True
            return not flights if self._closing else self._changed and flights.has_room

        with self._wake:
            self._wake.wait_for(may_go_on)
            if self._lost is not None:
                raise self._lost
            if self._closing or flights.oldest_has_ended:
                return None
            available = self._pool.available_blocks
            plan = self._scheduler.schedule()
            # Blocks given back by a preemption may let in what was tried before, and what a step left out may be in
            # the one beside it: then try once more.
            self._changed = plan.preempted or bool(plan.parts)
            has_more_room = self._settle(available)
        self._tell(has_more_room)
        return plan

    def _commit(self, step: EndedStep, listener: EngineListener) -> None:
        error, parts = step.error, step.plan.parts
        with self._changing():
            if error is None:
                news = self._scheduler.commit(step.plan, step.results)
            else:
                news = self._scheduler.fail(step.plan, f"the step failed: {type(error).__name__}: {error}")
            load = self._scheduler.load()
        if error is not None:
            logger.error("a step of %d requests failed", len(parts), exc_info=error)
        sample = step_sample([part.step for part in parts], step.duration_ms) if parts and error is None else None
        if any(part.step.scoring is not None for part in parts):
            sample = None  # logits of whole chunks are no part of what a step usually takes
        listener.on_step(StepResult(news.outputs, news.prefills, load, sample))
