"""Self-measurement: a few real steps, timed before the first request, so that it is routed by measured figures.

The steps are those that requests are made of: prompts of growing length, a chunk with context behind it, one decode
and batches of several. They run on scratch blocks that belong to no request and are never indexed; what they compute is
thrown away. `BlockEngine.measure_first` runs them on the engine's thread, where real steps will run.

The one idea: *nothing is begun that would take too long*. Prompts grow by fours, each is predicted from the one before,
and they may take half of the budget; so a slow machine measures small steps and a fast one large ones. An untimed step
goes first: it pays for what an engine sets up only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from antiphon_engine._step import step_sample
from antiphon_engine.executor import SampledToken, SampleSpec, SequenceStep
from antiphon_engine.interface import ModelInfo, Sampling, StepSample
from antiphon_engine.scheduler import SchedulerConfig

SHORTEST_PROMPT_TOKENS = 16
LONGEST_PROMPT_TOKENS = 4096
CONTEXT_CHUNK_TOKENS = 64
DECODE_BATCHES = (1, 4, 16)

Execute = Callable[[Sequence[SequenceStep]], list[SampledToken | None]]


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


def probe_steps(
    execute: Execute,
    limits: Limits,
    blocks: Sequence[int],
    budget_ms: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[StepSample]:
    """Run the steps one by one and yield what each took. `blocks`: `limits.blocks` of them, whose content is void.

    After the untimed step, nothing is begun once the budget is spent, nor a prompt that by the one before it would take
    more than half of what is left. Raises what `execute` raises.
    """
    if len(blocks) < limits.blocks:
        return
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
        sample = _timed(execute, _step(Probe(length, 0), limits, blocks), clock)
        computed_tokens, took_ms = length, sample.duration_ms
        yield sample
    for probe in limits.with_context(computed_tokens):
        if clock() >= ends_at:
            return
        yield _timed(execute, _step(probe, limits, blocks), clock)


def _timed(execute: Execute, step: Sequence[SequenceStep], clock: Callable[[], float]) -> StepSample:
    started = clock()
    execute(step)
    return step_sample(step, (clock() - started) * 1e3)


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


def _token(position: int, vocab_size: int) -> int:
    """Tokens that differ, so that nothing is quicker than with real ones."""
    return (7919 * position + 13) % vocab_size
