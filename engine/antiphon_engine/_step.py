"""What a step is planned to be, and what it brought: records between the scheduler and the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from antiphon_engine._request import Request
from antiphon_engine.executor import SampledToken, SampleSpec, Scoring, SequenceStep
from antiphon_engine.interface import FinishReason, PrefillProgress, RequestOutput, StepSample, TokenLogprob


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
    if start + count == len(request.tokens) and not request.only_scores:
        sampling, output = request.source.sampling, request.output
        forbidden = request.early_stop_ids if position < sampling.min_tokens else frozenset()
        if request.bans is not None:
            forbidden |= request.bans.forbidden_after(output)
        sample = SampleSpec(
            sampling, position, request.source.prompt, output, forbidden, request.grammar, request.allowed_ids
        )
    scoring = None
    if request.scored_tokens < request.to_score:
        scoring = _scoring_of(request, start, start + count)
    request.begin_flight(count)
    blocks = request.blocks[: request.blocks_for(start + count)]
    tokens = request.tokens[start : start + count]
    step = SequenceStep(request.request_id, tokens, start, blocks, sample, sequence=request.tokens, scoring=scoring)
    return StepPart(request, step)


def _scoring_of(request: Request, start: int, end: int) -> Scoring | None:
    rows = request.unscored_rows(start, end)
    if not rows:
        return None
    targets = request.tokens[rows.start + 1 : rows.stop + 1]
    return Scoring(rows.start - start, targets, request.source.sampling.prompt_logprobs or 0)


def output_of(
    request: Request,
    finish: FinishReason | None,
    sampled: SampledToken | None,
    error: str = "",
    scores: tuple[TokenLogprob, ...] = (),
) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        token_ids=(sampled.token_id,) if sampled else (),
        logprobs=(sampled.logprob,) if sampled and sampled.logprob else (),
        finish=finish,
        cached_tokens=request.cached_tokens,
        error=error,
        prompt_logprobs=scores,
    )


def progress_of(
    request: Request, sampled: SampledToken | None, error: str = "", scores: tuple[TokenLogprob, ...] = ()
) -> PrefillProgress:
    request.announced_blocks = request.indexed_blocks
    return PrefillProgress(
        request_id=request.request_id,
        full_blocks=request.indexed_blocks,
        cached_tokens=request.cached_tokens,
        first_token=sampled.token_id if sampled else None,
        first_logprob=sampled.logprob if sampled else None,
        partial_tokens=len(request.tokens) % request.block_tokens if sampled else 0,
        error=error,
        prompt_logprobs=scores,
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
