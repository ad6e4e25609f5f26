"""Workers' status pages, served over real sockets as workers serve them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from antiphon_operator.runtime.pages import PageError, Pages
from antiphon_operator.runtime.workers import Workers
from antiphon_telemetry.status import StatusServer

IDLE = {"running": 0, "waiting": 0, "active_requests": 0, "pins": 0, "prefill_runs": 0, "links": [], "worker_id": "w"}
POD = {"metadata": {"name": "w-0"}, "status": {"podIP": "127.0.0.1"}}


@contextlib.asynccontextmanager
async def worker(page: Any) -> AsyncIterator[Workers]:
    """Those who ask, and a worker whose page is this."""
    server = StatusServer("127.0.0.1", 0, ready=lambda: (True, ""), detail=lambda: page)
    await server.start()
    workers = Workers(port=server.port)
    try:
        yield workers
    finally:
        await workers.close()
        await server.close()


async def test_a_worker_that_does_nothing_for_anybody_is_idle() -> None:
    async with worker(IDLE) as workers:
        view = await workers.ask(POD)
        assert view is not None
        assert view.idle
        assert view.links == ()


@pytest.mark.parametrize("busy", ["running", "waiting", "active_requests", "pins", "prefill_runs"])
async def test_whatever_it_does_it_is_not_idle(busy: str) -> None:
    async with worker(IDLE | {busy: 1}) as workers:
        view = await workers.ask(POD)
        assert view is not None
        assert not view.idle


async def test_a_decode_worker_has_no_prefill_runs_and_can_be_idle() -> None:
    page = {key: value for key, value in IDLE.items() if key != "prefill_runs"}
    async with worker(page) as workers:
        view = await workers.ask(POD)
        assert view is not None
        assert view.idle


async def test_a_worker_whose_ranks_are_being_started_has_nothing_to_do_and_says_what_is_in_the_way() -> None:
    page = {"model": "chat/qwen", "phase": "starting 4 ranks", "problem": "GangUnschedulable: stage 0", "ready": False}
    async with worker(page) as workers:
        view = await workers.ask(POD)
        assert view is not None
        assert (view.idle, view.problem) == (True, "GangUnschedulable: stage 0")


async def test_transports_of_standing_links_are_named_once() -> None:
    links = [
        {"peer_worker_id": "a", "transport": "ucx", "up": True, "gigabytes_per_s": 1.0, "detail": ""},
        {"peer_worker_id": "b", "transport": "ucx", "up": True, "gigabytes_per_s": 1.0, "detail": ""},
        {"peer_worker_id": "c", "transport": "tcp", "up": False, "gigabytes_per_s": 0.0, "detail": "broken"},
    ]
    async with worker(IDLE | {"links": links}) as workers:
        view = await workers.ask(POD)
        assert view is not None
        assert view.links == ("ucx",)


async def test_a_pod_without_an_address_cannot_be_asked() -> None:
    workers = Workers()
    assert await workers.ask({"metadata": {}, "status": {}}) is None
    await workers.close()


async def test_a_page_that_does_not_say_it_is_not_taken_for_idle() -> None:
    async with worker({"worker_id": "w"}) as workers:
        with pytest.raises(PageError, match="not the page it should be"):
            await workers.ask(POD)


async def test_a_worker_that_is_gone_or_silent_is_an_error_in_time() -> None:
    async with worker(IDLE) as gone:
        pass
    with pytest.raises(PageError, match="cannot be read"):
        await gone.ask(POD)
    await gone.close()

    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    workers = Workers(port=port, pages=Pages(deadline_s=0.05))
    with pytest.raises(PageError, match=r"did not answer within 0\.05 s"):
        await workers.ask(POD)
    await workers.close()
    silent.close()


async def test_only_so_many_pages_are_read_at_once() -> None:
    open_now, most = 0, 0
    enough, release = asyncio.Event(), asyncio.Event()

    async def page() -> dict[str, Any]:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        if open_now == 2:
            enough.set()
        await release.wait()
        open_now -= 1
        return IDLE

    server = StatusServer("127.0.0.1", 0, ready=lambda: (True, ""), detail=page)
    await server.start()
    workers = Workers(port=server.port, pages=Pages(at_once=2))
    asked = [asyncio.create_task(workers.ask(POD)) for _ in range(6)]
    async with asyncio.timeout(5):
        await enough.wait()
        release.set()
        await asyncio.gather(*asked)
    assert most == 2
    await workers.close()
    await server.close()
