"""How many tokens of an answer were reasoning: by marks of several tokens or one, cut, opened by the prompt."""

from __future__ import annotations

import pytest
from antiphon_gateway.models import Model
from antiphon_gateway.tools import AnswerParser, Reasoning
from antiphon_gateway.tools.reasoning import ReasoningParser
from antiphon_gateway.tools.reasoning_tokens import count_reasoning

from tests.gateway.test_chat_tools import BODY, THINKING, THINKS, answering, streamed
from tests.support.fake_worker import byte_card, byte_tokenizer

MARKS = ("<think>", "</think>")
USAGE = {"include_usage": True}


def model_with(*specials: str) -> Model:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(specials))
    card = byte_card()
    card.tokenizer_json = tokenizer.to_str().encode()
    return Model(card)


@pytest.mark.parametrize("marks", [(), MARKS])
@pytest.mark.parametrize(
    ("text", "inside", "count"),
    [
        ("<think>\nIt rains.\n</think>\n\nSo.", False, len("\nIt rains.\n")),
        (" \n<think>a</think>b</think>", False, 1),
        ("<think>caf\u00e9 \u0e2a\u0e27", False, len("caf\u00e9 \u0e2a\u0e27".encode())),
        ("<think></think>b", False, 0),
        ("<think", False, 0),
        ("So <think>a</think>", False, 0),
        ("a</think>b", True, 1),
        ("\n<think>ab</think>c", True, 2),
        ("\nab", True, 3),
        ("", True, 0),
        ("", False, 0),
    ],
)
def test_tokens_between_the_marks_are_counted(marks: tuple[str, ...], text: str, inside: bool, count: int) -> None:
    model = model_with(*marks)
    ids = model.codec.encode(text, add_special_tokens=False)
    assert count_reasoning(model, [*ids, 256], MARKS, inside=inside) == count, "what ends the answer does not count"
    parser = AnswerParser(ReasoningParser(*MARKS, inside=inside), None, one_call=False, with_reasoning=True)
    reasoned = "".join(event.text for event in [*parser.push(text), *parser.end()] if isinstance(event, Reasoning))
    assert len(reasoned.encode()) <= count, "the parser takes line ends away, and sees no reasoning elsewhere"
    assert (count == 0) <= (reasoned == "")


async def test_usage_tells_them_whole_and_streamed_also_where_reasoning_is_left_out() -> None:
    text = "<think>\nIt rains.\n</think>\n\nTake an umbrella."
    async with answering(text, template=THINKS) as running:
        for more in ({}, {"include_reasoning": False}, {"n": 2}):
            body = {**BODY, **more, "tools": None}
            usage = (await running.client.post("/v1/chat/completions", json=body)).json()["usage"]
            assert usage["completion_tokens"] == len(text) * body.get("n", 1)
            assert usage["completion_tokens_details"] == {"reasoning_tokens": 11 * body.get("n", 1)}
            stream = await streamed(running, **more, stream_options=USAGE, tools=None)
            assert stream.events[-1]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
        body = {"model": "test-model", "input": "hello"}
        usage = (await running.client.post("/v1/responses", json=body)).json()["usage"]
        assert usage["output_tokens_details"] == {"reasoning_tokens": 11}
        raw = (await running.client.post("/v1/responses", json={**body, "stream": True})).text
        assert '"output_tokens_details":{"reasoning_tokens":11}' in raw
    async with answering("It rains.\n</think>Yes", template=THINKING) as running:
        usage = (await running.client.post("/v1/chat/completions", json=BODY)).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 10}
    async with answering("no thoughts") as running:
        usage = (await running.client.post("/v1/chat/completions", json=BODY)).json()["usage"]
        assert "completion_tokens_details" not in usage
