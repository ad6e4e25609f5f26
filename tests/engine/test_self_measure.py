"""Self-measurement: which steps are timed, within what, and that nothing of it is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from antiphon_engine import BlockEngine, SchedulerConfig, SequenceStep, StepSample
from antiphon_engine.executor import SampledToken
from antiphon_engine.self_measure import Limits, probe_steps

from tests.support.engine import Recorder, generate, timed_executor

DEADLINE_S = 10.0


@dataclass
class Machine:
    """Computes nothing; a step takes so long on its own clock."""

    ms_per_token: float
    now_s: float = 0.0
    steps: list[Sequence[SequenceStep]] = field(default_factory=list)

    def execute(self, step: Sequence[SequenceStep]) -> list[SampledToken | None]:
        self.steps.append(step)
        self.now_s += (1.0 + self.ms_per_token * sum(len(part.tokens) for part in step)) / 1e3
        return []

    def clock(self) -> float:
        return self.now_s


def limits(*, free_blocks: int = 1000, max_batch_tokens: int = 512, max_sequences: int = 64) -> Limits:
    config = SchedulerConfig(max_batch_tokens=max_batch_tokens, max_sequences=max_sequences)
    return Limits.of(config, timed_executor(1, max_context_tokens=8192).info, free_blocks)


def measured(machine: Machine, bounds: Limits, budget_ms: float = 500.0) -> list[StepSample]:
    blocks = list(range(bounds.blocks))
    return list(probe_steps(machine.execute, bounds, blocks, budget_ms, machine.clock))


def shapes(samples: Sequence[StepSample]) -> list[tuple[int, int, int]]:
    """(new tokens, sequences, tokens attended to) of each."""
    return [(sample.new_tokens, sample.sequences, sample.kv_tokens) for sample in samples]


def test_prompts_a_chunk_with_context_and_decode_batches_are_timed() -> None:
    machine = Machine(ms_per_token=0.01)
    samples = measured(machine, limits())
    prompts = [(16, 1, 16), (64, 1, 64), (256, 1, 256), (512, 1, 512)]
    with_context = [(1, 1, 513), (4, 4, 4 * 513), (16, 16, 16 * 513), (64, 1, 576), (1, 1, 5)]
    assert shapes(samples) == prompts + with_context
    assert samples[0].duration_ms == pytest.approx(1.16)
    assert len(machine.steps) == len(samples) + 1, "one step goes first that is not timed"


@pytest.mark.parametrize("ms_per_token", [0.0, 0.01, 0.3, 2.0, 40.0])
def test_a_slow_machine_measures_small_steps_and_none_measures_for_much_longer_than_it_may(ms_per_token: float) -> None:
    machine = Machine(ms_per_token)
    samples = measured(machine, limits(free_blocks=4000, max_batch_tokens=8192), budget_ms=400.0)
    slowest_first_steps_ms = 2 * (1 + 16 * ms_per_token)
    assert machine.now_s * 1e3 <= 400.0 + slowest_first_steps_ms + 20 * ms_per_token
    longest = max((sample.new_tokens for sample in samples), default=0)
    assert longest == {0.0: 4096, 0.01: 4096, 0.3: 256, 2.0: 64, 40.0: 16}[ms_per_token]
    if ms_per_token <= 2.0:
        assert {1, 4, 16} <= {sample.sequences for sample in samples}


@pytest.mark.parametrize("free_blocks", [0, 1, 2, 3, 7, 40])
@pytest.mark.parametrize("max_sequences", [1, 3])
def test_steps_stay_inside_a_small_pool_and_what_the_scheduler_allows(free_blocks: int, max_sequences: int) -> None:
    machine = Machine(0.01)
    bounds = limits(free_blocks=free_blocks, max_batch_tokens=32, max_sequences=max_sequences)
    assert bounds.blocks <= free_blocks
    measured(machine, bounds)
    for step in machine.steps:
        assert len(step) <= max_sequences
        assert sum(len(part.tokens) for part in step) <= 32
        for part in step:
            assert set(part.blocks) <= set(range(free_blocks))
            assert len(part.blocks) * 4 >= part.start + len(part.tokens)


def test_decodes_are_measured_also_where_there_is_time_for_less_than_a_block_of_context() -> None:
    machine = Machine(ms_per_token=3.0)
    info = replace(timed_executor(1, max_context_tokens=8192).info, block_tokens=64)
    samples = measured(machine, Limits.of(SchedulerConfig(), info, 100), budget_ms=200.0)
    assert shapes(samples) == [(16, 1, 16), (1, 1, 1), (4, 4, 4), (16, 16, 16)]


def test_no_sequence_writes_where_another_one_reads_or_writes() -> None:
    machine = Machine(0.01)
    measured(machine, limits())
    for step in machine.steps:
        written = [block for part in step for block in part.blocks[part.start // 4 :]]
        read = {block for part in step for block in part.blocks[: part.start // 4]}
        assert len(written) == len(set(written))
        assert not read & set(written)


def test_the_engine_measures_itself_and_nothing_of_it_is_left() -> None:
    """The timed executor checks the content of every block that a step attends to, so the context was really there."""
    engine = BlockEngine(timed_executor(200), SchedulerConfig(max_batch_tokens=64))
    future = engine.measure_first(500.0)
    recorder = Recorder()
    engine.start(recorder)
    samples = future.result(DEADLINE_S)
    assert {(16, 1), (64, 1), (1, 1), (4, 4), (16, 16)} <= {(s.new_tokens, s.sequences) for s in samples}
    report = engine.check_integrity()
    assert (report.free_blocks, report.used_blocks, report.cached_blocks) == (200, 0, 0)
    assert engine.indexed_blocks() == (0, frozenset())
    assert engine.load().retained_blocks == 0
    assert not recorder.steps, "its steps are no steps of requests"
    prompt = [(7919 * position + 13) % engine.info.vocab_size for position in range(64)]
    engine.submit(generate("a", prompt, max_tokens=3))
    recorder.wait_finished("a")
    assert recorder.steps[0].outputs[0].cached_tokens == 0, "what it computed is found by nobody"
    engine.close()


def test_a_step_that_fails_ends_the_measurement_and_not_the_engine() -> None:
    executor = timed_executor(200)
    real, calls = executor.execute, 0

    def failing(step: Sequence[SequenceStep]) -> list[SampledToken | None]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("no room for so many tokens")
        return real(step)

    executor.execute = failing  # type: ignore[method-assign]
    engine = BlockEngine(executor, SchedulerConfig(max_batch_tokens=64))
    future = engine.measure_first(500.0)
    recorder = Recorder()
    engine.start(recorder)
    assert len(future.result(DEADLINE_S)) == 1
    engine.submit(generate("a", [1, 2, 3], max_tokens=3))
    recorder.wait_finished("a")
    assert engine.check_integrity().used_blocks == 0
    engine.close()


def test_it_comes_before_the_start_or_not_at_all() -> None:
    engine = BlockEngine(timed_executor(8), SchedulerConfig())
    engine.start(Recorder())
    with pytest.raises(RuntimeError, match="before it is started"):
        engine.measure_first(10.0)
    engine.close()
