"""That streams tell the truth, as checks against a gateway whose workers have a real engine with tokens of one byte.

What the engine says is dictated by a grammar with one choice, so each text is known to the letter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from tests.support.awkward_texts import AWKWARD
from tests.support.rare_checks import CHAT, COMPLETIONS, Asking, Check, text_of


def _saying(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 400, "ignore_eos": False}


async def _a_few_at_once(checks: Iterable[Coroutine[Any, Any, None]]) -> None:
    at_once = asyncio.Semaphore(4)

    async def run(check: Coroutine[Any, Any, None]) -> None:
        async with at_once:
            await check

    async with asyncio.TaskGroup() as group:
        for check in checks:
            group.create_task(run(check))


async def pieces_are_the_text_and_never_half_a_character(base_url: str, model: str) -> None:
    asking = Asking(base_url, model)

    async def check(text: str) -> None:
        for path in (CHAT, COMPLETIONS):
            stream = await asking.stream(path, **_saying(text), stream_options={"include_usage": True})
            assert text_of(stream, path) == text
            if "\ufffd" not in text:
                assert not any("\ufffd" in str(choice) for choice in stream.choices(0))
            assert stream.finish_reasons() == ["stop"]
            usage = stream.events[-1]["usage"]
            assert usage["completion_tokens"] == len(text.encode()) + 1, "a token a byte, and the one that ends it"

    await _a_few_at_once(check(text) for text in AWKWARD.values())


async def stop_strings_never_leak(base_url: str, model: str) -> None:
    """ai-dynamo/dynamo#12562, #14317."""
    asking = Asking(base_url, model)
    text = "one two \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \U0001f468\u200d\U0001f469\u200d\U0001f467 three stop sto"

    async def check(stop: list[str]) -> None:
        begins = min((text.find(one) for one in stop if one in text), default=len(text))
        ends = min((text.find(one) + len(one) for one in stop if one in text), default=len(text))
        for path in (CHAT, COMPLETIONS):
            wishes = {**_saying(text), "stop": stop}
            stream = await asking.stream(path, **wishes, stream_options={"include_usage": True})
            assert text_of(stream, path) == text[:begins]
            usage = stream.events[-1]["usage"]
            tokens = len(text[:ends].encode()) + (1 if begins == len(text) else 0)
            assert usage["completion_tokens"] == tokens, "what came until the stop string was whole, and no more"
            whole = await asking.whole(path, **wishes)
            assert whole["usage"]["completion_tokens"] == tokens
            kept = await asking.stream(path, **wishes, include_stop_str_in_output=True)
            assert text_of(kept, path) == text[:ends]

    stops = (
        ["two"],
        ["\u200d\U0001f467"],
        ["\u0e31"],
        ["stop!", "three"],
        ["stop?"],
        ["e t", "o \u0e2a"],
        ["stop sto"],
    )
    await _a_few_at_once(check(list(stop)) for stop in stops)


async def text_that_can_match_no_more_comes_at_once(base_url: str, model: str) -> None:
    """Each token's chunk has all of the text that is not the beginning of a stop string."""
    asking = Asking(base_url, model)
    text, stop = "aabaabaaac abc", "aabaaac!"
    stream = await asking.stream(
        COMPLETIONS,
        **_saying(text),
        stop=[stop],
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    told = ""
    for event in stream.events[:-1]:
        told += event["choices"][0]["text"]
        # One token is one character here; a chunk comes with the token that made its text certain.
        held = text[len(told) : event["usage"]["completion_tokens"]]
        assert stop.startswith(held), (told, held)
    assert told == text


STREAM_CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        pieces_are_the_text_and_never_half_a_character,
        stop_strings_never_leak,
        text_that_can_match_no_more_comes_at_once,
    )
}
