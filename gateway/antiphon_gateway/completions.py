"""POST /v1/completions: from prompts to a flight, and from steps to the answer.

A list of prompts makes one choice per prompt and per `n`, in order. With `max_tokens` 0 there is nothing to compute but
log-probabilities of the prompt; where none are wanted, no worker is asked.
"""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway import errors
from antiphon_gateway.answers import FINISH_REASONS, FINISH_REASONS_JSON, Frame, UsageBody, usage
from antiphon_gateway.flight import Choice, Flight, Target
from antiphon_gateway.logprobs import CompletionLogprobs, completion_logprobs, with_prompt
from antiphon_gateway.models import Model, Prompt
from antiphon_gateway.rare_sampling import complete_rare, want_prompt_logprobs
from antiphon_gateway.sampling import make_sampling
from antiphon_gateway.schema import MAX_CHOICES_IN_ALL, CompletionBody, packed_ids, prompts
from antiphon_gateway.tokenization import IDS_PER_CHARACTER, TextWorkers
from antiphon_gateway.truncating import kept_part

DEFAULT_MAX_TOKENS = 16


class _WholeChoice(msgspec.Struct):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str


class Whole(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_WholeChoice]
    usage: UsageBody


async def make_prompts(body: CompletionBody, target: Target, workers: TextWorkers) -> list[Prompt]:
    """Raises ApiError (400)."""
    model, salt = target.model, target.salt
    given = prompts(body)
    if len(given) * (body.n or 1) > MAX_CHOICES_IN_ALL:
        raise errors.invalid(f"{len(given)} prompts times n make more than {MAX_CHOICES_IN_ALL} choices.", param="n")

    wishes = _Wishes(
        with_text=bool(body.echo),
        add_special_tokens=body.add_special_tokens is not False,
        kept=kept_part(body, target, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens),
    )

    def build() -> list[Prompt]:
        return [_prompt(prompt, model, salt, index, wishes) for index, prompt in enumerate(given)]

    return await workers.run(build, characters=_characters(given, with_text=bool(body.echo)))


def _characters(given: Sequence[str | list[int]], *, with_text: bool) -> int:
    """How much work the prompts are, in characters to encode. An id that is only checked and hashed is much less."""
    ids = sum(len(prompt) for prompt in given if not isinstance(prompt, str))
    texts = sum(len(prompt) for prompt in given if isinstance(prompt, str))
    return texts + (ids if with_text else ids // IDS_PER_CHARACTER)


class _Wishes(msgspec.Struct, frozen=True, gc=False):
    """What is to be done to each prompt."""

    with_text: bool
    add_special_tokens: bool
    kept: slice | None
    """Of its ids; None: all of them."""


def _prompt(given: str | list[int], model: Model, salt: bytes, index: int, wishes: _Wishes) -> Prompt:
    packed: array[int] | None = None
    encoded, text = b"", ""
    if isinstance(given, str):
        token_ids, text = model.codec.encode(given, add_special_tokens=wishes.add_special_tokens), given
    else:
        packed, encoded = packed_ids(given, model.wire_ids)
        token_ids = given
    whole = len(token_ids)
    if wishes.kept is not None:
        token_ids, packed, encoded = token_ids[wishes.kept], None, b""
    if wishes.with_text and (len(token_ids) < whole or not isinstance(given, str)):
        text = model.codec.decode(token_ids)
    if not token_ids:
        raise errors.invalid(
            f"The prompt is empty (item {index}); a completion needs at least one token.", param="prompt"
        )
    return model.prompt(token_ids, salt, text if wishes.with_text else "", packed, encoded)


def sampling_for(body: CompletionBody, target: Target, given: Sequence[Prompt]) -> pb.Sampling:
    """Raises ApiError (400)."""
    longest = max(len(prompt.token_ids) for prompt in given)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.max_tokens is None:
        max_tokens = max(1, min(max_tokens, target.max_context_tokens - longest))
    if longest + max_tokens > target.max_context_tokens:
        raise errors.context_too_long(
            limit=target.max_context_tokens, prompt_tokens=longest, max_tokens=max_tokens, param="prompt"
        )
    sampling = make_sampling(body, vocab_size=target.model.vocab_size, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.wide:
        complete_rare(sampling, body, target.model, given)
    if body.echo and body.logprobs is not None:
        want_prompt_logprobs(sampling, body.logprobs, given, "logprobs")
    return sampling


@dataclass(slots=True)
class _Streamed:
    """What must be known of one choice's earlier chunks."""

    offset: int = 0
    begun: bool = False


class CompletionRenderer:
    """A `Renderer`."""

    def __init__(self, answer_id: str, body: CompletionBody, target: Target) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._name = target.name
        self._model = target.model
        self._top = body.logprobs
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._echo = bool(body.echo)
        self._streamed: dict[int, _Streamed] = {}
        self._include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)

    @functools.cached_property
    def _frame(self) -> Frame:
        return Frame(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._name,
            include_usage=self._include_usage,
        )

    def take(self, choice: Choice, step: pb.RequestStep) -> bytes:
        text = step.text
        if self._echo and (step.token_ids or step.finish):
            streamed = self._of(choice)
            if not streamed.begun:
                text = choice.prompt.text + text
                streamed.begun = True
                if self._top is not None:
                    return self._chunk(choice, step, text, msgspec.json.encode(self._first(choice, step, streamed)))
        if not (text or step.logprobs or step.finish):
            return b""
        logprobs = b"null"
        if self._top is not None and step.logprobs:
            streamed = self._of(choice)
            told, streamed.offset = completion_logprobs(
                self._model.codec, step.logprobs, self._top, streamed.offset, as_ids=self._as_ids
            )
            logprobs = msgspec.json.encode(told)
        return self._chunk(choice, step, text, logprobs)

    def _first(self, choice: Choice, step: pb.RequestStep, streamed: _Streamed) -> CompletionLogprobs | None:
        """Those of the first chunk of an answer behind its prompt. They were computed for the prompt's first choice."""
        told, streamed.offset = self._behind_prompt(choice, choice.prompt_logprobs, step.logprobs)
        return told

    def _behind_prompt(
        self, choice: Choice, scores: Sequence[pb.TokenLogprob] | None, answer: Sequence[pb.TokenLogprob]
    ) -> tuple[CompletionLogprobs | None, int]:
        codec, top, offset = self._model.codec, self._top or 0, len(choice.prompt.text)
        told, end = completion_logprobs(codec, answer, top, offset, as_ids=self._as_ids)
        if scores is None:
            return (told if answer else None), end
        return with_prompt(codec, choice.prompt, scores, told, top, as_ids=self._as_ids), end

    def _chunk(self, choice: Choice, step: pb.RequestStep, text: str, logprobs: bytes) -> bytes:
        return self._frame.chunk(
            b'{"text":%b,"index":%d,"logprobs":%b,"finish_reason":%b}'
            % (msgspec.json.encode(text), choice.index, logprobs, FINISH_REASONS_JSON[step.finish])
        )

    def end(self, flight: Flight) -> bytes:
        return self._frame.last(flight)

    def _of(self, choice: Choice) -> _Streamed:
        return self._streamed.setdefault(choice.index, _Streamed())

    def whole(self, flight: Flight) -> bytes:
        choices = []
        for choice in flight.choices:
            text = (choice.prompt.text if self._echo else "") + "".join(choice.texts)
            logprobs = None
            if self._top is not None and self._echo:
                logprobs, _ = self._behind_prompt(choice, flight.scores_of(choice), choice.logprobs)
            elif self._top is not None:
                logprobs, _ = completion_logprobs(self._model.codec, choice.logprobs, self._top, 0, as_ids=self._as_ids)
            choices.append(_WholeChoice(text, choice.index, logprobs, FINISH_REASONS[choice.finish]))
        return msgspec.json.encode(
            Whole(self._id, "text_completion", self._created, self._name, choices, usage(flight))
        )
