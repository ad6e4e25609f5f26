"""What is kept of /v1/responses: how much, how long, and what answers of one conversation share."""

from __future__ import annotations

from antiphon_gateway.responses_store import ResponseStore, StoredResponse


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_store_is_bounded_by_number_bytes_and_age() -> None:
    clock = Clock()
    store = ResponseStore(3, 100_000, 60.0, clock)
    for number in range(5):
        clock.now += 10.0
        assert store.keep(StoredResponse(str(number), "t", b"page", (b"turn %d" % number,)))
    assert [store.find(str(number), "t") is not None for number in range(5)] == [False, False, True, True, True]
    clock.now = 190.0
    store.expire()
    assert len(store) == 2, "the one of 130 s has been there for a minute"
    assert not store.keep(StoredResponse("large", "t", bytes(100_000), ()))
    assert store.keep(StoredResponse("half", "t", bytes(97_000), ()))
    assert [store.find(name, "t") is not None for name in ("3", "4", "half")] == [False, True, True]
    clock.now = 1000.0
    assert store.find("half", "t") is None
    assert (len(store), store.size_bytes) == (0, 0)


def test_turns_that_several_answers_hold_count_once_and_outlive_the_first() -> None:
    store = ResponseStore(10, 100_000, 60.0, Clock())
    first, second = bytes(20_000), bytes(10_000)
    store.keep(StoredResponse("a", "t", b"", (first,)))
    before = store.size_bytes
    store.keep(StoredResponse("b", "t", b"", (first, second)))
    assert 10_000 < store.size_bytes - before < 12_000
    assert store.delete("a", "t")
    found = store.find("b", "t")
    assert found is not None
    assert found.turns == (first, second)
    assert 30_000 < store.size_bytes < 32_000
    assert store.delete("b", "t")
    assert store.size_bytes == 0
