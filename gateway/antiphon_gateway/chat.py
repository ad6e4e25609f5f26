"""POST /v1/chat/completions: from messages to a flight, and from steps to the answer."""

from __future__ import annotations

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway import errors
from antiphon_gateway.answers import FINISH_REASONS, FINISH_REASONS_JSON, UsageBody, usage
from antiphon_gateway.chat_answer import ChatAnswer
from antiphon_gateway.continuing import check_continuing, cut_behind
from antiphon_gateway.effort import effort_variables
from antiphon_gateway.flight import Choice, Flight, Target
from antiphon_gateway.logprobs import ChatLogprobs
from antiphon_gateway.models import Prompt
from antiphon_gateway.parameters import unknown_fields
from antiphon_gateway.rare_sampling import complete_rare
from antiphon_gateway.sampling import make_sampling
from antiphon_gateway.schema import ChatBody
from antiphon_gateway.templating import ChatTemplate, TemplateInvalid
from antiphon_gateway.tokenization import BegunEncoding, TextWorkers
from antiphon_gateway.truncating import kept_part

_TEMPLATE_ROOM_CHARACTERS = 1024 * 1024
_LIGHT_BYTES = 32 * 1024
_LIGHT_MESSAGES = 64
"""Rendering takes about 4 us a message: up to here it is done where it is, to see how much is left to encode."""
_COMPILING = 100
"""Characters that are encoded in the time in which one of a template is compiled."""


class _Message(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class _WholeChoice(msgspec.Struct):
    index: int
    message: _Message
    logprobs: ChatLogprobs | None
    finish_reason: str


class Whole(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_WholeChoice]
    usage: UsageBody


async def make_prompt(body: ChatBody, target: Target, workers: TextWorkers, body_bytes: int) -> Prompt:
    """Messages through the template and the tokenizer. Raises ApiError (400)."""
    model, salt = target.model, target.salt
    template = template_of(body, target)
    if template is None:
        raise errors.invalid(
            f"The model {target.name!r} has no chat template; use /v1/completions.", param="model", code="no_template"
        )
    add_generation_prompt = body.add_generation_prompt is not False and not body.continue_final_message
    if body.continue_final_message:
        check_continuing(body)
    extra = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        extra = {**effort_variables(body.reasoning_effort, template.source), **extra}
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    if tools and not template.takes_tools:
        raise errors.invalid(
            f"The chat template of the model {target.name!r} has no place for tools; send none, or tool_choice 'none'.",
            param="tools",
            code="unsupported_parameter",
        )

    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    kept = kept_part(body, target, wanted)

    def begin() -> BegunEncoding:
        text = template.render(
            body.messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            extra=extra,
            limit_characters=4 * body_bytes + _TEMPLATE_ROOM_CHARACTERS,
            documents=body.documents or None,
        )
        if body.continue_final_message:
            text = cut_behind(text, body.messages)
        return model.codec.begin_chat(text, salt, add_special_tokens=bool(body.add_special_tokens))

    def finish(begun: BegunEncoding) -> Prompt:
        packed = begun.finish()
        if kept is not None:
            packed = packed[kept]
        return model.prompt(packed.tolist(), salt, packed=packed)

    if body_bytes <= _LIGHT_BYTES and len(body.messages) <= _LIGHT_MESSAGES and body.chat_template is None:
        begun = begin()
        prompt = await workers.run(lambda: finish(begun), characters=begun.work_characters)
    else:
        characters = body_bytes if body.chat_template is None else _COMPILING * body_bytes
        prompt = await workers.run(lambda: finish(begin()), characters=characters)
    if not prompt.token_ids:
        raise errors.invalid("The prompt is empty.", param="messages")
    return prompt


def template_of(body: ChatBody, target: Target) -> ChatTemplate | None:
    """The model's, or the one that the request brings, which `compile_template` has seen. Raises ApiError (400)."""
    if body.chat_template is None:
        return target.model.template
    if not target.takes_templates:
        raise errors.invalid(
            "chat_template is not supported: this gateway runs without --trust-request-chat-template. The model's own"
            " is used; see chat_template_kwargs.",
            param="chat_template",
            code="unsupported_parameter",
        )
    try:
        return target.model.other_template(body.chat_template)
    except TemplateInvalid as error:
        raise errors.invalid(f"chat_template: {error}.", param="chat_template") from error


async def compile_template(body: ChatBody, target: Target, workers: TextWorkers) -> None:
    """The template that the request brings, in a thread: from then on it is at hand. Raises ApiError (400)."""
    await workers.run(lambda: template_of(body, target), characters=_COMPILING * len(body.chat_template or ""))


def has_no_place_for_tools(body: ChatBody, target: Target) -> bool:
    """The model cannot be told of its tools, and need not call any: clients that offer them always get an answer."""
    template = template_of(body, target)
    return template is not None and not template.takes_tools and body.tool_choice in (None, "auto", "none")


def ignored_by(raw: bytes, body: ChatBody, target: Target) -> tuple[str, ...]:
    """Fields that have no effect: unknown ones, and those that this model's chat template has no word for.

    Raises ApiError (400).
    """
    names = unknown_fields(raw, type(body)) if body.wide else ()
    template, effort = template_of(body, target), body.reasoning_effort
    if effort is not None and template is not None and not effort_variables(effort, template.source):
        names += ("reasoning_effort",)
    if body.documents and template is not None and not template.takes_documents:
        names += ("documents",)
    return names


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
    sampling = make_sampling(body, vocab_size=target.model.vocab_size, max_tokens=max_tokens, logprobs=logprobs)
    if body.wide:
        complete_rare(sampling, body, target.model, [prompt])
    return sampling


class ChatRenderer(ChatAnswer):
    """A `Renderer`."""

    def __init__(self, answer_id: str, body: ChatBody, target: Target) -> None:
        super().__init__(answer_id, body, target)
        self._begun: set[int] = set()

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
            logprobs = msgspec.json.encode(self._content(step.logprobs)) if self._logprobs else b"null"
            out += self._frame.chunk(
                head + b'{"content":' + text + b'},"logprobs":' + logprobs + b',"finish_reason":null}'
            )
        if step.finish:
            reason = FINISH_REASONS_JSON[step.finish]
            out += self._frame.chunk(head + b'{},"logprobs":null,"finish_reason":' + reason + b"}")
        return out

    def whole(self, flight: Flight) -> bytes:
        choices = []
        for choice in flight.choices:
            logprobs = self._content(choice.logprobs) if self._logprobs else None
            message = _Message("".join(choice.texts))
            choices.append(_WholeChoice(choice.index, message, logprobs, FINISH_REASONS[choice.finish]))
        return msgspec.json.encode(
            Whole(self._id, "chat.completion", self._created, self._name, choices, usage(flight))
        )
