"""A request of the Responses API as one for chat: what the chat template and everything behind it know.

    instructions             a message of the role system; those of earlier answers are not carried over
    message                  a message; its parts are joined
    reasoning                the reasoning of the assistant's message that it belongs to
    function_call            a call of that message
    function_call_output     a message of the role tool

What an assistant says between two other messages is one message of reasoning, text and calls, as the model wrote it.
Items of earlier answers are read in the same way as those of the request, all in one go: a conversation that goes on
by `previous_response_id` has the very prompt that it would have if all of it were sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import msgspec

from antiphon_gateway.errors import ApiError, invalid
from antiphon_gateway.responses_body import ResponseBody, unsupported
from antiphon_gateway.schema import ChatBody

_Parts: TypeAlias = str | list[dict[str, Any]]


class _Message(msgspec.Struct, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts


class _Reasoning(msgspec.Struct, tag="reasoning"):
    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None


class _Call(msgspec.Struct, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class _CallOutput(msgspec.Struct, tag="function_call_output"):
    call_id: str
    output: _Parts


_Item: TypeAlias = _Message | _Reasoning | _Call | _CallOutput
_KINDS = ("message", "reasoning", "function_call", "function_call_output")
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
_NAMES = (
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("response_format", "text.format"),
)
"""What chat's refusals call a thing, and how it is called here."""


def items_of(body: ResponseBody) -> list[dict[str, Any]]:
    """The input of a checked body, always as items."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    return body.input or []


def to_chat(body: ResponseBody, earlier: Iterable[dict[str, Any]]) -> ChatBody:
    """The same request for chat, behind the items of `earlier` answers, with a checked body. It knows nothing of
    max_output_tokens, for which another rule holds (`responses.complete_sampling`). Raises ApiError (400)."""
    turns = _Turns()
    for item in earlier:
        turns.read(item, "input")
    for index, item in enumerate(items_of(body)):
        turns.read(item, f"input[{index}]")
    messages = turns.messages
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    return ChatBody(
        model=body.model,
        messages=messages,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)] if body.tools else None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
        service_tier=body.service_tier,
    )


def in_own_words(error: ApiError) -> ApiError:
    """Chat's refusal, naming what this API calls it."""
    # Here a schema stands beside its name.
    param, message = error.param or "", error.message.replace("response_format.json_schema.", "response_format.")
    for name, own in _NAMES:
        if param == name or param.startswith((f"{name}[", f"{name}.")):
            return ApiError(
                error.status,
                message.replace(name, own),
                type=error.type,
                param=own + param[len(name) :],
                code=error.code,
            )
    if param.startswith("tools["):
        own, message = param.replace(".function", ""), message.replace(".function", "")
        return ApiError(error.status, message, type=error.type, param=own, code=error.code)
    return error


class _Turns:
    """Reads the items of one conversation."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The assistant's message that more items may belong to."""
        self._called: dict[str, str] = {}
        """Functions by the ids of their calls so far."""

    def read(self, given: dict[str, Any], where: str) -> None:
        """Raises ApiError (400)."""
        match _item(given, where):
            case _Message("assistant", content):
                self._said(_text(content, f"{where}.content"))
            case _Message(role, content):
                self._open = None
                self.messages.append({"role": role, "content": _text(content, f"{where}.content")})
            case _Reasoning(content, summary):
                if given.get("encrypted_content") and not content and not summary:
                    raise unsupported(f"{where}.encrypted_content", "it cannot be read here; leave the item out.")
                self._thought(
                    _text(content, f"{where}.content") if content else _text(summary or [], f"{where}.summary")
                )
            case _Call(call_id, name, arguments):
                self._called[call_id] = name
                function = {"name": name, "arguments": arguments}
                self._assistant().setdefault("tool_calls", []).append(
                    {"id": call_id, "type": "function", "function": function}
                )
            case _CallOutput(call_id, output):
                called = self._called.get(call_id)
                if called is None:
                    raise invalid(
                        f"{where}.call_id: no function_call before it has the call_id {call_id[:100]!r}.",
                        param=f"{where}.call_id",
                    )
                self._open = None
                text = _text(output, f"{where}.output")
                self.messages.append({"role": "tool", "tool_call_id": call_id, "name": called, "content": text})

    def _assistant(self) -> dict[str, Any]:
        if self._open is None:
            self._open = {"role": "assistant", "content": ""}
            self.messages.append(self._open)
        return self._open

    def _said(self, text: str) -> None:
        if self._open is not None and self._open["content"] and "tool_calls" not in self._open:
            self._open = None
        self._assistant()["content"] += text

    def _thought(self, text: str) -> None:
        if not text:
            # Clients that put an answer together from its stream may have kept the item and lost its text.
            return
        if self._open is not None and (self._open["content"] or "tool_calls" in self._open):
            self._open = None
        message = self._assistant()
        message["reasoning"] = message.get("reasoning", "") + text


def _item(given: dict[str, Any], where: str) -> _Item:
    kind = given.get("type")
    if kind is None and "role" in given:
        given = {**given, "type": "message"}
    elif isinstance(kind, str) and kind not in _KINDS:
        raise invalid(
            f"{where}.type: {kind[:50]!r} is not supported; only {', '.join(_KINDS)} are.",
            param=f"{where}.type",
            code="unsupported_content",
        )
    try:
        item: _Item = msgspec.convert(given, _Item)
        return item
    except msgspec.ValidationError as error:
        raise invalid(f"{where}: {str(error)[:1].lower()}{str(error)[1:]}.", param=where) from error


def _text(content: _Parts, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type")
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        if not isinstance(kind, str) or kind not in _TEXT_PARTS | {"refusal"} or not isinstance(text, str):
            what = repr(kind)[:50] if isinstance(kind, str) else "without a type"
            raise invalid(
                f"{where}[{index}]: only parts with text are supported, not a part {what}.",
                param=f"{where}[{index}]",
                code="unsupported_content",
            )
        texts.append(text)
    return "".join(texts)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind, name = tool.get("type"), tool.get("name")
    if kind != "function":
        what = repr(kind)[:50] if isinstance(kind, str) else "without a type"
        raise unsupported(f"{where}.type", f"a tool {what} is not one of the client's functions; there are no others.")
    if not isinstance(name, str):
        raise invalid(f"{where}.name is missing.", param=f"{where}.name", code="missing_parameter")
    function: dict[str, Any] = {"name": name}
    for field in ("description", "parameters"):
        if tool.get(field) is not None:
            function[field] = tool[field]
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise unsupported("tool_choice", "must be 'none', 'auto', 'required', or {'type': 'function', 'name': NAME}.")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(body: ResponseBody) -> dict[str, Any] | None:
    given = body.text.format if body.text is not None else None
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
