"""Whose turn it is to fill a worker's room, where several gateways fill it."""

from __future__ import annotations

from antiphon_policy.admission import OVERTAKEN_LATE, Entry, Priority, WaitingLine
from antiphon_policy.sharing import NEWS_MS, NOTHING, Kept, SharedRoom, kept_back


def entry(key: int = 0, *, due_ms: float | None = 1000.0, arrived_ms: float = 0.0, **more: object) -> Entry[int]:
    return Entry(key=key, arrived_ms=arrived_ms, uncached_tokens=100, due_ms=due_ms, **more)  # type: ignore[arg-type]


def kept(due_ms: float | None = 1000.0, **more: object) -> tuple[Kept, float]:
    return Kept(100, Priority.NORMAL, due_ms, **more), 0.0  # type: ignore[arg-type]


def test_of_one_report_every_gateway_concludes_the_same_and_one_goes_first() -> None:
    report = {"a": kept(900.0), "b": kept(500.0), "c": kept(700.0)}
    left = []
    for gateway, due_ms in (("a", 900.0), ("b", 500.0), ("c", 700.0)):
        room = SharedRoom(gateway)
        room.hear("p", report)
        left.append(room.leaves_ms("p", entry(due_ms=due_ms), 0.0))
    assert left == [2 * NEWS_MS, 0.0, NEWS_MS]


def test_equals_do_not_both_go() -> None:
    report = {"a": kept(500.0), "b": kept(500.0)}
    left = []
    for gateway in report:
        room = SharedRoom(gateway)
        room.hear("p", report)
        left.append(room.leaves_ms("p", entry(due_ms=500.0), 0.0))
    assert left == [0.0, NEWS_MS]


def test_what_the_report_does_not_say_yet_counts_for_nothing() -> None:
    room = SharedRoom("a")
    room.hear("p", {"b": kept(500.0)})
    assert room.leaves_ms("p", entry(due_ms=10.0), 0.0) == NEWS_MS
    # It was told, but of something less urgent.
    room.hear("q", {"a": kept(800.0), "b": kept(500.0)})
    assert room.leaves_ms("q", entry(due_ms=10.0), 0.0) == NEWS_MS


def test_room_that_nobody_takes_is_taken_and_the_next_is_left_anew() -> None:
    """However old or wrong what is said: a gateway that hangs, or wants another worker, costs that and no more."""
    room = SharedRoom("a")
    room.hear("p", {"b": kept(500.0)})
    assert room.leaves_ms("p", entry(), 0.0) == NEWS_MS
    assert room.leaves_ms("p", entry(), 20.0) == NEWS_MS - 20.0
    assert room.is_left("p")
    assert room.leaves_ms("p", entry(), NEWS_MS) == 0.0
    room.sent("p")
    assert not room.is_left("p")
    assert room.leaves_ms("p", entry(), 100.0) == NEWS_MS
    room.full("p", 120.0)
    assert room.leaves_ms("p", entry(), 130.0) == NEWS_MS


def test_who_is_held_behind_one_that_leaves_room_does_not_begin_its_time_anew() -> None:
    room = SharedRoom("a")
    room.hear("p", {"b": kept(500.0)})
    for now_ms in (0.0, 10.0, 20.0):
        assert room.leaves_ms("p", entry(), now_ms) == NEWS_MS - now_ms
        room.full("p", now_ms)
    assert room.leaves_ms("p", entry(), NEWS_MS) == 0.0


def test_a_gateway_whose_requests_can_wait_gets_some_room_all_the_same() -> None:
    room = SharedRoom("a")
    room.hear("p", {"b": kept(500.0)})
    rooms = 0
    while room.leaves_ms("p", entry(), 100.0 * rooms) > 0.0:
        room.full("p", 100.0 * rooms + 50.0)
        rooms += 1
    assert rooms == OVERTAKEN_LATE
    room.sent("p")
    assert room.leaves_ms("p", entry(), 100.0 * rooms) == NEWS_MS


def test_a_gateway_alone_or_without_others_that_wait_leaves_nothing() -> None:
    room = SharedRoom("a")
    assert room.leaves_ms("p", entry(), 0.0) == 0.0
    room.hear("p", {"a": kept(500.0), "b": (NOTHING, 0.0)})
    assert room.leaves_ms("p", entry(), 0.0) == 0.0
    room.hear("p", {"b": kept(100.0)})
    assert room.others_tokens == 100
    # The other one died: the worker says no more of it.
    room.hear("p", {})
    assert room.others_tokens == 0
    assert room.leaves_ms("p", entry(), 0.0) == 0.0


def test_what_is_too_late_goes_after_what_is_not_and_a_higher_class_before() -> None:
    room = SharedRoom("b")
    room.hear("p", {"a": kept(50.0, service_ms=100.0), "b": kept(900.0)})
    assert room.leaves_ms("p", entry(due_ms=900.0), 0.0) == 0.0
    room.hear("p", {"a": (Kept(100, Priority.HIGH, 5000.0), 0.0), "b": kept(900.0)})
    assert room.leaves_ms("p", entry(due_ms=900.0, priority=Priority.NORMAL), 0.0) == NEWS_MS


def test_without_a_promise_who_came_first_goes_first() -> None:
    report = {"a": kept(None, arrived_ms=20.0), "b": kept(None, arrived_ms=10.0)}
    room = SharedRoom("a")
    room.hear("p", report)
    assert room.leaves_ms("p", entry(due_ms=None, arrived_ms=20.0, priority=Priority.NORMAL), 30.0) == NEWS_MS


def test_the_newest_word_of_each_counts_whichever_worker_has_it() -> None:
    room = SharedRoom("a")
    room.hear("p", {"b": (Kept(500, Priority.NORMAL), 20.0), "c": (Kept(7, Priority.NORMAL), 0.0)})
    room.hear("q", {"b": (Kept(300, Priority.NORMAL), 10.0)})
    assert room.others_tokens == 507
    room.hear("q", {"b": (Kept(400, Priority.NORMAL), 30.0)})
    assert room.others_tokens == 407
    room.forget("q")
    room.forget("p")
    assert room.others_tokens == 0


def test_what_is_said_is_all_that_waits_and_the_most_urgent_of_the_highest_class() -> None:
    line: WaitingLine[int] = WaitingLine()
    assert kept_back(line, 0.0) == NOTHING
    line.add(entry(1, due_ms=300.0))
    line.add(entry(2, due_ms=50.0, service_ms=80.0))
    line.add(entry(3, due_ms=200.0))
    assert kept_back(line, 0.0) == Kept(300, Priority.NORMAL, 200.0)
    line.add(entry(4, due_ms=None, priority=Priority.HIGH))
    assert kept_back(line, 0.0) == Kept(400, Priority.HIGH, None)


def test_a_worker_is_told_once_and_told_when_nothing_waits_any_more() -> None:
    room = SharedRoom("a")
    said, _ = kept(500.0)
    assert [room.is_news("p", what) for what in (NOTHING, said, said, NOTHING, NOTHING)] == [
        False,
        True,
        False,
        True,
        False,
    ]
