"""The engine's thread with several steps in flight: order, waiting, failures, closing, durations, self-measurement."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
from antiphon_engine import (
    BlockEngine,
    ExecutorLost,
    FinishReason,
    RefusalReason,
    RequestKind,
    RequestRefused,
    SampledToken,
    SchedulerConfig,
    SequenceStep,
)
from antiphon_engine._flights import Flights
from antiphon_engine._request import Request
from antiphon_engine._step import StepPlan, part_of
from antiphon_engine.self_measure import Limits, pace_in_flight, probe_steps

from tests.support.engine import (
    Recorder,
    expected_tokens,
    generate,
    hashes_of,
    kv_content,
    prefill,
    started,
    timed_executor,
    write_block,
)
from tests.support.in_flight import HandExecutor, PipelinedExecutor


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + number) % 256 for number in range(length)]


def by_hand(depth: int = 2, **config: int) -> tuple[HandExecutor, BlockEngine, Recorder]:
    executor = HandExecutor(timed_executor(24), depth)
    return executor, *started(executor, SchedulerConfig(**config))


# -- what begins when


def test_what_comes_while_a_step_is_in_flight_begins_beside_it_and_results_keep_their_order() -> None:
    executor, engine, recorder = by_hand()
    engine.submit(generate("a", prompt(9), max_tokens=3))
    first = executor.next_begun()
    engine.submit(generate("b", prompt(5, 100), max_tokens=1))
    second = executor.next_begun()
    engine.submit(generate("c", prompt(5, 200), max_tokens=1))
    assert [first.request_ids, second.request_ids] == [["a"], ["b"]]
    executor.end(first)
    third = executor.next_begun()
    assert third.request_ids == ["a", "c"], "there was no room in flight for c before"
    executor.end(second)
    executor.end(third)
    executor.let_go()
    recorder.wait_finished("a", "b", "c")
    told = [output.request_id for step in recorder.steps for output in step.outputs]
    assert told == ["a", "b", "a", "c", "a"]
    assert recorder.tokens["a"] == expected_tokens(prompt(9), 3)
    assert engine.check_integrity().used_blocks == 0
    engine.close()
    assert executor.closed


def test_a_grant_lets_the_next_chunk_begin_while_the_one_before_it_is_in_flight() -> None:
    executor, engine, recorder = by_hand()
    engine.submit(prefill("p", prompt(10), credit_blocks=1))
    first = executor.next_begun()
    engine.grant("p", 3)
    second = executor.next_begun()
    assert [(part.start, len(part.tokens)) for part in (*first.step, *second.step)] == [(0, 4), (4, 6)]
    executor.end(first)
    executor.end(second)
    recorder.wait(lambda: len(recorder.prefills["p"]) == 2)
    assert [progress.full_blocks for progress in recorder.prefills["p"]] == [1, 2]
    assert recorder.prefills["p"][-1].first_token == expected_tokens(prompt(10), 1)[0]
    engine.close()


def test_a_cancel_keeps_the_blocks_until_the_last_step_that_uses_them_has_ended() -> None:
    executor, engine, recorder = by_hand(max_batch_tokens=8)
    engine.submit(generate("a", prompt(20)))
    first, second = executor.next_begun(), executor.next_begun()
    engine.cancel("a")
    engine.submit(generate("b", prompt(5, 100), max_tokens=1))
    executor.end(first)
    third = executor.next_begun()
    assert third.request_ids == ["b"]
    assert not set(third.step[0].blocks) & set(second.step[0].blocks)
    executor.end(second)
    executor.end(third)
    recorder.wait_finished("b")
    assert engine.check_integrity().used_blocks == 0
    assert recorder.tokens["a"] == []
    engine.close()


# -- ends


def test_close_takes_in_what_is_in_flight_and_begins_nothing_more() -> None:
    executor, engine, recorder = by_hand()
    engine.submit(generate("a", prompt(9)))
    first = executor.next_begun()
    engine.submit(generate("b", prompt(5, 100)))
    second = executor.next_begun()
    engine.close(deadline_s=0.0)
    executor.end(first)
    assert not executor.closed
    executor.end(second)
    engine.close()
    assert executor.closed
    assert [recorder.tokens[name] for name in "ab"] == [
        expected_tokens(prompt(9), 1),
        expected_tokens(prompt(5, 100), 1),
    ]
    assert executor.begun.empty()
    assert recorder.failure is None
    assert "antiphon-engine" not in {thread.name for thread in threading.enumerate()}


def test_a_failed_step_ends_its_own_requests_and_what_depended_on_it() -> None:
    executor, engine, recorder = by_hand(depth=3, max_batch_tokens=8)
    engine.submit(generate("a", prompt(16)))
    first, second = executor.next_begun(), executor.next_begun()
    engine.submit(generate("b", prompt(5, 100), max_tokens=2))
    third = executor.next_begun()
    assert [first.request_ids, second.request_ids, third.request_ids] == [["a"], ["a"], ["b"]]
    executor.end(first, RuntimeError("the device is on fire"))
    recorder.wait_finished("a")
    assert "the device is on fire" in recorder.finished["a"].error
    executor.end(second)
    executor.end(third)
    executor.let_go()
    recorder.wait_finished("b")
    assert recorder.tokens["b"] == expected_tokens(prompt(5, 100), 2)
    assert recorder.tokens["a"] == []
    assert sum(output.request_id == "a" for step in recorder.steps for output in step.outputs) == 1
    assert engine.check_integrity().used_blocks == 0
    assert recorder.failure is None
    engine.close()


def test_three_steps_in_a_row_that_fail_are_the_end_also_when_they_were_in_flight_together() -> None:
    executor, engine, recorder = by_hand(depth=3)
    begun = []
    for number, name in enumerate("abc"):
        engine.submit(generate(name, prompt(5, 50 * number)))
        begun.append(executor.next_begun())
    errors = [RuntimeError(f"broken {number}") for number in range(3)]
    for step, error in zip(begun, errors, strict=True):
        executor.end(step, error)
    recorder.wait(lambda: recorder.failure is not None)
    assert recorder.failure is errors[-1]
    assert [recorder.finished[name].finish for name in "abc"] == [FinishReason.ERROR] * 3
    engine.close()


@pytest.mark.parametrize("at", ["begin", "end"])
def test_a_lost_executor_is_the_end_at_once_and_requests_end_without_a_word(at: str) -> None:
    """They fare as those of a worker that died: no error reaches a client, so their owners take them elsewhere."""
    executor, engine, recorder = by_hand()
    lost = ExecutorLost("rank 1 died")
    engine.submit(generate("a", prompt(9)))
    first = executor.next_begun()
    if at == "begin":
        executor.refuse_to_begin = lost
        engine.submit(generate("b", prompt(5, 100)))
    else:
        engine.submit(generate("b", prompt(5, 100)))
        executor.next_begun()
        executor.end(first, lost)
    recorder.wait(lambda: recorder.failure is not None)
    assert recorder.failure is lost
    assert not recorder.finished
    with pytest.raises(RequestRefused) as refused:
        engine.submit(generate("c", prompt(9)))
    assert refused.value.reason is RefusalReason.DRAINING
    engine.close()
    assert executor.closed


# -- durations and order


class Clocked:
    """Flights of one-sequence steps on a clock that the test sets."""

    def __init__(self, depth: int = 2) -> None:
        self.now_s = 0.0
        self.executor = HandExecutor(timed_executor(24), depth)
        self.flights = Flights(self.executor, on_end=lambda: None, clock=lambda: self.now_s)

    def begin(self, at_s: float, name: str) -> StepPlan:
        self.now_s = at_s
        request = Request.of(generate(name, prompt(3)), self.executor.info)
        request.blocks = [ord(name) % 24]
        plan = StepPlan((part_of(request, 3),), has_news=False, preempted=False)
        self.flights.begin(plan)
        return plan

    def end(self, at_s: float) -> None:
        self.now_s = at_s
        self.executor.end(self.executor.next_begun())


def test_a_step_took_as_long_as_it_added_to_those_before_it() -> None:
    clocked = Clocked()
    clocked.begin(0.0, "a")
    clocked.begin(1.0, "b")
    assert not clocked.flights.has_room
    clocked.end(10.0)
    clocked.end(16.0)
    assert [clocked.flights.take().duration_ms for _ in range(2)] == [10_000, 6_000]
    clocked.begin(20.0, "c")
    clocked.end(25.0)
    assert clocked.flights.take().duration_ms == 5_000, "nothing was in flight before it began"


def test_a_step_that_could_not_begin_fails_when_those_before_it_have_ended() -> None:
    clocked = Clocked()
    first = clocked.begin(0.0, "a")
    clocked.executor.refuse_to_begin = ValueError("it does not fit")
    second = clocked.begin(1.0, "b")
    assert not clocked.flights.oldest_has_ended
    clocked.end(2.0)
    steps = [clocked.flights.take() for _ in range(2)]
    assert [step.plan for step in steps] == [first, second]
    assert [step.error for step in steps] == [None, clocked.executor.refuse_to_begin]


# -- self-measurement


class Landing(Future[list[SampledToken | None]]):
    """A step whose result is there when its clock says so: whoever waits for it puts the clock forward."""

    def __init__(self, stages: Stages, at_ms: float) -> None:
        super().__init__()
        self.set_result([])
        self._stages, self._at_ms = stages, at_ms

    def result(self, timeout: float | None = None) -> list[SampledToken | None]:
        self._stages.now_ms = max(self._stages.now_ms, self._at_ms)
        return super().result(timeout)


class Stages(HandExecutor):
    """Computes nothing; each stage takes so many milliseconds for a step."""

    def __init__(self, *stage_ms: float) -> None:
        super().__init__(timed_executor(1), len(stage_ms))
        self._stage_ms = stage_ms
        self._free_at_ms = [0.0] * len(stage_ms)
        self.now_ms = 0.0

    def begin(self, step: Sequence[SequenceStep]) -> Future[list[SampledToken | None]]:
        at_ms = self.now_ms
        for stage, duration_ms in enumerate(self._stage_ms):
            at_ms = self._free_at_ms[stage] = max(at_ms, self._free_at_ms[stage]) + duration_ms
        return Landing(self, at_ms)

    def clock(self) -> float:
        return self.now_ms / 1e3


@pytest.mark.parametrize("stage_ms", [(4.0, 6.0), (6.0, 4.0), (5.0, 6.0, 1.0)])
def test_a_pipeline_is_measured_by_its_slowest_stage(stage_ms: tuple[float, ...]) -> None:
    """A single step takes the sum of the stages; but that is not what each one more takes."""
    stages = Stages(*stage_ms)
    limits = Limits.of(SchedulerConfig(), stages.info, 1000)
    pace = pace_in_flight(stages, stages.clock)
    samples = list(probe_steps(stages.execute, limits, range(limits.blocks), 1000.0, stages.clock, pace=pace))
    assert [sample.duration_ms for sample in samples] == [pytest.approx(6.0)] * len(samples)
    assert {(16, 1), (256, 1), (16, 16)} <= {(sample.new_tokens, sample.sequences) for sample in samples}


@pytest.mark.parametrize("depth", [2, 3])
def test_a_pipelined_engine_measures_itself_and_nothing_of_it_is_left(depth: int) -> None:
    engine = BlockEngine(PipelinedExecutor(timed_executor(200), depth), SchedulerConfig(max_batch_tokens=64))
    future = engine.measure_first(2000.0)
    recorder = Recorder()
    engine.start(recorder)
    samples = future.result(20.0)
    assert {(16, 1), (64, 1), (1, 1), (4, 4), (16, 16)} <= {(s.new_tokens, s.sequences) for s in samples}
    report = engine.check_integrity()
    assert (report.free_blocks, report.requests) == (200, 0)
    engine.submit(generate("a", prompt(9), max_tokens=3))
    recorder.wait_finished("a")
    engine.close()


def test_an_executor_that_is_lost_in_the_self_measurement_is_lost() -> None:
    executor = HandExecutor(timed_executor(200), 2)
    executor.refuse_to_begin = ExecutorLost("rank 0 died")
    engine = BlockEngine(executor, SchedulerConfig())
    future = engine.measure_first(500.0)
    recorder = Recorder()
    engine.start(recorder)
    recorder.wait(lambda: recorder.failure is not None)
    assert recorder.failure is executor.refuse_to_begin
    assert future.result(20.0) == ()
    engine.close()


# -- everything at once


@pytest.mark.parametrize("depth", [2, 3])
def test_many_threads_and_stages_at_once_leave_nothing_behind(depth: int) -> None:
    """Calls from three threads, steps on as many threads as stages, some of which fail, in a pool that is too small."""
    executor = PipelinedExecutor(timed_executor(30), depth, failures=random.Random(depth))
    engine, recorder = started(executor, SchedulerConfig(max_batch_tokens=11, max_sequences=6))
    broken: list[BaseException] = []
    prompts: dict[str, list[int]] = {}

    def client(seed: int) -> None:
        rng = random.Random(seed)
        kept: list[str] = []
        try:
            for number in range(30):
                name = f"{seed}-{number}"
                prompts[name] = tokens = prompt(rng.randrange(1, 40), 10 * rng.randrange(6))
                if rng.random() < 0.3:
                    request = prefill(name, tokens, credit_blocks=rng.choice([None, 1]))
                else:
                    request = generate(name, tokens, max_tokens=12, held=rng.random() < 0.3)
                try:
                    engine.submit(request)
                except RequestRefused:
                    continue
                if request.kind is RequestKind.PREFILL:
                    kept.append(name)
                if request.held:
                    _pull(engine, name, tokens)
                engine.release(engine.pin(hashes_of(executor, tokens)))
                engine.check_integrity()
                if rng.random() < 0.4:
                    engine.cancel(name)
                elif request.kind is RequestKind.GENERATE and rng.random() < 0.5:
                    while kept:  # they may be what it waits for
                        engine.cancel(kept.pop())
                    recorder.wait(lambda name=name: name in recorder.finished or len(recorder.tokens[name]) > 2)
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            broken.append(error)
        finally:
            for name in kept:
                engine.cancel(name)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not broken, broken
    recorder.wait(
        lambda: (
            (engine.check_integrity().requests == 0 and engine.indexed_blocks() == (recorder.sequence, recorder.blocks))
            or recorder.failure is not None
        )
    )
    assert recorder.failure is None
    failed = {output.error for output in recorder.finished.values() if output.finish is FinishReason.ERROR}
    assert failed <= {"the step failed: RuntimeError: broken"}
    complete = [name for name, output in recorder.finished.items() if output.finish is FinishReason.LENGTH]
    assert {name: recorder.tokens[name] for name in complete} == {
        name: expected_tokens(prompts[name], 12) for name in complete
    }
    assert executor.rules.most_flying == depth
    report = engine.check_integrity()
    assert report.free_blocks + report.cached_blocks == 30
    engine.close()


def _pull(engine: BlockEngine, name: str, tokens: list[int]) -> None:
    reservation = engine.reserve(name, len(tokens))
    if reservation is not None:
        engine.retain(reservation.blocks)
        contents = kv_content(tokens)
        for number in range(reservation.filled_blocks, len(reservation.blocks)):
            write_block(engine.kv, reservation.blocks[number], contents[number])
        engine.publish(name, len(tokens))
        engine.release(reservation.blocks)
    engine.resume(name)
