"""Self-measurement: a few real steps, timed before the first request, so that it is routed by measured figures.

The steps are those that requests are made of: prompts of growing length, a chunk with context behind it, one decode
and batches of several. They run on scratch blocks that belong to no request and are never indexed; what they compute is
thrown away. `BlockEngine.measure_first` runs them on the engine's thread, where real steps will run.

The one idea: *nothing is begun that would take too long*. Prompts grow by fours, each is predicted from the one before,
and they may take half of the budget; so a slow machine measures small steps and a fast one large ones. An untimed step
goes first: it pays for what an engine sets up only once.

With an executor of several stages, as many equal steps are in flight as it takes, and what counts is by how much the
last one ended after the one before it: as with real steps (`_flights`), what a step adds to those before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import msgspec

from antiphon_engine._step import step_sample
from antiphon_engine.executor import Executor, ExecutorLost, SampledToken, SampleSpec, SequenceStep
from antiphon_engine.interface import ModelInfo, Sampling, StepSample
from antiphon_engine.scheduler import SchedulerConfig

logger = logging.getLogger("antiphon.engine")

SHORTEST_PROMPT_TOKENS = 16
LONGEST_PROMPT_TOKENS = 4096
CONTEXT_CHUNK_TOKENS = 64
DECODE_BATCHES = (1, 4, 16)

Execute = Callable[[Sequence[SequenceStep]], list[SampledToken | None]]
Pace = Callable[[Sequence[SequenceStep]], float]
"""Milliseconds that a step adds to equal ones before it."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One step to be timed: `sequences` equal ones, each with so many tokens to compute and so many before them."""

    new_tokens: int
    context_tokens: int
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step of this engine may be."""

    block_tokens: int
    vocab_size: int
    prompt_tokens: int
    """Of the longest prompt that is measured."""
    chunk_tokens: int
    """Of the prompt chunk with context behind it."""
    decodes: int
    """Sequences of the largest decode batch."""

    @classmethod
    def of(cls, config: SchedulerConfig, info: ModelInfo, free_blocks: int) -> Limits:
        """As large as scheduler, model and pool allow. The pool is shared out between context and what follows it."""
        block_tokens = info.block_tokens
        own_blocks = free_blocks // 2
        prompt_tokens = min(
            LONGEST_PROMPT_TOKENS,
            config.max_batch_tokens,
            (free_blocks - own_blocks) * block_tokens,
            info.max_context_tokens // 2,
        )
        return cls(
            block_tokens=block_tokens,
            vocab_size=info.vocab_size,
            prompt_tokens=prompt_tokens,
            chunk_tokens=min(CONTEXT_CHUNK_TOKENS, prompt_tokens, own_blocks * block_tokens),
            decodes=min(DECODE_BATCHES[-1], config.max_sequences, config.max_batch_tokens, own_blocks),
        )

    @property
    def shared_blocks(self) -> int:
        """Of the longest prompt, which is the context of other steps."""
        return -(-self.prompt_tokens // self.block_tokens)

    @property
    def blocks(self) -> int:
        """That the steps need in all."""
        return self.shared_blocks + max(self.decodes, -(-self.chunk_tokens // self.block_tokens))

    def prompts(self) -> tuple[int, ...]:
        """Lengths of the prompts to measure, growing by fours."""
        lengths = []
        length = SHORTEST_PROMPT_TOKENS
        while length < self.prompt_tokens:
            lengths.append(length)
            length *= 4
        return (*lengths, self.prompt_tokens) if self.prompt_tokens > 0 else ()

    def with_context(self, computed_tokens: int) -> tuple[Probe, ...]:
        """Decodes, and a chunk, behind the full blocks of so many computed tokens. Without any, decodes at the start of
        a sequence: they cost about what short ones do."""
        context_tokens = computed_tokens // self.block_tokens * self.block_tokens
        probes = [Probe(1, context_tokens, count) for count in DECODE_BATCHES if count <= self.decodes]
        if self.chunk_tokens > 1 and context_tokens:
            probes.append(Probe(self.chunk_tokens, context_tokens))
        if self.decodes and context_tokens > self.block_tokens:
            probes.append(Probe(1, self.block_tokens))
        return tuple(probes)


def measure(
    executor: Executor, limits: Limits, blocks: Sequence[int], budget_ms: float, stop: Callable[[], bool]
) -> tuple[StepSample, ...]:
    """What the steps took: fewer, or none, where time or blocks are short, a step fails or `stop` says so.

    Raises ExecutorLost. No step is in flight afterwards.
    """
    samples: list[StepSample] = []
    pace = pace_in_flight(executor) if executor.depth > 1 else None
    try:
        for sample in probe_steps(executor.execute, limits, blocks, budget_ms, pace=pace):
            samples.append(sample)
            if stop():
                break
    except ExecutorLost:
        raise
    except Exception as error:
        logger.warning("a step of the self-measurement failed after %d of them", len(samples), exc_info=error)
    return tuple(samples)


def pace_in_flight(executor: Executor, clock: Callable[[], float] = time.perf_counter) -> Pace:
    """Have `executor.depth` copies of a step in flight. They write the same into the same blocks, one after another."""

    def pace(step: Sequence[SequenceStep]) -> float:
        futures: list[Future[list[SampledToken | None]]] = []
        ends: list[float] = []
        try:
            for copy in range(executor.depth):
                began = clock()
                futures.append(executor.begin([_named(part, f"{part.request_id}-{copy}") for part in step]))
            for future in futures:
                future.result()
                ends.append(clock())
        finally:
            wait(futures)
        return (ends[-1] - max([began, *ends[-2:-1]])) * 1e3

    return pace


def probe_steps(
    execute: Execute,
    limits: Limits,
    blocks: Sequence[int],
    budget_ms: float,
    clock: Callable[[], float] = time.perf_counter,
    *,
    pace: Pace | None = None,
) -> Iterator[StepSample]:
    """Run the steps one by one and yield what each took. `blocks`: `limits.blocks` of them, whose content is void.

    After the untimed step, nothing is begun once the budget is spent, nor a prompt that by the one before it would take
    more than half of what is left. Raises what `execute` raises. `pace` times a step; None: `execute` alone does.
    """
    if len(blocks) < limits.blocks:
        return
    if pace is None:
        pace = _alone(execute, clock)
    prompts = limits.prompts()
    computed_tokens = 0
    took_ms = 0.0
    if prompts:
        execute(_step(Probe(prompts[0], 0), limits, blocks))
    ends_at = clock() + budget_ms / 1e3
    for length in prompts:
        left_ms = (ends_at - clock()) * 1e3
        if left_ms <= 0 or (computed_tokens and took_ms * length / computed_tokens > left_ms / 2):
            break
        step = _step(Probe(length, 0), limits, blocks)
        began = clock()
        sample = step_sample(step, pace(step))
        computed_tokens, took_ms = length, (clock() - began) * 1e3
        yield sample
    for probe in limits.with_context(computed_tokens):
        if clock() >= ends_at:
            return
        step = _step(probe, limits, blocks)
        yield step_sample(step, pace(step))


def _alone(execute: Execute, clock: Callable[[], float]) -> Pace:
    def pace(step: Sequence[SequenceStep]) -> float:
        began = clock()
        execute(step)
        return (clock() - began) * 1e3

    return pace


def _step(probe: Probe, limits: Limits, blocks: Sequence[int]) -> list[SequenceStep]:
    """The sequences share the blocks of their context; what they compute goes into blocks of their own behind it."""
    end = probe.context_tokens + probe.new_tokens
    tokens = [_token(position, limits.vocab_size) for position in range(end)]
    own_blocks = -(-probe.new_tokens // limits.block_tokens)
    shared = list(blocks[: probe.context_tokens // limits.block_tokens])
    rest = blocks[limits.shared_blocks :] if shared else blocks
    return [
        SequenceStep(
            request_id=f"self-measure-{number}",
            tokens=tokens[probe.context_tokens :],
            start=probe.context_tokens,
            blocks=[*shared, *rest[number * own_blocks : (number + 1) * own_blocks]],
            sample=SampleSpec(Sampling(), 0, tokens, (), frozenset()),
            sequence=tokens,
        )
        for number in range(probe.sequences)
    ]


def _named(part: SequenceStep, request_id: str) -> SequenceStep:
    return msgspec.structs.replace(part, request_id=request_id)


def _token(position: int, vocab_size: int) -> int:
    """Tokens that differ, so that nothing is quicker than with real ones."""
    return (7919 * position + 13) % vocab_size
