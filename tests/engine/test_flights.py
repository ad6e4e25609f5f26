"""Several steps in flight: the scheduler's decisions, and that nothing of a step changes before it has landed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from antiphon_engine import FinishReason, RequestRefused, SchedulerConfig
from antiphon_engine._step import StepPlan

from tests.support.engine import BLOCK_TOKENS, expected_tokens, generate, hashes_of, prefill, timed_executor
from tests.support.in_flight import FlightDriver


def driver(depth: int = 2, num_blocks: int = 64, **config: int) -> FlightDriver:
    return FlightDriver(timed_executor(num_blocks), depth, SchedulerConfig(**config))


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + number) % 256 for number in range(length)]


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    """(request, start, new tokens) of each part of a plan."""
    return [(part.step.request_id, part.step.start, len(part.step.tokens)) for part in plan.parts]


def names(plan: StepPlan) -> list[str]:
    return [part.step.request_id for part in plan.parts]


def decoding(engine: FlightDriver, names: str) -> None:
    """Bring a request of each name to where it decodes, with nothing in flight."""
    for number, name in enumerate(names):
        engine.submit(generate(name, prompt(4, 20 * number), max_tokens=30))
    engine.begin()
    engine.land()


# -- batches


@pytest.mark.parametrize(
    ("depth", "batches"), [(1, ["abcde"]), (2, ["abc", "de"]), (3, ["ab", "cd", "e"]), (4, ["ab", "cd", "e", ""])]
)
def test_each_step_takes_its_share_of_the_decodes_and_batches_take_turns(depth: int, batches: list[str]) -> None:
    engine = driver(depth)
    decoding(engine, "abcde")
    assert ["".join(names(engine.begin())) for _ in range(depth)] == batches
    for _ in range(3):
        for batch in filter(None, batches):
            engine.land()
            assert "".join(names(engine.begin())) == batch


def test_batches_become_equal_again_when_requests_come_and_go() -> None:
    engine = driver()
    decoding(engine, "abcd")
    assert names(engine.begin()) == ["a", "b"]
    engine.scheduler.cancel("c")
    assert names(engine.begin()) == ["d"]
    engine.submit(generate("x", prompt(5, 100), max_tokens=30))
    engine.land()
    assert names(engine.begin()) == ["a", "b", "x"], "its prompt fits beside them"
    engine.land()
    assert names(engine.begin()) == ["d"]
    engine.land()
    assert names(engine.begin()) == ["a", "b"], "two of four"
    engine.land()
    assert names(engine.begin()) == ["d", "x"]


def test_a_sequence_whose_token_is_being_sampled_is_in_no_other_step() -> None:
    engine = driver(depth=3)
    engine.submit(generate("a", prompt(6), max_tokens=3))
    for expected in [("a", 0, 6), ("a", 6, 1), ("a", 7, 1)]:
        assert shape(engine.begin()) == [expected]
        assert engine.begin().parts == ()
        engine.land()
    assert engine.tokens["a"] == expected_tokens(prompt(6), 3)


def test_decodes_go_on_beside_a_long_prompt() -> None:
    engine = driver(max_batch_tokens=9)
    decoding(engine, "ab")
    engine.submit(generate("long", prompt(40, 100)))
    assert shape(engine.begin()) == [("a", 4, 1), ("long", 0, 8)]
    assert shape(engine.begin()) == [("b", 4, 1), ("long", 8, 8)]
    engine.land()
    assert shape(engine.begin()) == [("a", 5, 1), ("long", 16, 8)]


# -- prompts that run ahead


def test_a_prompt_runs_ahead_of_what_is_computed_and_no_further_than_its_end() -> None:
    engine = driver(depth=3, max_batch_tokens=6)
    engine.submit(generate("a", prompt(14), max_tokens=2))
    plans = [engine.begin() for _ in range(3)]
    assert [shape(plan) for plan in plans] == [[("a", 0, 6)], [("a", 6, 6)], [("a", 12, 2)]]
    assert [plan.parts[0].step.sample is None for plan in plans] == [True, True, False]
    engine.land()
    assert engine.begin().parts == ()
    engine.run()
    assert engine.tokens["a"] == expected_tokens(prompt(14), 2)


def test_a_prefill_runs_ahead_within_its_credit_and_announces_as_its_chunks_land() -> None:
    engine = driver(max_batch_tokens=4)
    engine.submit(prefill("p", prompt(14), credit_blocks=1))
    assert shape(engine.begin()) == [("p", 0, 4)]
    assert engine.begin().parts == (), "what is in flight counts"
    engine.scheduler.grant("p", 3)
    assert shape(engine.begin()) == [("p", 4, 4)]
    engine.land()
    assert engine.prefills["p"][-1].full_blocks == 1
    assert shape(engine.begin()) == [("p", 8, 4)]
    engine.scheduler.grant("p", 4)
    engine.run()
    assert [(p.full_blocks, p.first_token) for p in engine.prefills["p"]] == [
        (1, None),
        (2, None),
        (3, None),
        (3, expected_tokens(prompt(14), 1)[0]),
    ]


def test_a_prefill_with_all_its_credit_in_flight_keeps_its_place() -> None:
    engine = driver(max_sequences=1)
    engine.submit(prefill("p", prompt(14), credit_blocks=2))
    engine.submit(generate("g", prompt(5, 100), max_tokens=1))
    assert shape(engine.begin()) == [("p", 0, 8)]
    assert engine.begin().parts == ()
    engine.land()
    assert shape(engine.begin()) == [("g", 0, 5)], "out of credit, it lets others pass"


@pytest.mark.parametrize("depth", [2, 3])
def test_equal_prompts_in_flight_at_once_come_to_share_their_blocks(depth: int) -> None:
    """A block that a step in flight uses is not exchanged for the equal one that was indexed first."""
    engine = driver(depth, max_batch_tokens=10)
    for name in "ab":
        engine.submit(generate(name, prompt(40), max_tokens=8))
    engine.submit(prefill("p", prompt(40)))
    engine.run(each=engine.scheduler.check_integrity)
    assert engine.rules.chunks_ahead > 0
    assert engine.tokens["a"] == engine.tokens["b"] == expected_tokens(prompt(40), 8)
    assert engine.prefills["p"][-1].full_blocks == 10
    report = engine.scheduler.check_integrity()
    assert (report.used_blocks, report.cached_blocks) == (10, 1), "everything is there once"


# -- ends in mid-flight


def test_a_cancel_frees_when_the_last_step_that_uses_the_request_has_landed() -> None:
    engine = driver(max_batch_tokens=6)
    engine.submit(generate("a", prompt(20)))
    engine.begin()
    engine.begin()
    engine.scheduler.cancel("a")
    assert engine.scheduler.check_integrity().used_blocks == 3
    engine.land()
    assert engine.scheduler.check_integrity().used_blocks == 3
    engine.land()
    report = engine.scheduler.check_integrity()
    assert (report.used_blocks, report.requests, report.free_blocks) == (0, 0, 64)
    assert engine.tokens["a"] == []
    assert "a" not in engine.finished


@pytest.mark.parametrize("length", [1, 7])
def test_a_request_of_the_same_name_waits_until_the_cancelled_one_has_landed(length: int) -> None:
    engine = driver()
    engine.submit(generate("a", prompt(9)))
    engine.begin()
    engine.scheduler.cancel("a")
    engine.submit(generate("a", prompt(length, 100), max_tokens=2))
    assert engine.begin().parts == ()
    engine.land()
    assert shape(engine.begin()) == [("a", 0, length)]
    engine.run()
    assert engine.tokens["a"] == expected_tokens(prompt(length, 100), 2)


def test_a_failed_chunk_ends_its_request_once_and_the_chunks_behind_it_are_dropped() -> None:
    engine = driver(depth=3, max_batch_tokens=8)
    engine.submit(generate("g", prompt(12), max_tokens=1))
    engine.submit(prefill("p", prompt(20, 100)))
    assert [shape(engine.begin()) for _ in range(3)] == [[("g", 0, 8)], [("g", 8, 4), ("p", 0, 4)], [("p", 4, 8)]]
    engine.land(error="broken")
    assert engine.finished["g"].error == "broken"
    engine.land(error="broken too")
    assert engine.finished["g"].error == "broken"
    assert [progress.error for progress in engine.prefills["p"]] == ["broken too"]
    assert engine.scheduler.check_integrity().used_blocks == 3
    engine.land()
    report = engine.scheduler.check_integrity()
    assert (report.requests, report.free_blocks) == (0, 64)
    assert engine.tokens["g"] == []


# -- room


def test_a_decode_without_room_waits_for_later_ones_to_land_and_preempts_them_then() -> None:
    engine = driver(num_blocks=5)
    engine.submit(generate("old", prompt(5)))
    engine.submit(generate("new", prompt(7, 100)))
    engine.begin()
    engine.land()
    assert [names(engine.begin()) for _ in range(2)] == [["old"], ["new"]]
    for name in ["old", "new", "old", "new"]:
        engine.land()
        assert names(engine.begin()) == [name]
    engine.land()
    assert engine.begin().parts == (), "two blocks of one and three of the other are full or in flight"
    assert engine.scheduler.preemptions == 0
    engine.land()
    assert names(engine.begin()) == ["old"]
    assert engine.scheduler.preemptions == 1
    engine.run()
    assert engine.tokens["old"] == expected_tokens(prompt(5), 8)
    assert engine.tokens["new"] == expected_tokens(prompt(7, 100), 8)


def test_no_prompt_runs_ahead_while_a_decode_waits_for_its_room() -> None:
    engine = driver(num_blocks=19, max_batch_tokens=3)
    engine.submit(generate("old", prompt(3), max_tokens=20))
    engine.begin()
    engine.land()
    engine.submit(generate("long", prompt(62, 100), max_tokens=2))
    engine.begin()
    while (plan := engine.begin()).parts:
        engine.land()
    assert [names(flying) for flying, _ in engine.flying] == [["long"]], "it has more to compute, and does not go on"
    assert engine.scheduler.preemptions == 0
    engine.land()
    assert "long" not in engine.tokens
    plan = engine.begin()
    assert names(plan)[0] == "old"
    assert plan.preempted
    engine.run()
    assert engine.tokens["old"] == expected_tokens(prompt(3), 20)
    assert engine.tokens["long"] == expected_tokens(prompt(62, 100), 2)


@pytest.mark.parametrize("depth", [2, 3])
def test_decodes_that_lack_room_preempt_and_all_get_their_tokens(depth: int) -> None:
    engine = driver(depth, num_blocks=12)
    prompts = {f"r{n}": prompt(6, 40 * n) for n in range(5)}
    for request_id, tokens in prompts.items():
        engine.submit(generate(request_id, tokens, max_tokens=24))
    engine.run()
    assert engine.scheduler.preemptions > 0
    assert engine.rules.most_flying == depth
    assert {r: engine.tokens[r] for r in prompts} == {r: expected_tokens(p, 24) for r, p in prompts.items()}
    assert next(iter(engine.finished)) == "r0"


class Traffic:
    """Random calls: requests of all kinds, cancels, pulls, pins, credits."""

    def __init__(self, engine: FlightDriver, rng: random.Random) -> None:
        self.engine = engine
        self.prompts: dict[str, list[int]] = {}
        self._rng = rng
        self._alive: list[str] = []
        self._held: list[str] = []
        self._retained: list[list[int]] = []

    def call(self) -> None:
        calls = [self._submit, self._submit, self._submit, self._cancel, self._pull, self._pin, self._release]
        self._rng.choice([*calls, self._grant])()

    def settle(self) -> None:
        """Let go of all that stands in anybody's way, and let everything run to its end."""
        while self._retained:
            self._release()
        for request_id in self._held:
            self.engine.scheduler.resume(request_id, ())
        for request_id in self._alive:
            self.engine.scheduler.grant(request_id, 99)
        for _ in range(len(self._alive) + 1):
            self.engine.run()
            self.engine.scheduler.check_integrity()
            for request_id, progress in self.engine.prefills.items():
                if progress[-1].first_token is not None:
                    assert progress[-1].first_token == expected_tokens(self.prompts[request_id], 1)[0]
                    self.engine.scheduler.cancel(request_id)

    def _submit(self) -> None:
        rng, request_id = self._rng, f"r{len(self.prompts)}"
        tokens = prompt(rng.randrange(1, 40), first=10 * rng.randrange(9))
        if rng.random() < 0.4:
            request = prefill(request_id, tokens, credit_blocks=rng.choice([None, 0, 2]), held=rng.random() < 0.2)
        else:
            request = generate(request_id, tokens, max_tokens=20, held=rng.random() < 0.4)
        try:
            self.engine.submit(request)
        except RequestRefused:
            return
        self.prompts[request_id] = tokens
        self._alive.append(request_id)
        if request.held:
            self._held.append(request_id)

    def _cancel(self) -> None:
        if self._alive:
            request_id = self._alive.pop(self._rng.randrange(len(self._alive)))
            self.engine.scheduler.cancel(request_id)
            if request_id in self._held:
                self._held.remove(request_id)

    def _pull(self) -> None:
        if not self._held:
            return
        request_id = self._rng.choice(self._held)
        tokens = self.prompts[request_id]
        count = self._rng.randrange(0, len(tokens) + 1)
        count -= count % BLOCK_TOKENS if count < len(tokens) else 0
        reservation = self.engine.scheduler.reserve(request_id, len(tokens))
        if reservation is not None:
            if self._rng.random() < 0.3:
                self._retain(reservation.blocks)
            self.engine.fill(request_id, tokens[:count])
        if self._rng.random() < 0.6:
            self._held.remove(request_id)
            self.engine.scheduler.resume(request_id, ())

    def _pin(self) -> None:
        if self.prompts:
            tokens = self._rng.choice(list(self.prompts.values()))
            self._retain(self.engine.pool.leading(hashes_of(self.engine.executor, tokens)))

    def _retain(self, blocks: Sequence[int]) -> None:
        self.engine.pool.retain(blocks)
        self._retained.append(list(blocks))

    def _release(self) -> None:
        if self._retained:
            self.engine.pool.release(self._retained.pop(self._rng.randrange(len(self._retained))))

    def _grant(self) -> None:
        if self._alive:
            self.engine.scheduler.grant(self._rng.choice(self._alive), self._rng.randrange(1, 9))


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_leaks_and_nothing_in_flight_changes_whatever_happens(depth: int, seed: int) -> None:
    """Books balance after every call; what a step uses is unchanged when it lands; completed requests are right."""
    rng = random.Random(seed)
    engine = driver(depth, num_blocks=24, max_batch_tokens=13, max_sequences=5, max_waiting_tokens=200)
    traffic = Traffic(engine, rng)
    for _ in range(300):
        traffic.call()
        engine.scheduler.check_integrity()
        if len(engine.flying) < depth and rng.random() < 0.7:
            engine.begin()
            engine.scheduler.check_integrity()
        if engine.flying and rng.random() < 0.5:
            engine.land(error="broken" if rng.random() < 0.03 else "")
            engine.scheduler.check_integrity()
    traffic.settle()
    report = engine.scheduler.check_integrity()
    assert (report.used_blocks, report.requests) == (0, 0)
    assert report.free_blocks + report.cached_blocks == 24
    assert engine.scheduler.load().free_blocks == 24
    assert engine.rules.most_flying == depth
    assert engine.rules.chunks_ahead > 0
    completed = [r for r, output in engine.finished.items() if output.finish is FinishReason.LENGTH]
    assert completed
    for request_id in completed:
        assert engine.tokens[request_id] == expected_tokens(traffic.prompts[request_id], 20)
