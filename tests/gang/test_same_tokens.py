"""Through a whole engine with real ranks, whatever happens to a request: the tokens of one rank, one request at a time.

One pool, too small for what runs in it, serves all: prompts in chunks, with hits, and requests that are preempted.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jsonschema
import pytest
from antiphon_engine import (
    BlockEngine,
    FinishReason,
    Grammar,
    GrammarKind,
    SampledToken,
    Sampling,
    SchedulerConfig,
    SequenceStep,
)
from antiphon_engine.gang import GangExecutor, GangSettings, RayCluster
from antiphon_engine.gang.torch_ranks import MAKER, look_at_model
from antiphon_engine.parallel import ParallelShape
from antiphon_engine.torch_engine.factory import TorchSettings
from tokenizers import Tokenizer

from tests.support.engine import Recorder
from tests.support.same_tokens import Answered, Asked, Asking, answered_by_one_rank, asked_of_all_kinds
from tests.torch_engine.parallel.tiny_models import BLOCK_TOKENS, CONFIGS, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_TOKENS = 32
POOL_BLOCKS = 14
"""The eight requests need 50 by their ends; the longest one needs 12."""
CHUNK_TOKENS = 40

BOTH_WAYS = ParallelShape(tensor=2, pipeline=2)
CASES = {
    ParallelShape(tensor=2): "qwen3-two-kv-heads",
    ParallelShape(pipeline=2): "mistral-window",
    BOTH_WAYS: "llama-tied",
}


class Watched(GangExecutor):
    """Also counts steps in flight."""

    most_in_flight = 0
    steps = 0
    _in_flight: tuple[Future[list[SampledToken | None]], ...] = ()

    def begin(self, step: Sequence[SequenceStep]) -> Future[list[SampledToken | None]]:
        future = super().begin(step)
        self._in_flight = (*(earlier for earlier in self._in_flight if not earlier.done()), future)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        self.steps += 1
        return future


@dataclasses.dataclass
class Case:
    asking: Asking
    executor: Watched
    requests: list[Asked]
    expected: list[Answered]


@pytest.fixture(scope="module")
def gangs(
    request: pytest.FixtureRequest, roomy_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[ParallelShape, Case]]:
    """All that tests ask for, started at the same time: ranks mostly wait for each other."""
    requests = asked_of_all_kinds(MAX_TOKENS)
    own = [item.callspec.params for item in request.session.items if getattr(item, "callspec", None) is not None]
    shapes = list(dict.fromkeys(params["case"] for params in own if params.get("case") in CASES))
    folders = {CASES[shape]: write_model(tmp_path_factory.mktemp("model"), CONFIGS[CASES[shape]]) for shape in shapes}
    roomy_cluster.ensure(1, print, threading.Event())  # once, before several threads ask for it

    def start(shape: ParallelShape) -> Watched:
        settings = TorchSettings(
            model=str(folders[CASES[shape]]),
            name="tiny",
            dtype="float32",
            kv_blocks=POOL_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            max_context_tokens=256,
            threads=1,
        )
        model = look_at_model(settings, shape, print)
        executor = Watched.start(GangSettings(shape, MAKER, model.packed), roomy_cluster, print, threading.Event())
        assert isinstance(executor, Watched)
        assert executor.info == model.info
        assert (executor.info.model, executor.info.max_context_tokens) == ("tiny", 256)
        return executor

    found: dict[ParallelShape, Case] = {}
    try:
        with ThreadPoolExecutor(len(shapes)) as threads:
            starting = {shape: threads.submit(start, shape) for shape in shapes}
            for shape, future in starting.items():
                expected = answered_by_one_rank(folders[CASES[shape]], requests)
                executor = future.result()
                config = SchedulerConfig(max_batch_tokens=CHUNK_TOKENS, max_sequences=8)
                engine, recorder = BlockEngine(executor, config), Recorder()
                engine.start(recorder)
                found[shape] = Case(Asking(engine, recorder), executor, requests, expected)
        yield found
    finally:
        for case in found.values():
            case.asking.engine.close()


@pytest.fixture(
    params=[shape if shape == BOTH_WAYS else pytest.param(shape, marks=pytest.mark.exhaustive) for shape in CASES],
    ids=lambda shape: str(shape).replace(" ", "-"),
)
def case(request: pytest.FixtureRequest, gangs: dict[ParallelShape, Case]) -> Case:
    return gangs[request.param]


def test_a_replica_of_several_ranks_gives_the_tokens_of_one(case: Case) -> None:
    asking, requests, expected = case.asking, case.requests, case.expected

    together = asking.run(requests)
    asking.compare("all at once", together, expected)

    # With room for one or two at a time, so that what the cache holds stays.
    for first, then in ((1, 3), (3, 6), (6, 6)):
        asking.compare("first", asking.run([requests[first]]), [expected[first]])
        [name] = asking.run([requests[then]])
        asking.compare("with a hit", [name], [expected[then]])
        assert asking.recorder.finished[name].cached_tokens >= 4 * BLOCK_TOKENS

    _cancel_some(case)
    report = asking.engine.check_integrity()
    assert (report.used_blocks, report.requests) == (0, 0)
    assert asking.engine.preemptions > 0
    assert case.executor.most_in_flight == case.executor.depth
    print(f"{case.executor.steps} steps, {asking.engine.preemptions} preemptions")


def _cancel_some(case: Case) -> None:
    """While they compute their prompts, wait, and decode, in steps with others, who do not notice."""
    asking, recorder = case.asking, case.asking.recorder
    endless = [Asked((*asked.prompt, 7), dataclasses.replace(asked.sampling, max_tokens=60)) for asked in case.requests]
    doomed = asking.submit(endless[:4])
    recorder.wait(lambda: len(recorder.tokens[doomed[0]]) >= 3)
    staying = asking.submit(case.requests)
    asking.engine.cancel(doomed[0])
    recorder.wait(lambda: any(recorder.tokens[name] for name in staying))
    for name in doomed[1:]:
        asking.engine.cancel(name)
    waiting = asking.submit(endless[4:])
    for name in waiting:
        asking.engine.cancel(name)
    asking.wait(staying)
    asking.compare("beside cancelled ones", staying, case.expected)
    assert not any(name in recorder.finished for name in (*doomed, *waiting))


def test_structured_answers_keep_to_their_grammars_beside_others(case: Case) -> None:
    """The driver has the grammars and sends masks with each step; how it packs them: `test_messages`."""
    tokenizer = Tokenizer.from_buffer(case.executor.info.tokenizer_json)
    choices = ["one", "two, süß", "three"]
    items = {"type": "array", "items": {"enum": [1, True, "x"]}, "minItems": 2, "maxItems": 3}
    bound = [
        Sampling(temperature=1.0, seed=1, max_tokens=90, grammar=Grammar(GrammarKind.CHOICE, json.dumps(choices))),
        Sampling(temperature=0.0, seed=2, max_tokens=90, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(items))),
        Sampling(temperature=1.0, seed=3, max_tokens=90, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(items))),
    ]
    free = case.requests[:2]
    names = case.asking.run([*free, *(Asked((9 + n, 8, 7), sampling) for n, sampling in enumerate(bound))])
    case.asking.compare("beside structured ones", names[:2], case.expected[:2])
    recorder = case.asking.recorder
    assert [recorder.finished[name].finish for name in names[2:]] == [FinishReason.STOP] * 3
    choice, *lists = (tokenizer.decode(recorder.tokens[name], skip_special_tokens=True) for name in names[2:])
    assert choice in choices
    for text in lists:
        jsonschema.validate(json.loads(text), items)
