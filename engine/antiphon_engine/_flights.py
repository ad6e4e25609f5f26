"""Steps in flight: begun by the executor, not committed yet. Owned by the engine's thread.

They are taken in the order in which they began, which is the order in which they end. A step that cannot even be begun
lines up behind the others as one that failed, so that results stay in order.

The one idea, for the latency model: *a step's duration is what it added to those before it*. It counts from the end of
the step before it, or from its own begin where nothing was in flight then. So durations never overlap, their sum is the
time in which anything was computed, and `depth` half-full stages look as fast as they are. What a single step takes
from begin to end with several stages, the model does not learn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from antiphon_engine._step import StepPlan
from antiphon_engine.executor import Executor, ExecutorLost, SampledToken


@dataclass(frozen=True, slots=True)
class EndedStep:
    plan: StepPlan
    results: Sequence[SampledToken | None]
    error: Exception | None
    """Then there are no results."""
    duration_ms: float


@dataclass(slots=True)
class _Flight:
    plan: StepPlan
    future: Future[list[SampledToken | None]]
    begun_s: float
    ended_s: float | None = None
    """Set by the future's callback; only then is the step taken, as the result is there a moment earlier."""


class Flights:
    def __init__(
        self, executor: Executor, on_end: Callable[[], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`on_end` is called whenever a step has ended, on whatever thread ends it."""
        self._executor = executor
        self._on_end = on_end
        self._clock = clock
        self._flying: deque[_Flight] = deque()
        self._last_ended_s = float("-inf")

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def has_room(self) -> bool:
        return len(self._flying) < self._executor.depth

    @property
    def oldest_has_ended(self) -> bool:
        return bool(self._flying) and self._flying[0].ended_s is not None

    def begin(self, plan: StepPlan) -> None:
        """Raises ExecutorLost; any other error is what the step ends with."""
        begun_s = self._clock()
        try:
            future = self._executor.begin([part.step for part in plan.parts])
        except ExecutorLost:
            raise
        except Exception as error:  # noqa: BLE001 - `take` hands it on, when it is this step's turn
            future = Future()
            future.set_exception(error)
        flight = _Flight(plan, future, begun_s)
        self._flying.append(flight)

        def ended(_: Future[list[SampledToken | None]]) -> None:
            flight.ended_s = self._clock()
            self._on_end()

        future.add_done_callback(ended)

    def take(self) -> EndedStep:
        """The oldest step, which has ended. Raises ExecutorLost, and whatever is no Exception."""
        flight = self._flying.popleft()
        error: Exception | None = None
        results: Sequence[SampledToken | None] = ()
        try:
            results = flight.future.result(timeout=0)
            self._check(flight.plan, results)
        except ExecutorLost:
            raise
        except Exception as caught:  # noqa: BLE001 - the engine fails the step's requests with it
            error = caught
        since_s = max(flight.begun_s, self._last_ended_s)
        self._last_ended_s = max(since_s, flight.ended_s or since_s)
        return EndedStep(flight.plan, results, error, (self._last_ended_s - since_s) * 1e3)

    def _check(self, plan: StepPlan, results: Sequence[SampledToken | None]) -> None:
        if [result is None for result in results] != [part.step.sample is None for part in plan.parts]:
            raise RuntimeError(f"{type(self._executor).__name__} did not sample exactly where it was asked to")
