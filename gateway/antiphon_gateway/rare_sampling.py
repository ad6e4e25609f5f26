"""What few requests ask of sampling, as the protocol has it: allowed ids, words never completed, and how likely the
prompt's own tokens are. Ranges that need no model are `schema`'s to check."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.errors import invalid
from antiphon_gateway.models import Model, Prompt
from antiphon_gateway.schema import CommonBody, check_token_ids

MAX_PROMPT_SCORES = 65_536
"""Log-probabilities of prompts that one answer tells, alternatives included: some 3 MB of JSON."""


def complete_rare(sampling: pb.Sampling, body: CommonBody, model: Model, prompts: Sequence[Prompt]) -> None:
    """Of a wide body. Raises ApiError (400)."""
    if body.allowed_token_ids is not None:
        check_token_ids(body.allowed_token_ids, model.vocab_size, "allowed_token_ids")
        sampling.allowed_token_ids.extend(sorted(set(body.allowed_token_ids)))
    if body.bad_words:
        sampling.bad_words.extend(pb.TokenIds(ids=word) for word in words_as_ids(body.bad_words, model))
    if body.prompt_logprobs is not None:
        want_prompt_logprobs(sampling, body.prompt_logprobs, prompts, "prompt_logprobs")


def words_as_ids(words: Sequence[str], model: Model) -> list[tuple[int, ...]]:
    """Each word at the beginning of a text and behind a space, as the tokenizer writes it; each sequence once."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            token_ids = model.codec.encode(text, add_special_tokens=False)
            if not token_ids or max(token_ids) >= model.vocab_size:
                raise invalid(f"bad_words: {word!r} has no tokens that this model could sample.", param="bad_words")
            found[tuple(token_ids)] = None
    return list(found)


def want_prompt_logprobs(sampling: pb.Sampling, top: int, prompts: Sequence[Prompt], param: str) -> None:
    """Ask for them, with `top` alternatives or as many as were asked for already. Raises ApiError (400)."""
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    if tokens * (top + 1) > MAX_PROMPT_SCORES:
        raise invalid(
            f"{param}: {tokens} prompt tokens with {top} alternatives each are more than the {MAX_PROMPT_SCORES}"
            " log-probabilities of prompts that one answer tells; ask for fewer, or send the prompts by themselves.",
            param=param,
            code="out_of_range",
        )
    sampling.prompt_logprobs = max(top, sampling.prompt_logprobs)
