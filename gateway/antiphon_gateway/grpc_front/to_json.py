"""From a call's message to the JSON body that HTTP's client would have sent.

Fields go over by their names. A text marked `json_text` is put in as it was written, once it is known to be JSON, and
the members of `extra` stand beside the fields. What then is wrong with the body is found where HTTP's bodies are read,
and named the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import msgspec
from antiphon_proto import inference_pb2 as api
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from antiphon_gateway.errors import invalid

_EXTRA = "extra"
_OF_THE_METHOD = "stream"


def body_of(message: Message, *, stream: bool = False) -> bytes:
    """Raises ApiError (400)."""
    body = _object(message, "")
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        # A newer client's: named in x-antiphon-ignored, as the body's other unknown fields are.
        body[f"field_{unknown.field_number}"] = True
    if stream:
        body[_OF_THE_METHOD] = True
    try:
        return msgspec.json.encode(body)
    except (UnicodeEncodeError, RecursionError) as error:
        raise invalid(f"The message cannot be read: {error}.") from error


def _object(message: Message, path: str) -> dict[str, Any]:
    """`path`: of the message in the body, as errors name it."""
    made: dict[str, Any] = {}
    extra: str | None = None
    for field, value in message.ListFields():
        if field.name == _EXTRA:
            extra = value
        else:
            where = f"{path}.{field.name}" if path else field.name
            made[field.name] = _converter(field)(value, where)
    finish = _FINISHERS.get(type(message))
    if finish is not None:
        finish(message, made, path)
    if extra is not None:
        _add_extra(made, extra, message, path)
    return made


def _add_extra(made: dict[str, Any], text: str, message: Message, path: str) -> None:
    where = f"{path}.{_EXTRA}" if path else _EXTRA
    value = _checked(text, where)
    if not isinstance(value, dict):
        raise invalid(f"{where} must be a JSON object.", param=where, code="invalid_type")
    own = set(message.DESCRIPTOR.fields_by_name)
    if not path:
        own.add(_OF_THE_METHOD)
    for name, raw in msgspec.json.decode(text, type=dict[str, msgspec.Raw]).items():
        if name in own:
            instead = "the method says whether it is" if name == _OF_THE_METHOD else "it is a field of the message"
            raise invalid(f"{where} may not set {name}: {instead}.", param=where)
        made[name] = raw


# ------------------------------------------------------------------ values

_Converter = Callable[[Any, str], Any]


@functools.cache
def _converter(field: FieldDescriptor) -> _Converter:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _map
    one = _one(field)
    if not field.is_repeated:
        return one
    if one is _as_it_is:
        return lambda values, where: list(values)
    return lambda values, where: [one(value, f"{where}[{index}]") for index, value in enumerate(values)]


def _one(field: FieldDescriptor) -> _Converter:
    if field.message_type is not None:
        return _SPECIAL.get(field.message_type.full_name, _object)
    if field.GetOptions().Extensions[api.json_text]:
        return _raw
    return _number if field.type == FieldDescriptor.TYPE_DOUBLE else _as_it_is


def _as_it_is(value: Any, where: str) -> Any:
    return value


def _number(value: float, where: str) -> float:
    """JSON has neither infinities nor what is no number."""
    if not math.isfinite(value):
        raise invalid(f"{where} must be a finite number.", param=where, code="out_of_range")
    return value


def _map(value: Any, where: str) -> dict[str, float]:
    return {str(key): _number(number, where) for key, number in value.items()}


def _raw(text: str, where: str) -> msgspec.Raw:
    _checked(text, where)
    return msgspec.Raw(text.encode())


def _checked(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"{where} is not JSON: {error}.", param=where, code="invalid_json") from error


# ------------------------------------------------------------------ where the forms differ


def _prompt(prompt: api.Prompt, where: str) -> str | list[int]:
    match prompt.WhichOneof("kind"):
        case "text":
            return prompt.text
        case "token_ids":
            return list(prompt.token_ids.ids)
        case _:
            raise invalid(f"{where} is neither a text nor token ids.", param="prompt", code="missing_parameter")


def _tool_choice(choice: api.ToolChoice, where: str) -> str | dict[str, Any] | None:
    match choice.WhichOneof("kind"):
        case "mode":
            return choice.mode
        case "function":
            return {"type": "function", "function": {"name": choice.function}}
        case _:
            return None


def _finish_message(message: Any, made: dict[str, Any], path: str) -> None:
    parts = made.pop("content_parts", None)
    if parts is not None:
        if "content" in made:
            raise invalid(f"{path} has both content and content_parts; give one.", param=f"{path}.content")
        made["content"] = parts


def _finish_part(part: Any, made: dict[str, Any], path: str) -> None:
    made.setdefault("type", "text")


def _finish_tool(tool: Any, made: dict[str, Any], path: str) -> None:
    """The type before the function: templates write tools and calls as they come."""
    if "type" not in made:
        function = made.pop("function", None)
        made["type"] = "function"
        if function is not None:
            made["function"] = function


def _finish_function_call(call: Any, made: dict[str, Any], path: str) -> None:
    made.setdefault("arguments", "")


def _finish_chat(request: Any, made: dict[str, Any], path: str) -> None:
    made.setdefault("messages", [])


def _finish_completion(request: Any, made: dict[str, Any], path: str) -> None:
    prompts = made.get("prompt")
    if prompts is not None and len(prompts) == 1:
        # As most of HTTP's clients send it: ids that are one list are not looked at one by one.
        made["prompt"] = prompts[0]


def _finish_detokenize(request: Any, made: dict[str, Any], path: str) -> None:
    made.setdefault("tokens", [])


_SPECIAL: dict[str, Callable[[Any, str], Any]] = {
    api.Prompt.DESCRIPTOR.full_name: _prompt,
    api.ToolChoice.DESCRIPTOR.full_name: _tool_choice,
}
_FINISHERS: dict[type, Callable[[Any, dict[str, Any], str], None]] = {
    api.Message: _finish_message,
    api.ContentPart: _finish_part,
    api.Tool: _finish_tool,
    api.ToolCall: _finish_tool,
    api.FunctionCall: _finish_function_call,
    api.ChatCompletionRequest: _finish_chat,
    api.CompletionRequest: _finish_completion,
    api.DetokenizeRequest: _finish_detokenize,
}
