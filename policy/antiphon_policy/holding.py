"""When a request is kept back, and for how long a client is sent away. Pure.

A worker should be given only what it will start soon: what waits, waits in the line, where its order and its worker can
still change. But it must never be idle while something waits for it. So it is given work up to a *horizon*:

    horizon_ms = max(20, one chunk, time between two reports of it) + round trip

- one chunk: a step that runs cannot be changed any more, so work for the next one has to be there before it ends;
- time between reports: what it still has to do is known only then, and is a prediction in between;
- round trip: so long does it take until what is sent is there, and its answer here.

All three are measured. With the default step model: a chunk of 512 tokens 2.1 + 256 + 0.0512 = 258.2 ms; a report every
50 ms; a round trip of 2 ms: 260.2 ms. A request whose prefiller has 300 ms to do before it is held, and looked at
again in 39.8 ms or when the worker says something, whichever is first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from antiphon_policy.latency import CHUNK_TOKENS, StepModel

LEAST_HORIZON_MS = 20.0
"""What an event loop, a garbage collection and a scheduler may take between them: less than that would be a bubble."""

LEAST_RETRY_S = 1.0
MOST_RETRY_S = 300.0

RETRY_JITTER = 0.5
"""Clients are told up to this share more, so that they do not all come back at once."""


def horizon_ms(
    step: StepModel, *, round_trip_ms: float = 0.0, report_ms: float = 0.0, chunk_tokens: int = CHUNK_TOKENS
) -> float:
    """See the module."""
    chunk_ms = step.prefill_ms(new_tokens=chunk_tokens, chunk_tokens=chunk_tokens)
    return max(LEAST_HORIZON_MS, chunk_ms, report_ms) + round_trip_ms


def hold_ms(queue_ms: float, horizon_ms: float) -> float:
    """How long a request is held whose prefiller has `queue_ms` to do before it; 0: it starts now."""
    return max(0.0, queue_ms - horizon_ms)


def prompt_tokens_per_ms(steps: Iterable[StepModel], *, chunk_tokens: int = CHUNK_TOKENS) -> float:
    """What the workers with these step models compute together, in full chunks; 0: there are none."""
    return sum(
        chunk_tokens / max(1e-6, step.prefill_ms(new_tokens=chunk_tokens, chunk_tokens=chunk_tokens)) for step in steps
    )


def retry_after_s(tokens: float, tokens_per_ms: float, draw: float) -> int:
    """Whole seconds until `tokens` have been computed, at least 1, with a little more by `draw` in [0, 1).

    30,000 tokens at 2 a millisecond take 15 s; draws from 0 to 1 give 15 to 23. At a rate that is not known: 1 or 2.
    """
    seconds = tokens / tokens_per_ms / 1000.0 if tokens_per_ms > 0.0 else 0.0
    seconds = min(MOST_RETRY_S, max(LEAST_RETRY_S, seconds))
    return math.ceil(seconds * (1.0 + RETRY_JITTER * draw))
