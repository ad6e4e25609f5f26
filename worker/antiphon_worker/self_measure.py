"""What a worker learns of its own speed before anybody hears of it.

The torch engine times a few real steps (`antiphon_engine.self_measure`). The timed engine waits as its step model says,
so that is asked instead: timing its waits would measure how busy the machine is at the moment, not the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future

from antiphon_engine import BlockEngine, StepSample
from antiphon_policy.equals import TYPICAL_STEPS

from antiphon_worker.engines import timed_step_model
from antiphon_worker.options import WorkerOptions

log = logging.getLogger("antiphon.worker")

BUDGET_MS = 1000.0
"""For the steps: enough for all of them where a prompt of 512 tokens takes less than 400 ms."""

DEADLINE_S = 30.0
"""For a step that hangs, or takes that long: then the worker starts with the prior."""

Measuring = Future[tuple[StepSample, ...]]


def begin_measuring(options: WorkerOptions, engine: BlockEngine) -> Measuring:
    """To be called before the engine is started. What it gives is for `measured_steps`."""
    if options.self_measure and options.engine != "timed":
        return engine.measure_first(BUDGET_MS)
    known: Measuring = Future()
    known.set_result(_as_the_model_says(options) if options.self_measure else ())
    return known


async def measured_steps(measuring: Measuring) -> Sequence[StepSample]:
    """The steps and what they took; none where they took too long."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            samples = await asyncio.wrap_future(measuring)
    except TimeoutError:
        log.warning("the self-measurement did not end within %.0f s: going on without it", DEADLINE_S)
        return ()
    if samples:
        longest = max(samples, key=lambda sample: sample.new_tokens)
        took_ms = sum(sample.duration_ms for sample in samples)
        log.info(
            "measured its own speed: steps=%d took_ms=%.0f prompt_tokens=%d prompt_ms=%.1f",
            len(samples),
            took_ms,
            longest.new_tokens,
            longest.duration_ms,
        )
    return samples


def _as_the_model_says(options: WorkerOptions) -> tuple[StepSample, ...]:
    model = timed_step_model(options)
    return tuple(
        StepSample(step.ms(model), step.new_tokens, step.token_context, step.sequences, step.kv_tokens)
        for step in TYPICAL_STEPS
        if step.new_tokens <= options.max_batch_tokens
    )
