"""POST /v1/responses: an answer as OpenAI's output items, streamed or whole, and kept for what follows it.

The request goes through chat's own parts (`responses_prompt` turns it into one), and what the answer's text turns out
to be is told by the same events (`tools`), as items (`responses_output`). What an answer repeats of its request is made
once, before anything is generated, so that it is known that it can be said. A stream ends with response.completed or
response.incomplete, or with response.failed. Kept (`responses_store`) is what ended in one of the first two ways, just
before its client gets the last of it.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.effort import effort_variables
from antiphon_gateway.errors import ApiError, invalid
from antiphon_gateway.flight import Choice, Flight, Target, Ticket
from antiphon_gateway.parameters import unknown_fields
from antiphon_gateway.responses_body import ResponseBody, check_response
from antiphon_gateway.responses_output import Item, Output
from antiphon_gateway.responses_prompt import items_of, to_chat
from antiphon_gateway.responses_store import ResponseStore, StoredResponse
from antiphon_gateway.schema import ChatBody
from antiphon_gateway.tools import AnswerParser, CallEnded, Parsing

PATH = "/v1/responses"


class _InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0
    """Nobody pays for those here."""


class _OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class _Usage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: _InputTokensDetails
    output_tokens: int
    output_tokens_details: _OutputTokensDetails
    total_tokens: int


class _Incomplete(msgspec.Struct):
    reason: str


class _Failure(msgspec.Struct):
    code: str
    message: str


class Response(msgspec.Struct):
    """An answer, as far as it has come."""

    id: str
    created_at: int
    model: str
    instructions: str | None
    previous_response_id: str | None
    store: bool
    text: Any
    reasoning: Any
    tools: Any
    tool_choice: Any
    parallel_tool_calls: bool
    max_output_tokens: int | None
    temperature: float
    top_p: float
    metadata: dict[str, str]
    status: str = "in_progress"
    output: list[Item] = []
    completed_at: int | None = None
    incomplete_details: _Incomplete | None = None
    error: _Failure | None = None
    usage: _Usage | None = None
    object: str = "response"
    background: bool = False
    truncation: str = "disabled"
    top_logprobs: int = 0


class Deleted(msgspec.Struct):
    """The answer to a DELETE."""

    id: str
    object: str = "response"
    deleted: bool = True


def not_found(response_id: str) -> ApiError:
    """404: to read or delete it."""
    return ApiError(
        404,
        f"There is no response {response_id[:100]!r}. This gateway may have forgotten it, another one may keep it, or"
        " it was asked for with store: false.",
        type="invalid_request_error",
        param="response_id",
        code="response_not_found",
    )


def ignored_by(raw: bytes, body: ResponseBody, target: Target) -> tuple[str, ...]:
    """Fields that have no effect: unknown ones, and those that nobody here has a word for. Raises ApiError (400)."""
    names = unknown_fields(raw, type(body)) if body.wide else ()
    reasoning, template = body.reasoning, target.model.template
    if reasoning is None:
        return names
    if reasoning.effort is not None and template is not None:
        names += () if effort_variables(reasoning.effort, template.source) else ("reasoning.effort",)
    # Reasoning is told whole, and nobody writes a summary of it.
    return names + tuple(
        f"reasoning.{name}" for name in ("summary", "generate_summary") if getattr(reasoning, name) is not None
    )


def complete_sampling(sampling: pb.Sampling, body: ResponseBody) -> None:
    """What chat was not told. It has given the answer the rest of the context: no more than that is an error here."""
    if body.max_output_tokens is not None:
        sampling.max_tokens = min(sampling.max_tokens, body.max_output_tokens)


class Exchange:
    """One request that has been read and checked, with the conversation that it goes on with."""

    def __init__(self, body: ResponseBody, ticket: Ticket, store: ResponseStore) -> None:
        """Raises ApiError (400)."""
        check_response(body, can_store=store.keeps)
        self._tenant = ticket.tenant
        self._store = store
        self._keeps = body.store is not False and store.keeps
        self._earlier = _turns_before(body, ticket.tenant, store)
        self.earlier_bytes = sum(len(turn) for turn in self._earlier)
        self._asked = b""
        self.chat: ChatBody = to_chat(body, [item for turn in self._earlier for item in msgspec.json.decode(turn)])
        """The same request for chat."""
        try:
            self.response = _response(body, ticket.request_id, stored=self._keeps)
            if self._keeps:
                self._asked = msgspec.json.encode(items_of(body))
        except (OverflowError, UnicodeError, RecursionError) as error:
            raise invalid(f"The body has a value that cannot be said again: {error}.", code="invalid_json") from error

    def keep(self, page: bytes, output: list[Item]) -> bool:
        """Keep the answer, if it is to be kept. False: it is to be, and is too large."""
        if not self._keeps:
            return True
        asked, answered = self._asked, msgspec.json.encode(output)
        return self._store.keep(StoredResponse(self.response.id, self._tenant, page, (*self._earlier, asked, answered)))


def _turns_before(body: ResponseBody, tenant: str, store: ResponseStore) -> tuple[bytes, ...]:
    if body.previous_response_id is None:
        return ()
    previous = store.find(body.previous_response_id, tenant)
    if previous is None:
        raise invalid(
            f"previous_response_id: there is no response {body.previous_response_id[:100]!r} to go on with. This"
            " gateway may have forgotten it, another one may keep it, or it was asked for with store: false. Send the"
            " whole conversation as input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return previous.turns


def _response(body: ResponseBody, request_id: str, *, stored: bool) -> Response:
    """Before anything of it has come. What clients sent in any form is JSON already."""

    def said(value: Any) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(value))

    format_ = body.text.format if body.text is not None and body.text.format is not None else {"type": "text"}
    tools = [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()]
    reasoning = body.reasoning
    return Response(
        id=f"resp_{request_id}",
        created_at=int(time.time()),
        model=body.model,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        store=stored,
        text=said({"format": format_, "verbosity": "medium"}),
        reasoning=said({"effort": reasoning.effort if reasoning is not None else None, "summary": None}),
        tools=said(tools),
        tool_choice=said(body.tool_choice or "auto"),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        max_output_tokens=body.max_output_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        metadata=body.metadata or {},
    )


class ResponseRenderer:
    """A `Renderer` that also tells of failures."""

    def __init__(self, exchange: Exchange, parsing: Parsing | None) -> None:
        """`parsing` None: answers are text and nothing else."""
        self._exchange = exchange
        self._parsing = parsing
        self._response = exchange.response
        self._parser = (
            AnswerParser(None, None, one_call=False, with_reasoning=True) if parsing is None else parsing.parser()
        )
        # Without a parsing there are no calls, and no ids for them.
        self._output = Output(
            self._response.id.removeprefix("resp_"), parsing.dialect.call_id if parsing is not None else str
        )
        self._begun = False

    def take(self, choice: Choice, step: pb.RequestStep) -> bytes:
        if not (step.text or step.finish or step.token_ids):
            return b""
        out = b""
        if not self._begun:
            self._begun = True
            response = b'"response":%b,' % msgspec.json.encode(self._response)
            out = self._output.event(b"response.created", response) + self._output.event(
                b"response.in_progress", response
            )
        return out + self._read(step.text, step.finish)

    def end(self, flight: Flight) -> bytes:
        page = self._finished(flight)
        return self._output.event(b"response." + self._response.status.encode(), b'"response":%b,' % page)

    def whole(self, flight: Flight) -> bytes:
        choice = flight.choices[0]
        self._read("".join(choice.texts), choice.finish)
        return self._finished(flight)

    def failed(self, error: ApiError) -> bytes:
        response = self._response
        response.status = "failed"
        response.error = _Failure("server_error", error.message)
        out = self._output.close("incomplete")
        response.output = self._output.items
        return out + self._output.event(b"response.failed", b'"response":%b,' % msgspec.json.encode(response))

    def _read(self, text: str, finish: pb.Finish.ValueType) -> bytes:
        events = self._parser.push(text)
        if finish == pb.FINISH_LENGTH:
            # A call that ends only because the answer does has not come to its end.
            events += [event for event in self._parser.end() if not isinstance(event, CallEnded)]
        elif finish:
            events += self._parser.end()
        out = b"".join([self._output.take(event) for event in events])
        if finish:
            out += self._output.close("incomplete" if finish == pb.FINISH_LENGTH else "completed")
        return out

    def _reasoning_tokens(self, flight: Flight) -> int:
        """0 also of a model that is not known to reason."""
        if self._parsing is None:
            return 0
        return self._parsing.reasoning_tokens(flight.model, [flight.choices[0].output]) or 0

    def _finished(self, flight: Flight) -> bytes:
        """The answer as JSON; it is kept."""
        response = self._response
        if flight.choices[0].finish == pb.FINISH_LENGTH:
            response.status, response.incomplete_details = "incomplete", _Incomplete("max_output_tokens")
        else:
            response.status, response.completed_at = "completed", int(time.time())
        response.output = self._output.items
        prompt_tokens, completion_tokens = flight.prompt_tokens, flight.completion_tokens
        response.usage = _Usage(
            prompt_tokens,
            _InputTokensDetails(min(prompt_tokens, flight.cached_tokens)),
            completion_tokens,
            _OutputTokensDetails(self._reasoning_tokens(flight)),
            prompt_tokens + completion_tokens,
        )
        page = msgspec.json.encode(response)
        if not self._exchange.keep(page, response.output):
            response.store = False
            page = msgspec.json.encode(response)
        return page
