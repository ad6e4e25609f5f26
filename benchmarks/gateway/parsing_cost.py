"""What it costs the gateway to read tool calls and reasoning, in processor time a token.

python -m benchmarks.gateway.parsing_cost
"""

from __future__ import annotations

import time

from antiphon_gateway.tools import AnswerParser, Dialect, ReasoningFamily, ToolFamily

_TOKENS = 20_000
_ROUNDS = 5
_TOOLS: dict[str, dict[str, object]] = {"search": {}}
_TEXTS = {
    "prose": ("", " word"),
    "reasoning": ("<think>\n", " word"),
    "arguments of a call": ('<think></think><tool_call>\n{"name": "search", "arguments": {"q": "', " word"),
    "prose full of what may be marks": ("", " <too"),
}


def _parser() -> AnswerParser:
    dialect = Dialect(ToolFamily.HERMES, ReasoningFamily.THINK)
    return AnswerParser(
        dialect.reasoning_parser(inside=False), dialect.call_parser(_TOOLS), one_call=False, with_reasoning=True
    )


def _us_a_token(before: str, token: str) -> float:
    """The least of some rounds: what else the machine does only adds to it."""
    best = float("inf")
    for _ in range(_ROUNDS):
        parser = _parser()
        parser.push(before)
        began = time.process_time()
        for _ in range(_TOKENS):
            parser.push(token)
        best = min(best, time.process_time() - began)
    return best / _TOKENS * 1e6


def main() -> None:
    for name, (before, token) in _TEXTS.items():
        print(f"{name}: {_us_a_token(before, token):.1f} us a token")


if __name__ == "__main__":
    main()
