"""POST /v1/chat/completions: from messages to a flight, and from steps to the answer."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway import errors
from antiphon_gateway.answers import FINISH_REASONS, FINISH_REASONS_JSON, Frame, UsageBody, usage
from antiphon_gateway.flight import Choice, Flight, Target
from antiphon_gateway.logprobs import ChatLogprobs, ContentLogprob, chat_logprobs
from antiphon_gateway.models import Prompt
from antiphon_gateway.sampling import make_sampling
from antiphon_gateway.schema import ChatBody
from antiphon_gateway.tokenization import TextWorkers

_TEMPLATE_ROOM_CHARACTERS = 1024 * 1024


class _Message(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class _WholeChoice(msgspec.Struct):
    index: int
    message: _Message
    logprobs: ChatLogprobs | None
    finish_reason: str


class _Whole(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_WholeChoice]
    usage: UsageBody


async def make_prompt(body: ChatBody, target: Target, workers: TextWorkers, body_bytes: int) -> Prompt:
    """Messages through the template and the tokenizer. Raises ApiError (400)."""
    model, salt = target.model, target.salt
    template = model.template
    if template is None:
        raise errors.invalid(
            f"The model {target.name!r} has no chat template; use /v1/completions.", param="model", code="no_template"
        )
    add_generation_prompt = body.add_generation_prompt is not False
    tools = body.tools if body.tools and body.tool_choice != "none" else None

    def build() -> Prompt:
        text = template.render(
            body.messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            extra=body.chat_template_kwargs or {},
            limit_characters=4 * body_bytes + _TEMPLATE_ROOM_CHARACTERS,
        )
        # The template writes the start token itself.
        return model.prompt(model.codec.encode(text, add_special_tokens=False), salt)

    prompt = await workers.run(build, characters=body_bytes)
    if not prompt.token_ids:
        raise errors.invalid("The prompt is empty.", param="messages")
    return prompt


def sampling_for(body: ChatBody, target: Target, prompt: Prompt) -> pb.Sampling:
    """Raises ApiError (400)."""
    prompt_tokens = len(prompt.token_ids)
    room = target.max_context_tokens - prompt_tokens
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    max_tokens = max(1, room) if wanted is None else wanted
    if max_tokens > room:
        raise errors.context_too_long(
            limit=target.max_context_tokens, prompt_tokens=prompt_tokens, max_tokens=max_tokens, param="messages"
        )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return make_sampling(body, vocab_size=target.model.vocab_size, max_tokens=max_tokens, logprobs=logprobs)


@dataclass(slots=True)
class _Kept:
    texts: list[str] = field(default_factory=list)
    logprobs: list[ContentLogprob] = field(default_factory=list)


class ChatRenderer:
    """A `Renderer`."""

    def __init__(self, answer_id: str, body: ChatBody, target: Target) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._name = target.name
        self._model = target.model
        self._logprobs = bool(body.logprobs)
        self._top = body.top_logprobs or 0
        self._begun: set[int] = set()
        self._kept: dict[int, _Kept] = {}
        self._include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)

    @functools.cached_property
    def _frame(self) -> Frame:
        return Frame(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._name,
            include_usage=self._include_usage,
        )

    def take(self, choice: Choice, step: pb.RequestStep) -> bytes:
        if not (step.text or step.finish or step.token_ids):
            return b""
        head = b'{"index":%d,"delta":' % choice.index
        out = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            delta = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            out = self._frame.chunk(head + delta)
        if step.text or step.logprobs:
            text = msgspec.json.encode(step.text)
            logprobs = msgspec.json.encode(self._content(step)) if self._logprobs else b"null"
            out += self._frame.chunk(
                head + b'{"content":' + text + b'},"logprobs":' + logprobs + b',"finish_reason":null}'
            )
        if step.finish:
            reason = FINISH_REASONS_JSON[step.finish]
            out += self._frame.chunk(head + b'{},"logprobs":null,"finish_reason":' + reason + b"}")
        return out

    def _content(self, step: pb.RequestStep) -> ChatLogprobs:
        return ChatLogprobs(chat_logprobs(self._model.codec, step.logprobs, self._top))

    def end(self, flight: Flight) -> bytes:
        return self._frame.last(flight)

    def keep(self, choice: Choice, step: pb.RequestStep) -> None:
        kept = self._kept.setdefault(choice.index, _Kept())
        kept.texts.append(step.text)
        if self._logprobs:
            kept.logprobs.extend(chat_logprobs(self._model.codec, step.logprobs, self._top))

    def whole(self, flight: Flight) -> bytes:
        choices = []
        for choice in flight.choices:
            kept = self._kept.get(choice.index, _Kept())
            logprobs = ChatLogprobs(kept.logprobs) if self._logprobs else None
            message = _Message("".join(kept.texts))
            choices.append(_WholeChoice(choice.index, message, logprobs, FINISH_REASONS[choice.finish]))
        return msgspec.json.encode(
            _Whole(self._id, "chat.completion", self._created, self._name, choices, usage(flight))
        )
