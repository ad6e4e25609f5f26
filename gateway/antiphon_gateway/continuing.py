"""`continue_final_message`: a prompt that ends in the middle of the assistant's last message, for the model to go on.

The messages are rendered as always, and the prompt is cut behind the text of the last one: what the template writes
after it would end the message. As in `transformers`, white space around that text does not count, as templates trim it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from antiphon_gateway.errors import invalid
from antiphon_gateway.schema import ChatBody

_PARAM = "continue_final_message"


def check_continuing(body: ChatBody) -> None:
    """Raises ApiError (400) where there is nothing to go on with."""
    if body.add_generation_prompt:
        raise invalid(f"{_PARAM} and add_generation_prompt contradict each other; use one.", param=_PARAM)
    last = body.messages[-1]
    if last.get("role") != "assistant" or last.get("tool_calls") or not text_of(last).strip():
        raise invalid(f"{_PARAM} needs an assistant's message with text, and without calls, at the end.", param=_PARAM)


def cut_behind(prompt: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt up to the end of the last message's text. Raises ApiError (400)."""
    text = text_of(messages[-1]).strip()
    begin = prompt.rfind(text)
    if begin < 0:
        raise invalid(f"{_PARAM}: the model's chat template changes the last message's text.", param=_PARAM)
    return prompt[: begin + len(text)]


def text_of(message: Mapping[str, Any]) -> str:
    """Its parts joined; empty where it has none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(str(part.get(part.get("type"), "")) for part in content if isinstance(part, dict))
