"""An answer that is moved after any of its tokens is the answer that was not moved: ids, text, log-probabilities, end.

A worker's decode service answers a request; what came of it up to a token is kept by the gateway's own `Choice`, and
what another worker is given of that is what the gateway gives it. Moved after each token in turn, with text that is
held back: stop strings that almost come, characters of several tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from antiphon_decode.service import DecodeService
from antiphon_engine import BlockEngine, SchedulerConfig, TimedExecutor, TimedSettings
from antiphon_engine.executor import SampledToken, SampleSpec
from antiphon_engine.interface import TokenLogprob
from antiphon_engine.timed_tokenizer import EOS_TOKEN_ID
from antiphon_gateway.flight import Choice
from antiphon_policy.latency import StepModel
from antiphon_proto import worker_pb2 as wire
from antiphon_worker.bridge import EngineBridge
from antiphon_worker.channels import ChannelPool
from antiphon_worker.engines import create_engine
from antiphon_worker.identity import new_identity
from antiphon_worker.load import LoadReport
from antiphon_worker.metrics import WorkerMetrics
from antiphon_worker.options import WorkerOptions
from antiphon_worker.role import CurrentRole
from antiphon_worker.service import WorkerContext
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from tests.support.models import write_tiny_model
from tests.support.workers import prompt_of, within


class Scripted(TimedExecutor):
    """Says a text, a byte a token, and ends."""

    def __init__(self, text: str) -> None:
        super().__init__(TimedSettings(step_ms=lambda **_: 0.0, num_blocks=256, block_tokens=16))
        self._ids = [*text.encode(), EOS_TOKEN_ID]

    def _sample(self, spec: SampleSpec, known: Any) -> SampledToken:
        token_id = self._ids[spec.position]
        return SampledToken(token_id, TokenLogprob(token_id, -spec.position / 8, ((token_id, -spec.position / 8),)))


@dataclass
class Collected:
    """One request's steps, as a gateway hears them."""

    steps: list[wire.RequestStep] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def accepted(self) -> None: ...

    def refused(self, reason: int, message: str) -> None:
        raise AssertionError(message)

    def step(self, step: wire.RequestStep) -> None:
        self.steps.append(step)
        if step.finish:
            self.ended.set()


@contextlib.asynccontextmanager
async def serving(engine: BlockEngine) -> AsyncIterator[DecodeService]:
    options = WorkerOptions(role="decode")
    bridge = EngineBridge(on_blocks=lambda _: None, on_failure=lambda _: None)
    links: Any = SimpleNamespace(wanted=lambda _: None, statuses=list)
    role = CurrentRole("decode")
    context = WorkerContext(
        options=options,
        identity=new_identity(options),
        role=role,
        engine=engine,
        bridge=bridge,
        links=links,
        tokenizer=Tokenizer.from_buffer(engine.info.tokenizer_json),
        load=LoadReport(engine, role, prior=StepModel(), links=links.statuses, draining=lambda: False),
        channels=ChannelPool(),
        metrics=WorkerMetrics(CollectorRegistry()),
    )
    engine.start(bridge)
    service = DecodeService(context)
    try:
        yield service
    finally:
        await service.close()
        bridge.close()
        await asyncio.to_thread(engine.close)
        await context.channels.close()


class Asked:
    """One request, at one service."""

    def __init__(
        self, service: DecodeService, prompt: Sequence[int], sampling: wire.Sampling, *, tell_every_ms: int = 0
    ) -> None:
        self._service = service
        self._prompt = list(prompt)
        self._sampling = sampling
        self._tell_every_ms = tell_every_ms
        self._names = 0

    async def answer(self, so_far: Choice | None = None) -> list[wire.RequestStep]:
        """Its steps from where `so_far` ends."""
        self._names += 1
        submit = wire.Submit(
            request_id=f"r{self._names}",
            prompt_token_ids=self._prompt,
            sampling=self._sampling,
            cache_salt=b"a",
            tell_every_ms=self._tell_every_ms,
        )
        if so_far is not None:
            submit.output_token_ids.extend(so_far.output)
            submit.held_logprobs.extend(so_far.held_logprobs or ())
        told = Collected()
        assert self._service.submit(submit, told) is not None
        await within(30, told.ended.wait())
        return told.steps

    def kept_of(self, steps: Sequence[wire.RequestStep]) -> Choice:
        """What a gateway has after these steps."""
        flight: Any = SimpleNamespace(
            sent_whole=True, target=SimpleNamespace(group=None), open_choices=1, wake=lambda: None
        )
        prompt: Any = SimpleNamespace(token_ids=self._prompt, chain=())
        choice = Choice(flight, 0, prompt, self._sampling, 1000)
        for step in steps:
            assert choice.put(step)
        return choice


async def moved_after_each_token(asked: Asked) -> Choice:
    """The answer that was not moved; all others are the same."""
    whole = await asked.answer()
    right = asked.kept_of(whole)
    tails = await asyncio.gather(*(asked.answer(asked.kept_of(whole[:kept])) for kept in range(len(whole))))
    for kept, tail in enumerate(tails):
        moved = asked.kept_of([*whole[:kept], *tail])
        assert moved.output == right.output, kept
        assert "".join(moved.texts) == "".join(right.texts), kept
        assert (moved.finish, tail[-1].stop_reason) == (right.finish, whole[-1].stop_reason), kept
        assert [one.token_id for one in moved.logprobs] == [one.token_id for one in right.logprobs], kept
        told, wanted = [one.logprob for one in moved.logprobs], [one.logprob for one in right.logprobs]
        assert told == pytest.approx(wanted, abs=1e-3), kept
        assert tail[-1].usage.completion_tokens == len(right.output)
        assert tail[-1].usage.prompt_tokens == whole[-1].usage.prompt_tokens
    return right


@pytest.mark.parametrize(
    ("text", "stop", "options", "said"),
    [
        ("naïve 🎼 notes — 列车 end", [], {}, "naïve 🎼 notes — 列车 end"),
        ("a STO STOQ 🎻 STOP more", ["STOP", "TOQ!"], {}, "a STO STOQ 🎻 "),
        ("a 🎼🎻 b", ["🎼🎹"], {}, "a 🎼🎻 b"),
        ("ab..ab..", ["ab"], {"min_tokens": 3}, "ab.."),
        ("one STOP", ["STOP"], {"include_stop_text": True}, "one STOP"),
        ("cut here", [], {"max_tokens": 3}, "cut"),
        ("half 🎼", [], {"max_tokens": 7}, "half \ufffd"),
    ],
)
async def test_text_that_is_held_back(text: str, stop: list[str], options: dict[str, Any], said: str) -> None:
    sampling = wire.Sampling(
        **({"max_tokens": 100, "skip_special_tokens": True, "logprobs": 1, "stop": stop} | options)
    )
    async with serving(BlockEngine(Scripted(text), SchedulerConfig())) as service:
        right = await moved_after_each_token(Asked(service, prompt_of(40), sampling))
    assert "".join(right.texts) == said
    assert right.logprobs


async def test_an_answer_that_is_told_together_goes_on_from_what_was_told() -> None:
    """Its first step is told at once, the others with the last: lost between them, it is generated again."""
    sampling = wire.Sampling(max_tokens=100, skip_special_tokens=True, stop=["STOP"])
    async with serving(BlockEngine(Scripted("naïve 🎼 notes STOP more"), SchedulerConfig())) as service:
        one_by_one = Asked(service, prompt_of(40), sampling)
        right = one_by_one.kept_of(await one_by_one.answer())
        together = Asked(service, prompt_of(40), sampling, tell_every_ms=600_000)
        steps = await together.answer()
        assert [len(step.token_ids) for step in steps] == [1, len(right.output) - 1]
        for kept in (0, 1):
            moved = together.kept_of([*steps[:kept], *await together.answer(together.kept_of(steps[:kept]))])
            assert (moved.output, "".join(moved.texts)) == (right.output, "naïve 🎼 notes ")
            assert moved.finish == right.finish == wire.Finish.FINISH_STOP


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.7},
        {"temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.5, "min_tokens": 6, "seed": 5, "choice": 1},
        {"temperature": 1.0, "logit_bias": {2: 5.0}, "min_tokens": 12, "seed": 9},
    ],
)
async def test_a_real_model_with_penalties_and_limits(tiny: Path, options: dict[str, Any]) -> None:
    """Penalties count the whole output, limits too, and noise is the position's."""
    settings = WorkerOptions(engine="torch", model=str(tiny), dtype="float32", threads=1, kv_blocks=64, block_tokens=16)
    sampling = wire.Sampling(**({"max_tokens": 24, "logprobs": 2, "skip_special_tokens": True} | options))
    async with serving(create_engine(settings)) as service:
        plain = Asked(service, prompt_of(37), sampling)
        text = "".join((await moved_after_each_token(plain)).texts)
        assert text
        stopped = wire.Sampling()
        stopped.CopyFrom(sampling)
        stopped.stop.extend([text[len(text) // 2 : len(text) // 2 + 3], text[1:3] + "~~"])
        await moved_after_each_token(Asked(service, prompt_of(37), stopped))


async def test_a_structured_answer_goes_on_in_its_grammar(tiny: Path) -> None:
    """It does not begin again: neither twice the same nor one within the other."""
    settings = WorkerOptions(engine="torch", model=str(tiny), dtype="float32", threads=1, kv_blocks=64, block_tokens=16)
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 6}, "size": {"enum": ["größer", 7]}},
        "required": ["text", "size"],
        "additionalProperties": False,
    }
    grammar = wire.Grammar(kind=wire.GrammarKind.GRAMMAR_JSON_SCHEMA, text=json.dumps(schema))
    sampling = wire.Sampling(
        temperature=1.0, seed=3, max_tokens=300, logprobs=2, skip_special_tokens=True, grammar=grammar
    )
    async with serving(create_engine(settings)) as service:
        right = await moved_after_each_token(Asked(service, prompt_of(37), sampling))
    assert right.finish == wire.Finish.FINISH_STOP
    jsonschema.validate(json.loads("".join(right.texts)), schema)
