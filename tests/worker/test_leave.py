"""How long a worker that was told to end waits, and for what."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from antiphon_kvtransfer.pins import KvBlocksService
from antiphon_worker import leave as leaving
from antiphon_worker.leave import leave

from tests.support.eventually import eventually
from tests.support.workers import within


class Service:
    """So many requests, which end when they are given back, or when somebody says so."""

    def __init__(self, active: int) -> None:
        self.active_requests = active
        self.given_back: list[str] = []
        self.idle = asyncio.Event()
        if not active:
            self.idle.set()

    async def drained(self) -> None:
        await self.idle.wait()

    def give_back(self, why: str) -> None:
        self.given_back.append(why)
        self.end()

    def end(self) -> None:
        self.active_requests = 0
        self.idle.set()


class Readers:
    """Stands in for the service that readers call."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.waited_for = False

    async def until_unread(self, quiet_s: float) -> None:
        self.waited_for = True
        await self.gone.wait()


def context_of(readers: Readers, drain_timeout_s: float = 60.0) -> Any:
    return SimpleNamespace(
        options=SimpleNamespace(drain_timeout_s=drain_timeout_s),
        identity=SimpleNamespace(worker_id="w"),
        links=SimpleNamespace(servicer=lambda: readers),
    )


async def test_what_ends_in_time_ends_here_and_nobody_is_waited_for() -> None:
    service, readers = Service(1), Readers()
    going: Any = asyncio.create_task(leave(context_of(readers), [service], asyncio.Event()))  # type: ignore[list-item]
    await asyncio.sleep(0)
    service.end()
    await within(5, going)
    assert (service.given_back, readers.waited_for) == ([], False)


@pytest.mark.parametrize("told_again", [True, False])
async def test_what_does_not_end_is_given_back_and_readers_are_waited_for(told_again: bool) -> None:
    service, readers, hurry = Service(2), Readers(), asyncio.Event()
    context = context_of(readers, 60.0 if told_again else 0.0)
    going: Any = asyncio.create_task(leave(context, [Service(0), service], hurry))  # type: ignore[list-item]
    if told_again:
        hurry.set()
    await within(5, eventually(lambda: readers.waited_for))
    assert service.given_back == ["w is draining"]
    assert not going.done()
    readers.gone.set()
    await within(5, going)


async def test_a_reader_that_never_ends_does_not_keep_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "READ_S", 0.05)
    service, readers = Service(1), Readers()
    await within(5, leave(context_of(readers, 0.0), [service], asyncio.Event()))  # type: ignore[list-item]
    assert readers.waited_for


class Reader:
    """One that has blocks pinned."""

    def __init__(self) -> None:
        self.table = SimpleNamespace(held_blocks=3)


async def test_a_holder_is_not_unread_while_a_pin_stands() -> None:
    no: Any = None
    holder, reader = KvBlocksService(no, no, no), Reader()
    calls: Any = holder._calls
    calls.add(reader)
    going = asyncio.create_task(holder.until_unread(0.01))
    await asyncio.sleep(0.1)
    assert not going.done()
    reader.table.held_blocks = 0
    await within(5, going)
