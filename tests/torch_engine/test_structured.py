"""Structured output of a model: a tiny one with random weights, which knows nothing of JSON and likes any token as
much as another. So whatever keeps to the grammar does so by the mask alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from antiphon_engine import (
    BlockEngine,
    EngineRequest,
    FinishReason,
    Grammar,
    GrammarKind,
    RequestKind,
    Sampling,
    SchedulerConfig,
)
from antiphon_engine.torch_engine import TorchSettings, create_torch_executor
from antiphon_proto.grammars import compile_grammar, load_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.support.engine import Recorder, started
from tests.support.models import write_tiny_model

PROMPT = tuple(range(10, 40))
SAMPLED = Sampling(temperature=1.0, top_p=0.95, seed=3, max_tokens=300)
GREEDY = Sampling(temperature=0.0, max_tokens=300)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "blue", 7, None]}, "minItems": 1, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
SHORT = {"type": "array", "items": {"enum": ["a\u00fc", False, 12]}, "minItems": 2, "maxItems": 3}


class Running:
    """An engine, and requests with names of their own."""

    def __init__(self, engine: BlockEngine, recorder: Recorder, folder: Path) -> None:
        self.folder = folder
        self.engine = engine
        self.recorder = recorder
        info = engine.info
        self.vocab_size = info.vocab_size
        self.tokenizer: Tokenizer = Tokenizer.from_buffer(info.tokenizer_json)
        self.guide: LLTokenizer = load_tokenizer(info.tokenizer_json, info.vocab_size, list(info.eos_token_ids))
        self._names = (f"r{number}" for number in itertools.count())

    def submit(self, sampling: Sampling, output: Sequence[int] = ()) -> str:
        name = next(self._names)
        self.engine.submit(EngineRequest(name, PROMPT, sampling, output=output))
        return name

    def ends(self, *names: str) -> list[tuple[list[int], FinishReason | None]]:
        self.recorder.wait_finished(*names)
        return [(self.recorder.tokens[name], self.recorder.finished[name].finish) for name in names]

    def tokens(self, sampling: Sampling, output: Sequence[int] = ()) -> list[int]:
        return self.ends(self.submit(sampling, output))[0][0]

    def first_token(self, sampling: Sampling) -> int:
        """As a prefill worker samples it."""
        name = next(self._names)
        sampling = dataclasses.replace(sampling, max_tokens=1)
        self.engine.submit(EngineRequest(name, PROMPT, sampling, RequestKind.PREFILL))
        self.recorder.wait(lambda: any(p.first_token is not None for p in self.recorder.prefills[name]))
        first = self.recorder.prefills[name][-1].first_token
        self.engine.cancel(name)
        assert first is not None
        return first

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def assert_keeps_to(self, grammar: Grammar, token_ids: Sequence[int], finish: FinishReason | None) -> None:
        """By a matcher of its own: every token legal, the end where there can be one."""
        matcher = compile_grammar(self.guide, grammar.kind.value, grammar.text)
        assert matcher.consume_tokens(list(token_ids)), self.text(token_ids)
        if finish is FinishReason.STOP:
            assert matcher.is_stopped()
            assert not matcher.is_error()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    configured = TorchSettings(model=str(folder), dtype="float32", kv_blocks=600, block_tokens=16, threads=1)
    engine, recorder = started(create_torch_executor(configured, lambda _: None), SchedulerConfig(max_sequences=24))
    yield Running(engine, recorder, folder)
    assert recorder.failure is None
    engine.check_integrity()
    engine.close()


def by_schema(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def under(sampling: Sampling, grammar: Grammar, **changes: Any) -> Sampling:
    return dataclasses.replace(sampling, grammar=grammar, **changes)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, dataclasses.replace(SAMPLED, top_k=5, min_p=0.1, top_p=1.0)])
def test_answers_validate_greedy_and_sampled(running: Running, sampling: Sampling) -> None:
    grammar = by_schema(SCHEMA)
    for token_ids, finish in running.ends(*(running.submit(under(sampling, grammar, seed=n)) for n in range(4))):
        running.assert_keeps_to(grammar, token_ids, finish)
        assert finish is FinishReason.STOP
        jsonschema.validate(json.loads(running.text(token_ids)), SCHEMA)


def test_regex_choice_and_grammar(running: Running) -> None:
    regex = Grammar(GrammarKind.REGEX, r"\d{3}-[a-c]+x")
    choice = Grammar(GrammarKind.CHOICE, json.dumps(["yes", "no", "süß 😀"]))
    lark = Grammar(GrammarKind.LARK, 'start: item ("," item)~2\nitem: "a" | "b" | /[0-9]{2}/')
    names = [running.submit(under(SAMPLED, grammar, seed=n)) for grammar in (regex, choice, lark) for n in range(4)]
    ends = running.ends(*names)
    for grammar, group in zip((regex, choice, lark), (ends[:4], ends[4:8], ends[8:]), strict=True):
        for token_ids, finish in group:
            running.assert_keeps_to(grammar, token_ids, finish)
            if finish is FinishReason.STOP and grammar is choice:
                assert running.text(token_ids) in ("yes", "no", "süß 😀")
    assert sum(finish is FinishReason.STOP for _, finish in ends) >= 8


def test_equal_tokens_whole_disaggregated_and_continued_after_any_token(running: Running) -> None:
    sampling = under(SAMPLED, by_schema(SHORT))
    whole = running.tokens(sampling)
    first = running.first_token(sampling)
    assert [first, *running.tokens(sampling, output=[first])] == whole
    names = [running.submit(sampling, output=whole[:cut]) for cut in range(1, len(whole))]
    for cut, (token_ids, finish) in enumerate(running.ends(*names), start=1):
        assert whole[:cut] + token_ids == whole
        assert finish is FinishReason.STOP


def test_many_grammars_in_one_batch_and_plain_requests_keep_their_tokens(running: Running) -> None:
    plain = dataclasses.replace(GREEDY, max_tokens=40)
    noisy = dataclasses.replace(SAMPLED, max_tokens=40, logprobs=2)
    alone = [running.tokens(plain), running.tokens(noisy)]
    grammars = [by_schema({"type": "array", "items": {"const": n}, "minItems": n, "maxItems": n}) for n in range(1, 9)]
    bound = [running.submit(under(SAMPLED, grammar, seed=n)) for n, grammar in enumerate(grammars)]
    free = [running.submit(plain), running.submit(noisy)]
    assert [token_ids for token_ids, _ in running.ends(*free)] == alone
    for n, (token_ids, finish) in enumerate(running.ends(*bound), start=1):
        assert finish is FinishReason.STOP
        assert json.loads(running.text(token_ids)) == [n] * n


def test_logprobs_are_of_what_may_be_sampled(running: Running) -> None:
    sampling = under(SAMPLED, Grammar(GrammarKind.REGEX, "[ab]"), logprobs=5)
    [(_, finish)] = running.ends(name := running.submit(sampling))
    assert finish is FinishReason.STOP
    outputs = [output for step in running.recorder.steps for output in step.outputs if output.request_id == name]
    letter, end = (output.logprobs[0] for output in outputs)
    assert {running.tokenizer.id_to_token(token_id) for token_id, _ in letter.top} == {"a", "b"}
    assert sum(math.exp(value) for _, value in letter.top) == pytest.approx(1.0)
    assert end.logprob == pytest.approx(0.0)


def test_logprobs_are_transformers_softmax_over_what_the_grammar_allows(running: Running) -> None:
    """As vLLM's default (`raw_logprobs`): its runner masks the logits before its sampler takes them, and temperature,
    penalties and bias come after (0.33.0, `v1/worker/gpu_model_runner.py`, `v1/sample/sampler.py`)."""
    grammar = by_schema(SCHEMA)
    sampling = under(SAMPLED, grammar, temperature=0.6, presence_penalty=1.0, logit_bias={40: 3.0}, logprobs=3)
    [(token_ids, _)] = running.ends(name := running.submit(sampling))
    told = [
        output.logprobs[0] for step in running.recorder.steps for output in step.outputs if output.request_id == name
    ]
    assert [entry.token_id for entry in told] == token_ids
    model = AutoModelForCausalLM.from_pretrained(running.folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    matcher = compile_grammar(running.guide, grammar.kind.value, grammar.text)
    masked_away = 0.0
    for row, entry in zip(logits, told, strict=True):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, count=running.vocab_size, bitorder="little")).bool()
        expected = torch.log_softmax(row.masked_fill(~allowed, -math.inf), dim=0)
        best = torch.topk(expected, min(3, int(allowed.sum())))
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        masked_away = max(masked_away, float(expected[entry.token_id] - torch.log_softmax(row, dim=0)[entry.token_id]))
        assert matcher.consume_token(entry.token_id)
    assert masked_away > 1.0, "so that the two would be told apart"


_VALUES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-999, 999),
        st.integers(0, 99),
    ),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(lambda n: {"type": "string", "pattern": f"^[a-f]{{1,{n}}}$"}, st.integers(1, 5)),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.integers(0, 99), st.text("xyz é", max_size=3)), min_size=1, max_size=4),
    ),
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "long name", "ü"])
    objects = st.builds(
        lambda properties, some: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:some],
            "additionalProperties": False,
        },
        st.dictionaries(names, inner, max_size=3),
        st.integers(0, 3),
    )
    lists = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    return st.one_of(
        objects, lists, st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    )


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=st.recursive(_VALUES, _containers, max_leaves=5), seed=st.integers(0, 2**32))
def test_any_bounded_schema_ends_and_validates_and_what_is_cut_is_a_legal_beginning(
    running: Running, schema: dict[str, Any], seed: int
) -> None:
    grammar = by_schema(schema)
    whole, cut = running.ends(
        running.submit(under(SAMPLED, grammar, seed=seed, max_tokens=900)),
        running.submit(under(SAMPLED, grammar, seed=seed, max_tokens=5)),
    )
    running.assert_keeps_to(grammar, *whole)
    running.assert_keeps_to(grammar, *cut)
    assert cut[0] == whole[0][:5]
    assert whole[1] is FinishReason.STOP
    jsonschema.validate(json.loads(running.text(whole[0])), schema)
