"""The scheduler's decisions, on the timed executor, which checks every block that it is given."""

from __future__ import annotations

import random

import pytest
from antiphon_engine import FinishReason, RefusalReason, RequestRefused, SchedulerConfig
from antiphon_engine.timed_tokenizer import EOS_TOKEN_ID

from tests.support.engine import (
    BLOCK_TOKENS,
    Driver,
    expected_tokens,
    generate,
    hashes_of,
    prefill,
    timed_executor,
)


def driver(num_blocks: int = 64, **config: int) -> Driver:
    return Driver(timed_executor(num_blocks), SchedulerConfig(**config))


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + number) % 256 for number in range(length)]


def shape(plan) -> list[tuple[str, int, int]]:  # type: ignore[no-untyped-def]
    """(request, start, new tokens) of each part of a plan."""
    return [(part.step.request_id, part.step.start, len(part.step.tokens)) for part in plan.parts]


# -- batching


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    engine = driver(max_batch_tokens=10)
    engine.submit(generate("a", prompt(6)))
    assert shape(engine.step()) == [("a", 0, 6)]
    engine.submit(generate("b", prompt(12, 50)))
    engine.submit(generate("c", prompt(5, 100)))
    assert shape(engine.step()) == [("a", 6, 1), ("b", 0, 9)]
    assert shape(engine.step()) == [("a", 7, 1), ("b", 9, 3), ("c", 0, 5)]
    assert shape(engine.step()) == [("a", 8, 1), ("b", 12, 1), ("c", 5, 1)]


def test_no_more_sequences_than_allowed_in_a_step() -> None:
    engine = driver(max_sequences=2)
    for number in range(3):
        engine.submit(generate(f"r{number}", prompt(5, 20 * number), max_tokens=2))
    assert [len(engine.step().parts) for _ in range(4)] == [2, 2, 1, 1]
    assert engine.finished.keys() == {"r0", "r1", "r2"}


def test_tokens_do_not_depend_on_chunks_or_company() -> None:
    engine = driver(max_batch_tokens=7)
    prompts = {f"r{n}": prompt(3 + 5 * n, 17 * n) for n in range(6)}
    for request_id, tokens in prompts.items():
        engine.submit(generate(request_id, tokens, max_tokens=9))
    engine.run()
    assert {r: engine.tokens[r] for r in prompts} == {r: expected_tokens(p, 9) for r, p in prompts.items()}


# -- ends


def test_max_tokens_and_context_end_with_length() -> None:
    engine = driver()
    engine.submit(generate("a", prompt(5), max_tokens=1))
    engine.run()
    assert engine.finished["a"].finish is FinishReason.LENGTH
    assert len(engine.tokens["a"]) == 1
    short = Driver(timed_executor(64, max_context_tokens=10))
    short.submit(generate("a", prompt(6), max_tokens=100))
    short.run()
    assert short.finished["a"].finish is FinishReason.LENGTH
    assert len(short.tokens["a"]) == 4


def test_a_pool_smaller_than_the_context_ends_with_length_too() -> None:
    engine = driver(num_blocks=3)
    engine.submit(generate("a", prompt(6), max_tokens=100))
    engine.run()
    assert engine.finished["a"].finish is FinishReason.LENGTH
    assert len(engine.tokens["a"]) == 3 * BLOCK_TOKENS - 6
    assert engine.scheduler.preemptions == 0


def test_the_stop_token_is_the_last_output_id() -> None:
    tokens = expected_tokens(prompt(5), 6)
    engine = driver()
    engine.submit(generate("a", prompt(5), max_tokens=6, stop=frozenset({tokens[3]})))
    engine.run()
    assert engine.finished["a"].finish is FinishReason.STOP
    assert engine.tokens["a"] == tokens[: tokens.index(tokens[3]) + 1]


def test_stop_ids_and_eos_are_forbidden_below_min_tokens() -> None:
    first = expected_tokens(prompt(5), 1)[0]
    engine = driver()
    engine.submit(generate("a", prompt(5), max_tokens=6, stop=frozenset({first}), min_tokens=2))
    forbidden = []
    for _ in range(3):
        sample = engine.step().parts[0].step.sample
        assert sample is not None
        forbidden.append(sample.forbidden)
    assert forbidden[0] == forbidden[1]
    assert forbidden[0] >= {first, EOS_TOKEN_ID}
    assert forbidden[2] == frozenset()
    assert engine.tokens["a"][0] != first


@pytest.mark.parametrize("held", [False, True])
def test_output_that_is_complete_already_ends_the_request_without_a_step(held: bool) -> None:
    engine = driver()
    engine.submit(generate("length", prompt(5), max_tokens=2, output=[65, 66], held=held))
    engine.submit(generate("stop", prompt(5), stop=frozenset({66}), output=() if held else [66], held=held))
    if held:
        engine.scheduler.resume("length", ())
        engine.scheduler.resume("stop", [66])
    assert engine.step().parts == ()
    assert engine.finished["length"].finish is FinishReason.LENGTH
    assert engine.finished["stop"].finish is FinishReason.STOP
    assert engine.tokens["stop"] == []
    assert engine.scheduler.check_integrity().used_blocks == 0


def test_output_of_an_earlier_attempt_goes_on_where_it_stopped() -> None:
    tokens = expected_tokens(prompt(9), 12)
    engine = driver()
    engine.submit(generate("a", prompt(9), max_tokens=12, output=tokens[:5]))
    engine.run()
    assert engine.tokens["a"] == tokens[5:]


# -- refusals


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "empty"), ([260], "vocabulary of 260"), ([-1], "vocabulary"), (prompt(64), "KV pool"), (prompt(100), "KV")],
)
def test_what_can_never_be_served_is_invalid(tokens: list[int], message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as refused:
        driver(num_blocks=16).submit(generate("a", tokens))
    assert refused.value.reason is RefusalReason.INVALID


def test_a_prompt_that_fills_the_context_is_invalid() -> None:
    engine = Driver(timed_executor(64, max_context_tokens=10))
    engine.submit(generate("fits", prompt(9)))
    with pytest.raises(RequestRefused, match="context of 10") as refused:
        engine.submit(generate("a", prompt(10)))
    assert refused.value.reason is RefusalReason.INVALID


def test_the_queue_is_bounded_but_never_refuses_when_empty() -> None:
    engine = driver(max_waiting_tokens=10)
    engine.submit(generate("long", prompt(30)))
    with pytest.raises(RequestRefused) as refused:
        engine.submit(generate("b", prompt(5)))
    assert refused.value.reason is RefusalReason.CAPACITY
    engine.step()
    engine.submit(generate("b", prompt(5)))


def test_room_is_promised_once() -> None:
    engine = driver(num_blocks=10)
    engine.submit(prefill("p", prompt(16)))  # 4 blocks
    engine.submit(generate("h", prompt(19, 50), held=True))  # 5 blocks, with the next token
    assert engine.scheduler.load().free_blocks == 1
    with pytest.raises(RequestRefused) as refused:
        engine.submit(prefill("q", prompt(8, 100)))
    assert refused.value.reason is RefusalReason.CAPACITY
    engine.submit(prefill("r", prompt(4, 100)))
    engine.scheduler.cancel("h")
    engine.submit(prefill("q", prompt(8, 100)))
    engine.run()
    assert engine.scheduler.check_integrity().used_blocks == 4 + 2


def test_a_prefix_in_use_is_not_promised_twice() -> None:
    engine = driver(num_blocks=10)
    engine.submit(prefill("a", prompt(24)))
    engine.run()
    engine.submit(prefill("b", [*prompt(24), 7, 7, 7, 7, 7, 7, 7, 7]))
    assert engine.scheduler.load().free_blocks == 2


def test_what_is_promised_is_not_empty_any_more() -> None:
    engine = driver(num_blocks=10)
    engine.submit(prefill("a", prompt(16)))
    engine.run()
    engine.scheduler.cancel("a")
    load = engine.scheduler.load()
    assert (load.free_blocks, load.empty_blocks) == (10, 6)
    engine.submit(prefill("b", prompt(16, 100)))
    load = engine.scheduler.load()
    assert (load.free_blocks, load.empty_blocks) == (6, 2)


# -- prefix reuse


def test_a_full_hit_computes_the_last_block_only() -> None:
    engine = driver()
    engine.submit(generate("a", prompt(16), max_tokens=2))
    engine.run()
    engine.submit(generate("b", prompt(16), max_tokens=2))
    assert shape(engine.step()) == [("b", 12, 4)]
    engine.run()
    assert engine.finished["b"].cached_tokens == 12
    assert engine.tokens["b"] == engine.tokens["a"]


def test_output_blocks_serve_the_next_turn() -> None:
    engine = driver()
    engine.submit(generate("a", prompt(6), max_tokens=11))
    engine.run()
    turn = [*prompt(6), *engine.tokens["a"], 9, 9, 9]
    engine.submit(generate("b", turn))
    assert shape(engine.step()) == [("b", 16, 4)]


def test_two_requests_that_compute_the_same_at_once_share_it_afterwards() -> None:
    engine = driver(max_batch_tokens=6)
    for request_id in ("a", "b"):
        engine.submit(generate(request_id, prompt(20), max_tokens=8))
    engine.step()
    engine.step()
    plan = engine.step()
    assert shape(plan)[0] == ("a", 12, 6)
    engine.run()
    assert engine.tokens["a"] == engine.tokens["b"] == expected_tokens(prompt(20), 8)
    assert engine.scheduler.check_integrity().cached_blocks == 6


def test_salts_separate_caches() -> None:
    """llm-d/llm-d-kv-cache#243: what a block was computed for is part of its identity."""
    engine = driver()
    engine.submit(generate("a", prompt(16), max_tokens=1))
    engine.run()
    other = generate("b", prompt(16), max_tokens=1)
    object.__setattr__(other, "cache_salt", b"tenant")
    engine.submit(other)
    assert shape(engine.step()) == [("b", 0, 16)]


# -- PREFILL


def test_prefill_announces_chunks_and_keeps_its_blocks() -> None:
    engine = driver(max_batch_tokens=6)
    engine.submit(prefill("p", prompt(14)))
    engine.run()
    assert [(p.full_blocks, p.first_token, p.partial_tokens) for p in engine.prefills["p"]] == [
        (1, None, 0),
        (3, None, 0),
        (3, expected_tokens(prompt(14), 1)[0], 2),
    ]
    assert engine.scheduler.check_integrity().used_blocks == 4
    assert len(engine.scheduler.partial_block("p")) == 1
    engine.scheduler.cancel("p")
    assert engine.scheduler.check_integrity().used_blocks == 0
    assert engine.scheduler.partial_block("p") == []


def test_prefill_stops_at_its_credit_and_lets_others_pass() -> None:
    """ai-dynamo/dynamo#13691: a prompt that nobody takes up must not stand in the way of others."""
    engine = driver(max_sequences=1)
    engine.submit(prefill("p", prompt(14), credit_blocks=0))
    engine.submit(generate("g", prompt(5, 100), max_tokens=2))
    engine.run()
    assert "g" in engine.finished
    assert engine.prefills["p"] == []
    engine.scheduler.grant("p", 2)
    assert shape(engine.step()) == [("p", 0, 8)]
    assert engine.step().parts == ()
    engine.scheduler.grant("p", 1)  # a running total never goes back
    engine.scheduler.grant("p", 4)
    assert shape(engine.step()) == [("p", 8, 6)]


def test_blocks_found_in_the_cache_are_announced_without_credit() -> None:
    engine = driver()
    engine.submit(generate("g", prompt(14), max_tokens=1))
    engine.run()
    engine.submit(prefill("p", prompt(14), credit_blocks=1))
    engine.step()
    assert [(p.full_blocks, p.cached_tokens) for p in engine.prefills["p"]] == [(3, 12)]


def test_a_held_prefill_announces_what_it_pulled() -> None:
    engine = driver()
    engine.submit(prefill("p", prompt(14), held=True))
    engine.fill("p", prompt(8))
    engine.step()
    assert engine.prefills["p"][-1].full_blocks == 2
    engine.scheduler.resume("p", ())
    assert shape(engine.step()) == [("p", 8, 6)]


# -- held requests


@pytest.mark.parametrize("length", [14, 15, 16, 17])
def test_all_pulled_and_first_token_known_leaves_one_decode(length: int) -> None:
    tokens = expected_tokens(prompt(length), 8)
    engine = driver()
    engine.submit(generate("h", prompt(length), held=True))
    engine.fill("h", prompt(length))
    assert engine.step().parts == ()
    engine.scheduler.resume("h", tokens[:1])
    assert shape(engine.step()) == [("h", length, 1)]
    engine.run()
    assert engine.tokens["h"] == tokens[1:]
    assert engine.finished["h"].cached_tokens == length


@pytest.mark.parametrize("length", [14, 15, 16, 17])
@pytest.mark.parametrize("pulled", [0, 4, 8, 12, -1])
def test_whatever_was_not_pulled_is_computed(length: int, pulled: int) -> None:
    tokens = prompt(length)[: None if pulled < 0 else pulled]
    engine = driver()
    engine.submit(generate("h", prompt(length), held=True))
    if tokens:
        engine.fill("h", tokens)
    engine.scheduler.resume("h", ())
    engine.run()
    assert engine.tokens["h"] == expected_tokens(prompt(length), 8)


def test_a_held_request_starts_from_the_cache() -> None:
    engine = driver()
    engine.submit(generate("a", prompt(16), max_tokens=1))
    engine.run()
    engine.submit(generate("h", [*prompt(16), 1, 2, 3], held=True))
    reservation = engine.scheduler.reserve("h", 19)
    assert reservation is not None
    assert (len(reservation.blocks), reservation.filled_blocks) == (5, 4)
    engine.fill("h", [*prompt(16), 1, 2, 3])
    engine.scheduler.resume("h", [65])
    assert shape(engine.step()) == [("h", 19, 1)]


def test_reserved_blocks_that_were_not_published_are_not_computed_into() -> None:
    """A read that was given up may still write: its target stays out of use until it is released."""
    engine = driver()
    engine.submit(generate("h", prompt(14), held=True))
    reservation = engine.scheduler.reserve("h", 14)
    assert reservation is not None
    engine.pool.retain(reservation.blocks)
    engine.scheduler.resume("h", ())
    plan = engine.step()
    assert not set(plan.parts[0].step.blocks) & set(reservation.blocks)
    engine.scheduler.cancel("h")
    assert engine.pool.allocate(60) is not None
    assert engine.pool.allocate(1) is None
    engine.pool.release(reservation.blocks)
    assert engine.pool.available_blocks == 4


def test_a_pulled_request_that_must_redo_a_shared_block_queues_for_the_room() -> None:
    """All of its prompt is in blocks that others use; the block that it computes anew was not promised to it."""
    engine = driver(num_blocks=6)
    engine.submit(prefill("p", prompt(8)))
    engine.run()
    engine.submit(generate("h", prompt(8), held=True, max_tokens=4))  # shares both blocks: one more is promised
    engine.submit(prefill("q", prompt(12, 100)))
    engine.run()
    engine.scheduler.resume("h", ())
    engine.scheduler.check_integrity()
    assert engine.step().parts == ()
    engine.scheduler.cancel("q")
    engine.run()
    assert engine.tokens["h"] == expected_tokens(prompt(8), 4)


def test_pins_that_take_promised_room_delay_and_no_more() -> None:
    engine = driver(num_blocks=4)
    engine.submit(generate("a", prompt(12), max_tokens=1))
    engine.run()
    engine.submit(generate("h", prompt(12, 50), held=True))
    pinned = engine.pool.leading(hashes_of(engine.executor, prompt(12)))
    engine.pool.retain(pinned)
    assert engine.scheduler.reserve("h", 12) is None
    engine.scheduler.resume("h", ())
    assert engine.step().parts == ()
    engine.pool.release(pinned)
    engine.run()
    assert engine.tokens["h"] == expected_tokens(prompt(12, 50), 4)  # all that fits the pool


def test_late_calls_for_a_request_that_is_not_held_are_told() -> None:
    engine = driver()
    engine.submit(generate("h", prompt(9), held=True))
    with pytest.raises(ValueError, match="fewer have reserved blocks"):
        engine.scheduler.publish("h", 8)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.scheduler.resume("h", [99999])
    engine.scheduler.resume("h", ())
    for call in (engine.scheduler.publish, engine.scheduler.reserve):
        with pytest.raises(KeyError):
            call("h", 4)
    with pytest.raises(KeyError):
        engine.scheduler.resume("gone", ())


# -- preemption and cancels


def test_decodes_that_lack_room_preempt_the_latest_and_all_get_their_tokens() -> None:
    engine = driver(num_blocks=12)
    prompts = {f"r{n}": prompt(6, 40 * n) for n in range(4)}
    for request_id, tokens in prompts.items():
        engine.submit(generate(request_id, tokens, max_tokens=24))
    engine.run()
    assert engine.scheduler.preemptions > 0
    assert {r: engine.tokens[r] for r in prompts} == {r: expected_tokens(p, 24) for r, p in prompts.items()}
    assert next(iter(engine.finished)) == "r0"


def test_a_decode_alone_among_promises_waits_for_them_and_goes_first_then() -> None:
    engine = driver(num_blocks=8)
    engine.submit(generate("d", prompt(6), max_tokens=20))
    engine.step()
    engine.submit(prefill("p", prompt(20, 100)))  # 5 of the 6 blocks left
    engine.run()
    assert "d" not in engine.finished
    assert engine.scheduler.preemptions == 1
    with pytest.raises(RequestRefused):  # the one who waits is counted first
        engine.submit(prefill("q", prompt(4, 200)))
    engine.scheduler.cancel("p")
    engine.run()
    assert engine.tokens["d"] == expected_tokens(prompt(6), 20)


def test_a_preempted_pulled_request_is_computed_here() -> None:
    engine = driver(num_blocks=9)
    engine.submit(generate("old", prompt(6), max_tokens=24))
    engine.step()
    engine.submit(generate("h", prompt(14, 100), held=True, max_tokens=12))
    engine.fill("h", prompt(14, 100))
    first = expected_tokens(prompt(14, 100), 12)
    engine.scheduler.resume("h", first[:1])
    engine.run()
    assert engine.scheduler.preemptions > 0
    assert engine.tokens["h"] == first[1:]
    assert engine.tokens["old"] == expected_tokens(prompt(6), 24)


def test_a_cancel_during_a_step_frees_at_its_end_without_output() -> None:
    engine = driver()
    engine.submit(generate("a", prompt(9)))

    def cancel() -> None:
        engine.scheduler.cancel("a")
        assert engine.scheduler.check_integrity().used_blocks == 3

    engine.step(during=cancel)
    assert engine.scheduler.check_integrity().used_blocks == 0
    assert engine.tokens["a"] == []


@pytest.mark.parametrize("seed", range(12))
def test_nothing_leaks_whatever_happens(seed: int) -> None:
    """ai-dynamo/dynamo#7489, vllm-project/vllm#50425: cancels and failures in any state leave free blocks unchanged.

    Random requests of all kinds in a pool that is too small, cancelled, failed, pinned and resumed at random moments,
    also while a step computes. Books balance after every operation; what completes has the right tokens.
    """
    rng = random.Random(seed)
    engine = driver(num_blocks=20, max_batch_tokens=13, max_sequences=4, max_waiting_tokens=200)
    prompts: dict[str, list[int]] = {}
    alive: list[str] = []
    held: list[str] = []
    retained: list[list[int]] = []
    refusals: set[RefusalReason] = set()

    def operate() -> None:
        number = len(prompts)
        action = rng.random()
        if action < 0.4:
            tokens = prompt(rng.randrange(1, 30), first=10 * rng.randrange(3))
            request_id = f"r{number}"
            kind = rng.random()
            request = (
                prefill(request_id, tokens, credit_blocks=rng.choice([None, 0, 2]), held=rng.random() < 0.2)
                if kind < 0.4
                else generate(request_id, tokens, max_tokens=20, held=kind < 0.7)
            )
            try:
                engine.submit(request)
            except RequestRefused as refused:
                refusals.add(refused.reason)
                return
            prompts[request_id] = tokens
            alive.append(request_id)
            if request.held:
                held.append(request_id)
        elif action < 0.55 and alive:
            request_id = alive.pop(rng.randrange(len(alive)))
            engine.scheduler.cancel(request_id)
            if request_id in held:
                held.remove(request_id)
        elif action < 0.75 and held:
            request_id = held[rng.randrange(len(held))]
            tokens = prompts[request_id]
            count = rng.randrange(0, len(tokens) + 1)
            count -= count % BLOCK_TOKENS if count < len(tokens) else 0
            reservation = engine.scheduler.reserve(request_id, len(tokens))
            if reservation is not None:
                if rng.random() < 0.3:
                    engine.pool.retain(reservation.blocks)
                    retained.append(list(reservation.blocks))
                engine.fill(request_id, tokens[:count])
            if rng.random() < 0.6:
                held.remove(request_id)
                engine.scheduler.resume(request_id, ())
        elif action < 0.85 and prompts:
            blocks = engine.pool.leading(hashes_of(engine.executor, rng.choice(list(prompts.values()))))
            engine.pool.retain(blocks)
            retained.append(blocks)
        elif retained:
            engine.pool.release(retained.pop(rng.randrange(len(retained))))
        elif alive:
            engine.scheduler.grant(rng.choice(alive), rng.randrange(1, 9))

    for _ in range(300):
        operate()
        engine.scheduler.check_integrity()
        if rng.random() < 0.6:
            engine.step(during=operate, error="broken" if rng.random() < 0.03 else "")
            engine.scheduler.check_integrity()

    for blocks in retained:
        engine.pool.release(blocks)
    for request_id in alive:
        if request_id in held:
            engine.scheduler.resume(request_id, ())
        engine.scheduler.grant(request_id, 99)
    for _ in range(len(alive) + 1):
        engine.run()
        for request_id, progress in engine.prefills.items():
            if progress[-1].first_token is not None:
                assert progress[-1].first_token == expected_tokens(prompts[request_id], 1)[0]
                engine.scheduler.cancel(request_id)
    report = engine.scheduler.check_integrity()
    assert (report.used_blocks, report.requests) == (0, 0)
    assert report.free_blocks + report.cached_blocks == 20
    assert engine.scheduler.load().free_blocks == 20
    assert refusals <= {RefusalReason.CAPACITY}
    completed = [r for r, output in engine.finished.items() if output.finish is FinishReason.LENGTH]
    assert completed
    for request_id in completed:
        assert engine.tokens[request_id] == expected_tokens(prompts[request_id], 20)
