"""From a checked body to the `Sampling` message that every choice of it starts from."""

from __future__ import annotations

import random

from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.errors import invalid
from antiphon_gateway.schema import MAX_STOP_TOKEN_IDS, CommonBody, check_token_ids, stop_strings

_SMALLEST_TOP_P = 1e-6
"""top_p 0 means the most likely token only; a mass of zero would mean none."""


def make_sampling(
    body: CommonBody, *, vocab_size: int, max_tokens: int, logprobs: int | None, default_temperature: float = 1.0
) -> pb.Sampling:
    """All choices share it but for `choice`. Raises ApiError (400) where it does not fit the vocabulary."""
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise invalid(f"min_tokens {body.min_tokens} is above max_tokens {max_tokens}.", param="min_tokens")
    if body.stop_token_ids is not None:
        if len(body.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise invalid(f"stop_token_ids may have {MAX_STOP_TOKEN_IDS} ids.", param="stop_token_ids")
        check_token_ids(body.stop_token_ids, vocab_size, "stop_token_ids")
    sampling = pb.Sampling(
        temperature=default_temperature if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else max(body.top_p, _SMALLEST_TOP_P),
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        seed=random.getrandbits(64) if body.seed is None else body.seed & (2**64 - 1),
        max_tokens=max_tokens,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    # Most have none of these: what is not named costs nothing.
    if body.top_k is not None:
        sampling.top_k = max(0, body.top_k)
    if body.min_p is not None:
        sampling.min_p = body.min_p
    if body.presence_penalty is not None:
        sampling.presence_penalty = body.presence_penalty
    if body.frequency_penalty is not None:
        sampling.frequency_penalty = body.frequency_penalty
    if body.min_tokens is not None:
        sampling.min_tokens = body.min_tokens
    if body.stop_token_ids:
        sampling.stop_token_ids.extend(body.stop_token_ids)
    if body.stop is not None:
        sampling.stop.extend(stop_strings(body))
    if body.ignore_eos:
        sampling.ignore_eos = True
    if body.include_stop_str_in_output:
        sampling.include_stop_text = True
    if logprobs is not None:
        sampling.logprobs = logprobs
    for key, value in (body.logit_bias or {}).items():
        token_id = int(key) if len(key) <= 10 else vocab_size
        if token_id >= vocab_size:
            raise invalid(
                f"logit_bias names the token id {key[:50]}, but the vocabulary ends at {vocab_size - 1}.",
                param="logit_bias",
            )
        sampling.logit_bias[token_id] = value
    return sampling
