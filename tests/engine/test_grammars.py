"""Structured output in the engine's core: what compiles when, what waits for it, and whose error it is.

The timed engine, whose tokens are bytes. That masks reach a model's logits: tests/torch_engine/test_structured.py.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence

import jsonschema
import pytest
from antiphon_engine import (
    BlockEngine,
    EngineRequest,
    FinishReason,
    Grammar,
    GrammarKind,
    RefusalReason,
    RequestKind,
    RequestRefused,
    Sampling,
)
from antiphon_engine._grammars import Grammars
from antiphon_engine.timed_tokenizer import EOS_TOKEN_ID, IM_END_TOKEN_ID
from llguidance import LLMatcher

from tests.support.engine import Recorder, started, timed_executor

PROMPT = list(b"a prompt of some length")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
BY_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
BY_REGEX = Grammar(GrammarKind.REGEX, r"[a-f]{4,9}-\d{2}")
ENDS = (EOS_TOKEN_ID, IM_END_TOKEN_ID)


@pytest.fixture
def running() -> Iterator[tuple[BlockEngine, Recorder]]:
    engine, recorder = started(timed_executor(200))
    yield engine, recorder
    assert recorder.failure is None
    engine.check_integrity()
    engine.close()


def request(
    name: str, grammar: Grammar | None, *, output: Sequence[int] = (), max_tokens: int = 400, seed: int = 1
) -> EngineRequest:
    return EngineRequest(name, PROMPT, Sampling(seed=seed, max_tokens=max_tokens, grammar=grammar), output=output)


def text_of(token_ids: Sequence[int]) -> str:
    return bytes(token_id for token_id in token_ids if token_id < 256).decode()


def test_an_answer_keeps_to_its_grammar_and_stops_where_it_ends(running: tuple[BlockEngine, Recorder]) -> None:
    engine, recorder = running
    kinds = {
        "schema": BY_SCHEMA,
        "object": Grammar(GrammarKind.JSON_OBJECT, ""),
        "regex": BY_REGEX,
        "choice": Grammar(GrammarKind.CHOICE, json.dumps(["yes", 'no "never"', "süß\n"])),
        "lark": Grammar(GrammarKind.LARK, 'start: "call " %json {"type": "integer", "minimum": 10, "maximum": 99}'),
    }
    for name, grammar in kinds.items():
        engine.submit(request(name, grammar))
    assert set(recorder.wait_finished(*kinds)) == {FinishReason.STOP}
    texts = {name: text_of(recorder.tokens[name]) for name in kinds}
    jsonschema.validate(json.loads(texts["schema"]), SCHEMA)
    assert isinstance(json.loads(texts["object"]), dict)
    assert texts["choice"] in ("yes", 'no "never"', "süß\n")
    assert 10 <= int(texts["lark"].removeprefix("call ")) <= 99
    for name in kinds:
        assert recorder.tokens[name][-1] in ENDS
        assert not set(recorder.tokens[name][:-1]) & set(ENDS)


def test_plain_requests_beside_it_keep_their_tokens(running: tuple[BlockEngine, Recorder]) -> None:
    engine, recorder = running
    engine.submit(request("alone", None, max_tokens=30))
    recorder.wait_finished("alone")
    for number in range(6):
        engine.submit(request(f"plain{number}", None, max_tokens=30))
        engine.submit(request(f"bound{number}", BY_SCHEMA, seed=number))
    recorder.wait_finished(*(f"{kind}{number}" for kind in ("plain", "bound") for number in range(6)))
    for number in range(6):
        assert recorder.tokens[f"plain{number}"] == recorder.tokens["alone"]
        jsonschema.validate(json.loads(text_of(recorder.tokens[f"bound{number}"])), SCHEMA)


def test_an_answer_goes_on_from_any_of_its_tokens(running: tuple[BlockEngine, Recorder]) -> None:
    engine, recorder = running
    engine.submit(request("whole", BY_SCHEMA))
    recorder.wait_finished("whole")
    whole = recorder.tokens["whole"]
    for cut in range(1, len(whole)):
        engine.submit(request(f"from{cut}", BY_SCHEMA, output=whole[:cut]))
    for cut in range(1, len(whole)):
        assert recorder.wait_finished(f"from{cut}") == [FinishReason.STOP]
        assert whole[:cut] + recorder.tokens[f"from{cut}"] == whole


def test_the_first_token_of_a_prefill_is_under_the_grammar_and_the_rest_goes_on_from_it(
    running: tuple[BlockEngine, Recorder],
) -> None:
    engine, recorder = running
    engine.submit(request("whole", BY_REGEX))
    engine.submit(EngineRequest("p", PROMPT, Sampling(seed=1, max_tokens=1, grammar=BY_REGEX), RequestKind.PREFILL))
    engine.submit(EngineRequest("d", PROMPT, Sampling(seed=1, max_tokens=400, grammar=BY_REGEX), held=True))
    recorder.wait(lambda: any(progress.first_token is not None for progress in recorder.prefills["p"]))
    first = recorder.prefills["p"][-1].first_token
    assert first is not None
    engine.resume("d", output=[first])
    assert recorder.wait_finished("whole", "d") == [FinishReason.STOP] * 2
    assert [first, *recorder.tokens["d"]] == recorder.tokens["whole"]
    engine.cancel("p")


def test_a_grammar_begins_after_the_end_of_reasoning_and_eos_not_before(
    running: tuple[BlockEngine, Recorder],
) -> None:
    engine, recorder = running
    end = tuple(b"~")
    grammar = Grammar(GrammarKind.CHOICE, '["yes", "no"]', after_token_ids=end)
    engine.submit(request("r", grammar, max_tokens=2000))
    assert recorder.wait_finished("r") == [FinishReason.STOP]
    reasoning, answer = text_of(recorder.tokens["r"]).split("~")
    assert reasoning
    assert answer in ("yes", "no")
    # Of an answer that goes on, the ids say whether it had ended.
    tokens = recorder.tokens["r"]
    cuts = (1, len(reasoning), len(reasoning) + 1, len(reasoning) + 2)
    for cut in cuts:
        engine.submit(request(f"from{cut}", grammar, output=tokens[:cut], max_tokens=2000))
    recorder.wait_finished(*(f"from{cut}" for cut in cuts))
    for cut in cuts:
        assert tokens[:cut] + recorder.tokens[f"from{cut}"] == tokens


def test_where_the_model_may_reason_its_first_token_says_whether_it_does(
    running: tuple[BlockEngine, Recorder],
) -> None:
    engine, recorder = running
    grammar = Grammar(GrammarKind.REGEX, "[a-y]{3}", after_token_ids=tuple(b"~"), opening_token_id=ord("%"))
    names = [f"r{number}" for number in range(80)]
    for number, name in enumerate(names):
        engine.submit(request(name, grammar, seed=number, max_tokens=3000))
    assert set(recorder.wait_finished(*names)) == {FinishReason.STOP}
    texts = [text_of(recorder.tokens[name]) for name in names]
    reasoned = [text for text in texts if text.startswith("%")]
    assert reasoned
    assert len(reasoned) < len(texts)
    assert all(re.fullmatch(r"%[^~]*~[a-y]{3}", text) for text in reasoned)
    assert all(re.fullmatch("[a-y]{3}", text) for text in texts if text not in reasoned)


def test_a_failing_grammar_ends_its_own_request_and_says_so(running: tuple[BlockEngine, Recorder]) -> None:
    engine, recorder = running
    bad = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": 5}}')
    engine.submit(request("bad", bad))
    engine.submit(request("strayed", BY_REGEX, output=list(b"xyz")))
    engine.submit(request("good", BY_REGEX))
    engine.submit(EngineRequest("p", PROMPT, Sampling(max_tokens=1, grammar=bad), RequestKind.PREFILL))
    assert recorder.wait_finished("good", "bad", "strayed") == [
        FinishReason.STOP,
        FinishReason.ERROR,
        FinishReason.ERROR,
    ]
    assert "schema must be an object or boolean" in recorder.finished["bad"].error
    assert "structured output failed" in recorder.finished["strayed"].error
    recorder.wait(lambda: any(progress.error for progress in recorder.prefills["p"]))


def test_others_do_not_wait_while_a_grammar_compiles(
    running: tuple[BlockEngine, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, recorder = running
    engine.submit(request("known", BY_REGEX))
    recorder.wait_finished("known")
    compiling, go_on = threading.Event(), threading.Event()
    matcher = Grammars.matcher

    def slow(self: Grammars, grammar: Grammar) -> LLMatcher:
        if grammar == BY_SCHEMA:
            compiling.set()
            assert go_on.wait(20.0)
        return matcher(self, grammar)

    monkeypatch.setattr(Grammars, "matcher", slow)
    engine.submit(request("slow", BY_SCHEMA))
    assert compiling.wait(20.0)
    engine.submit(request("plain", None, max_tokens=20))
    engine.submit(request("other", BY_REGEX))
    assert recorder.wait_finished("plain", "other") == [FinishReason.LENGTH, FinishReason.STOP]
    assert recorder.tokens["other"] == recorder.tokens["known"]
    assert not recorder.tokens["slow"]
    # Meanwhile its prompt was computed, but for the token that the first one is sampled after.
    assert engine.load().kv_tokens == len(PROMPT) - 1
    go_on.set()
    assert recorder.wait_finished("slow") == [FinishReason.STOP]


def test_a_preempted_answer_goes_on_in_its_grammar() -> None:
    engine, recorder = started(timed_executor(26))
    names = [f"r{number}" for number in range(6)]
    for number, name in enumerate(names):
        engine.submit(request(name, BY_SCHEMA, seed=number))
    assert set(recorder.wait_finished(*names)) == {FinishReason.STOP}
    assert engine.preemptions
    for name in names:
        jsonschema.validate(json.loads(text_of(recorder.tokens[name])), SCHEMA)
    engine.close()


def test_a_cut_answer_is_the_beginning_of_the_whole_one(running: tuple[BlockEngine, Recorder]) -> None:
    engine, recorder = running
    engine.submit(request("whole", BY_SCHEMA))
    engine.submit(request("cut", BY_SCHEMA, max_tokens=7))
    assert recorder.wait_finished("whole", "cut") == [FinishReason.STOP, FinishReason.LENGTH]
    assert recorder.tokens["cut"] == recorder.tokens["whole"][:7]


@pytest.mark.parametrize("also", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_what_contradicts_a_grammar_is_refused(
    running: tuple[BlockEngine, Recorder], also: dict[str, int | bool]
) -> None:
    engine, _ = running
    sampling = Sampling(grammar=BY_REGEX, **also)  # type: ignore[arg-type]
    with pytest.raises(RequestRefused, match="a grammar says where the output ends") as refusal:
        engine.submit(EngineRequest("r", PROMPT, sampling))
    assert refusal.value.reason is RefusalReason.INVALID
    assert engine.load().running == engine.load().waiting == 0


def test_equal_grammars_are_compiled_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    from antiphon_proto import grammars as source

    original = source.compile_grammar

    def counted(tokenizer: object, kind: str, text: str) -> LLMatcher:
        compiled.append(text)
        return original(tokenizer, kind, text)  # type: ignore[arg-type]

    monkeypatch.setattr(source, "compile_grammar", counted)
    grammars = Grammars(timed_executor(4).info, kept=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        grammars.matcher(Grammar(GrammarKind.REGEX, text))
    assert compiled == ["a", "b", "c", "b"]
    grammars.close()
