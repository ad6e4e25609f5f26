"""The least work of each request on a worker of each pool, and between when and when it has to be done.

Prefill: alone, less what others can share of the step's fixed costs: a prompt that leaves room in the chunk pays for
its share of the chunk.

Decode: m steps after the first token, each with `each = per_new + per_sequence + per_context * (prompt + 1)` of its own
at least. The fixed costs of a step are shared by its batch, in one of three ways, each of which never adds up to more
than the step, so the one that gives most is taken for all:

- in proportion to `each`: with mean step time at most the TPOT limit, the request pays at least
  m * each * limit / (limit - base), since s / (s - base) is convex and falls;
- equally, among `max_running` answers at most: m * (each + base / max_running);
- by KV room: m * (each + base * (prompt + output) / room).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_simulate.autoscale.calls import Call
from antiphon_simulate.autoscale.records import Setting
from antiphon_simulate.worker import HOP_MS


@dataclass(frozen=True, slots=True)
class Demand:
    from_ms: float
    until_ms: float
    work_ms: float


def prefill_demands(calls: Sequence[Call], setting: Setting) -> list[Demand]:
    """Of calls that are feasible, in their order."""
    base_ms, chunk = setting.timing.step.base_ms, setting.timing.chunk_tokens
    return [
        Demand(
            call.arrival_ms,
            call.arrival_ms + call.ttft_limit_ms - HOP_MS,
            call.prefill_ms - base_ms * max(0.0, 1.0 - call.uncached_tokens / chunk),
        )
        for call in calls
        if call.feasible
    ]


def decode_demands(calls: Sequence[Call], setting: Setting) -> list[Demand]:
    """Of calls that are feasible, in their order; those without further tokens need nothing."""
    step, limit_ms, site = setting.timing.step, setting.goal.tpot_ms, setting.site
    per_context = step.per_token_context_ms + step.per_kv_token_ms
    known = [call for call in calls if call.feasible]
    steps = [call.output_tokens - 1 for call in known]
    each = [step.per_new_token_ms + step.per_sequence_ms + per_context * (call.prompt_tokens + 1) for call in known]
    shares = [
        [m * ms * limit_ms / max(limit_ms - step.base_ms, 1e-9) for m, ms in zip(steps, each, strict=True)],
        [m * (ms + step.base_ms / site.max_running) for m, ms in zip(steps, each, strict=True)],
        [
            m * (ms + step.base_ms * min(1.0, (call.prompt_tokens + call.output_tokens) / site.kv_tokens))
            for call, m, ms in zip(known, steps, each, strict=True)
        ],
    ]
    return [
        Demand(call.arrival_ms, call.arrival_ms + call.ttft_limit_ms + m * limit_ms, work_ms)
        for call, m, work_ms in zip(known, steps, max(shares, key=sum), strict=True)
    ]
