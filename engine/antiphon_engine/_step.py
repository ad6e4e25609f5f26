"""What a step is planned to be, and what it brought: records between the scheduler and the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from antiphon_engine._request import Request
from antiphon_engine.executor import SampledToken, SampleSpec, SequenceStep
from antiphon_engine.interface import FinishReason, PrefillProgress, RequestOutput, StepSample


class StepPart(msgspec.Struct, frozen=True):
    request: Request
    step: SequenceStep


@dataclass(frozen=True, slots=True)
class StepPlan:
    parts: tuple[StepPart, ...]
    has_news: bool
    """`commit` has something to tell even if nothing is computed."""
    preempted: bool


@dataclass(frozen=True, slots=True)
class StepNews:
    outputs: tuple[RequestOutput, ...]
    prefills: tuple[PrefillProgress, ...]


def part_of(request: Request, count: int) -> StepPart:
    """The next `count` tokens of `request`, and a sample behind them if they are the last. The request is in flight."""
    start = request.planned_tokens
    position = len(request.output)
    sample = None
    if start + count == len(request.tokens):
        forbidden = request.early_stop_ids if position < request.source.sampling.min_tokens else frozenset()
        sample = SampleSpec(
            request.source.sampling, position, request.source.prompt, request.output, forbidden, request.grammar
        )
    request.begin_flight(count)
    blocks = request.blocks[: request.blocks_for(start + count)]
    tokens = request.tokens[start : start + count]
    return StepPart(request, SequenceStep(request.request_id, tokens, start, blocks, sample, sequence=request.tokens))


def output_of(
    request: Request, finish: FinishReason | None, sampled: SampledToken | None, error: str = ""
) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        token_ids=(sampled.token_id,) if sampled else (),
        logprobs=(sampled.logprob,) if sampled and sampled.logprob else (),
        finish=finish,
        cached_tokens=request.cached_tokens,
        error=error,
    )


def progress_of(request: Request, sampled: SampledToken | None, error: str = "") -> PrefillProgress:
    request.announced_blocks = request.indexed_blocks
    return PrefillProgress(
        request_id=request.request_id,
        full_blocks=request.indexed_blocks,
        cached_tokens=request.cached_tokens,
        first_token=sampled.token_id if sampled else None,
        first_logprob=sampled.logprob if sampled else None,
        partial_tokens=len(request.tokens) % request.block_tokens if sampled else 0,
        error=error,
    )


def step_sample(steps: Sequence[SequenceStep], duration_ms: float) -> StepSample:
    """What the latency model is told of a computed step."""
    counts = [len(step.tokens) for step in steps]
    contexts = [step.start + count for step, count in zip(steps, counts, strict=True)]
    return StepSample(
        duration_ms=duration_ms,
        new_tokens=sum(counts),
        token_context=sum(count * context for count, context in zip(counts, contexts, strict=True)),
        sequences=len(counts),
        kv_tokens=sum(contexts),
    )
