"""What nobody could do better: the hits of one cache that is shared by all and never full, and the requests that an
idle worker with that cache would still answer too late. Properties of a trace and a timing alone, with requests in the
order of the trace: the same for every policy, seed and rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from antiphon_simulate.records import Sla, Timing, TraceRequest
from antiphon_simulate.traces import BLOCK_TOKENS
from antiphon_simulate.worker import HOP_MS


def ideal_cached_tokens(requests: Iterable[TraceRequest]) -> list[int]:
    """For each request min(512 x leading blocks that came before, prompt), starting with nothing."""
    seen: set[int] = set()
    cached = []
    for request in requests:
        leading = 0
        for block in request.blocks:
            if block not in seen:
                break
            leading += 1
        seen.update(request.blocks[leading:])
        cached.append(min(BLOCK_TOKENS * leading, request.prompt_tokens))
    return cached


def infeasible(requests: Sequence[TraceRequest], timing: Timing, sla: Sla) -> frozenset[int]:
    """Indexes of those that no routing can serve inside the SLA: an idle worker, with everything cached that anybody
    had sent before, takes longer to the first token or to each of the next. (At least the prompt's last token is
    computed: its logits give the first token.)"""
    late = set()
    for request, cached in zip(requests, ideal_cached_tokens(requests), strict=True):
        cached = min(cached, request.prompt_tokens - 1)
        ttft_ms = HOP_MS + timing.step.prefill_ms(
            new_tokens=request.prompt_tokens - cached, cached_tokens=cached, chunk_tokens=timing.chunk_tokens
        )
        more = request.output_tokens - 1
        # Contexts grow by one a step, so the middle one is the mean.
        kv_tokens = request.prompt_tokens + 1 + more // 2
        tpot_ms = timing.step.step_ms(new_tokens=1, token_context=kv_tokens, sequences=1, kv_tokens=kv_tokens)
        if ttft_ms > sla.ttft_limit_ms(request.prompt_tokens) or (more > 0 and tpot_ms > sla.tpot_ms):
            late.add(request.index)
    return frozenset(late)
