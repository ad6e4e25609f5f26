"""What one request counts as, however it ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from antiphon_gateway import errors
from antiphon_gateway.errors import ApiError
from antiphon_gateway.explain import Outcome
from antiphon_gateway.flight import Flight, StartAgain
from antiphon_gateway.scaling_demand import Demand
from antiphon_gateway.scaling_window import UNKNOWN_OUTPUT_TOKENS
from antiphon_policy.scaling.records import RequestSample
from antiphon_proto import worker_pb2 as pb

MODEL = "default/chat"
UNIX_S = 1_764_520_500.0
BEGAN_AT = 100.0


class Scene:
    def __init__(self) -> None:
        self.demand = Demand(clock=lambda: UNIX_S + 10.0, draw=lambda: 0.0)
        self.records: dict[int, list[Any]] = {}

    def flight(self, *choices: Any, failure: ApiError | None = None) -> Flight:
        flight: Any = SimpleNamespace(
            failure=failure,
            began_at=BEGAN_AT,
            target=SimpleNamespace(group=SimpleNamespace(model=MODEL)),
            trail=SimpleNamespace(arrived_unix=UNIX_S, choices=self.records),
            choices=list(choices),
        )
        for index, choice in enumerate(choices):
            choice.flight, choice.index = flight, index
        return cast(Flight, flight)

    def ended(self, *choices: Any, failure: ApiError | None = None) -> list[RequestSample]:
        self.demand.ended(self.flight(*choices, failure=failure))
        return self.samples()

    def samples(self) -> list[RequestSample]:
        return list(self.demand.window(MODEL).samples(self.demand.now_ms))


def choice(**changes: Any) -> Any:
    """One that was served: first token after 0.2 s, 11 tokens in one second more, 40 of 100 prompt tokens cached."""
    served: dict[str, Any] = {
        "prompt": SimpleNamespace(token_ids=[0] * 100),
        "output": [0] * 11,
        "cached_tokens": 40,
        "first_token_at": BEGAN_AT + 0.2,
        "last_token_at": BEGAN_AT + 1.2,
        "attempt": None,
        "ended": True,
        "finish": pb.FINISH_STOP,
        "sampling": pb.Sampling(max_tokens=500),
    }
    return SimpleNamespace(**(served | changes))


def unserved(**changes: Any) -> Any:
    return choice(**{"output": [], "cached_tokens": 0, "first_token_at": 0.0, "finish": pb.FINISH_NONE, **changes})


def test_a_served_answer_is_told_as_it_was() -> None:
    (told,) = Scene().ended(choice())
    assert told == RequestSample(
        UNIX_S * 1e3, 60, 100, 11, 1.0, pytest.approx(200.0, abs=0.01), pytest.approx(100.0, abs=0.01)
    )


def test_an_answer_whose_first_token_nobody_timed_has_lengths_and_no_latency() -> None:
    (told,) = Scene().ended(choice(first_token_at=0.0))
    assert (told.uncached_tokens, told.output_tokens, told.ttft_ms, told.tpot_ms) == (60, 11, None, None)


@pytest.mark.parametrize(
    ("failure", "counts"),
    [
        (errors.queue_full(5), True),
        (errors.queue_timeout(5.0), True),
        (errors.draining(), True),
        (None, True),
        (errors.invalid("no"), False),
        (StartAgain(errors.no_worker(MODEL), 0), False),
    ],
)
def test_what_nobody_served_is_demand_unless_it_was_wrong_or_starts_again(
    failure: ApiError | None, counts: bool
) -> None:
    scene = Scene()
    told = scene.ended(unserved(), failure=failure)
    assert len(told) == counts
    if told:
        # Nothing is known yet: all of its prompt, and an answer of a usual length.
        assert told[0] == RequestSample(UNIX_S * 1e3, 100, 100, int(UNKNOWN_OUTPUT_TOKENS))


def test_what_nobody_served_is_taken_to_be_like_the_others() -> None:
    scene = Scene()
    scene.ended(choice())
    _, told, short = scene.ended(unserved(), unserved(sampling=pb.Sampling(max_tokens=4)), failure=errors.queue_full(5))
    assert (told.uncached_tokens, told.output_tokens) == (60, 11)
    assert short.output_tokens == 4
    # Guesses are not learnt from.
    assert scene.demand.window(MODEL).expected_output_tokens == pytest.approx(11.0)


def test_an_answer_that_its_client_left_counts_with_what_came_and_says_nothing_of_others() -> None:
    scene = Scene()
    (told,) = scene.ended(choice(finish=pb.FINISH_NONE, ended=False))
    assert (told.output_tokens, told.ttft_ms) == (11, pytest.approx(200.0, abs=0.01))
    assert scene.demand.window(MODEL).expected_output_tokens == UNKNOWN_OUTPUT_TOKENS


@pytest.mark.parametrize(
    ("peers", "prefill", "holder"),
    [((("c", 3), ("d", 2)), "b", "c"), ((), "b", "b"), ((), "", "a")],
)
def test_a_hit_belongs_to_the_peer_that_had_it_or_to_whoever_computed_the_rest(
    peers: tuple[tuple[str, int], ...], prefill: str, holder: str
) -> None:
    scene = Scene()
    began = Outcome(first_token_at=1.0, prefill_worker_id=prefill)
    decision = SimpleNamespace(prefix_peers=peers, decode="a")
    # Of two attempts, the one that brought the first token says what was cached.
    scene.records = {
        0: [SimpleNamespace(outcome=Outcome(), decision=None), SimpleNamespace(outcome=began, decision=decision)]
    }
    scene.ended(choice())
    assert scene.demand.window(MODEL).hits(scene.demand.now_ms) == {holder: 40}


def test_one_that_runs_is_told_by_what_is_known_of_it() -> None:
    scene = Scene()
    running = choice(ended=False, finish=pb.FINISH_NONE, output=[0] * 200)
    sent = unserved(ended=False, attempt=SimpleNamespace(entry=SimpleNamespace(uncached_tokens=17)))
    waits = unserved(ended=False)
    (told,) = scene.demand.running([scene.flight(running, sent, waits)]).values()
    assert [(one.uncached_tokens, one.output_tokens) for one in told] == [(60, 200), (17, 128), (100, 128)]
    assert [one.ttft_ms for one in told] == [pytest.approx(200.0, abs=0.01), None, None]
    assert all(one.tpot_ms is None for one in told)
