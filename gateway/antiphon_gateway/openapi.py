"""GET /openapi.json: what this API is, as an OpenAPI 3.1 document made from the code.

Bodies and answers are the very records that the gateway decodes and encodes; what each parameter does is said by the
table that it goes by (`parameters`). What a record does not say (ranges, combinations) is answered with 400. Made when
it is first asked for: it never changes.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from antiphon_gateway import (
    chat,
    chat_parsed,
    completions,
    error_forms,
    errors,
    explain_document,
    index_page,
    messages,
    messages_body,
    pages,
    responses,
    responses_body,
    schema,
    token_pages,
)
from antiphon_gateway.parameters import PARAMETERS, Endpoint, Standing, wide

PATH = "/openapi.json"
PAGE_PATH = "/docs"

_REFERENCES = "#/components/schemas/"
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
"""One event of a stream; its data are JSON, or the word that ends the stream."""

_FAILURES = {
    "400": "The request is at fault; `param` says where.",
    "401": "A valid API key is needed.",
    "404": "There is no such model, worker or request.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "Too much waits already; see Retry-After.",
    "502": "The answer broke off.",
    "503": "Nobody can answer now; see Retry-After.",
    "504": "No token came in time.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    body: Any = None
    """The record that is decoded; None: there is no body."""
    answers: tuple[Any, ...] = ()
    """Records, of which the answer is one; none: JSON of any form, or `media_type`."""
    streams: bool = False
    media_type: str = "application/json"
    failures: tuple[str, ...] = ("400", "401", "404", "408", "413", "415", "503")
    failure: Any = errors.Envelope


_GENERATES = tuple(_FAILURES)
_READS = ("401", "404")

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        Endpoint.CHAT.value,
        "The answer to a chat",
        schema.ChatBody,
        (chat.Whole, chat_parsed.Whole),
        streams=True,
        failures=_GENERATES,
    ),
    Operation(
        "POST",
        Endpoint.COMPLETIONS.value,
        "What follows a text",
        schema.CompletionBody,
        (completions.Whole,),
        streams=True,
        failures=_GENERATES,
    ),
    Operation(
        "POST",
        error_forms.MESSAGES_PATH,
        "The answer to a chat, in Anthropic's form",
        messages_body.MessageBody,
        (messages.Message,),
        streams=True,
        failures=_GENERATES,
        failure=error_forms.Envelope,
    ),
    Operation(
        "POST",
        f"{error_forms.MESSAGES_PATH}/count_tokens",
        "How long such a prompt is",
        messages_body.CountBody,
        (messages.Counted,),
        failure=error_forms.Envelope,
    ),
    Operation(
        "POST",
        responses.PATH,
        "The next answer of a conversation",
        responses_body.ResponseBody,
        (responses.Response,),
        streams=True,
        failures=_GENERATES,
    ),
    Operation(
        "GET",
        f"{responses.PATH}/{{response_id}}",
        "An answer that is kept",
        None,
        (responses.Response,),
        failures=_READS,
    ),
    Operation(
        "DELETE",
        f"{responses.PATH}/{{response_id}}",
        "Keep that answer no longer",
        None,
        (responses.Deleted,),
        failures=_READS,
    ),
    Operation("POST", "/tokenize", "A text or a chat as tokens", token_pages.TextBody, (token_pages.Tokenized,)),
    Operation("POST", "/detokenize", "Tokens as text", token_pages.TokensBody, (token_pages.Detokenized,)),
    Operation("GET", "/v1/models", "The models", None, (pages.ModelList,), failures=_READS),
    Operation("GET", "/v1/models/{model}", "One model", None, (pages.ModelObject,), failures=_READS),
    Operation(
        "GET",
        "/v1/antiphon/explain/{request_id}",
        "Why a request went where it went",
        None,
        (explain_document.Explanation,),
        failures=_READS,
    ),
    Operation("GET", index_page.PATH, "What the workers' caches hold", None, (index_page.IndexPage,), failures=_READS),
    Operation(
        "GET",
        f"{index_page.PATH}/{{worker_id}}",
        "What one worker's cache holds",
        None,
        (index_page.WorkerIndexPage,),
        failures=_READS,
    ),
    Operation("GET", "/health", "Whether this process lives", failures=()),
    Operation("GET", "/ready", "Whether it can serve (503: not now)", None, (pages.Ready,), failures=()),
    Operation("GET", "/metrics", "Figures for Prometheus", media_type="text/plain", failures=()),
    Operation("GET", PATH, "This document", failures=()),
    Operation("GET", PAGE_PATH, "This document, to read", media_type="text/html", failures=()),
)


@functools.cache
def encoded() -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    records = {id(record): record for operation in OPERATIONS for record in _records(operation)}
    found, components = msgspec.json.schema_components(
        [*records.values(), errors.Envelope], ref_template=_REFERENCES + "{name}"
    )
    references = dict(zip(records, found, strict=False))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, references)
    for endpoint, name in ((Endpoint.CHAT, "ChatBody"), (Endpoint.COMPLETIONS, "CompletionBody")):
        _describe(components[name]["properties"], endpoint)
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "Antiphon",
            "version": "1",
            "description": "OpenAI's API, vLLM's extras and Anthropic's messages."
            " Fields of bodies that are not known are named in the answer's header x-antiphon-ignored.",
        },
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
    return _with_short_names(made, list(components))


def _records(operation: Operation) -> list[Any]:
    body = [] if operation.body is None else [_wide(operation.body)]
    return [*body, *operation.answers, operation.failure]


def _wide(body: Any) -> Any:
    return wide(body)


def _operation(operation: Operation, references: dict[int, dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    if operation.answers:
        answer = {"anyOf": [references[id(record)] for record in operation.answers]}
    if operation.media_type != "application/json":
        answer = {"type": "string"}
    content = {operation.media_type: {"schema": answer}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    good = {"description": "The answer.", "content": content}
    responses = {"200": good}
    if operation.path == "/ready":
        responses["503"] = good
    failure = {"application/json": {"schema": references[id(operation.failure)]}}
    responses |= {status: {"description": _FAILURES[status], "content": failure} for status in operation.failures}
    made: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    names = re.findall(r"{(\w+)}", operation.path)
    if names:
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.body is not None:
        schema_of_body = references[id(_wide(operation.body))]
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of_body}}}
    return made


def _describe(properties: dict[str, Any], endpoint: Endpoint) -> None:
    """Say of every parameter what the table says; of refused ones, which values they may have."""
    for row in PARAMETERS:
        if endpoint in row.endpoints:
            known = properties[row.name]
            if row.standing is Standing.REFUSED and set(known) <= {"default"}:
                known["enum"] = [None, *row.harmless]
            known["description"] = f"{row.standing.value.capitalize()}. {row.sentence}"


def _with_short_names(made: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Records of one name are told apart by their modules; what all of those begin with says nothing."""
    text = msgspec.json.encode(made).decode()
    for name in names:
        short = name.removeprefix("antiphon_gateway.").replace("._", ".").removeprefix("_")
        if short != name:
            text = text.replace(f'"{name}":', f'"{short}":').replace(
                f'"{_REFERENCES}{name}"', f'"{_REFERENCES}{short}"'
            )
    shortened: dict[str, Any] = msgspec.json.decode(text)
    return shortened
