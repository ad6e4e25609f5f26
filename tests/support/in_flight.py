"""Executors with several steps in flight, which check what they are given; and a scheduler driven step by step."""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache

from antiphon_engine import Executor, KvMemory, ModelInfo, SampledToken, SchedulerConfig, SequenceStep, TimedExecutor
from antiphon_engine._step import StepPlan
from antiphon_engine.scheduler import Scheduler

from tests.support.engine import BLOCK_TOKENS, Driver, read_block, timed_executor

Results = list[SampledToken | None]


PEER = timed_executor(64)


@lru_cache(maxsize=100_000)
def _content(tokens: tuple[int, ...]) -> bytes:
    """Of the last block of `tokens`, as an executor elsewhere computes it."""
    blocks = range(-(-len(tokens) // BLOCK_TOKENS))
    PEER.execute([SequenceStep("peer", tokens, 0, blocks, None, sequence=tokens)])
    return read_block(PEER.kv, blocks[-1])


class FlightRules:
    """What an executor may rely on, asserted for each step as it begins and as it ends."""

    def __init__(self, kv: KvMemory, depth: int) -> None:
        self._kv = kv
        self._depth = depth
        self._flying: deque[Sequence[SequenceStep]] = deque()
        self.most_flying = 0
        self.chunks_ahead = 0
        """Chunks that began while the one before them was in flight."""

    def begun(self, step: Sequence[SequenceStep]) -> None:
        assert len(self._flying) < self._depth, "too many steps in flight"
        assert step, "an empty step"
        assert len({part.request_id for part in step}) == len(step), "a request is twice in one step"
        for earlier in [part for flying in self._flying for part in flying]:
            for part in step:
                self._check_beside(part, earlier)
        for part in step:
            for other in step:
                assert part is other or not set(_written(part)) & set(other.blocks), "a block is written and used"
        self._flying.append(step)
        self.most_flying = max(self.most_flying, len(self._flying))

    def _check_beside(self, part: SequenceStep, earlier: SequenceStep) -> None:
        if part.request_id == earlier.request_id:
            assert earlier.sample is None, "a sequence is planned again before its token is known"
            assert part.sequence is earlier.sequence, "a request of the same name is in flight"
            assert part.start >= earlier.start + len(earlier.tokens), "a chunk is computed twice"
            count = len(earlier.blocks)
            assert list(part.blocks[:count]) == list(earlier.blocks), "a block changed between two chunks"
            self.chunks_ahead += part.start == earlier.start + len(earlier.tokens)
        elif not part.request_id.startswith("self-measure"):  # whose copies write the same into the same blocks
            assert not set(_written(part)) & set(earlier.blocks), "a block in flight is written by another request"
            assert not set(_written(earlier)) & set(part.blocks), "a block is read that another request still writes"

    def ended(self, step: Sequence[SequenceStep]) -> None:
        """The KV of all that the step computed or attended to is in its blocks still."""
        began = self._flying.popleft()
        assert all(a is b for a, b in zip(began, step, strict=True)), "steps end in the order in which they began"
        for part in step:
            end = part.start + len(part.tokens)
            tokens = tuple(part.sequence)
            for number in range(end // BLOCK_TOKENS):
                expected = _content(tokens[: (number + 1) * BLOCK_TOKENS])
                assert read_block(self._kv, part.blocks[number]) == expected, f"block {number} changed in flight"
            number, rest = divmod(end, BLOCK_TOKENS)
            if rest:  # the next chunk may have appended to it
                whole = min(len(tokens), (number + 1) * BLOCK_TOKENS)
                found = read_block(self._kv, part.blocks[number])
                assert any(found == _content(tokens[:count]) for count in range(end, whole + 1)), "a changed last block"


def _written(part: SequenceStep) -> Sequence[int]:
    return part.blocks[part.start // BLOCK_TOKENS :]


@dataclass
class BegunStep:
    step: Sequence[SequenceStep]
    future: Future[Results] = field(default_factory=Future)
    results: Results = field(default_factory=list)

    @property
    def request_ids(self) -> list[str]:
        return [part.request_id for part in self.step]


class HandExecutor(Executor):
    """Steps are computed as they begin and end when the test says so, or at once after `let_go`."""

    def __init__(self, inner: TimedExecutor, depth: int) -> None:
        self._inner = inner
        self._depth = depth
        self.rules = FlightRules(inner.kv, depth)
        self._lock = threading.RLock()
        self._free = False
        self.begun: queue.Queue[BegunStep] = queue.Queue()
        self.refuse_to_begin: BaseException | None = None
        self.closed = False

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    @property
    def kv(self) -> KvMemory:
        return self._inner.kv

    @property
    def depth(self) -> int:
        return self._depth

    def execute(self, step: Sequence[SequenceStep]) -> Results:
        return self.begin(step).result()

    def begin(self, step: Sequence[SequenceStep]) -> Future[Results]:
        if self.refuse_to_begin is not None:
            raise self.refuse_to_begin
        begun = BegunStep(step)
        with self._lock:
            self.rules.begun(step)
            begun.results = self._inner.execute(step)
            if self._free:
                self.end(begun)
            else:
                self.begun.put(begun)
        return begun.future

    def next_begun(self) -> BegunStep:
        return self.begun.get(timeout=20.0)

    def let_go(self) -> None:
        """End what has begun and not been taken by `next_begun`; what begins from now on ends at once."""
        with self._lock:
            self._free = True
            while not self.begun.empty():
                self.end(self.begun.get())

    def end(self, begun: BegunStep, error: BaseException | None = None) -> None:
        try:
            with self._lock:
                self.rules.ended(begun.step)
            if error is not None:
                raise error
        except BaseException as reason:  # noqa: BLE001 - a broken rule is a failed step too
            begun.future.set_exception(reason)
        else:
            begun.future.set_result(begun.results)

    def close(self) -> None:
        self.closed = True
        self._inner.close()


class PipelinedExecutor(HandExecutor):
    """A thread a stage; a step goes from one to the next. Now and then one fails, never two in a row."""

    def __init__(self, inner: TimedExecutor, depth: int, *, failures: random.Random | None = None) -> None:
        super().__init__(inner, depth)
        self._failures = failures
        self._stages: list[queue.Queue[BegunStep | None]] = [queue.Queue() for _ in range(depth)]
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(depth)]
        for thread in self._threads:
            thread.start()

    def begin(self, step: Sequence[SequenceStep]) -> Future[Results]:
        future = super().begin(step)
        self._stages[0].put(self.begun.get_nowait())
        return future

    def close(self) -> None:
        self._stages[0].put(None)
        for thread in self._threads:
            thread.join(20.0)
        super().close()

    def _run(self, number: int) -> None:
        failed = False
        while True:
            begun = self._stages[number].get()
            if number + 1 < len(self._stages):
                self._stages[number + 1].put(begun)
            elif begun is not None:
                failed = not failed and self._failures is not None and self._failures.random() < 0.03
                self.end(begun, RuntimeError("broken") if failed else None)
            if begun is None:
                return


class FlightDriver(Driver):
    """Scheduler and executor without a thread: steps begin and land when the test says so."""

    def __init__(self, executor: TimedExecutor, depth: int, config: SchedulerConfig | None = None) -> None:
        super().__init__(executor, config)
        self.depth = depth
        self.scheduler = Scheduler(config or SchedulerConfig(), executor.info, self.pool, depth)
        self.rules = FlightRules(executor.kv, depth)
        self.flying: deque[tuple[StepPlan, Results]] = deque()

    def begin(self) -> StepPlan:
        """Plan a step and compute it; it stays in flight. One without sequences is over at once."""
        plan = self.scheduler.schedule()
        step = [part.step for part in plan.parts]
        if step:
            self.rules.begun(step)
            self.flying.append((plan, self.executor.execute(step)))
        elif plan.has_news:
            self._take(self.scheduler.commit(plan, []))
        return plan

    def land(self, error: str = "") -> None:
        """The oldest step is over; with `error` it has failed."""
        plan, results = self.flying.popleft()
        self.rules.ended([part.step for part in plan.parts])
        self._take(self.scheduler.fail(plan, error) if error else self.scheduler.commit(plan, results))
        for flying, _ in self.flying:
            for part in flying.parts:
                assert all(self.pool.is_used(block) for block in part.step.blocks), "a block in flight was given back"

    def run(self, max_steps: int = 2000, each: Callable[[], object] = lambda: None) -> None:
        """As many steps in flight as there may be, until nothing can be done."""
        for _ in range(max_steps):
            plan = self.begin() if len(self.flying) < self.depth else None
            each()
            if plan is not None and (plan.parts or plan.preempted):
                continue
            if not self.flying:
                return
            self.land()
            each()
        raise AssertionError(f"still at work after {max_steps} steps")
