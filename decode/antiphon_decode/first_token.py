"""What a token sampled elsewhere means here: whether it already ends the request.

The engine decides this for every token that it samples. The first token of a remote prefill never was in this
worker's engine, so the decode role decides, by the same rules and before any KV has arrived.
"""

from __future__ import annotations

from antiphon_engine.interface import FinishReason, ModelInfo, Sampling


def finish_after(
    token_id: int, *, output_tokens: int, prompt_tokens: int, sampling: Sampling, info: ModelInfo, pool_tokens: int
) -> FinishReason | None:
    """Whether the request ends with `token_id`, which is the last of `output_tokens` output ids.

    `pool_tokens`: tokens that the whole KV pool holds. (Below `min_tokens` no ending id can have been sampled.)
    """
    if token_id in sampling.stop_token_ids or (token_id in info.eos_token_ids and not sampling.ignore_eos):
        return FinishReason.STOP
    limit_tokens = min(info.max_context_tokens, pool_tokens)
    if output_tokens >= sampling.max_tokens or prompt_tokens + output_tokens >= limit_tokens:
        return FinishReason.LENGTH
    return None
