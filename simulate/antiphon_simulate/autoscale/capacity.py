"""What one worker can do, by the step model: what those who profile a worker before they scale it would know.

largest batch within the limit:  base + B * (per_new_token + per_sequence + per_context * context) <= tpot
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_simulate.autoscale.calls import Call
from antiphon_simulate.autoscale.records import Setting, Sizes
from antiphon_simulate.records import Timing


@dataclass(frozen=True, slots=True)
class Profile:
    """Means over requests, and what a worker does with such requests."""

    prefill_ms: float
    """Of a prompt, alone."""
    uncached_tokens: float
    prompt_tokens: float
    output_tokens: float
    batch: float
    """Answers that one worker decodes at once within the TPOT limit."""

    @property
    def context_tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens / 2.0


def profile(calls: Sequence[Call], setting: Setting) -> Profile:
    """Of feasible requests; there must be one."""
    known = [call for call in calls if call.feasible] or list(calls)
    prompt = _mean([call.prompt_tokens for call in known])
    output = _mean([call.output_tokens for call in known])
    context = prompt + output / 2.0
    batch = batch_within(setting.timing, setting.goal.tpot_ms, context)
    room = setting.site.kv_tokens / (prompt + output)
    return Profile(
        prefill_ms=_mean([call.prefill_ms for call in known]),
        uncached_tokens=_mean([call.uncached_tokens for call in known]),
        prompt_tokens=prompt,
        output_tokens=output,
        batch=max(1.0, min(batch, room, setting.site.max_running)),
    )


def batch_within(timing: Timing, limit_ms: float, context_tokens: float) -> float:
    """Answers of that context in one step of `limit_ms`; not rounded, 0 where not even the fixed costs fit."""
    step = timing.step
    each = step.per_new_token_ms + step.per_sequence_ms
    each += (step.per_token_context_ms + step.per_kv_token_ms) * context_tokens
    return max(0.0, limit_ms - step.base_ms) / each if each > 0.0 else float("inf")


def mean_work_ms(calls: Sequence[Call], setting: Setting) -> tuple[float, float]:
    """What all of them take of workers of each pool: prompts alone, answers in the largest batches within the limit."""
    found = profile(calls, setting)
    decode_ms = sum(call.output_tokens for call in calls) * setting.goal.tpot_ms / found.batch
    return sum(call.prefill_ms for call in calls), decode_ms


def mean_sizes(calls: Sequence[Call], span_ms: float, setting: Setting) -> Sizes:
    """What the mean load needs if all of it came evenly: the work of all requests over the time, rounded up."""
    if not span_ms:
        return Sizes(1, 1)
    prefill_ms, decode_ms = mean_work_ms(calls, setting)
    return Sizes(max(1, -int(-prefill_ms // span_ms)), max(1, -int(-decode_ms // span_ms)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
