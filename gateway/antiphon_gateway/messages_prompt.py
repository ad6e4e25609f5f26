"""Anthropic's messages as a chat request: what the chat template and everything behind it know.

    system, and turns of the role system     messages of the role system
    text blocks                              a turn's text, joined; turns of one role that follow each other are one,
                                             a line end between them
    thinking blocks                          the message's reasoning
    tool_use blocks                          the message's tool_calls
    tool_result blocks                       messages of the role tool, in their order

Whatever cannot be said so is refused with the place where it stands.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import msgspec

from antiphon_gateway.errors import ApiError, invalid
from antiphon_gateway.messages_body import Content, CountBody, MessageBody, Tool
from antiphon_gateway.schema import ChatBody

_KINDS = "text, thinking, tool_use and tool_result blocks"


class _Text(msgspec.Struct, tag="text"):
    text: str


class _Thought(msgspec.Struct, tag="thinking"):
    thinking: str


class _ToolUse(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(msgspec.Struct, tag="tool_result"):
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None


_Block: TypeAlias = _Text | _Thought | _ToolUse | _ToolResult
_TAGS = frozenset({"text", "thinking", "tool_use", "tool_result"})
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


def to_chat(body: CountBody) -> ChatBody:
    """The same request for chat, with a checked body. Raises ApiError (400). It knows nothing of
    max_tokens and stop sequences, for which other rules hold (`messages.complete_sampling`)."""
    chat = ChatBody(
        model=body.model,
        messages=_Turns().read(body),
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        chat_template_kwargs=_template_words(body),
        continue_final_message=_goes_on(body),
        include_reasoning=_wants_thinking(body) and (body.thinking is None or body.thinking.display != "omitted"),
    )
    choice = body.tool_choice
    if choice is not None:
        chat.tool_choice = _CHOICES.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if body.output_config is not None and body.output_config.format is not None:
        chat.response_format = {"type": "json_schema", "json_schema": {"schema": body.output_config.format.schema}}
    if isinstance(body, MessageBody):
        chat.stream = body.stream
        chat.temperature = body.temperature
        chat.top_p = body.top_p
        chat.top_k = body.top_k
        chat.seed = body.seed
        chat.service_tier = "auto" if body.service_tier == "auto" else None
    return chat


def _goes_on(body: CountBody) -> bool:
    """Whether the answer goes on with the last message, which is the assistant's. Raises ApiError (400)."""
    last, where = body.messages[-1], f"messages.{len(body.messages) - 1}"
    if last.role != "assistant":
        return False
    text = last.content
    if not isinstance(text, str):
        text = str(text[-1].get("text", "")) if text and text[-1].get("type") == "text" else ""
    if not text or text[-1].isspace():
        raise invalid(
            f"{where}: an answer can go on with the assistant's message only where that ends with text, and not with"
            " white space.",
            param=where,
        )
    return True


def _wants_thinking(body: CountBody) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled"


def _template_words(body: CountBody) -> dict[str, Any]:
    """What templates call these things: a template that does not know a word does not look at it."""
    thinks = _wants_thinking(body)
    words: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        words["thinking_budget"] = body.thinking.budget_tokens
    if body.output_config is not None and body.output_config.effort is not None:
        words["reasoning_effort"] = body.output_config.effort
    return words


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}


class _Turns:
    """Reads the turns of one request."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._called: dict[str, str] = {}
        """Tools by the ids of their calls so far."""

    def read(self, body: CountBody) -> list[dict[str, Any]]:
        if body.system:
            self._say("system", _text(body.system, "system"))
        for index, turn in enumerate(body.messages):
            where = f"messages.{index}.content"
            if isinstance(turn.content, str):
                self._say(turn.role, turn.content)
            elif turn.role == "assistant":
                self._assistant(turn.content, where)
            else:
                self._user(turn.role, turn.content, where)
        return self._messages

    def _say(self, role: str, text: str) -> None:
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != role or "tool_calls" in last:
            self._messages.append({"role": role, "content": text})
        else:
            last["content"] += f"\n{text}" if last["content"] else text

    def _user(self, role: str, content: list[dict[str, Any]], where: str) -> None:
        texts: list[str] = []
        for index, given in enumerate(content):
            at = f"{where}.{index}"
            match _block(given, at):
                case _Text(text):
                    texts.append(text)
                case _ToolResult() as result if role == "user":
                    if texts:
                        self._say(role, "".join(texts))
                        texts = []
                    self._result(result, at)
                case block:
                    raise _misplaced(block, role, at)
        if texts or not content:
            self._say(role, "".join(texts))

    def _result(self, result: _ToolResult, where: str) -> None:
        name = self._called.get(result.tool_use_id)
        if name is None:
            raise invalid(
                f"{where}.tool_use_id: no tool_use block before it has the id {result.tool_use_id[:100]!r}.",
                param=f"{where}.tool_use_id",
            )
        text = "" if result.content is None else _text(result.content, f"{where}.content")
        if result.is_error:
            text = f"Error: {text}"
        self._messages.append({"role": "tool", "tool_call_id": result.tool_use_id, "name": name, "content": text})

    def _assistant(self, content: list[dict[str, Any]], where: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, given in enumerate(content):
            at = f"{where}.{index}"
            match _block(given, at):
                case _Text(text):
                    texts.append(text)
                case _Thought(thinking):
                    thoughts.append(thinking)
                case _ToolUse(call_id, name, arguments):
                    self._called[call_id] = name
                    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                    calls.append({"id": call_id, "type": "function", "function": function})
                case block:
                    raise _misplaced(block, "assistant", at)
        if not thoughts and not calls:
            self._say("assistant", "".join(texts))
            return
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if thoughts:
            message["reasoning"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._messages.append(message)


def _text(content: Content, where: str) -> str:
    """Of a place where there may be nothing but text."""
    if isinstance(content, str):
        return content
    texts = []
    for index, given in enumerate(content):
        block = _block(given, f"{where}.{index}")
        if not isinstance(block, _Text):
            raise invalid(f"{where}.{index}: only text blocks may stand here.", param=f"{where}.{index}")
        texts.append(block.text)
    return "".join(texts)


def _block(given: dict[str, Any], where: str) -> _Block:
    kind = given.get("type")
    if isinstance(kind, str) and kind not in _TAGS:
        raise invalid(
            f"{where}.type: {kind[:50]!r} is not supported; only {_KINDS} are.",
            param=f"{where}.type",
            code="unsupported_content",
        )
    try:
        block: _Block = msgspec.convert(given, _Block)
        return block
    except msgspec.ValidationError as error:
        raise invalid(f"{where}: {str(error)[:1].lower()}{str(error)[1:]}.", param=where) from error


def _misplaced(block: _Block, role: str, where: str) -> ApiError:
    kind = type(block).__struct_config__.tag
    return invalid(f"{where}: a {kind} block cannot stand in a message of the role {role!r}.", param=where)
