"""The waiting line: who goes first, that nobody starves, and that no worker idles while something waits for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from antiphon_policy.admission import OVERTAKEN, OVERTAKEN_LATE, Entry, Order, Priority, Verdict, WaitingLine
from antiphon_policy.holding import hold_ms
from antiphon_policy.latency import CHUNK_TOKENS
from hypothesis import given, settings
from hypothesis import strategies as st

Line = WaitingLine[str]


def entry(key: str, tokens: int = 100, **fields: object) -> Entry[str]:
    return Entry(key=key, arrived_ms=0.0, uncached_tokens=tokens, **fields)  # type: ignore[arg-type]


def line_of(*entries: Entry[str], order: Order = Order.DEADLINE_THEN_PREFIX) -> Line:
    line: Line = WaitingLine(order=order)
    for one in entries:
        line.add(one)
    return line


def start(_: Entry[str]) -> Verdict:
    return Verdict.START


def drained(line: Line, now_ms: float = 0.0, tokens_per_ms: float = 0.0) -> list[str]:
    return [one.key for one in line.pass_over(now_ms, start, tokens_per_ms=tokens_per_ms)]


def start_one(line: Line, now_ms: float = 0.0, tokens_per_ms: float = 0.0) -> Entry[str]:
    return next(line.pass_over(now_ms, start, tokens_per_ms=tokens_per_ms))


# -- one tenant


def test_without_promises_the_longest_matched_prefix_goes_first_then_who_came_first() -> None:
    line = line_of(
        entry("cold"), entry("warm", matched_tokens=640), entry("hot", matched_tokens=1280), entry("cold again")
    )
    assert drained(line) == ["hot", "warm", "cold", "cold again"]


def test_who_would_miss_its_deadline_as_the_last_of_all_goes_before_the_longest_prefix() -> None:
    """300 tokens wait, 1 a millisecond: what is due within 300 ms of its own time is at risk."""
    line = line_of(
        entry("hot", matched_tokens=1280),
        entry("soon", due_ms=250.0),
        entry("sooner", due_ms=200.0, matched_tokens=64),
        entry("in time", due_ms=10_000.0),
    )
    assert drained(line, tokens_per_ms=1.0) == ["sooner", "soon", "hot", "in time"]


def test_who_cannot_make_its_deadline_any_more_goes_after_those_that_can() -> None:
    line = line_of(
        entry("late", due_ms=400.0, service_ms=450.0),
        entry("tight", due_ms=460.0, service_ms=450.0),
        entry("no promise"),
    )
    assert drained(line, tokens_per_ms=1.0) == ["tight", "no promise", "late"]


def test_arrival_order_is_there_to_measure_against() -> None:
    line = line_of(entry("cold"), entry("hot", matched_tokens=1280), order=Order.ARRIVAL)
    assert drained(line) == ["cold", "hot"]


def test_what_is_held_keeps_its_place_and_holds_up_nobody_behind_it() -> None:
    line = line_of(entry("a"), entry("b"), entry("c"))
    seen: list[str] = []

    def choose(one: Entry[str]) -> Verdict:
        seen.append(one.key)
        return Verdict.HOLD if one.key == "a" else Verdict.START

    assert [one.key for one in line.pass_over(0.0, choose)] == ["b", "c"]
    assert seen == ["a", "b", "c"]
    assert drained(line) == ["a"]


def test_a_pass_ends_when_nothing_more_can_start_or_enough_is_held() -> None:
    line = line_of(*(entry(str(at)) for at in range(5)))
    looked: list[str] = []

    def hold(one: Entry[str]) -> Verdict:
        looked.append(one.key)
        return Verdict.HOLD

    assert not list(line.pass_over(0.0, hold, max_held=3))
    assert looked == ["0", "1", "2"]
    assert not list(line.pass_over(0.0, lambda _: Verdict.STOP))
    assert len(line) == 5


def test_what_leaves_is_gone_and_costs_nothing() -> None:
    line = line_of(entry("a"), entry("b"))
    assert not list(line.pass_over(0.0, lambda _: Verdict.LEAVE))
    assert (len(line), line.waiting_tokens) == (0, 0)
    assert line.remove("a") is None


def test_what_nobody_took_comes_back_to_the_place_it_had() -> None:
    line = line_of(*(entry(str(at)) for at in range(4)))
    started = [start_one(line) for _ in range(3)]
    for at in (1, 0, 2):
        line.add(started[at])
    assert drained(line) == ["0", "1", "2", "3"]


def test_the_tokens_that_wait_follow_the_estimates() -> None:
    first = entry("a", 1000)
    line = line_of(first, entry("b", 500))
    line.estimate(first, 200)
    assert line.waiting_tokens == 700
    line.remove("a")
    assert line.waiting_tokens == 500
    with pytest.raises(ValueError, match="waits already"):
        line.add(entry("b"))


# -- tenants and classes


def test_tenants_take_turns_by_tokens_not_by_requests() -> None:
    """smg-project/smg#1621: a count of requests says nothing. 512 tokens of b are as much as eight requests of a."""
    line = line_of(
        *(entry(f"a{at}", 64, tenant="a") for at in range(32)), *(entry(f"b{at}", 512, tenant="b") for at in range(4))
    )
    started = [start_one(line) for _ in range(18)]
    assert Counter(one.tenant for one in started) == {"a": 16, "b": 2}


def test_a_tenant_that_sends_one_at_a_time_is_not_always_first() -> None:
    """Whoever is served and comes back at once has had its turn, although it never waits with two."""
    line = line_of(*(entry(f"b{at}", CHUNK_TOKENS, tenant="b") for at in range(40)))
    line.add(entry("a0", CHUNK_TOKENS, tenant="a"))
    started: Counter[str] = Counter()
    for at in range(20):
        one = start_one(line)
        started[one.tenant] += 1
        if one.tenant == "a":
            line.add(entry(f"a{at + 1}", CHUNK_TOKENS, tenant="a"))
    assert started == {"a": 10, "b": 10}


def test_classes_share_by_weight_and_the_lowest_is_served_too() -> None:
    line = line_of(
        *(entry(f"{priority.name}{at}", CHUNK_TOKENS, priority=priority) for priority in Priority for at in range(200))
    )
    order = [start_one(line).priority for _ in range(210)]
    assert order[:21] == [Priority.HIGH] * 16 + [Priority.NORMAL] * 4 + [Priority.LOW]
    started = Counter(order)
    assert started == {Priority.HIGH: 160, Priority.NORMAL: 40, Priority.LOW: 10}


def test_what_came_to_nothing_is_not_charged() -> None:
    line = line_of(*(entry(f"{tenant}{at}", CHUNK_TOKENS, tenant=tenant) for at in range(6) for tenant in "ab"))
    started = [start_one(line) for _ in range(2)]
    for one in started:
        line.add(one)
    assert [one.tenant for one in (start_one(line) for _ in range(6))] == list("ababab")


def test_who_went_ahead_while_others_were_held_pays_for_one_turn_of_it() -> None:
    """b starts 20 requests on a worker that a does not want; when a can start it has one turn more, not 20."""
    line = line_of(*(entry(f"{tenant}{at}", CHUNK_TOKENS, tenant=tenant) for at in range(30) for tenant in "ab"))
    for _ in range(20):
        next(line.pass_over(0.0, lambda one: Verdict.HOLD if one.tenant == "a" else Verdict.START))
    assert [one.tenant for one in (start_one(line) for _ in range(6))] == list("aababa")


@settings(max_examples=40, deadline=None)
@given(
    costs=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000)), min_size=5, max_size=40)
)
def test_tenants_that_always_wait_are_never_far_apart(costs: list[tuple[int, int, int]]) -> None:
    """The bound of deficit round robin: a quantum and the largest request of each."""
    line = line_of(
        *(
            entry(f"{tenant}{at}", cost, tenant=tenant)
            for at, row in enumerate(costs)
            for tenant, cost in zip("abc", row, strict=True)
        )
    )
    started = dict.fromkeys("abc", 0)
    left = Counter({tenant: len(costs) for tenant in "abc"})
    largest = max(max(row) for row in costs)
    while min(left.values()):
        one = start_one(line)
        started[one.tenant] += one.uncached_tokens
        left[one.tenant] -= 1
        if min(left.values()):
            assert max(started.values()) - min(started.values()) <= 2 * largest + CHUNK_TOKENS


# -- nobody starves


def overtaken(victim: Entry[str], rival: Callable[[int], Entry[str]], ahead: int, limit: int) -> int:
    """Tokens that start before the victim does, if a rival comes whenever something starts."""
    line = line_of(*(entry(f"before{at}") for at in range(ahead)))
    line.add(victim)
    line.add(rival(-1))
    tokens = 0
    for at in range(limit):
        one = start_one(line, now_ms=1000.0, tokens_per_ms=1.0)
        if one is victim:
            return tokens
        tokens += one.uncached_tokens
        line.add(rival(at))
    raise AssertionError(f"{tokens} tokens started, and it waits still")


def test_a_stream_of_better_matched_requests_passes_over_nobody_for_ever() -> None:
    tokens = overtaken(entry("victim"), lambda at: entry(f"rival{at}", matched_tokens=6400), ahead=3, limit=100)
    assert tokens > 600
    assert tokens <= 2 * 300 + OVERTAKEN * (300 + CHUNK_TOKENS) + 100


def test_who_is_too_late_gets_a_small_share() -> None:
    tokens = overtaken(
        entry("victim", due_ms=500.0), lambda at: entry(f"rival{at}", due_ms=1500.0 + at), ahead=0, limit=200
    )
    assert OVERTAKEN_LATE * CHUNK_TOKENS <= tokens <= OVERTAKEN_LATE * CHUNK_TOKENS + 200


@st.composite
def requests(draw: st.DrawFn) -> list[dict[str, object]]:
    return draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "tokens": st.integers(1, 2000),
                    "tenant": st.sampled_from("abc"),
                    "priority": st.sampled_from(Priority),
                    "matched_tokens": st.integers(0, 4000),
                    "due_ms": st.one_of(st.none(), st.floats(0, 5000)),
                    "service_ms": st.floats(0, 500),
                }
            ),
            min_size=1,
            max_size=60,
        )
    )


@settings(max_examples=40, deadline=None)
@given(made=requests(), data=st.data())
def test_every_request_starts_before_too_much_of_its_own_flow_overtook_it(
    made: list[dict[str, object]], data: st.DataObject
) -> None:
    """Whatever comes in whatever order, with one start at a time: the bound of the module, for each."""
    line: Line = WaitingLine()
    started: defaultdict[tuple[Priority, str], int] = defaultdict(int)
    at_arrival: dict[str, int] = {}
    largest = max(int(str(fields["tokens"])) for fields in made)
    coming = [entry(str(at), **fields) for at, fields in enumerate(made)]  # type: ignore[arg-type]
    now_ms = 0.0
    while coming or len(line):
        for one in coming[: data.draw(st.integers(0 if len(line) else 1, 5))]:
            coming.remove(one)
            at_arrival[one.key] = started[one.priority, one.tenant]
            line.add(one)
        now_ms += 50.0
        if not len(line):
            continue
        one = start_one(line, now_ms, tokens_per_ms=10.0)
        flow = (one.priority, one.tenant)
        overtook = started[flow] - at_arrival[one.key]
        assert overtook <= 2 * one.ahead_tokens + OVERTAKEN_LATE * (one.ahead_tokens + CHUNK_TOKENS) + largest
        started[flow] += one.uncached_tokens
    assert line.waiting_tokens == 0


# -- no worker idles


@settings(max_examples=40, deadline=None)
@given(
    made=requests(),
    workers=st.integers(1, 5),
    bias=st.lists(st.integers(0, 3000), min_size=60, max_size=60),
    step_ms=st.integers(5, 400),
)
def test_no_worker_idles_while_something_waits_for_it(
    made: list[dict[str, object]], workers: int, bias: list[int], step_ms: int
) -> None:
    """Each request likes one worker better, by so many ms; a worker computes a token a millisecond. After each pass,
    the worker that a waiting request wants has more to do than the horizon: so it does not idle before it gets it."""
    horizon = 300.0
    line: Line = WaitingLine()
    queued = [0.0] * workers
    coming = [entry(str(at), **fields) for at, fields in enumerate(made)]  # type: ignore[arg-type]
    now_ms = 0.0

    def wanted(one: Entry[str], figures: list[float]) -> int:
        home = int(one.key) % workers
        return min(range(workers), key=lambda at: figures[at] + (0 if at == home else bias[int(one.key)]))

    while coming or len(line):
        for one in coming[:3]:
            coming.remove(one)
            line.add(one)
        figures = list(queued)

        def choose(one: Entry[str], figures: list[float] = figures) -> Verdict:
            worker = wanted(one, figures)
            held = hold_ms(figures[worker], horizon) > 0.0
            figures[worker] += one.uncached_tokens
            queued[worker] += 0 if held else one.uncached_tokens
            return Verdict.HOLD if held else Verdict.START

        for _ in line.pass_over(now_ms, choose, tokens_per_ms=workers):
            pass
        for one in line:
            assert queued[wanted(one, queued)] > horizon
        now_ms += step_ms
        queued[:] = [max(0.0, left - step_ms) for left in queued]
