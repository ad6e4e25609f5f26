"""The forms in which text can be asked for, a method each: from a request's body to a flight and what tells its answer.

Chat's own, Anthropic's messages and OpenAI's responses all come to a chat (`_plan_chat`). Nothing is queued here.
"""

from __future__ import annotations

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway import (
    chat,
    completions,
    messages,
    messages_body,
    messages_prompt,
    responses,
    responses_body,
    responses_prompt,
    schema,
    structured,
)
from antiphon_gateway.answers import Renderer
from antiphon_gateway.answers_rare import with_more
from antiphon_gateway.answers_scored import with_scores
from antiphon_gateway.auth import own_salt
from antiphon_gateway.calls import Call, ChatPlan, Started
from antiphon_gateway.chat_parsed import ParsedChatRenderer
from antiphon_gateway.errors import ApiError, invalid
from antiphon_gateway.finding import ModelFinder
from antiphon_gateway.flight import Flight, Target
from antiphon_gateway.grammar_checks import GrammarChecks
from antiphon_gateway.metrics import GatewayMetrics
from antiphon_gateway.models import Prompt
from antiphon_gateway.options import GatewayOptions
from antiphon_gateway.parameters import unknown_fields
from antiphon_gateway.responses_store import ResponseStore
from antiphon_gateway.tokenization import TextWorkers
from antiphon_gateway.tools import Dialects, check_tool_choice, check_tools, forced_grammar, parsing_for


class Fronts:
    """See the module. Each method raises ApiError (400, 404, 429, 503) and ClientGone."""

    def __init__(
        self,
        options: GatewayOptions,
        finder: ModelFinder,
        dialects: Dialects,
        grammar_checks: GrammarChecks,
        text: TextWorkers,
        responses: ResponseStore,
        metrics: GatewayMetrics,
    ) -> None:
        self._options = options
        self._finder = finder
        self._dialects = dialects
        self._grammar_checks = grammar_checks
        self._text = text
        self._responses = responses
        self._metrics = metrics

    async def chat(self, call: Call) -> Started:
        body = schema.decode(call.raw, schema.ChatBody)
        call.stream = bool(body.stream)
        target = await self._finder.target(body.model, call)
        if body.wide:
            target = _checked_with_model(body, target)
            if body.chat_template is not None:
                await chat.compile_template(body, target, self._text)
        if body.wide or body.reasoning_effort is not None:
            call.ignored = chat.ignored_by(call.raw, body, target)
        if body.tools and chat.has_no_place_for_tools(body, target):
            body.tools = None
            call.ignored += ("tools",)
        plan = await self._plan_chat(body, target, len(call.raw))
        answer_id = f"chatcmpl-{call.ticket.request_id}"
        renderer: Renderer
        if plan.parsing is None:
            renderer = chat.ChatRenderer(answer_id, body, target)
        else:
            renderer = ParsedChatRenderer(answer_id, body, target, plan.parsing)
        renderer = with_more(renderer, body, ids_may_be_told=plan.parsing is None or plan.parsing.leaves_nothing_out)
        renderer = with_scores(renderer, body, target.model.codec)
        flight = self._flight(call, target, [plan.prompt], plan.sampling, body, "chat")
        flight.enough = plan.enough
        return Started(flight, renderer, call.stream)

    async def message(self, call: Call) -> Started:
        body = schema.decode(call.raw, messages_body.MessageBody)
        call.stream = bool(body.stream)
        target = await self._finder.target(body.model, call)
        call.ignored = messages.ignored_by(call.raw, body, target)
        messages_body.check_message(body)
        messages.check_model(body, self._dialects.of(target.model), target)
        asked = messages_prompt.to_chat(body)
        plan = await self._plan_chat(asked, target, len(call.raw))
        messages.complete_sampling(plan.sampling, body)
        renderer = messages.MessageRenderer(
            f"msg_{call.ticket.request_id}", body, target, plan.parsing, plan.sampling.max_tokens
        )
        flight = self._flight(call, target, [plan.prompt], plan.sampling, asked, "messages")
        flight.enough = plan.enough
        return Started(flight, renderer, call.stream)

    async def response(self, call: Call) -> Started:
        body = schema.decode(call.raw, responses_body.ResponseBody)
        call.stream = bool(body.stream)
        target = await self._finder.target(body.model, call)
        try:
            call.ignored = responses.ignored_by(call.raw, body, target)
            exchange = responses.Exchange(body, call.ticket, self._responses)
            plan = await self._plan_chat(exchange.chat, target, len(call.raw) + exchange.earlier_bytes)
        except ApiError as error:
            raise responses_prompt.in_own_words(error) from error
        responses.complete_sampling(plan.sampling, body)
        flight = self._flight(call, target, [plan.prompt], plan.sampling, exchange.chat, "responses")
        flight.enough = plan.enough
        return Started(flight, responses.ResponseRenderer(exchange, plan.parsing), call.stream)

    async def _plan_chat(self, body: schema.ChatBody, target: Target, body_bytes: int) -> ChatPlan:
        """Raises ApiError (400)."""
        schema.check_chat(body)
        if body.tools or body.tool_choice is not None:
            check_tools(body.tools or ())
            check_tool_choice(body)
        grammar = await self._grammar(body, target)
        prompt = await chat.make_prompt(body, target, self._text, body_bytes)
        sampling = chat.sampling_for(body, target, prompt)
        parsing = parsing_for(body, target.model, prompt, self._dialects)
        if grammar is not None:
            structured.after_reasoning(grammar, parsing, target.model, prompt.token_ids)
            sampling.grammar.CopyFrom(grammar)
        elif body.tools:
            forced = forced_grammar(body, parsing)
            if forced is not None:
                await self._grammar_checks.check(forced, target.model, "tools")
                sampling.grammar.CopyFrom(forced)
        if parsing is not None:
            sampling.kept_special_ids.extend(parsing.kept_special_ids)
        return ChatPlan(prompt, sampling, parsing, parsing.enough() if parsing is not None else None)

    async def completion(self, call: Call) -> Started:
        body = schema.decode(call.raw, schema.CompletionBody)
        call.stream = bool(body.stream)
        target = await self._finder.target(body.model, call)
        schema.check_completion(body)
        if body.wide:
            target = _checked_with_model(body, target)
            call.ignored = unknown_fields(call.raw, type(body))
        grammar = await self._grammar(body, target)
        prompts = await completions.make_prompts(body, target, self._text)
        sampling = completions.sampling_for(body, target, prompts)
        if grammar is not None:
            sampling.grammar.CopyFrom(grammar)
        flight = self._flight(call, target, prompts, sampling, body, "completions")
        renderer = with_more(completions.CompletionRenderer(f"cmpl-{call.ticket.request_id}", body, target), body)
        return Started(flight, with_scores(renderer, body, target.model.codec), call.stream)

    async def _grammar(self, body: schema.CommonBody, target: Target) -> pb.Grammar | None:
        """What the answer has to keep to; it compiles. Raises ApiError (400)."""
        wanted = structured.wanted_by(body)
        if wanted is None:
            return None
        await self._grammar_checks.check(wanted.grammar, target.model, wanted.param)
        return wanted.grammar

    def _flight(
        self,
        call: Call,
        target: Target,
        prompts: list[Prompt],
        sampling: pb.Sampling,
        body: schema.CommonBody,
        endpoint: str,
    ) -> Flight:
        flight = Flight(
            call.ticket,
            target,
            prompts,
            sampling,
            choices_per_prompt=body.n or 1,
            buffer_steps=self._options.stream_buffer_steps,
            metrics=self._metrics.of(target.model.name, endpoint),
            sent_whole=not call.stream,
            failures=call.failures,
            trail=call.trail,
            priority=call.ticket.wishes.granted(body.service_tier, body.priority),
        )
        if call.woken_at:
            # Its waiting for a place begins now: it is not to be turned away for having waited for the first worker.
            flight.queued_at = call.woken_at
        return flight


def _checked_with_model(body: schema.CommonBody, target: Target) -> Target:
    """The target as a wide body wants it. Raises ApiError (400) where its model cannot do that."""
    if body.spaces_between_special_tokens is False and target.model.codec.puts_spaces_between_special_tokens:
        raise invalid(
            "spaces_between_special_tokens: this model's tokenizer puts them; leave it out, or skip special tokens.",
            param="spaces_between_special_tokens",
            code="unsupported_parameter",
        )
    if body.cache_salt is None:
        return target
    return msgspec.structs.replace(target, salt=own_salt(target.salt, body.cache_salt))
