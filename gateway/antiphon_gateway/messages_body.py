"""Bodies of Anthropic's Messages API: what is read of them, and what is refused.

Content blocks are read one by one (`messages_prompt`), so that a refusal can say which one is at fault. Fields that are
not known are accepted and named in a header, as everywhere (`parameters`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from antiphon_gateway.errors import ApiError, invalid
from antiphon_gateway.schema import MAX_STOP_CHARACTERS
from antiphon_gateway.tools.steps import is_name

MAX_STOP_SEQUENCES = 16
MIN_BUDGET_TOKENS = 1024

Content: TypeAlias = str | list[dict[str, Any]]
"""A text, or blocks that are read later."""


class Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: Content


class Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[Any] | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of /v1/messages/count_tokens: all that the prompt is made of."""

    wide: ClassVar[bool] = False

    model: str
    messages: list[Turn]
    system: Content | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    """Without effect: all that can be cached is."""
    # Refused where they are there: they need servers that are not here.
    container: Any = None
    context_management: Any = None
    mcp_servers: list[Any] | None = None


class MessageBody(CountBody, kw_only=True):
    """Of /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    """Beyond Anthropic's: the same seed gives the same answer."""
    metadata: dict[str, Any] | None = None
    """Without effect: users are not told apart; API keys are."""
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard", "fast"] | None = None


def unsupported(param: str, why: str) -> ApiError:
    return invalid(f"{param}: {why}", param=param, code="unsupported_parameter")


def check_prompt(body: CountBody) -> None:
    """All but the content of the turns. Raises ApiError (400)."""
    if not body.messages:
        raise invalid("messages: at least one message is needed.", param="messages")
    if body.container is not None:
        raise unsupported("container", "there are no containers here; leave it out.")
    if body.context_management is not None:
        raise unsupported("context_management", "the context is not edited here; leave it out.")
    if body.mcp_servers:
        raise unsupported("mcp_servers", "MCP servers are not called from here; leave it out.")
    _check_tools(body)


def check_message(body: MessageBody) -> None:
    """What generating adds. Raises ApiError (400)."""
    check_prompt(body)
    if body.max_tokens < 1:
        raise invalid("max_tokens: must be at least 1.", param="max_tokens")
    if body.speed == "fast":
        raise unsupported("speed", "there is one speed here, 'standard'.")
    stops = body.stop_sequences or ()
    if len(stops) > MAX_STOP_SEQUENCES:
        raise invalid(
            f"stop_sequences: there may be {MAX_STOP_SEQUENCES}, not {len(stops)}.",
            param="stop_sequences",
        )
    if any(not text or len(text) > MAX_STOP_CHARACTERS for text in stops):
        raise invalid(f"stop_sequences: each must have 1 to {MAX_STOP_CHARACTERS} characters.", param="stop_sequences")
    thinking = body.thinking
    if thinking is not None and thinking.type == "enabled":
        budget = thinking.budget_tokens
        if budget is None or not MIN_BUDGET_TOKENS <= budget < body.max_tokens:
            raise invalid(
                f"thinking.budget_tokens: must be at least {MIN_BUDGET_TOKENS} and below max_tokens.",
                param="thinking.budget_tokens",
            )


def _check_tools(body: CountBody) -> None:
    forced = body.tool_choice is not None and body.tool_choice.type in ("any", "tool")
    for index, tool in enumerate(body.tools or ()):
        where = f"tools.{index}"
        if tool.type not in (None, "custom"):
            raise unsupported(
                f"{where}.type",
                f"{tool.type[:50]!r} is not a tool of the client's own; there are no others here.",
            )
        if not tool.name or not is_name(tool.name, tool.name):
            raise invalid(
                f"{where}.name: must be a text of letters, digits and any of _ - . : /.", param=f"{where}.name"
            )
        if tool.input_schema is None:
            raise invalid(f"{where}.input_schema: is missing, the JSON schema of its input.", param=where)
        if tool.defer_loading:
            raise unsupported(f"{where}.defer_loading", "there is no search for tools here; every tool is shown.")
        if tool.input_examples:
            raise unsupported(f"{where}.input_examples", "templates have no place for them; use the description.")
        if tool.strict and not forced:
            raise unsupported(
                f"{where}.strict", "a schema is enforced only where a call is: with tool_choice 'any' or 'tool'."
            )
    choice = body.tool_choice
    if choice is None or not forced:
        return
    names = [tool.name for tool in body.tools or ()]
    if not names:
        raise invalid(f"tool_choice: {choice.type!r} needs tools.", param="tool_choice")
    if choice.type == "tool" and choice.name not in names:
        raise invalid(
            f"tool_choice.name: there is no tool {(choice.name or '')[:100]!r} among tools.", param="tool_choice.name"
        )
