"""`truncate_prompt_tokens`: which part of a prompt that is too long is kept.

As vLLM's server has it, with one difference: a number above what the context allows is no error by itself, as a shorter
prompt is not touched by it.
"""

from __future__ import annotations

from antiphon_gateway.flight import Target
from antiphon_gateway.schema import CommonBody


def kept_part(body: CommonBody, target: Target, answer_tokens: int | None) -> slice | None:
    """Of a prompt's ids, what is sent; None: all of them. `answer_tokens`: what the answer may have; None: not said."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return None
    if keep < 0:
        keep = max(1, target.max_context_tokens - (1 if answer_tokens is None else answer_tokens))
    return slice(0, keep) if body.truncation_side == "right" else slice(-keep, None)
