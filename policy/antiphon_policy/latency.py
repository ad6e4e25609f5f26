"""The latency model: milliseconds of an engine step and of a transfer, from what workers measured.

    step_ms = base + per_new_token * new_tokens + per_token_context * sum(new_tokens * context)
            + per_sequence * sequences + per_kv_token * kv_tokens

All coefficients are >= 0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepModel:
    """Coefficients in milliseconds per unit (see the module's formula)."""

    base_ms: float = 2.0
    per_new_token_ms: float = 0.5
    per_token_context_ms: float = 0.0
    per_sequence_ms: float = 0.1
    per_kv_token_ms: float = 0.0001

    def step_ms(self, *, new_tokens: int, token_context: int, sequences: int, kv_tokens: int) -> float:
        """Predicted duration of one step."""
        return (
            self.base_ms
            + self.per_new_token_ms * new_tokens
            + self.per_token_context_ms * token_context
            + self.per_sequence_ms * sequences
            + self.per_kv_token_ms * kv_tokens
        )

    def prefill_ms(self, *, new_tokens: int, cached_tokens: int = 0, chunk_tokens: int = 512) -> float:
        """Predicted time to compute `new_tokens` prompt tokens after `cached_tokens`, alone, in chunks."""
        total = 0.0
        done = 0
        while done < new_tokens:
            count = min(chunk_tokens, new_tokens - done)
            context = cached_tokens + done + count
            total += self.step_ms(
                new_tokens=count, token_context=count * context, sequences=1, kv_tokens=context
            )
            done += count
        return total


def transfer_ms(num_bytes: int, *, gigabytes_per_s: float, latency_ms: float = 0.2) -> float:
    """Predicted time to move `num_bytes` over a link of that measured speed."""
    if gigabytes_per_s <= 0.0:
        return latency_ms
    return latency_ms + num_bytes / (gigabytes_per_s * 1e6)
