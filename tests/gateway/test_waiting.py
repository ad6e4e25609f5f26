"""The order of the waiting queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from antiphon_gateway.waiting import WaitingQueue


def choice(tenant: str, order: int) -> Any:
    return SimpleNamespace(flight=SimpleNamespace(ticket=SimpleNamespace(tenant=tenant)), order=order)


def drain(queue: WaitingQueue) -> list[tuple[str, int]]:
    taken = []
    while queue:
        head = queue.head()
        assert queue.pop() is head
        taken.append((head.flight.ticket.tenant, head.order))
    return taken


def test_tenants_take_turns_and_each_is_first_come_first_served() -> None:
    queue = WaitingQueue()
    for order, tenant in enumerate("aaabbc"):
        queue.append(choice(tenant, order))
    assert len(queue) == 6
    assert drain(queue) == [("a", 0), ("b", 3), ("c", 5), ("a", 1), ("b", 4), ("a", 2)]


def test_what_comes_back_takes_the_place_it_had() -> None:
    queue = WaitingQueue()
    choices = [choice("a", order) for order in range(4)]
    for one in choices:
        queue.append(one)
    for _ in range(3):
        queue.pop()
    for one in (choices[1], choices[0], choices[2]):
        queue.put_back(one)
    assert drain(queue) == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]


def test_what_is_withdrawn_is_gone() -> None:
    queue = WaitingQueue()
    first, second, stranger = choice("a", 0), choice("b", 1), choice("a", 2)
    queue.append(first)
    queue.append(second)
    assert queue.remove(first)
    assert not queue.remove(first)
    assert not queue.remove(stranger)
    assert drain(queue) == [("b", 1)]
