"""The engine's thread: steps while calls come from other threads, callbacks, failures, closing."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import pytest
from antiphon_engine import (
    BlockEngine,
    EngineRequest,
    FinishReason,
    RefusalReason,
    RequestKind,
    RequestRefused,
    SchedulerConfig,
)

from tests.support.engine import (
    GatedExecutor,
    Recorder,
    expected_tokens,
    generate,
    hashes_of,
    kv_content,
    prefill,
    read_block,
    started,
    timed_executor,
    write_block,
)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + number) % 256 for number in range(length)]


def test_requests_are_answered_and_events_mirror_the_index() -> None:
    engine, recorder = started(timed_executor(24), SchedulerConfig(max_batch_tokens=16))
    prompts = {f"r{n}": prompt(5 + 3 * n, 30 * n) for n in range(8)}
    for request_id, tokens in prompts.items():
        engine.submit(generate(request_id, tokens, max_tokens=10))
    assert set(recorder.wait_finished(*prompts)) == {FinishReason.LENGTH}
    assert {r: recorder.tokens[r] for r in prompts} == {r: expected_tokens(p, 10) for r, p in prompts.items()}
    sequence, indexed = engine.indexed_blocks()
    assert (sequence, indexed) == (recorder.sequence, recorder.blocks)
    assert recorder.capacity_calls > 0
    assert engine.check_integrity().used_blocks == 0
    assert engine.load().free_blocks == 24
    engine.close()


def test_step_samples_say_what_was_computed() -> None:
    engine, recorder = started(timed_executor(24))
    engine.submit(generate("a", prompt(6), max_tokens=2))
    recorder.wait_finished("a")
    samples = [step.sample for step in recorder.steps if step.sample is not None]
    assert [(s.new_tokens, s.token_context, s.sequences, s.kv_tokens) for s in samples] == [(6, 36, 1, 6), (1, 7, 1, 7)]
    assert all(sample.duration_ms > 0 for sample in samples)
    engine.close()


def test_calls_do_not_wait_for_a_step() -> None:
    executor = GatedExecutor(timed_executor(24))
    engine, recorder = started(executor)
    engine.submit(generate("a", prompt(9), max_tokens=2))
    assert executor.entered.acquire(timeout=20.0)
    assert executor.thread_name == "antiphon-engine"
    # The step is under way and cannot end before the permit: each of these returns all the same.
    engine.submit(generate("b", prompt(5, 100), max_tokens=1))
    engine.submit(generate("h", prompt(5, 200), held=True))
    assert engine.reserve("h", 5) is not None
    assert engine.pin(hashes_of(executor, prompt(9))) == []
    assert engine.check_integrity().requests == 3
    engine.cancel("a")
    engine.cancel("h")
    assert engine.check_integrity().used_blocks == 3  # of the step that runs
    executor.permits.release(10)
    recorder.wait_finished("b")
    assert recorder.tokens["a"] == []
    assert engine.check_integrity().used_blocks == 0
    engine.close()


def test_disaggregated_prefill_by_pull() -> None:
    """One engine prefills; the other pulls its blocks, by pin and by partial block, and decodes."""
    tokens = prompt(18)
    from_engine, from_recorder = started(timed_executor(24))
    to_engine, to_recorder = started(timed_executor(24))
    to_engine.submit(generate("d", tokens, held=True))
    from_engine.submit(prefill("p", tokens, credit_blocks=2))
    from_recorder.wait(lambda: bool(from_recorder.prefills["p"]))
    reservation = to_engine.reserve("d", 8)
    assert reservation is not None
    from_engine.grant("p", 5)
    from_recorder.wait(lambda: from_recorder.prefills["p"][-1].first_token is not None)
    reservation = to_engine.reserve("d", 18)
    assert reservation is not None
    to_engine.retain(reservation.blocks)
    pinned = from_engine.pin(hashes_of(timed_executor(1), tokens)) + from_engine.pin_partial("p")
    assert from_engine.load().retained_blocks == 5
    for remote, local in zip(pinned, reservation.blocks, strict=True):
        write_block(to_engine.kv, local, read_block(from_engine.kv, remote))
    from_engine.release(pinned)
    from_engine.cancel("p")
    to_engine.publish("d", 18)
    to_engine.release(reservation.blocks)
    first = from_recorder.prefills["p"][-1].first_token
    assert first is not None
    to_engine.resume("d", [first])
    to_recorder.wait_finished("d")
    assert [first, *to_recorder.tokens["d"]] == expected_tokens(tokens, 8)
    assert sum(step.sample.new_tokens for step in to_recorder.steps if step.sample) == 7
    for engine in (from_engine, to_engine):
        assert engine.check_integrity().used_blocks == 0
        engine.close()


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on() -> None:
    executor = GatedExecutor(timed_executor(24), gated=False)
    engine, recorder = started(executor)
    executor.failing = RuntimeError("the device is on fire")
    engine.submit(generate("a", prompt(9)))
    recorder.wait_finished("a")
    assert recorder.finished["a"].finish is FinishReason.ERROR
    assert "the device is on fire" in recorder.finished["a"].error
    engine.submit(prefill("p", prompt(9)))
    recorder.wait(lambda: bool(recorder.prefills["p"]))
    assert "the device is on fire" in recorder.prefills["p"][-1].error
    executor.failing = None
    engine.submit(generate("b", prompt(9)))
    recorder.wait_finished("b")
    assert recorder.tokens["b"] == expected_tokens(prompt(9), 8)
    assert recorder.failure is None
    assert engine.check_integrity().used_blocks == 0
    engine.close()


def test_failing_three_times_in_a_row_is_the_end() -> None:
    executor = GatedExecutor(timed_executor(24), gated=False)
    engine, recorder = started(executor)
    executor.failing = RuntimeError("for good")
    for request_id in ("a", "b", "c"):
        engine.submit(generate(request_id, prompt(9)))
        recorder.wait_finished(request_id)
    recorder.wait(lambda: recorder.failure is not None)
    assert recorder.failure is executor.failing
    with pytest.raises(RequestRefused) as refused:
        engine.submit(generate("d", prompt(9)))
    assert refused.value.reason is RefusalReason.DRAINING
    engine.close()
    assert executor.closed


def test_a_listener_that_raises_is_a_failure_not_a_silent_death() -> None:
    class Broken(Recorder):
        def on_step(self, result: object) -> None:
            raise RuntimeError("broken listener")

    engine = BlockEngine(timed_executor(24), SchedulerConfig())
    recorder = Broken()
    engine.start(recorder)
    engine.submit(generate("a", prompt(9)))
    recorder.wait(lambda: recorder.failure is not None)
    engine.close()


def test_an_executor_that_samples_where_it_was_not_asked_to_is_told_off() -> None:
    class Eager(GatedExecutor):
        def execute(self, step):  # type: ignore[no-untyped-def]
            return [None for _ in step]

    engine, recorder = started(Eager(timed_executor(24), gated=False))
    engine.submit(generate("a", prompt(9)))
    recorder.wait_finished("a")
    assert "did not sample exactly where it was asked to" in recorder.finished["a"].error
    engine.close()


def test_close_is_idempotent_and_refuses_what_comes_after() -> None:
    executor = GatedExecutor(timed_executor(24), gated=False)
    engine, _ = started(executor)
    engine.close()
    engine.close()
    assert executor.closed
    assert "antiphon-engine" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RequestRefused) as refused:
        engine.submit(generate("a", prompt(9)))
    assert refused.value.reason is RefusalReason.DRAINING


def test_close_without_start_releases_the_executor() -> None:
    executor = GatedExecutor(timed_executor(24))
    BlockEngine(executor, SchedulerConfig()).close()
    assert executor.closed


def test_a_listener_may_read_the_index_while_it_is_told_of_a_change() -> None:
    class Curious(Recorder):
        def on_blocks(self, change):  # type: ignore[no-untyped-def]
            super().on_blocks(change)
            seen.append(engine.indexed_blocks() == (change.sequence, self.blocks))

    seen: list[bool] = []
    engine = BlockEngine(timed_executor(24), SchedulerConfig())
    recorder = Curious()
    engine.start(recorder)
    engine.submit(generate("a", prompt(9)))
    recorder.wait_finished("a")
    assert seen
    assert all(seen)
    engine.close()


def test_many_threads_at_once_leave_nothing_behind() -> None:
    """Four threads submit, cancel, pull and pin in a pool that is too small; in the end all blocks are back."""
    engine, recorder = started(timed_executor(24), SchedulerConfig(max_batch_tokens=16, max_sequences=4))
    failures: list[BaseException] = []
    kept: list[str] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for number in range(40):
                request_id = f"{seed}-{number}"
                tokens = prompt(rng.randrange(1, 30), 10 * rng.randrange(4))
                if request := _any_request(rng, request_id, tokens):
                    try:
                        engine.submit(request)
                    except RequestRefused:
                        continue
                    if request.kind is RequestKind.PREFILL:
                        kept.append(request_id)
                    if request.held:
                        reservation = engine.reserve(request_id, len(tokens))
                        if reservation is not None:
                            engine.retain(reservation.blocks)
                            for block, content in zip(
                                reservation.blocks[reservation.filled_blocks :],
                                kv_content(tokens)[reservation.filled_blocks :],
                                strict=True,
                            ):
                                write_block(engine.kv, block, content)
                            engine.publish(request_id, len(tokens))
                            engine.release(reservation.blocks)
                        engine.resume(request_id)
                engine.release(engine.pin(hashes_of(timed_executor(1), tokens)))
                engine.check_integrity()
                if rng.random() < 0.5:
                    engine.cancel(request_id)
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    for request_id in kept:
        engine.cancel(request_id)
    recorder.wait(
        lambda: (
            (engine.check_integrity().requests == 0 and engine.indexed_blocks() == (recorder.sequence, recorder.blocks))
            or recorder.failure is not None
        )
    )
    assert recorder.failure is None
    assert not [output for output in recorder.finished.values() if output.finish is FinishReason.ERROR]
    report = engine.check_integrity()
    assert report.free_blocks + report.cached_blocks == 24
    engine.close()


def _any_request(rng: random.Random, request_id: str, tokens: list[int]) -> EngineRequest:
    if rng.random() < 0.3:
        return prefill(request_id, tokens, credit_blocks=rng.choice([None, 1]))
    return generate(request_id, tokens, max_tokens=12, held=rng.random() < 0.4)


def test_the_package_imports_no_torch() -> None:
    code = "import sys, antiphon_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
