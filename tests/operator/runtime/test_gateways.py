"""Gateways' ready pages: several addresses behind one name, some of them not ready, gone or silent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from antiphon_operator.runtime.gateways import FRESH_S, Gateways, GatewayUrlError
from antiphon_operator.runtime.pages import Pages

KEY = "chat/qwen"


def ready(revisions: dict[str, Any], status: int = 200) -> tuple[int, dict[str, Any]]:
    models = {KEY: {"prefill": 1, "decode": 1, "both": 0, "revisions": revisions}}
    return status, {"ready": status == 200, "draining": False, "models": models, "redis": "ok"}


class Fleet:
    """Gateways at addresses of their own on one port, behind one name."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        """(address, Host header)"""
        self.port = 0

    async def _answer(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        address = request.transport.get_extra_info("sockname")[0]
        self.asked.append((address, request.headers["Host"]))
        status, page = self.pages[address]
        return web.json_response(page, status=status)

    @contextlib.asynccontextmanager
    async def serving(self, **pages: Any) -> AsyncIterator[Fleet]:
        application = web.Application()
        application.router.add_get("/ready", self._answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        for address in self.pages:
            await web.TCPSite(runner, address, self.port).start()
        try:
            yield self
        finally:
            await runner.cleanup()


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def behind_one_name(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    """As DNS would: the name `gateways` has these addresses now."""

    async def resolve(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if host != "gateways":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)


async def test_every_address_of_the_name_says_what_it_sees(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.pages = {
        "127.0.0.11": ready({"aaaaaa": {"prefill": 2, "decode": 4}}),
        "127.0.0.12": ready({"aaaaaa": {"prefill": 2, "decode": 3}, "bbbbbb": {"prefill": 0, "decode": 1}}),
    }
    async with fleet.serving():
        behind_one_name(monkeypatch, list(fleet.pages))
        gateways = Gateways(f"http://gateways:{fleet.port}")
        views = await gateways.views(KEY)
        assert [(view.address, view.prefill, view.decode) for view in views.views] == [
            ("127.0.0.11", {"aaaaaa": 2}, {"aaaaaa": 4}),
            ("127.0.0.12", {"aaaaaa": 2, "bbbbbb": 0}, {"aaaaaa": 3, "bbbbbb": 1}),
        ]
        assert views.unreachable == ()
        assert {host for _, host in fleet.asked} == {"gateways"}
        other = await gateways.views("chat/unknown")
        assert [view.decode for view in other.views] == [{}, {}]
        await gateways.close()


async def test_a_gateway_that_is_not_ready_still_says_what_it_sees(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.pages = {"127.0.0.11": ready({"aaaaaa": {"prefill": 1, "decode": 0}}, status=503)}
    async with fleet.serving():
        behind_one_name(monkeypatch, list(fleet.pages))
        gateways = Gateways(f"http://gateways:{fleet.port}")
        (view,) = (await gateways.views(KEY)).views
        assert (view.prefill, view.decode) == ({"aaaaaa": 1}, {"aaaaaa": 0})
        await gateways.close()


async def test_a_worker_that_does_both_counts_for_both(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.pages = {"127.0.0.11": ready({"aaaaaa": {"prefill": 0, "decode": 1, "both": 2}})}
    async with fleet.serving():
        behind_one_name(monkeypatch, list(fleet.pages))
        gateways = Gateways(f"http://gateways:{fleet.port}")
        (view,) = (await gateways.views(KEY)).views
        assert (view.prefill, view.decode) == ({"aaaaaa": 2}, {"aaaaaa": 3})
        await gateways.close()


async def test_who_does_not_answer_is_named_and_the_others_are_heard(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.pages = {
        "127.0.0.11": ready({"aaaaaa": {"prefill": 1, "decode": 1}}),
        "127.0.0.12": (404, {}),
        "127.0.0.13": (200, ["not", "the", "page"]),
    }
    async with fleet.serving():
        behind_one_name(monkeypatch, [*fleet.pages, "127.0.0.14"])
        gateways = Gateways(f"http://gateways:{fleet.port}")
        views = await gateways.views(KEY)
        assert [view.address for view in views.views] == ["127.0.0.11"]
        wrong, other_page, nobody = views.unreachable
        assert "127.0.0.12" in wrong
        assert "status 404" in wrong
        assert "not the page it should be" in other_page
        assert "127.0.0.14" in nobody
        await gateways.close()


async def test_a_silent_gateway_holds_nobody_up(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.15", 0)
    behind_one_name(monkeypatch, ["127.0.0.15"])
    port = silent.sockets[0].getsockname()[1]
    gateways = Gateways(f"http://gateways:{port}", pages=Pages(deadline_s=0.05))
    views = await gateways.views(KEY)
    assert views.views == ()
    assert "did not answer within 0.05 s" in views.unreachable[0]
    await gateways.close()
    silent.close()


async def test_a_name_that_does_not_resolve_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    behind_one_name(monkeypatch, [])
    gateways = Gateways("http://nowhere:1")
    views = await gateways.views(KEY)
    assert views.views == ()
    assert "nowhere: the name does not resolve" in views.unreachable[0]
    await gateways.close()


async def test_one_round_serves_all_models_that_ask_at_about_the_same_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.pages = {"127.0.0.11": ready({"aaaaaa": {"prefill": 1, "decode": 1}})}
    now = 0.0
    async with fleet.serving():
        behind_one_name(monkeypatch, list(fleet.pages))
        gateways = Gateways(f"http://gateways:{fleet.port}", clock=lambda: now)
        await asyncio.gather(*(gateways.views(f"chat/m{number}") for number in range(100)))
        assert len(fleet.asked) == 1
        now = FRESH_S / 2
        await gateways.views(KEY)
        assert len(fleet.asked) == 1
        now = FRESH_S * 2
        fleet.pages["127.0.0.11"] = ready({"aaaaaa": {"prefill": 1, "decode": 9}})
        (view,) = (await gateways.views(KEY)).views
        assert view.decode == {"aaaaaa": 9}
        await gateways.close()


async def test_who_gives_up_waiting_does_not_end_the_round_for_others(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.pages = {"127.0.0.11": ready({"aaaaaa": {"prefill": 1, "decode": 1}})}
    async with fleet.serving():
        behind_one_name(monkeypatch, list(fleet.pages))
        gateways = Gateways(f"http://gateways:{fleet.port}")
        impatient = asyncio.create_task(gateways.views(KEY))
        patient = asyncio.create_task(gateways.views(KEY))
        await asyncio.sleep(0)
        impatient.cancel()
        assert len((await patient).views) == 1
        await gateways.close()


@pytest.mark.parametrize("url", ["", "gateways:8000", "ftp://gateways", "http://", "http://gateways:notaport"])
def test_a_url_that_cannot_be_used_is_refused_at_once(url: str) -> None:
    with pytest.raises(GatewayUrlError, match="http://host:port"):
        Gateways(url)
